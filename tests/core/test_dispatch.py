from __future__ import annotations

import gc
import weakref
from typing import Any

import pluggy
import pytest
import recording

from rankscope import BackendError, FaultError, annotate, hookimpl
from rankscope.dispatch import FaultLog, Tool, bind
from rankscope.hookspecs import BackendSpecs
from rankscope.types import Fault, Window
from rankscope.windows import opened

WINDOW = Window(id=1, role="actor", step=3, steps=(3,), scope="train", reason="step")


class Told:
    def __init__(self) -> None:
        self.errors: list[tuple[str, Any]] = []

    def error(self, event: str, **facts: Any) -> None:
        self.errors.append((event, facts.get("exc_info")))

    debug = info = warning = error


# What is refused when a backend is bound.


class Empty:
    pass


class NotAHook:
    @hookimpl
    def strat(self, window: Window) -> None: ...


class UnknownArgument:
    @hookimpl
    def start(self, window: Window, rank: int) -> None: ...


class NewWrapper:
    @hookimpl(wrapper=True)
    def start(self, window: Window) -> Any:
        return (yield)


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def stop(self, window: Window) -> Any:
        yield


class BrokenProperty:
    @property
    def device(self) -> int:
        raise RuntimeError("no device")


def on_the_instance() -> Any:
    backend = Empty()
    backend.strat = hookimpl(lambda window: None)  # type: ignore[attr-defined]
    return backend


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (Empty, ["got the class Empty", "'()' missing"]),
        (NotAHook(), ["hook that does not exist: 'strat'", "Did you mean 'start'?", "relocate, finish"]),
        (on_the_instance(), ["hook that does not exist: 'strat'"]),
        (UnknownArgument(), ["does not fit the hooks", "rank"]),
        (NewWrapper(), ["start is a hook wrapper", "plain hook"]),
        (OldWrapper(), ["stop is a hook wrapper"]),
    ],
)
def test_a_backend_that_breaks_the_contract_is_refused_by_name(backend: object, words: list[str]) -> None:
    with pytest.raises(BackendError) as caught:
        bind([("fine", Empty()), ("broken", backend)])
    assert "'broken'" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_every_hook_is_optional_and_properties_are_left_alone() -> None:
    assert bind([("a", Empty()), ("b", BrokenProperty())]) == {"a": {}, "b": {}}


def test_an_optional_hook_of_a_newer_core_is_tolerated() -> None:
    class Newer:
        @hookimpl(optionalhook=True)
        def checkpoint(self, window: Window) -> None: ...

        @hookimpl
        def start(self, window: Window) -> None: ...

    assert list(bind([("a", Newer())])["a"]) == ["start"]


def test_fewer_arguments_in_any_order() -> None:
    seen: list[Any] = []

    class Reversed:
        @hookimpl
        def step(self, span: Any, window: Any) -> None:
            seen.append(("reversed", window, span))

    class None_:
        @hookimpl
        def step(self) -> None:
            seen.append("none")

    class OnlySpan:
        @staticmethod
        @hookimpl
        def step(span: Any) -> None:
            seen.append(("span", span))

    class Both:
        @hookimpl(trylast=True)
        def step(self, window: Any, span: Any) -> None:
            seen.append(("both", window, span))

    hooks = bind([("b", Both()), ("r", Reversed()), ("n", None_()), ("s", OnlySpan())])
    for tool in "brns":
        hooks[tool]["step"]("W", "S")
    assert seen == [("both", "W", "S"), ("reversed", "W", "S"), "none", ("span", "S")]


def test_one_object_cannot_be_two_tools() -> None:
    backend = Empty()
    with pytest.raises(BackendError, match="'second' does not fit the hooks"):
        bind([("first", backend), ("second", backend)])


# Isolation.


def tool_of(backend: object, *, strict: bool = False, told: Told | None = None) -> Tool:
    return Tool("t", backend, bind([("t", backend)])["t"], FaultLog(told or Told(), strict=strict))


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.starts = 0

    @hookimpl
    def start(self, window: Window) -> None:
        self.starts += 1
        raise self.error


def test_a_fault_is_kept_told_once_and_ends_the_tool() -> None:
    told, error = Told(), ValueError("broken")
    backend = Failing(error)
    tool = tool_of(backend, told=told)
    assert tool.call("start", WINDOW, step=3) == (False, None)
    assert tool.call("start", WINDOW, step=4) == (True, None)
    assert backend.starts == 1
    assert not tool.on
    assert [(fault.tool, fault.hook, fault.step, fault.error) for fault in tool.faults.faults] == [
        ("t", "start", 3, error)
    ]
    assert [error for _, error in told.errors] == [error]
    assert "t.start failed in step 3: ValueError: broken" in told.errors[0][0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_not_an_exception_passes(error: BaseException) -> None:
    tool = tool_of(Failing(error))
    with pytest.raises(type(error)):
        tool.call("start", WINDOW)
    assert tool.on


def test_an_exception_without_a_text_is_a_fault_like_any_other() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    told = Told()
    tool = tool_of(Failing(Mute()), told=told)
    assert tool.call("start", WINDOW) == (False, None)
    assert "Mute without a text" in told.errors[0][0]
    assert "Mute without a text" in str(FaultError(tool.faults.faults))


@pytest.mark.parametrize("strict", [False, True])
def test_a_contained_fault_keeps_no_tensor_alive(strict: bool) -> None:
    class Batch:
        pass

    class Chained:
        @hookimpl
        def start(self, window: Window) -> None:
            batch = Batch()
            references.append(weakref.ref(batch))
            try:
                raise KeyError(id(batch))
            except KeyError as error:
                raise ValueError("x") from error

    references: list[Any] = []
    tool = tool_of(Chained(), strict=strict)
    tool.call("start", WINDOW)
    gc.collect()
    assert (references[0]() is None) is not strict
    assert (tool.faults.faults[0].error.__traceback__ is None) is not strict


def test_strict_mode_raises_everything_once_at_the_end() -> None:
    log = FaultLog(Told(), strict=True)
    reached = []
    with pytest.raises(FaultError) as caught, log.raised_at_end():  # noqa: PT012
        log.add(Fault("a", "start", 1, ValueError("one")))
        log.add(Fault("b", "start", 1, KeyError("two")))
        reached.append(True)
    assert reached
    assert [fault.tool for fault in caught.value.faults] == ["a", "b"]
    assert caught.value.__cause__ is caught.value.faults[0].error
    with log.raised_at_end():
        pass
    with pytest.raises(IndexError), log.raised_at_end():  # noqa: PT012
        log.add(Fault("c", "stop", 1, ValueError("three")))
        raise IndexError


# Order, and what the hot path touches.


def test_start_in_config_order_stop_in_reverse(profiler: Any) -> None:
    handle = profiler(tool=["rec2", "bound", "rec"])
    handle.start(step=1)
    with annotate("a"):
        pass
    handle.step()
    handle.stop()
    assert recording.calls("start", "step", "stop") == [
        "rec2 start 1 train",
        "bound start 1 train",
        "rec start 1 train",
        "rec2 step None",
        "bound step None",
        "rec step None",
        "rec stop 1 train",
        "bound stop 1 train",
        "rec2 stop 1 train",
    ]
    assert [call for call in recording.calls("enter", "exit") if call.endswith(" a")] == [
        "rec2 enter a",
        "bound enter a",
        "rec enter a",
        "rec exit a",
        "bound exit a",
        "rec2 exit a",
    ]


def test_annotated_code_never_goes_through_pluggy(profiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = profiler()

    def watched(method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # pytest's own hooks are of the same class
            if self.spec is not None and self.spec.namespace is BackendSpecs:
                reached.append(self.name)
            return method(self, *args, **kwargs)

        return call

    reached: list[str] = []
    for name in ("__call__", "get_hookimpls"):
        monkeypatch.setattr(pluggy.HookCaller, name, watched(getattr(pluggy.HookCaller, name)))

    @annotate("update", scheduled=True)
    def update() -> int:
        handle.step()
        return 1

    assert update() == 1
    handle.start(step=1)
    assert update() == 1
    handle.stop()
    assert update() == 1
    assert opened() == ()
    assert reached == []
    profiler("critic")
    assert "start" in reached  # the watch works: binding looks at the hooks
    assert recording.calls("annotate", "step") == ["rec annotate step1", "rec annotate update", "rec step update"]
