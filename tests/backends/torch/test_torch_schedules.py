"""Schedules over the mini-batches of an update stage."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope import ConfigError, DistProfiler, annotate

pytestmark = pytest.mark.torch


def update(profiler: Any, count: int, stage: str = "actor_update") -> None:
    """An update stage with this many mini-batches."""
    with annotate(stage, scheduled=True):
        for number in range(count):
            with annotate(f"mini_batch{number}"):
                pass
            profiler.step()


def batches(trace: Any) -> list[str]:
    return [label for label in trace.labels if label.startswith("mini_batch")]


@pytest.fixture
def recorded(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> Callable[..., Any]:
    """Run one update stage with a schedule; its traces in order."""

    def record(count: int, *, discrete: bool = True, **schedule: int) -> list[Any]:
        profiler = handle(discrete=discrete, schedule=schedule)
        profiler.start(step=1)
        update(profiler, count)
        profiler.stop()
        profiler.close()
        assert kit.left_over(tmp_path) == []
        found: list[Any] = kit.traces(tmp_path)
        assert kit.outcomes(tmp_path)["published"] == len(found)
        return found

    return record


def test_each_cycle_is_a_file_with_exactly_its_mini_batches(recorded: Callable[..., Any], kit: Any) -> None:
    first, second = recorded(10, wait=1, warmup=1, active=2)
    assert (first.name.part, batches(first)) == ("mb2-3", ["mini_batch2", "mini_batch3"])
    assert (second.name.part, batches(second)) == ("mb6-7", ["mini_batch6", "mini_batch7"])
    assert [trace.meta["mini_batches"] for trace in (first, second)] == [[2, 3], [6, 7]]
    assert [trace.meta["partial"] for trace in (first, second)] == [False, False]
    for trace in (first, second):  # the stage runs on around them
        stage = trace.row("actor_update")
        assert all(stage.start <= row.start <= row.end <= stage.end for row in trace.rows)


def test_a_schedule_that_the_loop_never_reaches_says_so(
    recorded: Callable[..., Any], kit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorded(4, skip_first=5, active=1) == []
    [artifact] = kit.ledger(tmp_path, "artifact")
    assert artifact["status"] == "empty"
    assert artifact["reason"] == (
        "the schedule records from mini-batch 5 on, so it needs at least 6; 4 ran in stage 'actor_update'"
    )
    said = kit.messages(capsys.readouterr().err, "warning")
    [warning] = [message for message in said if message["event"] == "no scheduled mini-batch was recorded"]
    assert (warning["needed"], warning["seen"]) == (6, 4)


def test_a_loop_that_ends_inside_of_a_cycle_leaves_a_partial_file(recorded: Callable[..., Any]) -> None:
    [trace] = recorded(3, active=8)
    assert (trace.name.part, trace.meta["mini_batches"], trace.meta["partial"]) == ("mb0-2", [0, 2], True)
    assert batches(trace) == ["mini_batch0", "mini_batch1", "mini_batch2"]


def test_a_loop_that_ends_with_a_cycle_leaves_no_junk(recorded: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    traces = recorded(4, active=2)
    assert [(trace.name.part, batches(trace)) for trace in traces] == [
        ("mb0-1", ["mini_batch0", "mini_batch1"]),
        ("mb2-3", ["mini_batch2", "mini_batch3"]),
    ]
    assert kit.outcomes(tmp_path) == {"exporting": 2, "published": 2}


def test_a_loop_that_ends_with_a_warm_up_leaves_no_junk(recorded: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    traces = recorded(4, warmup=1, active=2)
    assert [trace.name.part for trace in traces] == ["mb1-2"]
    assert kit.outcomes(tmp_path) == {"exporting": 1, "published": 1}


def test_repeat_bounds_the_number_of_files(recorded: Callable[..., Any]) -> None:
    assert [trace.name.part for trace in recorded(10, wait=1, active=1, repeat=2)] == ["mb1", "mb3"]


def test_the_first_wait_can_be_skipped(recorded: Callable[..., Any]) -> None:
    traces = recorded(8, wait=3, active=1, skip_first_wait=1)
    assert [trace.name.part for trace in traces] == ["mb0", "mb4"]


@pytest.mark.parametrize("keep", [True, False])
def test_without_discrete_one_file_keeps_the_stages_around(
    handle: Callable[..., Any], kit: Any, tmp_path: Path, keep: bool
) -> None:
    profiler = handle(schedule={"wait": 1, "active": 2}, keep_stages=keep)
    profiler.start(step=1)
    with annotate("before"):
        pass
    update(profiler, 8)
    with annotate("after"):
        pass
    profiler.stop()
    profiler.close()
    trace = kit.trace(tmp_path)
    assert (trace.name.scope, trace.name.part, trace.meta["partial"]) == ("train", "mb1-2", False)
    assert batches(trace) == ["mini_batch1", "mini_batch2"]
    stages = [label for label in trace.labels if not label.startswith("mini_batch")]
    assert stages == (["before", "actor_update", "after"] if keep else [])


def test_the_first_stage_that_reports_mini_batches_is_the_scheduled_one(
    handle: Callable[..., Any], kit: Any, tmp_path: Path
) -> None:
    profiler = handle(schedule={"skip_first": 1, "active": 1})
    profiler.start(step=1)
    update(profiler, 1, "critic_update")
    update(profiler, 3, "actor_update")
    update(profiler, 2, "critic_update")
    profiler.stop()
    profiler.close()
    trace = kit.trace(tmp_path)
    assert trace.name.part == "mb1"
    # The second mini-batch of the critic is the one in its second stage; the actor's ran while it was awaited.
    assert "mini_batch0" in batches(trace)


def test_the_scheduled_stage_can_be_named(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    profiler = handle(schedule={"skip_first": 1, "active": 1, "stage": "actor_update"})
    profiler.start(step=1)
    update(profiler, 3, "critic_update")
    update(profiler, 3, "actor_update")
    profiler.stop()
    profiler.close()
    trace = kit.trace(tmp_path)
    assert (trace.name.part, batches(trace)) == ("mb1", ["mini_batch1"])
    assert [label for label in trace.labels if label.endswith("_update")] == ["critic_update", "actor_update"]


def test_in_discrete_mode_each_scheduled_stage_has_its_own_count(
    handle: Callable[..., Any], kit: Any, tmp_path: Path
) -> None:
    profiler = handle(discrete=True, schedule={"skip_first": 1, "active": 1, "repeat": 1})
    profiler.start(step=1)
    with annotate("actor_compute_log_prob"):
        pass
    update(profiler, 3, "critic_update")
    update(profiler, 3, "actor_update")
    profiler.stop()
    profiler.close()
    found = {(trace.name.scope, trace.name.part): batches(trace) for trace in kit.traces(tmp_path)}
    assert found == {
        ("actor-compute-log-prob", ""): [],
        ("critic-update", "mb1"): ["mini_batch1"],
        ("actor-update", "mb1"): ["mini_batch1"],
    }


def test_every_profiled_step_has_its_own_schedule(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    profiler = handle(schedule={"wait": 1, "active": 1, "repeat": 1})
    for step in (1, 2, 3):
        profiler.start(step=step)
        update(profiler, 3)
        profiler.stop()
    profiler.close()
    assert [(trace.name.step, trace.name.part) for trace in kit.traces(tmp_path)] == [
        (1, "mb1"),
        (2, "mb1"),
        (3, "mb1"),
    ]


@pytest.mark.parametrize(
    ("schedule", "key", "words"),
    [
        ({"wait": -1, "active": 1}, "wait", "must be 0 or more, got -1"),
        ({"skip_first": "one", "active": 1}, "skip_first", "one"),
        ({"repeat": True, "active": 1}, "repeat", "True"),
        ({"wait": 2, "active": 0}, "active", "switches the schedule off"),
        ({"activ": 1}, "activ", "Did you mean"),
    ],
)
def test_bad_schedules_are_refused_before_training(
    kit: Any, tmp_path: Path, schedule: dict[str, Any], key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        DistProfiler(kit.config(tmp_path, schedule=schedule), role="actor", rank=0)
    text = str(caught.value)
    assert f"global_tool_config.torch.schedule.{key}" in text
    assert words.lower() in text.lower()


@given(
    numbers=st.fixed_dictionaries(
        {
            "skip_first": st.integers(0, 5),
            "wait": st.integers(0, 4),
            "warmup": st.integers(0, 3),
            "active": st.integers(1, 4),
            "repeat": st.integers(0, 3),
            "skip_first_wait": st.integers(0, 1),
        }
    )
)
def test_the_numbers_mean_what_they_mean_to_torch(numbers: dict[str, int]) -> None:
    import torch

    from rankscope import Schedule, ScheduleOptions

    known = inspect.signature(torch.profiler.schedule).parameters
    if "skip_first_wait" not in known:
        numbers["skip_first_wait"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a schedule without warm-up
        theirs = torch.profiler.schedule(**{key: value for key, value in numbers.items() if key in known})
    ours = Schedule(ScheduleOptions(**numbers), numbers["repeat"])
    phases = {"NONE": "idle", "WARMUP": "warmup", "RECORD": "record", "RECORD_AND_SAVE": "record"}
    indices = range(60)
    assert [ours.phase(index) for index in indices] == [phases[theirs(index).name] for index in indices]
    recorded = [index for index in indices if ours.phase(index) == "record"]
    if recorded:
        assert recorded[0] == ours.first
    saved = [index for index in indices if theirs(index).name == "RECORD_AND_SAVE"]
    begun = [index for index in indices if ours.phase(index) == "record" and ours.begins(index)]
    # Every cycle that begins is saved with its last mini-batch.
    assert [index + numbers["active"] - 1 for index in begun if index + numbers["active"] <= 60] == saved
