"""Dumps of two steps and two stages lie where they should and hold what the model computed (real msprobe, CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.status import read_status

pytestmark = pytest.mark.torch

STAGES = ("actor_compute_log_prob", "actor_update")
STEPS = (2, 3)
KINDS = [("L0", "tensor"), ("mix", "statistics"), ("L1", "tensor")]
LAYERS = {"0": "Linear", "1": "ReLU", "2": "Linear"}


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def dumped(request: pytest.FixtureRequest, scenarios: Any) -> Any:
    ended = scenarios.run("content", *request.param)
    assert ended.code == 0, ended.err
    ended.level, ended.task = request.param
    return ended


@pytest.fixture(scope="module")
def seen(dumped: Any) -> dict[str, dict[str, Any]]:
    """What torch's own hooks saw: ``<step>/<stage>`` -> name -> tensor."""
    torch = pytest.importorskip("torch")
    found: dict[str, dict[str, Any]] = torch.load(dumped.path / "seen.pt")
    return found


def test_each_stage_of_each_profiled_step_has_its_own_folder_and_nothing_else_does(dumped: Any, kit: Any) -> None:
    expected = [f"step_{step}/{stage}/step{step}/rank0" for step in STEPS for stage in STAGES]
    assert kit.folders(dumped.path) == expected
    for folder in expected:
        assert {"dump.json", "stack.json", "construct.json"} <= {path.name for path in (dumped.path / folder).iterdir()}
    assert not list((dumped.path / ".rankscope").glob("msprobe*"))


def test_the_dumps_are_artifacts_with_what_they_hold(dumped: Any, kit: Any) -> None:
    records = kit.ledger(dumped.path, "artifact")
    assert [(record["status"], record["step"], record["scope"]) for record in records] == [
        ("published", step, stage) for step in STEPS for stage in STAGES
    ]
    for record in records:
        folder = Path(record["path"])
        assert folder == kit.dumps(dumped.path, record["step"], record["scope"])
        files = [path for path in folder.rglob("*") if path.is_file()]
        tensors = [path for path in files if path.suffix == ".pt"]
        assert (record["level"], record["task"]) == (dumped.level, dumped.task)
        assert (record["files"], record["tensors"]) == (len(files), len(tensors))
        assert bool(tensors) == (dumped.task == "tensor")
        assert record["events"] == len(kit.data(folder)) > 0
        assert record["bytes"] == sum(path.stat().st_size for path in files)
    assert {row.status for row in read_status(dumped.path).rows} == {"published"}
    assert read_status(dumped.path).complete


@pytest.mark.parametrize("dumped", [("L0", "tensor")], ids="-".join, indirect=True)
def test_tensors_are_those_of_the_model(dumped: Any, seen: Any, kit: Any) -> None:
    torch = pytest.importorskip("torch")
    for step in STEPS:
        for stage in STAGES:
            folder = kit.dumps(dumped.path, step, stage) / "dump_tensor_data"
            expected = seen[f"{step}/{stage}"]
            for name, kind in LAYERS.items():
                for what in ("input", "output"):
                    tensor = torch.load(folder / f"Module.{name}.{kind}.forward.0.{what}.0.pt")
                    assert torch.equal(tensor, expected[f"{name}.forward.{what}"]), (step, stage, name, what)
            gradients = {path.name: torch.load(path) for path in folder.glob("*.parameters_grad.*.pt")}
            assert len(gradients) == (4 if stage == "actor_update" else 0)
            for name, tensor in gradients.items():
                layer, parameter = name.split(".")[1], name.split(".")[-2]
                assert torch.equal(tensor, expected[f"{layer}.{parameter}.gradient"])
    # The batches of the two steps differ, so a dump of the wrong step would not have passed.
    assert not torch.equal(seen["2/actor_update"]["0.forward.input"], seen["3/actor_update"]["0.forward.input"])


@pytest.mark.parametrize("dumped", [("mix", "statistics")], ids="-".join, indirect=True)
def test_statistics_are_those_of_the_model(dumped: Any, seen: Any, kit: Any) -> None:
    for step in STEPS:
        for stage in STAGES:
            data = kit.data(kit.dumps(dumped.path, step, stage))
            for name, kind in LAYERS.items():
                entry = data[f"Module.{name}.{kind}.forward.0"]
                for what, key in (("input", "input_args"), ("output", "output")):
                    expected = seen[f"{step}/{stage}"][f"{name}.forward.{what}"]
                    [found] = entry[key]
                    assert found["shape"] == list(expected.shape)
                    assert found["Max"] == pytest.approx(float(expected.max()))
                    assert found["Min"] == pytest.approx(float(expected.min()))
                    assert found["Mean"] == pytest.approx(float(expected.mean()), rel=1e-5)
            assert ("Module.0.Linear.backward.0" in data) == (stage == "actor_update")


def test_operators_are_dumped_at_their_levels_only(dumped: Any, kit: Any) -> None:
    for step in STEPS:
        data = kit.data(kit.dumps(dumped.path, step, "actor_compute_log_prob"))
        modules = {name for name in data if name.startswith("Module.")}
        operators = {name for name in data if name.startswith("Functional.linear.")}
        # Counted anew in each dump: two layers are two calls.
        assert operators == ({f"Functional.linear.{n}.forward" for n in (0, 1)} if dumped.level != "L0" else set())
        assert len(modules) == (3 if dumped.level != "L1" else 0)


def test_nothing_is_printed_and_no_variable_is_left_behind(dumped: Any) -> None:
    assert dumped.out.splitlines() == ['{"environ": []}']
    assert dumped.said("", "warning") == []
    cost = "precision_debugger: a step with dumped stages takes 3 to 10 times as long, and each dump several MB or more"
    assert [message["level"] for message in dumped.said(cost)] == ["info"]
    [said] = dumped.said("dump_path of msprobe's config file is not used")
    assert (said["dump_path"], said["save_path"]) == ("/nowhere", str(dumped.path))
