"""What msprobe leaves behind in torch, in the model and in the process: nothing (real msprobe, CPU)."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch

LOG_PROB, UPDATE = "actor_compute_log_prob", "actor_update"


@pytest.fixture(scope="module")
def traces(scenarios: Any) -> Any:
    ended = scenarios.run("traces")
    assert ended.code == 0, ended.err
    return ended


def test_functions_of_torch_are_replaced_while_a_stage_is_dumped_only(traces: Any) -> None:
    facts = traces.facts
    assert facts["replaced"] == 8
    assert facts["between_stages"]
    assert facts["after"]


def test_the_model_has_no_hooks_afterwards_and_can_be_copied(traces: Any) -> None:
    facts = traces.facts
    assert facts["hooked"]
    assert facts["module"]
    assert facts["hooks"] == 0
    assert facts["twin"] == 0.0, "a copy of the model computes with the weights of the original"


def test_the_training_computes_the_same_numbers(traces: Any, kit: Any) -> None:
    assert traces.facts["same_numbers"]
    assert len(kit.folders(traces.path / "numbers")) == 8  # or nothing was compared


def test_compiled_models_run_as_they_are_written_and_are_dumped(traces: Any, kit: Any) -> None:
    facts = traces.facts
    data = kit.data(kit.dumps(traces.path / "compiled", 1, LOG_PROB))
    assert {"Module.0.Linear.forward.0", "Functional.linear.0.forward"} <= set(data)
    assert (facts["compiled_between"], facts["compiled_after"]) == (2, 1)


def test_folder_and_environment_stay(traces: Any) -> None:
    assert traces.facts["cwd"]
    assert traces.facts["environ"] == []


def test_what_the_script_replaced_itself_stays(traces: Any) -> None:
    assert traces.facts["own_patch"]


def test_a_debugger_of_the_script_is_left_alone(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("foreign")
    assert ended.code == 0, ended.err
    assert ended.facts["same"]
    [theirs] = kit.folders(ended.path / "theirs")
    assert theirs.startswith("step0/proc")
    assert len(kit.data(ended.path / "theirs" / theirs)) == 3
    assert "Dump switch is turned on at step 0" in ended.out, "its messages are not ours to take"
    assert kit.artifacts(ended.path / "ours", "status", "reason") == [
        ("failed", "the training script uses msprobe's PrecisionDebugger itself; it is left alone")
    ]


def test_what_a_full_disk_did_not_take_is_in_no_later_dump(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("full_disk")
    assert ended.code == 0, ended.err
    assert kit.artifacts(ended.path, "status", "step", "scope") == [("failed", 1, UPDATE), ("published", 2, UPDATE)]
    assert kit.folders(ended.path)[1:] == [f"step_2/{UPDATE}/step2/rank0"]
    assert kit.data(kit.dumps(ended.path, 2, UPDATE))
    assert "Traceback" not in ended.err, "msprobe tried again when the process ended"


def test_an_msprobe_that_does_not_hear_where_to_write_is_made_anew(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("stuck")
    assert ended.code == 0, ended.err
    assert kit.folders(ended.path) == [
        f"step_{step}/{stage}/step{step}/rank0" for step in (1, 2) for stage in (LOG_PROB, UPDATE)
    ]
    assert ended.facts["debuggers"] == 5  # one to find out, and one for each dump
    for step in (1, 2):
        names = sorted(kit.data(kit.dumps(ended.path, step, UPDATE)))
        assert [name for name in names if ".forward.1" in name] == [], "hooks of an earlier debugger are still there"
        assert len(kit.data(kit.dumps(ended.path, step, LOG_PROB))) == 3
