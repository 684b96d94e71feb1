"""Start, stop, nesting, threads, and profilers that the user runs by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.status import read_status

pytestmark = pytest.mark.torch

MARKS = {"cos", "sin", "tan"}


@pytest.fixture(scope="module")
def lifecycle(scenarios: Any) -> Any:
    ended = scenarios.run("lifecycle")
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def foreign(scenarios: Any) -> Any:
    ended = scenarios.run("foreign")
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def threads(scenarios: Any) -> Any:
    ended = scenarios.run("threads")
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def all_threads(scenarios: Any) -> Any:
    ended = scenarios.run("all_threads")
    assert ended.code == 0, ended.err
    return ended


def by_step(path: Path) -> dict[int | None, tuple[str, str]]:
    """Status and reason of each step, as ``rankscope status`` tells them."""
    return {row.step: (row.status, row.reason) for row in read_status(path).rows}


def test_stopping_twice_changes_nothing_and_the_next_round_writes_again(lifecycle: Any, kit: Any) -> None:
    first, second = kit.traces(lifecycle.path / "twice")
    assert (first.name.step, first.ops & MARKS) == (1, {"cos"})
    assert (second.name.step, second.ops & MARKS) == (2, {"sin"})
    assert kit.outcomes(lifecycle.path / "twice") == {"exporting": 2, "published": 2}
    assert kit.left_over(lifecycle.path / "twice") == []


def test_discrete_stages_in_each_other_give_one_file_with_ranges(lifecycle: Any, kit: Any) -> None:
    two, three = kit.traces(lifecycle.path / "nested")
    assert (two.labels, two.ops & MARKS) == (["outer", "inner"], {"cos", "tan"})
    assert (three.labels, three.ops & MARKS) == (["outer", "middle", "inner"], MARKS)
    for trace in (two, three):
        assert trace.name.scope == trace.meta["scope"] == "outer"
        outer, *rest = trace.rows
        assert all(outer.start <= row.start <= row.end <= outer.end for row in rest)
    assert not kit.ledger(lifecycle.path / "nested", "artifact", status="empty")


@pytest.mark.parametrize("number", range(4))
def test_colocated_roles_share_one_file_whoever_starts_and_stops_first(lifecycle: Any, kit: Any, number: int) -> None:
    path = lifecycle.path / f"colocated{number}"
    owner, last = ("actor", "actor", "ref", "ref")[number], ("actor", "ref", "actor", "ref")[number]
    traces = kit.traces(path)
    assert [(trace.name.role, trace.name.step) for trace in traces] == [(owner, 1), (owner, 2)]
    # A stop by the role that only joined leaves the window open for its owner.
    expected = {"cos", "sin"} if last == owner else {"cos"}
    assert [trace.ops & MARKS for trace in traces] == [expected, expected]
    joined = {"actor": "ref", "ref": "actor"}[owner]
    assert len(kit.ledger(path, "join", role=joined, owner_role=owner)) == 2
    rows = [(row.role, row.step, row.status) for row in read_status(path).rows if row.step in {1, 2}]
    assert sorted(rows) == sorted(
        (role, step, "published" if role == owner else "joined") for role in ("actor", "ref") for step in (1, 2)
    )


def test_a_step_that_was_never_stopped_is_saved_as_aborted(lifecycle: Any, kit: Any) -> None:
    path = lifecycle.path / "never_stopped"
    aborted, whole = kit.traces(path)
    assert (aborted.name.step, aborted.name.scope, aborted.ops & MARKS) == (1, "train-aborted", {"cos"})
    assert (whole.name.step, whole.name.scope, whole.ops & MARKS) == (2, "train", {"sin"})
    assert len(lifecycle.said("still open when the next one began", "warning")) == 1
    assert by_step(path)[1][0] == "aborted"


def test_an_early_return_ends_the_window(lifecycle: Any, kit: Any) -> None:
    assert kit.trace(lifecycle.path / "early_return").ops & MARKS == {"cos"}


def test_handles_one_after_another_each_use_a_helper_process(lifecycle: Any, kit: Any) -> None:
    # That no file was finished in the training process is looked at there.
    assert [trace.name.step for trace in kit.traces(lifecycle.path / "again")] == [1, 2, 3, 4, 5]


def test_a_profiler_that_runs_already_is_left_alone(foreign: Any, kit: Any) -> None:
    path = foreign.path / "around"
    assert kit.trace(path).name.step == 2
    status, reason = by_step(path)[1]
    assert status == "failed"
    assert "already running" in reason
    assert foreign.said("left alone", "warning")


def test_a_profiler_that_comes_and_goes_inside_a_window_takes_it(foreign: Any, kit: Any) -> None:
    path = foreign.path / "within"
    trace = kit.trace(path)
    assert (trace.name.step, trace.ops & MARKS) == (2, {"sin"})
    status, reason = by_step(path)[1]
    assert status == "failed"
    assert "started and stopped inside this window" in reason


def test_a_profiler_that_outlives_the_window_goes_on(foreign: Any, kit: Any) -> None:
    path = foreign.path / "beyond"
    trace = kit.trace(path)
    assert (trace.name.step, trace.ops & MARKS) == (3, {"tan"})
    told = by_step(path)
    assert told[1] == (
        "failed",
        "another torch profiler was started inside this window and still runs; it is left alone",
    )
    assert told[2][0] == "failed"
    assert "already running" in told[2][1]


def test_a_window_of_a_thread_that_ended_is_refused_by_name(threads: Any, kit: Any) -> None:
    path = threads.path / "ended"
    trace = kit.trace(path)
    assert (trace.name.step, trace.ops & MARKS) == (2, {"sin"})
    status, reason = by_step(path)[1]
    assert status == "failed"
    assert "'short-lived'" in reason
    assert "'MainThread'" in reason


def test_a_stop_elsewhere_is_carried_over_to_the_thread_that_started(threads: Any, kit: Any) -> None:
    first, second = kit.traces(threads.path / "alive")
    assert (first.name.step, first.ops & MARKS, first.labels) == (1, {"cos"}, ["stage"])
    assert (second.name.step, second.ops & MARKS) == (2, {"tan"})
    assert threads.said("asked to stop on 'MainThread'", "info")


def test_a_stop_that_waits_is_carried_out_before_the_next_window(threads: Any, kit: Any) -> None:
    first, second = kit.traces(threads.path / "alive_next")
    assert (first.name.step, first.ops & MARKS) == (1, {"cos"})
    assert (second.name.step, second.ops & MARKS) == (2, {"sin"})


def test_a_window_that_cannot_open_while_a_stop_waits_says_so(threads: Any, kit: Any) -> None:
    path = threads.path / "alive_next_elsewhere"
    trace = kit.trace(path)
    assert (trace.name.step, trace.ops & MARKS) == (1, {"cos"})
    status, reason = by_step(path)[2]
    assert status == "failed"
    assert "'helper'" in reason


def test_ranges_of_other_threads_are_kept_and_counted(threads: Any, kit: Any) -> None:
    trace = kit.trace(threads.path / "pre_existing")
    assert trace.labels == ["stage"] * 3
    assert len({row.tid for row in trace.rows}) == 2
    assert trace.ops & MARKS == {"sin"}, "torch records no operators of a thread that was there before"
    assert trace.meta["pid"] in {row.tid for row in trace.rows}
    [said] = threads.said("ran on threads that torch does not profile", "warning")
    assert said["ranges"] == 2
    [artifact] = kit.ledger(threads.path / "pre_existing", "artifact", status="published")
    assert artifact["rows_of_other_threads"] == 2
    names = {event["args"]["name"] for event in trace.events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert "helper" in names


def test_all_threads_lets_any_thread_stop(all_threads: Any, kit: Any) -> None:
    assert kit.trace(all_threads.path / "ended").ops & MARKS == {"cos"}


def test_all_threads_records_threads_that_were_there_before(all_threads: Any, kit: Any) -> None:
    trace = kit.trace(all_threads.path / "pre_existing")
    assert trace.ops & MARKS == {"cos", "sin"}
    assert trace.labels == ["stage", "stage"]
    assert len({row.tid for row in trace.rows}) == 2


def test_all_threads_says_that_memory_will_be_empty(all_threads: Any, kit: Any) -> None:
    assert len(all_threads.said("records no allocator events", "warning")) == 1
    events = kit.trace(all_threads.path / "memory").events
    assert not [event for event in events if event["name"] == "[memory]"]


@pytest.mark.parametrize("kind", ["ended", "daemon"])
def test_a_process_ends_well_while_a_stop_still_waits(tmp_path: Path, scenarios: Any, kit: Any, kind: str) -> None:
    ended = scenarios.run("exit_while_waiting", kind)
    assert ended.code == 0, ended.err
    if kind == "ended":
        [artifact] = kit.ledger(ended.path, "artifact")
        assert artifact["status"] == "failed"
        assert "'recorder'" in artifact["reason"]
    else:
        [said] = ended.said("could not be saved", "warning")
        assert said["thread"] == "recorder"
    assert kit.traces(ended.path) == []


def test_a_swap_of_tensors_works_in_a_profiled_stage(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("swapping")
    assert ended.code == 0, ended.err
    assert "drop swapped" in ended.out
    [said] = ended.said("shapes and stack are not recorded", "warning")
    assert "set_swap_module_params_on_conversion" in said["reason"]
    dropped, kept = kit.trace(ended.path / "drop"), kit.trace(ended.path / "keep")
    assert (dropped.labels, dropped.meta["contents"]) == (["stage"], ["cpu"])
    assert (kept.labels, kept.meta["contents"]) == (["stage"], ["cpu", "shapes", "stack"])
    assert "addmm" in dropped.ops & kept.ops


def test_stacks_start_and_stop_at_different_depths(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("depths")
    assert ended.code == 0, ended.err
    for contents in ("stack", "stack-shapes-memory-flops"):
        traces = kit.traces(ended.path / contents)
        assert [trace.ops & MARKS for trace in traces] == [{"cos"}, {"sin"}, {"tan"}]
        assert all(any(event.get("cat") == "python_function" for event in trace.events) for trace in traces)


def test_status_of_a_whole_run_on_the_command_line(lifecycle: Any) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("rankscope"), "status", str(lifecycle.path / "twice")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "2 published, 1 not reached" in done.stdout
