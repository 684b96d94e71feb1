"""Which stretch a dump covers: exceptions, nesting, repetition, early ends, unusual windows (real msprobe, CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.status import read_status

pytestmark = pytest.mark.torch

LOG_PROB, UPDATE = "actor_compute_log_prob", "actor_update"


@pytest.fixture(scope="module")
def stretches(scenarios: Any) -> Any:
    ended = scenarios.run("stretches")
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def threads(scenarios: Any) -> Any:
    ended = scenarios.run("threads")
    assert ended.code == 0, ended.err
    return ended


def names(kit: Any, folder: Path) -> list[str]:
    return sorted(kit.data(folder))


def test_a_stage_that_raises_is_stopped_kept_and_marked_and_the_next_is_whole(stretches: Any, kit: Any) -> None:
    path = stretches.path / "raising"
    assert "must be Tensor, not str" in stretches.facts["raised"]
    first, second = kit.ledger(path, "artifact")
    assert first["warnings"] == ["the stage raised TypeError: the dump ends there"]
    assert "warnings" not in second
    assert [row.reason for row in read_status(path).rows if row.step == 1] == first["warnings"]
    assert names(kit, kit.dumps(path, 2, UPDATE)) == names(kit, kit.dumps(stretches.path / "plain", 1, UPDATE))


def test_a_stage_inside_a_dumped_stage_is_part_of_its_dump(stretches: Any, kit: Any) -> None:
    path = stretches.path / "nested"
    assert kit.folders(path) == [f"step_1/{UPDATE}/step1/rank0"]
    data = kit.data(kit.dumps(path, 1, UPDATE))
    assert {"Module.0.Linear.forward.0", "Module.0.Linear.forward.1", "Module.0.Linear.backward.1"} <= set(data)


def test_a_wanted_stage_inside_one_that_is_not_wanted_is_dumped(stretches: Any, kit: Any) -> None:
    path = stretches.path / "inside"
    assert kit.folders(path) == [f"step_1/{UPDATE}/step1/rank0"]
    assert kit.artifacts(path, "status", "scope") == [("published", UPDATE)]


@pytest.mark.parametrize("name", ["twice", "again"])
def test_a_dump_is_never_written_over(stretches: Any, kit: Any, name: str) -> None:
    """``twice``: one stage two times in a step. ``again``: a second job with the same save path."""
    path = stretches.path / name
    root = path / "step_1"
    assert kit.folders(path) == [f"step_1/{LOG_PROB}-run2/step1/rank0", f"step_1/{LOG_PROB}/step1/rank0"]
    first, second = (kit.data(root / stage / "step1" / "rank0") for stage in (LOG_PROB, f"{LOG_PROB}-run2"))
    assert sorted(first) == sorted(second)
    assert kit.artifacts(path, "run", "scope") == [(1, LOG_PROB), (2, LOG_PROB)]


def test_a_window_without_a_step_says_so_in_its_folder(stretches: Any, kit: Any) -> None:
    assert kit.folders(stretches.path / "manual") == [f"step_unknown/{LOG_PROB}/step0/rank0"]


def test_each_step_of_a_continuous_window_has_its_own_dumps(stretches: Any, kit: Any) -> None:
    path = stretches.path / "continuous"
    assert kit.folders(path) == [f"step_{step}/{LOG_PROB}/step{step}/rank0" for step in (2, 3)]
    assert kit.artifacts(path, "step", "scope") == [(2, LOG_PROB), (3, LOG_PROB)]
    assert len({record["window"] for record in kit.ledger(path, "artifact")}) == 1


def test_discrete_windows_give_the_same_dumps(stretches: Any, kit: Any) -> None:
    path = stretches.path / "discrete"
    assert kit.folders(path) == [f"step_{step}/{LOG_PROB}/step{step}/rank0" for step in (1, 2)]
    assert kit.artifacts(path, "status", "scope", "step") == [
        ("published", LOG_PROB, 1),
        ("empty", UPDATE, 1),
        ("published", LOG_PROB, 2),
        ("empty", UPDATE, 2),
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stopped", "the window was closed inside of the stage: the dump ends there"),
        ("early", "ended early: max_seconds=1 is reached"),
    ],
)
def test_a_window_that_ends_inside_a_stage_ends_the_dump(stretches: Any, kit: Any, name: str, reason: str) -> None:
    path = stretches.path / name
    folder = kit.dumps(path, 1, UPDATE)
    modules = [entry for entry in kit.data(folder) if entry.startswith("Module.")]
    assert sorted(modules) == [f"Module.{layer}.forward.0" for layer in ("0.Linear", "1.ReLU", "2.Linear")]
    [row] = [row for row in read_status(path).rows if row.step == 1]
    assert (row.status, row.reason, row.path) == ("published", reason, str(folder))


def test_coroutines_and_generators_are_dumped_to_their_end(stretches: Any, kit: Any) -> None:
    path = stretches.path / "kinds"
    assert stretches.facts["pieces"] == 2
    assert "Module.0.Linear.forward.0" in kit.data(kit.dumps(path, 1, UPDATE))
    assert "Module.0.Linear.forward.1" in kit.data(kit.dumps(path, 1, LOG_PROB))


def test_generation_is_never_dumped_and_an_empty_window_says_what_ran(stretches: Any, kit: Any) -> None:
    path = stretches.path / "nothing"
    assert kit.folders(path) == []
    assert not (path / "step_1").exists()
    [record] = kit.ledger(path, "artifact")
    assert (record["status"], record["step"]) == ("empty", 1)
    assert record["reason"] == (
        "none of the stages that are to be dumped ran while the window was open (rollout_generate is not one of them)"
    )


def test_a_stage_of_another_thread_is_part_of_the_dump_that_runs(threads: Any, kit: Any) -> None:
    path = threads.path / "at_once"
    assert kit.folders(path) == [f"step_1/{UPDATE}/step1/rank0"]
    assert "Module.0.Linear.forward.1" in kit.data(kit.dumps(path, 1, UPDATE))


def test_another_thread_may_stop_and_the_next_window_is_whole(threads: Any, kit: Any) -> None:
    path = threads.path / "foreign_stop"
    assert kit.artifacts(path, "step", "scope", "warnings") == [
        (1, UPDATE, ["the window was closed inside of the stage: the dump ends there"]),
        (2, LOG_PROB, None),
    ]
    assert len(kit.data(kit.dumps(path, 2, LOG_PROB))) == 3


def test_a_forked_child_leaves_the_parent_s_dump_alone_and_can_have_its_own(threads: Any, kit: Any) -> None:
    assert kit.artifacts(threads.path / "forking", "status", "scope") == [("published", UPDATE)]
    assert len(kit.data(kit.dumps(threads.path / "forking", 1, UPDATE))) == 3
    assert kit.artifacts(threads.path / "child", "status", "scope") == [("published", LOG_PROB)]
    assert len(kit.data(kit.dumps(threads.path / "child", 1, LOG_PROB))) == 3


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("raise", 1, "the stage raised ValueError: the dump ends there"),
        ("exit", 3, "the stage raised SystemExit: the dump ends there"),
        ("interrupt", -2, "the stage raised KeyboardInterrupt: the dump ends there"),
        ("terminate", -15, "the window was closed inside of the stage: the dump ends there"),
    ],
)
def test_a_process_that_ends_inside_a_stage_leaves_its_dump(
    scenarios: Any, kit: Any, how: str, code: int, reason: str
) -> None:
    ended = scenarios.run("leave", how)
    assert ended.code == code, ended.err
    assert ended.out == ""
    assert kit.artifacts(ended.path, "status", "scope", "warnings") == [("published", UPDATE, [reason])]
    assert len(kit.data(kit.dumps(ended.path, 1, UPDATE))) == 3
