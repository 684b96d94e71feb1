from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import calls

from rankscope import DistProfiler, annotate
from rankscope.windows import opened

Make = Callable[..., DistProfiler]
DISCRETE = {"rec": {"discrete": True}}


def in_thread(action: Callable[[], Any], name: str = "other") -> Any:
    """Run it on a thread that is gone afterwards; its exception comes out here."""
    with ThreadPoolExecutor(1, thread_name_prefix=name) as pool:
        return pool.submit(action).result()


# One window per stage.


def test_a_window_per_stage_and_none_for_batches(profiler: Make, save_path: Path) -> None:
    handle = profiler(options=DISCRETE)
    handle.start(step=4)
    assert calls("start") == []
    for label in ("mini_batch0", "micro_batch7", "mini_batch"):
        with annotate(label):
            handle.step()
    with annotate("log_prob"), annotate("inner"):
        pass
    with annotate("update", scheduled=True), annotate("mini_batch0"):
        handle.step()
    handle.stop()
    assert recording.CALLS == [
        "rec start 4 log_prob",
        "rec annotate step4",
        "rec enter step4",
        "rec annotate log_prob",
        "rec enter log_prob",
        "rec annotate inner",
        "rec enter inner",
        "rec exit inner",
        "rec exit log_prob",
        "rec exit step4",
        "rec stop 4 log_prob",
        "rec start 4 update",
        "rec annotate step4",
        "rec enter step4",
        "rec annotate update",
        "rec enter update",
        "rec annotate mini_batch0",
        "rec enter mini_batch0",
        "rec step update",
        "rec exit mini_batch0",
        "rec exit update",
        "rec exit step4",
        "rec stop 4 update",
    ]
    assert [(w.scope, w.scheduled, w.reason, w.steps) for w in recording.WINDOWS] == [
        ("log_prob", False, "stage", (4,)),
        ("update", True, "stage", (4,)),
    ]
    assert len(recording.files(save_path)) == 2


def test_a_stage_that_raises_closes_its_window(profiler: Make) -> None:
    handle = profiler(options=DISCRETE)
    handle.start(step=1)
    with pytest.raises(LookupError), annotate("a"):
        raise LookupError
    with annotate("b"):
        pass
    handle.stop()
    assert calls("start", "stop") == ["rec start 1 a", "rec stop 1 a", "rec start 1 b", "rec stop 1 b"]
    assert "rec exit a LookupError" in recording.CALLS


def test_no_stage_outside_the_step(profiler: Make) -> None:
    handle = profiler(options=DISCRETE)
    with annotate("before"):
        handle.start(step=1)
        with annotate("inside"):
            handle.stop()
        with annotate("after"):
            pass
    assert calls("start", "stop") == ["rec start 1 inside", "rec stop 1 inside"]
    assert opened() == ()


def test_advance_counts_for_stages_too(profiler: Make) -> None:
    handle = profiler(options=DISCRETE)
    handle.start(step=1)
    with annotate("a"):
        pass
    handle.advance(step=2)
    with annotate("a"):
        pass
    handle.stop()
    assert calls("start") == ["rec start 1 a", "rec start 2 a"]


def test_two_threads_share_one_window(profiler: Make) -> None:
    handle = profiler(options=DISCRETE)
    handle.start(step=1)
    both, go = threading.Barrier(2), threading.Event()

    def stage(label: str) -> None:
        both.wait(20)
        for _ in range(50):
            with annotate(label):
                pass
        go.wait(20)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(stage, label) for label in ("a", "b")]
        go.set()
        for run in runs:
            run.result()
    handle.stop()
    # Never two at once, and each is stopped.
    events = calls("start", "stop")
    assert len(events) % 2 == 0
    for begin, end in zip(events[::2], events[1::2], strict=True):
        assert begin.replace("start", "stop") == end
    assert sum(call.startswith(("rec enter a", "rec enter b")) for call in recording.CALLS) == 100


def test_stages_of_tasks_that_overlap_are_in_one_file(profiler: Make) -> None:
    async def main() -> None:
        first_began, second_began, first_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first() -> None:
            with annotate("first"):
                first_began.set()
                await second_began.wait()
            first_ended.set()

        async def second() -> None:
            await first_began.wait()
            with annotate("second"):
                second_began.set()
                await first_ended.wait()

        await asyncio.gather(first(), second())
        with annotate("third"):
            pass

    handle = profiler(options=DISCRETE)
    handle.start(step=1)
    asyncio.run(main())
    handle.stop()
    assert calls("start", "stop") == ["rec start 1 first", "rec stop 1 first", "rec start 1 third", "rec stop 1 third"]
    assert calls("enter", "exit").count("rec enter second") == calls("enter", "exit").count("rec exit second") == 1


def test_a_stages_file_carries_the_role_whose_worker_ran_it(profiler: Make, save_path: Path) -> None:
    class Worker:
        def __init__(self, handle: Any) -> None:
            self.profiler = handle

        @annotate("run")
        def run(self) -> None: ...

    class Odd:
        @property
        def profiler(self) -> Any:
            raise RuntimeError("not ready")

        @annotate("run")
        def run(self) -> None: ...

    actor, critic = profiler("actor", options=DISCRETE), profiler("critic", options=DISCRETE)
    stranger = profiler("ref", options=DISCRETE)
    actor.start(step=1)
    critic.start(step=1)
    Worker(critic).run()
    Worker(actor).run()
    Worker(stranger).run()
    Worker(None).run()
    Worker("text").run()
    Odd().run()
    actor.stop()
    critic.stop()
    assert [window.role for window in recording.WINDOWS] == ["critic", *["actor"] * 5]
    assert len(list(save_path.glob("critic_run_*.txt"))) == 1
    assert len(list(save_path.glob("actor_run_*.txt"))) == 5


@pytest.mark.usefixtures("lenient")
def test_a_stage_whose_start_fails_is_trained_all_the_same(profiler: Make, save_path: Path) -> None:
    handle = profiler(options={"rec": {"discrete": True, "fail": "start"}})
    handle.start(step=1)
    ran = []
    for _ in range(2):
        with annotate("a"):
            ran.append(1)
    handle.stop()
    assert ran == [1, 1]
    assert calls("start", "stop") == ["rec start 1 a"]
    assert not handle.recording
    assert opened() == ()


# Several handles.


@pytest.mark.parametrize("owner_first", [True, False])
def test_only_the_owners_stop_ends_a_window(profiler: Make, save_path: Path, owner_first: bool) -> None:
    owner, guest = profiler("actor"), profiler("critic")
    assert owner.start(step=1)
    assert guest.start(step=1)
    assert guest.start(step=1)
    assert (owner.recording, guest.recording, guest.joined, owner.joined) == (True, True, True, False)
    if owner_first:
        owner.stop()
        assert calls("stop") == ["rec stop 1 train"]
        assert not guest.recording
        guest.stop()
    else:
        guest.stop()
        assert calls("stop") == []
        assert (owner.recording, guest.recording) == (True, False)
        owner.stop()
    assert calls("start", "stop") == ["rec start 1 train", "rec stop 1 train"]
    (join, *more) = recording.ledger(save_path, "join")
    assert (join["role"], join["owner_role"], join["step"]) == ("critic", "actor", 1)
    assert len(more) <= 1
    # The next step may be owned by the other one.
    guest.start(step=2)
    owner.start(step=2)
    owner.stop()
    assert owner.recording is False
    assert guest.recording is True
    guest.stop()
    assert calls("start", "stop")[2:] == ["rec start 2 train", "rec stop 2 train"]
    assert [window.role for window in recording.WINDOWS] == ["actor", "critic"]


def test_a_guest_that_closes_leaves_the_window_alone(profiler: Make) -> None:
    owner, guest = profiler("actor"), profiler("critic")
    owner.start(step=1)
    guest.start(step=1)
    guest.close()
    assert owner.recording
    owner.close()
    assert calls("stop") == ["rec stop 1 train"]


def test_spans_and_steps_reach_every_open_window_from_any_handle(profiler: Make) -> None:
    actor, critic = profiler("actor"), profiler("critic", tool="rec2")
    ref = profiler("ref")
    actor.start(step=1)
    critic.start(step=1)
    with annotate("a", scheduled=True):
        ref.step()
    actor.stop()
    critic.stop()
    assert calls("step") == ["rec step a", "rec2 step a"]
    assert [call for call in calls("enter") if call.endswith(" a")] == ["rec enter a", "rec2 enter a"]


@pytest.mark.usefixtures("lenient")
def test_a_fault_of_the_owners_backend_leaves_the_guest_its_own(profiler: Make) -> None:
    owner = profiler("actor", options={"rec": {"fail": "enter"}})
    guest = profiler("critic")
    owner.start(step=1)
    guest.start(step=1)
    owner.stop()
    guest.stop()
    assert [fault.tool for fault in owner.faults] == ["rec"]
    owner.start(step=2)
    assert guest.start(step=2)
    guest.stop()
    assert calls("start", "stop")[-2:] == ["rec start 2 train", "rec stop 2 train"]
    assert guest.faults == ()


# Threads.


def bound(make: Make, **facts: Any) -> DistProfiler:
    return make(tool="bound", **facts)


@pytest.mark.parametrize("boundary", ["span", "mini-batch", "stop", "start", "close"])
def test_a_stop_from_another_thread_is_carried_over_to_the_owners_next_boundary(
    profiler: Make, save_path: Path, boundary: str
) -> None:
    handle = bound(profiler)
    handle.start(step=1)
    in_thread(handle.stop)
    in_thread(handle.stop)  # once is enough
    assert calls("stop") == []
    assert handle.recording
    if boundary == "span":
        with annotate("a"):
            pass
        assert "bound enter a" not in recording.CALLS
    elif boundary == "mini-batch":
        handle.step()
        assert calls("step") == []
    elif boundary == "stop":
        handle.stop()
    elif boundary == "start":
        handle.start(step=2)
        assert calls("start", "stop") == ["bound start 1 train", "bound stop 1 train", "bound start 2 train"]
        handle.stop()
    else:
        handle.close()
    assert recording.THREADS[:2] == [("bound start", "MainThread"), ("bound stop", "MainThread")]
    assert not handle.recording
    assert not any("aborted" in path.name for path in save_path.iterdir())


def test_a_span_that_runs_when_the_stop_comes_is_the_boundary(profiler: Make) -> None:
    handle = bound(profiler)
    handle.start(step=1)
    with annotate("a"):
        in_thread(handle.stop)
        assert calls("stop") == []
    assert calls("exit", "stop") == ["bound exit a", "bound exit step1", "bound stop 1 train"]


def test_a_tool_without_ranges_finds_its_boundary_too(profiler: Make) -> None:
    handle = bound(profiler)
    handle.tools[0].annotate = None
    handle.start(step=1)
    in_thread(handle.stop)
    with annotate("a"):
        pass
    assert calls() == ["bound start 1 train", "bound stop 1 train"]


def test_when_the_owners_thread_is_gone_the_stop_is_done_here(profiler: Make, save_path: Path) -> None:
    handle = bound(profiler)
    thread = threading.Thread(target=handle.start, kwargs={"step": 1}, name="short-lived")
    thread.start()
    thread.join()
    handle.stop()
    assert recording.THREADS == [("bound start", "short-lived"), ("bound stop", "MainThread")]
    assert recording.files(save_path) == ["step 1"]


def test_a_tool_that_is_not_bound_stops_on_any_thread(profiler: Make) -> None:
    handle = profiler()
    handle.start(step=1)
    in_thread(handle.stop, "elsewhere")
    assert recording.THREADS[1] == ("rec stop", "elsewhere_0")


def test_a_stage_that_ends_on_another_thread_does_not_cost_the_next_one(profiler: Make) -> None:
    handle = bound(profiler, options={"bound": {"discrete": True}})
    handle.start(step=1)

    @annotate("rows")
    def rows() -> Any:
        yield 1

    generator = rows()
    next(generator)
    in_thread(lambda: list(generator))
    assert calls("start", "stop") == ["bound start 1 rows"]
    with annotate("next"):
        pass
    handle.stop()
    assert calls("start", "stop") == [
        "bound start 1 rows",
        "bound stop 1 rows",
        "bound start 1 next",
        "bound stop 1 next",
    ]
    assert {name for _, name in recording.THREADS} == {"MainThread"}


def test_a_window_behind_a_busy_thread_is_told_not_lost_in_silence(
    profiler: Make, save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = bound(profiler)
    started, leave = threading.Event(), threading.Event()

    def own() -> None:
        handle.start(step=1)
        started.set()
        leave.wait(60)

    owner = threading.Thread(target=own, name="busy")
    owner.start()
    try:
        assert started.wait(20)
        handle.stop()
        assert handle.start(step=2) is True  # the first is still open …
        assert calls("start") == ["bound start 1 train"]  # … and the second was not begun
        missed = [record for record in recording.ledger(save_path, "artifact") if record["step"] == 2]
        assert [record["status"] for record in missed] == ["failed"]
        assert "'busy'" in missed[0]["reason"]
        handle.close()
        assert "could not be saved" in capsys.readouterr().err
    finally:
        leave.set()
        owner.join()
    handle.closed = False
    handle.close()
    assert calls("stop") == ["bound stop 1 train"]


def test_a_signal_in_the_middle_of_a_start_waits_for_its_end(profiler: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope.transitions import outside_transition, transition

    order: list[str] = []
    outside_transition(lambda: order.append("now"))
    with pytest.raises(KeyboardInterrupt), transition():  # noqa: PT012
        with transition():
            outside_transition(lambda: order.append("late"))
        order.append("end")
        raise KeyboardInterrupt
    assert order == ["now", "end", "late"]
