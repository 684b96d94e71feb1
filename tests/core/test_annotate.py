from __future__ import annotations

import ast
import asyncio
import contextvars
import functools
import importlib.util
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import recording
from hypothesis import given
from hypothesis import strategies as st

from rankscope import DistProfiler, annotate
from rankscope.annotate import current_stage, set_sinks
from rankscope.errors import FaultError
from rankscope.types import Fault, Span


class Shows:
    """A sink that notes spans."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.spans: list[Span] = []
        self.raises: list[FaultError] = []

    def enter(self, span: Span) -> object:
        self.spans.append(span)
        self.log.append(f"+{span.stage}")
        return span.stage

    def leave(self, span: Span, token: object, error: Any) -> FaultError | None:
        assert token == span.stage
        self.log.append(f"-{span.stage}" + (f" {error[0].__name__}" if error[0] else ""))
        return self.raises.pop() if self.raises else None


@pytest.fixture
def shows() -> Iterator[Shows]:
    sink = Shows()
    set_sinks((sink,))
    yield sink
    set_sinks(())


@pytest.fixture(params=["open", "closed"])
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both states of the process: what a function does must not depend on it."""
    set_sinks((Shows(),) if request.param == "open" else ())
    yield
    set_sinks(())


class Worker:
    name = "w"

    @annotate
    def bare(self, x: int, *, y: int = 1) -> tuple[str, int, int]:
        """Documented."""
        return self.name, x, y

    @annotate("stage_s")
    @staticmethod
    def static(x: int) -> int:
        return x

    @annotate("stage_c")
    @classmethod
    def of_class(cls, x: int) -> tuple[str, int]:
        return cls.name, x

    @staticmethod
    @annotate("stage_s2")
    def static_outside(x: int) -> int:
        return x

    @classmethod
    @annotate("stage_c2")
    def class_outside(cls, x: int) -> tuple[str, int]:
        return cls.name, x

    @property
    @annotate("stage_p")
    def value(self) -> str:
        return self.name


# Functions of every sort.


@pytest.mark.usefixtures("either")
def test_methods_of_every_sort_work_whether_anything_is_open_or_not() -> None:
    worker = Worker()
    assert worker.bare(1, y=2) == ("w", 1, 2)
    assert Worker.static(1) == worker.static(1) == worker.static_outside(1) == 1
    assert Worker.of_class(2) == worker.of_class(2) == worker.class_outside(2) == ("w", 2)
    assert worker.value == "w"


def test_what_a_span_says_of_the_call(shows: Shows) -> None:
    worker = Worker()
    worker.bare(1, y=2)
    worker.static(3)
    worker.of_class(4)
    seen = [(span.stage, span.kind, span.instance, span.args, span.kwargs) for span in shows.spans]
    assert seen == [
        ("bare", "sync", worker, (1,), {"y": 2}),
        ("stage_s", "sync", None, (3,), {}),
        ("stage_c", "sync", Worker, (4,), {}),
    ]


def test_a_decorated_function_still_says_who_it_is() -> None:
    plain = Worker.__dict__["bare"].__wrapped__
    assert Worker.bare.__name__ == "bare"
    assert Worker.bare.__doc__ == "Documented."
    assert inspect.signature(Worker.bare) == inspect.signature(plain)

    @annotate("a")
    async def run() -> None: ...

    @annotate("a")
    def rows() -> Iterator[int]:
        yield 1

    @annotate("a")
    async def arows() -> Any:
        yield 1

    assert inspect.iscoroutinefunction(run)
    assert inspect.isgeneratorfunction(rows)
    assert inspect.isasyncgenfunction(arows)


def test_partials_and_callable_objects(shows: Shows) -> None:
    def add(x: int, y: int) -> int:
        return x + y

    async def later(x: int) -> int:
        return x

    class Adder:
        def __call__(self, x: int) -> int:
            return x + 1

    assert annotate(functools.partial(functools.partial(add, 1), 2))() == 3
    assert asyncio.run(annotate("p")(functools.partial(later, 4))()) == 4
    assert annotate(Adder())(1) == 2
    assert annotate("b")(len)([1]) == 1
    assert [(span.stage, span.kind) for span in shows.spans] == [
        ("add", "sync"),
        ("p", "async"),
        ("Adder", "sync"),
        ("b", "sync"),
    ]


@pytest.mark.parametrize("wrong", [property(lambda self: 1), int, 3])
def test_what_cannot_be_decorated_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(TypeError, match="annotate\\(\\) decorates functions and methods, not"):
        annotate("a")(wrong)


@pytest.mark.parametrize("wrong", [3, 1.5, property(lambda self: 1), ["a"]])
def test_what_cannot_be_a_name_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes the name of a stage, not"):
        annotate(wrong)


@pytest.mark.usefixtures("either")
def test_with_needs_a_stage_in_every_step_not_only_in_profiled_ones() -> None:
    with pytest.raises(TypeError, match="needs a stage"), annotate():
        pytest.fail("the body must not run")  # pragma: no cover


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ({"stage": "s", "message": "m", "role": "r"}, "s"),
        ({"message": "m", "role": "r"}, "m"),
        ({"role": "r"}, "r"),
        ({}, "run"),
        ({"stage": "", "message": "m"}, "m"),
    ],
)
def test_stage_before_message_before_role_before_the_name(shows: Shows, given: dict[str, str], label: str) -> None:
    stage = given.pop("stage", None)

    @annotate(stage, **given)
    def run() -> None: ...

    run()
    assert shows.log == [f"+{label}", f"-{label}"]


def test_extras_reach_the_span(shows: Shows) -> None:
    with annotate("a", scheduled=True, color="#ff0000", domain="d", category="c"):
        pass
    with annotate("a"):
        pass
    first, second = shows.spans
    assert (first.scheduled, first.color, first.domain, first.category) == (True, "#ff0000", "d", "c")
    assert (second.scheduled, second.color, second.domain, second.category) == (False, None, None, None)
    assert (first.kind, first.args, first.kwargs, first.instance) == ("with", (), {}, None)


def test_it_is_an_attribute_of_the_profiler_too(shows: Shows) -> None:
    assert DistProfiler.annotate is annotate

    class Own:
        @DistProfiler.annotate(message="update", role="actor", color="red")
        def run(self) -> int:
            return 1

    assert Own().run() == 1
    assert shows.log == ["+update", "-update"]


# The body.


def test_the_bodys_exception_is_the_very_same_one(shows: Shows) -> None:
    error = ValueError("mine")

    @annotate("a")
    def run() -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        run()
    assert caught.value is error
    assert error.__context__ is None
    with pytest.raises(ValueError, match="mine") as caught, annotate("b"):
        raise error
    assert caught.value is error
    assert shows.log == ["+a", "-a ValueError", "+b", "-b ValueError"]


def test_all_that_strict_mode_has_to_say_comes_in_one_error() -> None:
    sinks = [Shows(), Shows()]
    for number, sink in enumerate(sinks):
        sink.raises = [FaultError([Fault(f"tool{number}", "annotate", 1, ValueError("x"))])]
    set_sinks(tuple(sinks))
    try:
        with pytest.raises(FaultError) as caught, annotate("a"):
            pass
    finally:
        set_sinks(())
    assert [fault.tool for fault in caught.value.faults] == ["tool1", "tool0"]


def test_strict_mode_does_not_hide_the_bodys_exception(shows: Shows) -> None:
    shows.raises = [FaultError([])]
    with pytest.raises(KeyError), annotate("a"):
        raise KeyError


def test_an_interrupt_while_a_span_begins_ends_it_where_it_began() -> None:
    class Interrupted(Shows):
        def enter(self, span: Span) -> object:
            raise KeyboardInterrupt

    first, second = Shows(), Interrupted()
    set_sinks((first, second))
    try:
        with pytest.raises(KeyboardInterrupt), annotate("a"):
            pytest.fail("the body must not run")  # pragma: no cover
        assert current_stage() is None
    finally:
        set_sinks(())
    assert first.log == ["+a", "-a KeyboardInterrupt"]
    assert second.log == []


def test_a_window_may_open_and_close_in_the_middle(shows: Shows) -> None:
    with annotate("a"):
        set_sinks(())
        with annotate("a"):
            assert current_stage() is not None
    assert current_stage() is None
    assert shows.log == ["+a", "-a"]
    set_sinks(())
    with annotate("b"):
        set_sinks((shows,))
        with annotate("b"):
            pass
    assert shows.log == ["+a", "-a", "+b", "-b"]


def test_recursion_with_one_label(shows: Shows) -> None:
    @annotate("f")
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    assert factorial(3) == 6
    assert shows.log == ["+f"] * 4 + ["-f"] * 4
    assert [span.parent for span in shows.spans] == [None, *shows.spans[:3]]


# Parents, tasks, threads.


def test_parents_and_the_stage_of_a_mini_batch(shows: Shows) -> None:
    with annotate("update", scheduled=True), annotate("inner"), annotate("mini_batch0"):
        stage = current_stage()
        assert stage is not None
        assert stage.stage == "update"
    with annotate("outer"), annotate("inner"), annotate("micro_batch1"):
        stage = current_stage()
        assert stage is not None
        assert stage.stage == "inner"
    with annotate("mini_batch0"):
        assert current_stage() is None
    parents = [(span.stage, span.parent.stage if span.parent else None) for span in shows.spans]
    assert parents == [
        ("update", None),
        ("inner", "update"),
        ("mini_batch0", "inner"),
        ("outer", None),
        ("inner", "outer"),
        ("micro_batch1", "inner"),
        ("mini_batch0", None),
    ]


def test_tasks_do_not_become_each_others_parents(shows: Shows) -> None:
    async def main() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        @annotate("slow")
        async def slow() -> str | None:
            begun.set()
            await go.wait()
            with annotate("in_slow"):
                stage = current_stage()
            return stage.stage if stage else None

        @annotate("fast")
        async def fast() -> None:
            await begun.wait()
            with annotate("in_fast"):
                go.set()

        with annotate("main"):
            assert (await asyncio.gather(slow(), fast()))[0] == "in_slow"

    asyncio.run(main())
    parents = {span.stage: span.parent.stage if span.parent else None for span in shows.spans}
    assert parents == {"main": None, "slow": "main", "fast": "main", "in_slow": "slow", "in_fast": "fast"}


def test_a_task_cannot_end_the_span_that_it_inherited_twice(shows: Shows) -> None:
    async def child() -> None:
        set_sinks(())
        with annotate("a"):  # begins nothing: nothing is open
            pass

    async def main() -> None:
        with annotate("a"):
            await asyncio.create_task(child())

    asyncio.run(main())
    assert shows.log == ["+a", "-a"]


def test_a_thread_begins_without_a_parent(shows: Shows) -> None:
    def run() -> None:
        with annotate("there"):
            pass

    with annotate("here"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        copied = threading.Thread(target=contextvars.copy_context().run, args=(run,))
        copied.start()
        copied.join()
    assert [(span.stage, span.parent.stage if span.parent else None) for span in shows.spans] == [
        ("here", None),
        ("there", None),
        ("there", "here"),
    ]


# Generators: decorated ones behave like undecorated ones.


def echo(log: list[Any]) -> Any:
    try:
        for i in range(3):
            log.append((yield i))  # noqa: PERF401
    finally:
        log.append("end")
    return "result"


def catching(log: list[Any]) -> Any:
    for i in range(5):
        try:
            log.append((yield i))
        except ValueError as error:
            log.append(str(error))
            yield "caught"
    return log


def stubborn(log: list[Any]) -> Any:
    while True:
        try:
            yield len(log)
        except GeneratorExit:
            log.append("asked to end")
            if len(log) > 2:
                return "at last"


def raising(log: list[Any]) -> Any:
    try:
        yield 1
        raise LookupError("mine")
    finally:
        log.append("cleanup")
        raise OSError("in finally")


def waiting_in_finally(log: list[Any]) -> Any:
    try:
        yield 1
    finally:
        yield "in finally"
        log.append("over")


def empty(log: list[Any]) -> Any:
    log.append("ran")
    return
    yield


BODIES = [echo, catching, stubborn, raising, waiting_in_finally, empty]
OPERATIONS = st.one_of(
    st.just(("next",)),
    st.tuples(st.just("send"), st.sampled_from([None, 1, "x"])),
    st.tuples(st.just("throw"), st.sampled_from([ValueError, KeyError, StopIteration, StopAsyncIteration])),
    st.just(("close",)),
)
EXIT = st.just(("throw", GeneratorExit))


def drive(generator: Any, operations: list[tuple[Any, ...]]) -> list[Any]:
    outcomes: list[Any] = []
    for name, *values in operations:
        try:
            if name == "next":
                outcomes.append(("value", next(generator)))
            elif name == "send":
                outcomes.append(("value", generator.send(values[0])))
            elif name == "throw":
                outcomes.append(("value", generator.throw(values[0]("thrown"))))
            else:
                outcomes.append(("closed", generator.close()))
        except StopIteration as stop:
            outcomes.append(("return", stop.value))
        except BaseException as error:
            outcomes.append((type(error), str(error), type(error.__cause__)))
    outcomes.append(inspect.getgeneratorstate(generator))
    return outcomes


@given(body=st.sampled_from(BODIES), operations=st.lists(st.one_of(OPERATIONS, EXIT), max_size=8))
def test_a_shown_generator_is_like_an_undecorated_one(body: Any, operations: list[tuple[Any, ...]]) -> None:
    plain_log: list[Any] = []
    shown_log: list[Any] = []
    plain = body(plain_log)
    expected = drive(plain, operations)
    sink = Shows()
    set_sinks((sink,))
    try:
        shown = annotate("g")(body)(shown_log)
        assert drive(shown, operations) == expected
        assert [str(entry) for entry in shown_log] == [str(entry) for entry in plain_log]
        assert current_stage() is None
    finally:
        set_sinks(())
    ended = expected[-1] == inspect.GEN_CLOSED
    begun = bool(operations) and len(sink.log) > 0
    assert len(sink.log) == (2 if begun and ended else 1 if begun else 0)
    for generator in (plain, shown):
        finish(generator)


def finish(generator: Any) -> None:
    """End it, however stubborn it is: a generator that is left to the garbage collector would complain there."""
    for _ in range(10):
        try:
            generator.close()
        except RuntimeError:
            continue
        except OSError:
            return
        return


@given(
    body=st.sampled_from(
        [body for body in BODIES if body not in (stubborn, waiting_in_finally)]
    ),  # these refuse to end
    operations=st.lists(OPERATIONS, max_size=8),
)
def test_a_generator_while_nothing_is_open_is_like_an_undecorated_one(
    body: Any, operations: list[tuple[Any, ...]]
) -> None:
    logs: tuple[list[Any], list[Any]] = ([], [])
    generators = body(logs[0]), annotate("g")(body)(logs[1])
    outcomes = [drive(generator, operations) for generator in generators]
    if any(outcome[0] == "closed" and outcome[1] is not None for outcome in outcomes[0][:-1]):
        outcomes = [
            [(one[0], None) if one[0] == "closed" else one for one in of_one] for of_one in outcomes
        ]  # what close() returns (Python 3.13) is lost in a "yield from"
    assert outcomes[0] == outcomes[1]
    assert [str(entry) for entry in logs[0]] == [str(entry) for entry in logs[1]]
    for generator in generators:
        finish(generator)


def test_a_generators_span_is_current_only_while_its_code_runs(shows: Shows) -> None:
    @annotate("rows")
    def rows() -> Iterator[str]:
        for _ in range(2):
            with annotate("in_rows"):
                pass
            yield "row"

    for _ in rows():
        assert current_stage() is None
        with annotate("consumer"):
            pass
    parents = [(span.stage, span.parent.stage if span.parent else None) for span in shows.spans]
    assert parents == [("rows", None), ("in_rows", "rows"), ("consumer", None), ("in_rows", "rows"), ("consumer", None)]
    assert shows.log[-1] == "-rows"


def test_a_generator_that_is_left_early_ends_its_span(shows: Shows) -> None:
    @annotate("rows")
    def rows() -> Iterator[int]:
        yield from range(5)

    for row in (generator := rows()):
        if row == 1:
            break
    generator.close()
    assert shows.log == ["+rows", "-rows GeneratorExit"]


# Async generators.


async def aecho(log: list[Any]) -> Any:
    try:
        for i in range(3):
            await asyncio.sleep(0)
            log.append((yield i))
    finally:
        await asyncio.sleep(0)
        log.append("end")


async def acatching(log: list[Any]) -> Any:
    for i in range(5):
        try:
            log.append((yield i))
        except ValueError as error:
            log.append(str(error))
            yield "caught"


async def araising(log: list[Any]) -> Any:
    try:
        yield 1
        raise LookupError("mine")
    finally:
        log.append("cleanup")
        raise OSError("in finally")


async def aempty(log: list[Any]) -> Any:
    log.append("ran")
    return
    yield


async def adrive(generator: Any, operations: list[tuple[Any, ...]]) -> list[Any]:
    outcomes: list[Any] = []
    for name, *values in operations:
        try:
            if name == "next":
                outcomes.append(("value", await anext(generator)))
            elif name == "send":
                outcomes.append(("value", await generator.asend(values[0])))
            elif name == "throw":
                outcomes.append(("value", await generator.athrow(values[0]("thrown"))))
            else:
                outcomes.append(("closed", await generator.aclose()))
        except StopAsyncIteration:
            outcomes.append(("over",))
        except BaseException as error:
            outcomes.append((type(error), str(error), type(error.__cause__)))
    with suppress(OSError):
        await generator.aclose()
    return outcomes


@pytest.mark.parametrize("opened", [True, False])
@given(
    body=st.sampled_from([aecho, acatching, araising, aempty]),
    operations=st.lists(OPERATIONS, max_size=8),
)
def test_an_async_generator_is_like_an_undecorated_one(
    opened: bool, body: Any, operations: list[tuple[Any, ...]]
) -> None:
    logs: tuple[list[Any], list[Any]] = ([], [])
    expected = asyncio.run(adrive(body(logs[0]), operations))
    sink = Shows()
    set_sinks((sink,) if opened else ())
    try:
        assert asyncio.run(adrive(annotate("g")(body)(logs[1]), operations)) == expected
    finally:
        set_sinks(())
    assert logs[0] == logs[1]
    assert len(sink.log) in ({0, 2} if opened else {0})


def test_an_async_generator_that_nobody_closed_ends_with_the_loop(shows: Shows) -> None:
    problems: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        generator = annotate("g")(aecho)([])
        assert await anext(generator) == 0
        main.kept = generator  # type: ignore[attr-defined]

    asyncio.run(main())
    assert problems == []
    assert shows.log[0] == "+g"
    assert len(shows.log) == 2


def test_a_cancelled_task_ends_its_span(shows: Shows) -> None:
    async def main() -> None:
        @annotate("wait")
        async def wait() -> None:
            await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert shows.log == ["+wait", "-wait CancelledError"]


BY_VALUE = """
import sys
import {cloudpickle} as cloudpickle
from rankscope import annotate

class Worker:
    @annotate("sync")
    def sync(self):
        return 1

    @annotate("async")
    async def coroutine(self):
        return 2

    @annotate("generator")
    def generator(self):
        yield 3

    @annotate("async generator")
    async def async_generator(self):
        yield 4

    def block(self):
        with annotate("with"):
            return 5

sys.stdout.buffer.write(cloudpickle.dumps(Worker))
"""

LOADED = """
import asyncio, pickle, sys
import recording
from rankscope import DistProfiler

Worker = pickle.load(sys.stdin.buffer)
assert Worker.sync.__globals__ is not sys.modules["rankscope.annotate"].__dict__
worker = Worker()
with DistProfiler(recording.config(sys.argv[1]), role="actor", rank=0, world_size=1) as profiler:
    profiler.start(step=1)

    async def collect():
        return [await worker.coroutine(), *[item async for item in worker.async_generator()]]

    assert [worker.sync(), *worker.generator(), *asyncio.run(collect()), worker.block()] == [1, 3, 2, 4, 5]
    profiler.stop()
print([span.stage for span in recording.SPANS if span.step is None])
"""


def test_a_class_that_is_sent_to_another_process_by_value_is_annotated_there(site: Path, save_path: Path) -> None:
    """As Ray sends the classes that the driver's own script defines."""
    libraries = {"cloudpickle": "cloudpickle", "ray": "ray.cloudpickle"}
    library = next((libraries[name] for name in libraries if importlib.util.find_spec(name)), None)
    if library is None:
        pytest.skip("cloudpickle is not installed")
    environ = recording.environment(site)
    words = [sys.executable, "-c"]
    sent = subprocess.run(
        [*words, BY_VALUE.format(cloudpickle=library)], env=environ, capture_output=True, timeout=60, check=True
    )
    done = subprocess.run(
        [*words, LOADED, str(save_path)], env=environ, input=sent.stdout, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert ast.literal_eval(done.stdout.decode()) == ["sync", "generator", "async", "async generator", "with"]
