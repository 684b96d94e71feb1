"""Windows that end early: max_seconds of core, over_budget of a backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import calls

from rankscope import DistProfiler, FaultError, annotate, windows
from rankscope.artifacts.status import read_status
from rankscope.config import ConfigError
from rankscope.windows import opened

Make = Callable[..., DistProfiler]


class Clock:
    """Stands in for time.monotonic; moves only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Time:
        monotonic = staticmethod(clock)

    monkeypatch.setattr("rankscope.dispatch.time", Time)
    return clock


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the recording backend's budget says next: empty goes on, a text ends the window, an error is raised."""
    says: list[Any] = []

    def over_budget(_: object) -> str | None:
        answer = says[0] if says else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(recording.RecordingBackend, "over_budget", over_budget, raising=False)
    yield says
    says.clear()


def closes(save_path: Path) -> list[dict[str, Any]]:
    return [record for record in recording.ledger(save_path, "window") if record["event"] == "close"]


def limited(seconds: float = 10.0, tool: str = "rec", **more: Any) -> dict[str, Any]:
    return {"options": {tool: {"max_seconds": seconds, **more}}, "tool": tool}


def span(label: str) -> None:
    with annotate(label):
        pass


# One window for the whole step.


def test_a_window_that_lasts_too_long_is_saved_and_says_so(
    profiler: Make, save_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = profiler(**limited())
    handle.start(step=1)
    clock.now += 9.9
    span("a")
    assert handle.recording
    clock.now += 0.1
    span("b")
    assert not handle.recording
    assert opened() == ()
    assert calls("stop") == ["rec stop 1 train"]
    assert "rec enter a" in recording.CALLS
    assert "rec enter b" not in recording.CALLS
    handle.stop()  # nothing is left to do
    assert calls("stop") == ["rec stop 1 train"]
    (artifact,) = handle.artifacts
    assert artifact.facts["ended_early"] == "max_seconds=10 is reached"
    (close,) = closes(save_path)
    assert close["reason"] == "max_seconds=10 is reached"
    assert close["aborted"] is False
    told = capsys.readouterr().err
    assert "a window was ended early and saved" in told
    assert "max_seconds=10 is reached" in told
    row = next(row for row in read_status(save_path).rows if row.step == 1)
    assert (row.status, row.reason) == ("published", "ended early: max_seconds=10 is reached")
    # The next step has its whole time again.
    handle.start(step=2)
    span("c")
    handle.stop()
    assert calls("start") == ["rec start 1 train", "rec start 2 train"]
    assert "rec enter c" in recording.CALLS
    assert [artifact.facts.get("ended_early") for artifact in handle.artifacts] == ["max_seconds=10 is reached", None]


def test_the_end_comes_also_at_the_end_of_a_span_a_mini_batch_and_a_step(profiler: Make, clock: Clock) -> None:
    handle = profiler(**limited())
    handle.start(step=1)
    with annotate("long"):
        clock.now += 11
    assert opened() == ()
    assert recording.CALLS[-3:] == ["rec exit long", "rec exit step1", "rec stop 1 train"]
    handle.start(step=2)
    clock.now += 11
    handle.step()
    assert opened() == ()
    assert calls("step") == ["rec step None"]
    handle.start(step=3)
    clock.now += 11
    handle.advance(step=4)
    assert opened() == ()
    assert "rec enter step4" not in recording.CALLS


def test_ranges_around_the_end_are_left_in_order(profiler: Make, clock: Clock) -> None:
    handle = profiler(**limited())
    handle.start(step=1)
    with annotate("outer"):
        with annotate("inner"):
            clock.now += 11
        assert opened() == ()
        span("later")
    handle.stop()
    assert calls("enter") == ["rec enter step1", "rec enter outer", "rec enter inner"]
    assert sorted(calls("exit")) == ["rec exit inner", "rec exit outer", "rec exit step1"]


def test_a_tool_that_shows_no_ranges_is_ended_at_spans_too(
    profiler: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording.RecordingBackend, "annotate", None)
    handle = profiler(**limited())
    handle.start(step=1)
    span("a")
    assert handle.recording
    clock.now += 11
    span("b")
    assert calls("stop") == ["rec stop 1 train"]


def test_the_bodys_exception_passes_a_window_that_ends_with_it(profiler: Make, clock: Clock) -> None:
    handle = profiler(**limited())
    handle.start(step=1)

    @annotate("a")
    def stage() -> None:
        clock.now += 11
        raise LookupError

    with pytest.raises(LookupError):
        stage()
    assert calls("stop") == ["rec stop 1 train"]


def test_only_the_tool_with_the_limit_ends(profiler: Make, clock: Clock) -> None:
    handle = profiler(options={"rec": {"max_seconds": 10}}, tool=["rec", "rec2"])
    handle.start(step=1)
    clock.now += 11
    span("a")
    assert [current.tool.name for current in opened()] == ["rec2"]
    assert "rec2 enter a" in recording.CALLS
    handle.stop()
    assert calls("stop") == ["rec stop 1 train", "rec2 stop 1 train"]


def test_an_aborted_step_whose_window_had_ended_keeps_the_file(profiler: Make, clock: Clock, save_path: Path) -> None:
    handle = profiler(**limited())
    handle.start(step=1)
    clock.now += 11
    span("a")
    handle.stop(aborted=True)
    (artifact,) = handle.artifacts
    assert artifact.scope == "train"


# One window a stage.


def test_only_the_stages_window_ends(profiler: Make, save_path: Path, clock: Clock) -> None:
    handle = profiler(**limited(discrete=True))
    handle.start(step=1)
    with annotate("first"):
        clock.now += 11
        span("nested")
        assert handle.recording  # the tool waits for the next stage
        assert opened()[0].window is None
        span("another")
        with annotate("deep"):
            span("deeper")
        handle.step()
    span("second")
    handle.stop()
    assert calls("start", "stop") == [
        "rec start 1 first",
        "rec stop 1 first",
        "rec start 1 second",
        "rec stop 1 second",
    ]
    assert calls("enter") == ["rec enter step1", "rec enter first", "rec enter step1", "rec enter second"]
    assert [record.get("reason") for record in closes(save_path)] == ["max_seconds=10 is reached", None]
    assert [artifact.facts.get("ended_early") for artifact in handle.artifacts] == ["max_seconds=10 is reached", None]


def test_each_stage_has_the_whole_time(profiler: Make, save_path: Path, clock: Clock) -> None:
    handle = profiler(**limited(discrete=True))
    handle.start(step=1)
    for label in ("a", "b", "c"):
        with annotate(label):
            clock.now += 9
            span("inner")
        clock.now += 9
    handle.stop()
    assert [record.get("reason") for record in closes(save_path)] == [None, None, None]
    assert len(handle.artifacts) == 3


def test_the_same_stage_called_again_opens_a_window_again(profiler: Make, clock: Clock) -> None:
    handle = profiler(**limited(discrete=True))
    handle.start(step=1)
    for _ in range(2):
        with annotate("update"):
            clock.now += 11
            span("inner")
    handle.stop()
    assert calls("start") == ["rec start 1 update"] * 2
    assert calls("stop") == ["rec stop 1 update"] * 2


def test_a_stage_that_raises_after_its_window_ended_leaves_the_next_one_alone(profiler: Make, clock: Clock) -> None:
    handle = profiler(**limited(discrete=True))
    handle.start(step=1)

    @annotate("first")
    def stage() -> None:
        clock.now += 11
        span("inner")
        raise LookupError

    with pytest.raises(LookupError):
        stage()
    span("second")
    handle.stop()
    assert calls("stop") == ["rec stop 1 first", "rec stop 1 second"]


# A backend's own budget.


def test_a_backend_says_when_it_has_had_enough(profiler: Make, spent: list[Any], save_path: Path) -> None:
    handle = profiler()
    handle.start(step=1)
    span("a")
    spent.append("max_things=3 is reached")
    span("b")
    assert opened() == ()
    spent.clear()
    assert closes(save_path)[0]["reason"] == "max_things=3 is reached"
    handle.start(step=2)
    span("c")
    assert handle.recording


@pytest.mark.parametrize("nothing", ["", False, None])
def test_a_budget_that_says_nothing_ends_nothing(profiler: Make, spent: list[Any], nothing: object) -> None:
    handle = profiler()
    handle.start(step=1)
    spent.append(nothing)
    span("a")
    assert handle.recording


def test_both_limits_count_the_first_one_ends(profiler: Make, spent: list[Any], clock: Clock, save_path: Path) -> None:
    handle = profiler(**limited())
    handle.start(step=1)
    spent.append("enough")
    span("a")
    spent.clear()
    handle.start(step=2)
    clock.now += 11
    span("b")
    assert [record["reason"] for record in closes(save_path)] == ["enough", "max_seconds=10 is reached"]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("where", ["enter", "leave", "step"])
def test_a_budget_that_raises_is_a_fault(profiler: Make, spent: list[Any], save_path: Path, where: str) -> None:
    handle = profiler()
    handle.start(step=1)
    if where == "leave":
        with annotate("a"):
            spent.append(RuntimeError("no meter"))
    else:
        spent.append(RuntimeError("no meter"))
        span("a") if where == "enter" else handle.step()
    assert [(fault.hook, str(fault.error)) for fault in handle.faults] == [("over_budget", "no meter")]
    assert opened() == ()
    assert calls("stop") == ["rec stop 1 train"]  # the one attempt
    span("b")
    handle.start(step=2)
    assert not handle.recording
    assert calls("start") == ["rec start 1 train"]
    (fault,) = recording.ledger(save_path, "fault")
    assert (fault["hook"], fault["step"]) == ("over_budget", 1)


@pytest.mark.parametrize("where", ["enter", "leave", "step"])
def test_in_strict_mode_it_is_raised(profiler: Make, spent: list[Any], where: str) -> None:
    handle = profiler()
    handle.start(step=1)

    def cross() -> None:
        if where == "leave":
            with annotate("a"):
                spent.append(RuntimeError("no meter"))
            return
        spent.append(RuntimeError("no meter"))
        span("a") if where == "enter" else handle.step()

    with pytest.raises(FaultError, match=r"rec\.over_budget failed in step 1"):
        cross()
    assert opened() == ()


@pytest.mark.usefixtures("lenient")
def test_a_stop_that_raises_at_the_early_end_is_contained(profiler: Make, clock: Clock, save_path: Path) -> None:
    handle = profiler(**limited(fail="stop"))
    handle.start(step=1)
    clock.now += 11
    span("a")
    assert [fault.hook for fault in handle.faults] == ["stop"]
    assert opened() == ()
    assert calls("stop") == ["rec stop 1 train"]


# Threads.


def in_thread(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(action).result()


def test_another_thread_may_end_an_unbound_window(profiler: Make, clock: Clock) -> None:
    handle = profiler(**limited())
    handle.start(step=1)
    clock.now += 11
    in_thread(lambda: span("a"))
    assert opened() == ()
    assert [name for what, name in recording.THREADS if what == "rec stop"] != [threading.current_thread().name]


@pytest.mark.parametrize("boundary", ["span", "step", "stop"])
def test_a_bound_window_is_ended_on_the_thread_that_owns_it(
    profiler: Make, clock: Clock, save_path: Path, boundary: str
) -> None:
    handle = profiler(**limited(tool="bound"))
    handle.start(step=1)
    clock.now += 11
    in_thread(lambda: span("a"))
    assert calls("stop") == []
    assert handle.recording
    assert "bound enter a" in recording.CALLS  # until then it goes on
    {"span": lambda: span("b"), "step": handle.step, "stop": handle.stop}[boundary]()
    assert recording.THREADS == [("bound start", "MainThread"), ("bound stop", "MainThread")]
    assert opened() == ()
    assert "bound enter b" not in recording.CALLS
    assert closes(save_path)[0]["reason"] == "max_seconds=10 is reached"
    handle.stop()
    handle.start(step=2)
    span("c")
    handle.stop()
    assert calls("start", "stop")[2:] == ["bound start 2 train", "bound stop 2 train"]


@pytest.mark.parametrize("boundary", ["span", "leave"])
def test_a_bound_stage_is_ended_on_its_own_thread(profiler: Make, clock: Clock, boundary: str) -> None:
    handle = profiler(**limited(tool="bound", discrete=True))
    handle.start(step=1)
    with annotate("first"):
        clock.now += 11
        in_thread(lambda: span("elsewhere"))
        assert calls("stop") == []
        if boundary == "span":
            span("inner")
            assert calls("stop") == ["bound stop 1 first"]
            span("later")
    assert calls("stop") == ["bound stop 1 first"]
    span("second")
    handle.stop()
    assert calls("start", "stop")[2:] == ["bound start 1 second", "bound stop 1 second"]
    assert {name for _, name in recording.THREADS} == {"MainThread"}


def test_many_threads_see_one_end(profiler: Make, clock: Clock, save_path: Path) -> None:
    handle = profiler(**limited())
    handle.start(step=1)
    together = threading.Barrier(4)

    def work() -> None:
        for number in range(50):
            span(f"a{number}")
        together.wait(30)
        clock.now = 2000.0
        for number in range(50):
            span(f"b{number}")

    with ThreadPoolExecutor(4) as pool:
        for run in [pool.submit(work) for _ in range(4)]:
            run.result()
    assert calls("stop") == ["rec stop 1 train"]
    assert len(closes(save_path)) == 1
    assert len(calls("enter")) == len(calls("exit"))


# Other roles of the process.


def test_a_window_that_others_joined_ends_for_all(profiler: Make, clock: Clock, save_path: Path) -> None:
    actor, critic = profiler("actor", **limited()), profiler("critic", **limited())
    actor.start(step=1)
    critic.start(step=1)
    assert len(opened()) == 1
    clock.now += 11
    span("a")
    assert not actor.recording
    assert not critic.recording
    critic.stop()
    actor.stop()
    assert calls("start", "stop") == ["rec start 1 train", "rec stop 1 train"]
    critic.start(step=2)
    actor.start(step=2)
    critic.stop()
    actor.stop()
    assert len(closes(save_path)) == 2
    rows = {(row.role, row.step): row.status for row in read_status(save_path).rows if row.step != 3}
    assert rows == {
        ("actor", 1): "published",
        ("critic", 1): "joined",
        ("critic", 2): "published",
        ("actor", 2): "joined",
    }


def test_a_window_over_several_steps_counts_once(profiler: Make, clock: Clock, save_path: Path) -> None:
    handle = profiler(profile_continuous_steps=True, **limited())
    handle.start(step=1)
    clock.now += 6
    handle.advance(step=2)
    span("a")
    clock.now += 6
    handle.advance(step=3)
    span("b")
    handle.stop()
    assert calls("start", "stop") == ["rec start 1 train", "rec stop 1 train"]
    (row,) = read_status(save_path).rows
    assert (row.status, row.reason) == ("published", "ended early: max_seconds=10 is reached")


# The option.


def test_without_limits_nobody_asks(profiler: Make) -> None:
    handle = profiler()
    handle.start(step=1)
    (current,) = windows.opened()
    assert current.tool.budget() is None
    assert not current.limited


def test_a_real_clock_is_enough(profiler: Make, save_path: Path) -> None:
    handle = profiler(**limited(1e-6))
    handle.start(step=1)
    before = time.monotonic()
    recording.wait_for(lambda: time.monotonic() > before + 1e-5)
    span("a")
    assert closes(save_path)[0]["reason"] == "max_seconds=1e-06 is reached"


@pytest.mark.parametrize("value", [0, -1, "soon", True, float("inf"), float("nan"), [1]])
def test_bad_limits_are_named(profiler: Make, value: object) -> None:
    with pytest.raises(ConfigError, match=r"global_tool_config\.rec\.max_seconds"):
        profiler(options={"rec": {"max_seconds": value}})


@pytest.mark.parametrize(("value", "limit"), [(None, None), (2, 2.0), ("2.5", 2.5)])
def test_good_limits_reach_the_tool(profiler: Make, value: object, limit: float | None) -> None:
    handle = profiler(options={"rec": {"max_seconds": value}})
    assert handle.tools[0].max_seconds == limit
