"""When the history is on, what is saved when, and what is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import Availability, ConfigError, annotate
from rankscope.artifacts.names import parse_name
from rankscope.artifacts.status import read_status
from rankscope_torch_memory import TorchMemoryBackend

MEBI = 1 << 20


def steps(prof: Any, device: Any, *numbers: int) -> list[bool]:
    """Run training steps 1 to 6, each keeping one MiB; whether the history was on in each."""
    on = []
    for step in range(1, 7):
        if step in numbers:
            prof.start(step=step)
        device.alloc(MEBI)
        on.append(device.history)
        if step in numbers:
            prof.stop()
    return on


def actions(snapshot: dict[str, Any]) -> list[str]:
    return [event["action"] for event in snapshot["device_traces"][0]]


def statuses(path: Path) -> dict[int | None, str]:
    return {row.step: row.status for row in read_status(path).rows}


def test_history_is_on_from_the_first_to_the_last_profiled_step(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any], save_path: Path
) -> None:
    prof = profiler(steps=(2, 3, 5))
    assert device.records == []
    assert steps(prof, device, 2, 3, 5) == [False, True, True, True, True, False]
    assert device.records[-1]["enabled"] is None
    found = snapshots()
    assert [snapshot["rankscope"]["step"] for snapshot in found] == [2, 3, 5]
    # Each begins with its window, although step 4 was recorded in between.
    assert [actions(snapshot) for snapshot in found] == [["segment_alloc", "alloc"]] * 3
    assert [len(snapshot["segments"]) for snapshot in found] == [2, 3, 5]
    assert statuses(save_path) == {2: "published", 3: "published", 5: "published"}


def test_a_rank_that_is_not_selected_records_nothing(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any]
) -> None:
    prof = profiler(rank=1)
    assert steps(prof, device, 2, 3, 5) == [False] * 6
    assert device.records == []
    assert device.snapshots == 0
    assert files() == []


def test_python_stacks_are_the_default_and_what_torch_gets(device: Any, profiler: Callable[..., Any]) -> None:
    steps(profiler(), device, 2)
    first = device.records[0]
    assert (first["enabled"], first["context"], first["stacks"], first["max_entries"]) == (
        "all",
        "all",
        "python",
        100_000,
    )
    assert first["clear_history"] is False


def test_name_and_facts_of_a_file(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    prof = profiler()
    steps(prof, device, 2)
    (path,) = files()
    name = parse_name(path.name)
    assert name is not None
    assert (name.role, name.scope, name.step, name.rank, name.world_size) == ("actor", "train", 2, 0, 2)
    assert (name.pid, name.suffix) == (os.getpid(), ".pickle")
    about = snapshots()[0]["rankscope"]
    assert (about["role"], about["rank"], about["world_size"], about["pid"]) == ("actor", 0, 2, os.getpid())
    assert about["device_bytes"] == {"free": 100 * MEBI, "total": 1000 * MEBI}
    assert about["statistics"] == {
        "allocated_bytes.all.current": 2 * MEBI,
        "allocated_bytes.all.peak": 2 * MEBI,
        "num_ooms": 0,
    }
    (artifact,) = prof.artifacts
    assert artifact.events == 2
    assert artifact.facts["allocated_bytes"] == artifact.facts["peak_allocated_bytes"] == 2 * MEBI
    assert artifact.facts["reserved_bytes"] == 2 * MEBI
    assert "warnings" not in artifact.facts


def test_a_full_history_is_told(device: Any, profiler: Callable[..., Any], files: Callable[..., Any]) -> None:
    prof = profiler(trace_alloc_max_entries=2)
    steps(prof, device, 2)
    files()
    (artifact,) = prof.artifacts
    assert artifact.facts["truncated"] is True
    assert "holds the last 2 events" in artifact.facts["warnings"][0]


@pytest.mark.parametrize(
    ("number", "covered", "rows"),
    [
        (2, [[2, 3], [5]], {2: "joined", 3: "published", 5: "published"}),
        (3, [[2, 3, 5]], {2: "joined", 3: "joined", 5: "published"}),
        (9, [[2, 3, 5]], {2: "joined", 3: "joined", 5: "published"}),
    ],
)
def test_one_file_for_several_steps_and_the_rest_at_the_end(
    device: Any,
    profiler: Callable[..., Any],
    snapshots: Callable[..., Any],
    save_path: Path,
    number: int,
    covered: list[list[int]],
    rows: dict[int, str],
) -> None:
    prof = profiler(memory_snapshot_num_steps=number)
    steps(prof, device, 2, 3, 5)
    found = snapshots()
    assert [snapshot["rankscope"]["steps"] for snapshot in found] == covered
    assert not device.history
    prof.close()
    assert len(snapshots()) == len(covered)
    assert statuses(save_path) == rows
    assert read_status(save_path).complete


def test_the_rest_is_saved_when_the_run_ends_early(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any], save_path: Path
) -> None:
    prof = profiler(memory_snapshot_num_steps=3)
    steps(prof, device, 2, 3)
    assert snapshots() == []
    assert device.history
    assert {row.step: row.status for row in read_status(save_path).rows}[2] == "exporting"
    prof.close()
    (snapshot,) = snapshots()
    assert snapshot["rankscope"]["steps"] == [2, 3]
    assert not device.history
    assert statuses(save_path) == {2: "joined", 3: "published", 5: "not reached"}
    assert [artifact.step for artifact in prof.artifacts] == [3]


def test_windows_without_a_step_count_too(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    prof = profiler(memory_snapshot_num_steps=2)
    for _ in range(3):
        prof.start()
        device.alloc(MEBI)
        prof.stop()
    assert [actions(snapshot) for snapshot in snapshots()] == [["segment_alloc", "alloc"] * 2]
    prof.close()
    assert [len(actions(snapshot)) for snapshot in snapshots()] == [4, 2]
    assert not device.history


def test_a_window_over_several_steps_counts_each_of_them(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    prof = profiler(steps=(1, 2, 4), memory_snapshot_num_steps=2, common={"profile_continuous_steps": True})
    prof.start(step=1)
    device.alloc(MEBI)
    prof.advance(step=2)
    device.alloc(MEBI)
    prof.stop()
    assert [snapshot["rankscope"]["steps"] for snapshot in snapshots()] == [[1, 2]]
    assert device.history
    prof.start(step=4)
    prof.stop()
    assert [snapshot["rankscope"]["steps"] for snapshot in snapshots()] == [[1, 2], [4]]
    assert not device.history


def test_discrete_makes_a_file_for_each_stage(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    prof = profiler(discrete=True, steps=(2, 3), memory_snapshot_num_steps=2)
    assert "memory_snapshot_num_steps has no effect" in capfd.readouterr().err
    for step in (2, 3):
        prof.start(step=step)
        for stage in ("update", "log_prob"):
            with annotate(stage):
                device.alloc(MEBI)
        prof.stop()
    names = [parse_name(path.name) for path in files()]
    assert sorted((name.step, name.scope) for name in names if name) == [
        (2, "log-prob"),
        (2, "update"),
        (3, "log-prob"),
        (3, "update"),
    ]
    assert not device.history


def test_without_history_there_are_no_events_but_stacks(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    steps(profiler(history=False), device, 2, 3)
    assert [record["enabled"] for record in device.records[:1]] == ["state"]
    last = snapshots()[-1]
    assert len(last["device_traces"][0]) <= 1
    assert last["segments"][-1]["blocks"][0]["frames"][0]["name"] == "steps"


def test_without_history_and_stacks_nothing_is_recorded(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    assert steps(profiler(history=False, context="none"), device, 2) == [False] * 6
    assert device.records == []
    (snapshot,) = snapshots()
    assert len(snapshot["segments"]) == 2


def test_a_sleeping_device_is_not_woken_and_recorded_from_its_first_use(
    use: Callable[..., Any], profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    device = use()
    prof = profiler()
    prof.start(step=2)
    assert (device.initialised, device.records, device.observers) == (False, [], [])
    device.alloc(MEBI)
    assert device.history
    assert len(device.observers) == 1
    prof.stop()
    (snapshot,) = snapshots()
    assert actions(snapshot) == ["segment_alloc", "alloc"]


def test_a_device_that_is_never_used_leaves_a_reason(
    use: Callable[..., Any],
    profiler: Callable[..., Any],
    files: Callable[..., Any],
    save_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    device = use()
    prof = profiler()
    for step in (2, 3, 5):
        prof.start(step=step)
        prof.stop()
    prof.close()
    assert not device.initialised
    assert files() == []
    assert {(row.status, row.reason) for row in read_status(save_path).rows} == {
        ("empty", "this process does not use the device yet: there is nothing to show")
    }
    assert capfd.readouterr().err.count("a window left no snapshot") == 1
    device.initialise()
    assert device.records == []


def test_a_device_that_cannot_be_waited_for_is_recorded_from_the_next_span(
    use: Callable[..., Any], profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    device = use(without=("_lazy_call",))
    device.queued = [lambda: None]
    prof = profiler()
    prof.start(step=2)
    device.alloc(MEBI)
    assert not device.history
    with annotate("update"):
        device.alloc(MEBI)
    assert device.history
    prof.stop()
    (snapshot,) = snapshots()
    assert actions(snapshot) == ["segment_alloc", "alloc"]


def test_from_init_records_the_models_own_memory(
    use: Callable[..., Any], profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    device = use()
    prof = profiler(from_init=True)
    assert not device.initialised
    device.alloc(7 * MEBI)
    assert device.history
    steps(prof, device, 2, 3, 5)
    first, second, third = snapshots()
    assert actions(first) == ["segment_alloc", "alloc"] * 3
    assert first["device_traces"][0][1]["size"] == 7 * MEBI
    assert actions(second) == actions(third) == ["segment_alloc", "alloc"]
    assert not device.history


def test_somebody_elses_history_is_read_and_left_alone(
    device: Any,
    profiler: Callable[..., Any],
    snapshots: Callable[..., Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    device.record(enabled="all", context="all", max_entries=1000)
    device.alloc(MEBI)
    theirs = list(device.records)
    steps(profiler(), device, 2, 3, 5)
    assert device.records == theirs
    assert device.history
    assert [len(snapshot["device_traces"][0]) for snapshot in snapshots()] == [6, 8, 12]
    assert all(snapshot["rankscope"]["foreign_history"] for snapshot in snapshots())
    assert capfd.readouterr().err.count("somebody else records the memory history") == 1


def test_roles_of_one_process_share_one_file(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], save_path: Path
) -> None:
    actor, critic = profiler(role="actor"), profiler(role="critic")
    for step in (2, 3, 5):
        actor.start(step=step)
        critic.start(step=step)
        device.alloc(MEBI)
        critic.stop()
        actor.stop()
    assert len(files()) == 3
    assert device.snapshots == 3
    assert not device.history
    assert {row.status for row in read_status(save_path).rows} == {"published", "joined"}


def test_roles_that_alternate_count_together(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    actor = profiler(role="actor", memory_snapshot_num_steps=2)
    critic = profiler(role="critic", memory_snapshot_num_steps=2)
    for handle, step in ((actor, 2), (critic, 3), (actor, 5)):
        handle.start(step=step)
        device.alloc(MEBI)
        handle.stop()
    assert sorted(snapshot["rankscope"]["steps"] for snapshot in snapshots()) == [[2, 3], [5]]


@pytest.mark.parametrize("generation", ["cuda 2.14", "cuda 2.13", "xpu 2.14", "npu 2.13", "legacy"])
def test_every_generation_of_torch_is_served(
    use: Callable[..., Any],
    profiler: Callable[..., Any],
    snapshots: Callable[..., Any],
    generation: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kind = generation.split(maxsplit=1)[0] if generation != "legacy" else "cuda"
    device = use(generation, kind=kind)
    device.initialise()
    prof = profiler(trace_alloc_max_entries=50, context="alloc", stacks="all")
    assert steps(prof, device, 2, 3, 5) == [False, True, True, True, True, False]
    assert [actions(snapshot) for snapshot in snapshots()] == [["segment_alloc", "alloc"]] * 3
    first = device.records[0]
    if generation == "legacy":
        assert (first["enabled"], first["trace_alloc_max_entries"], first["record_context_cpp"]) == (True, 50, True)
        assert first["trace_alloc_record_context"] is True
        assert device.records[-1]["enabled"] is False
    else:
        assert (first["enabled"], first["max_entries"], first["context"], first["stacks"]) == (
            "all",
            50,
            "alloc",
            "all",
        )
        assert device.records[-1]["enabled"] is None
    clears = [record.get("clear_history") for record in device.records]
    assert (True in clears) == ("clear_history" in first)
    assert "cannot honour" not in capfd.readouterr().err


def test_options_that_this_torch_cannot_honour_are_told_once(
    use: Callable[..., Any], profiler: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    device = use("npu 2.13", kind="npu")
    device.initialise()
    prof = profiler(stack_depth=32, kw_args={"skip_actions": ["alloc"], "device": 3})
    steps(prof, device, 2, 3, 5)
    told = capfd.readouterr().err
    assert told.count("this torch cannot honour stack_depth") == 1
    assert told.count("this torch cannot honour kw_args.skip_actions") == 1
    assert "kw_args.device" not in told
    assert device.records[0]["device"] == 3


def test_further_arguments_reach_torch_as_a_list(device: Any, profiler: Callable[..., Any]) -> None:
    steps(profiler(kw_args={"skip_actions": ["free_completed"], "compile_context": True}), device, 2)
    assert device.records[0]["skip_actions"] == ["free_completed"]
    assert device.records[0]["compile_context"] is True


def test_stages_are_named_in_the_events_where_torch_can(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    device.label = "theirs"
    prof = profiler(stages=True)
    prof.start(step=2)
    with annotate("update"):
        device.alloc(MEBI)
        with annotate("mini_batch0"):
            device.alloc(MEBI)
        with annotate("inner"):
            device.alloc(MEBI)
    prof.stop()
    (snapshot,) = snapshots()
    labels = [e["user_metadata"] for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert labels == ["update", "update", "inner"]
    assert device.label == "theirs"


def test_stages_are_reported_where_torch_cannot(
    use: Callable[..., Any], profiler: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    device = use(without=("_set_memory_metadata",))
    device.initialise()
    prof = profiler(stages=True)
    for step in (2, 3):
        prof.start(step=step)
        with annotate("update"):
            device.alloc(MEBI)
        prof.stop()
    assert capfd.readouterr().err.count("this torch cannot honour stages") == 1


def test_an_allocator_that_refuses_labels_is_told_once(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(text: str) -> None:
        raise RuntimeError("not with this allocator")

    sys.modules["torch"].cuda.memory._set_memory_metadata = refuse  # type: ignore[attr-defined]
    prof = profiler(stages=True)
    prof.start(step=2)
    for _ in range(2):
        with annotate("update"):
            device.alloc(MEBI)
    prof.stop()
    assert len(files()) == 1
    assert prof.faults == ()
    assert capfd.readouterr().err.count("not with this allocator") == 1


def test_a_snapshot_that_fails_is_told_and_the_next_one_comes(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], save_path: Path, capfd: Any
) -> None:
    prof = profiler()
    device.broken["snapshot"] = RuntimeError("the driver says no")
    prof.start(step=2)
    prof.stop()
    del device.broken["snapshot"]
    prof.start(step=3)
    device.alloc(MEBI)
    prof.stop()
    assert [parse_name(path.name).step for path in files()] == [3]  # type: ignore[union-attr]
    assert prof.faults == ()
    rows = {row.step: (row.status, row.reason) for row in read_status(save_path).rows}
    assert rows[2][0] == "failed"
    assert "the driver says no" in rows[2][1]
    assert "the driver says no" in capfd.readouterr().err


def test_a_history_that_cannot_be_switched_on_is_told_in_log_and_ledger(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    device.broken["record"] = RuntimeError("not on this device")
    prof = profiler()
    steps(prof, device, 2, 3, 5)
    assert len(files()) == 3
    assert all("not on this device" in artifact.facts["warnings"][0] for artifact in prof.artifacts)
    assert capfd.readouterr().err.count("the memory history could not be switched") == 1


def test_a_device_without_a_history_gives_its_state(
    use: Callable[..., Any], profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    device = use(without=("_record_memory_history",))
    device.initialise()
    prof = profiler()
    steps(prof, device, 2)
    (snapshot,) = snapshots()
    assert len(snapshot["segments"]) == 2
    assert "cannot record the memory history" in prof.artifacts[0].facts["warnings"][0]


def test_nothing_allocated_is_no_file(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], save_path: Path
) -> None:
    prof = profiler()
    prof.start(step=2)
    prof.stop()
    assert files() == []
    (row,) = [row for row in read_status(save_path).rows if row.step == 2]
    assert (row.status, row.reason) == ("empty", "no memory of the device was allocated in this process")


def test_a_step_that_raises_is_saved_at_once(
    device: Any, profiler: Callable[..., Any], snapshots: Callable[..., Any]
) -> None:
    prof = profiler(memory_snapshot_num_steps=3)
    prof.start(step=2)
    device.alloc(MEBI)
    prof.stop(aborted=True)
    (snapshot,) = snapshots("train-aborted")
    assert snapshot["rankscope"]["steps"] == [2]


def test_wrong_options_are_all_named(profiler: Callable[..., Any], device: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        profiler(
            context="al",
            stacks="cpp",
            trace_alloc_max_entries=0,
            memory_snapshot_num_steps=0,
            oom=False,
            oom_outside_steps=True,
            kw_args={"enabled": "all", "clear_history": True},
            histroy=False,
        )
    text = str(caught.value)
    for words in (
        "torch_memory.context: has no choice 'al'",
        "torch_memory.stacks: has no choice 'cpp'; choices: python, all",
        "trace_alloc_max_entries: must be 1 or more",
        "memory_snapshot_num_steps: must be 1 or more",
        "oom_outside_steps: needs oom: true",
        "must not hold 'enabled': set history instead",
        "must not hold 'clear_history'",
        "Did you mean 'history'?",
    ):
        assert words in text


def test_a_block_of_verl_works_as_it_is(device: Any, profiler: Callable[..., Any], capfd: Any) -> None:
    block = {
        "_target_": "verl.utils.profiler.config.TorchMemoryToolConfig",
        "name": "torch_memory",
        "trace_alloc_max_entries": 100_000,
        "stack_depth": 32,
        "memory_snapshot_num_steps": 1,
        "context": "all",
        "stacks": "all",
        "kw_args": {},
    }
    steps(profiler(**block), device, 2)
    assert device.records[0]["stacks"] == "all"
    told = capfd.readouterr().err
    assert "this torch cannot honour stack_depth" in told
    assert "may then take minutes" in told


def test_available_imports_nothing_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, use: Callable[..., Any]
) -> None:
    use()
    assert TorchMemoryBackend.available() == Availability(True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.3.1")
    assert TorchMemoryBackend.available().reason == "torch 2.3.1 is too old"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TorchMemoryBackend.available() == Availability(False, "torch is not installed", "pip install torch")
