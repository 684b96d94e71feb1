"""Whose model is dumped: attributes, functions, chunks, roles; and settings of msprobe (real msprobe, CPU)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankscope.artifacts.status import read_status

pytestmark = pytest.mark.torch

LOG_PROB, UPDATE = "actor_compute_log_prob", "actor_update"


@pytest.fixture(scope="module")
def models(scenarios: Any) -> Any:
    ended = scenarios.run("models")
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def settings(scenarios: Any) -> Any:
    ended = scenarios.run("settings")
    assert ended.code == 0, ended.err
    return ended


@pytest.fixture(scope="module")
def roles(scenarios: Any) -> Any:
    ended = scenarios.run("roles")
    assert ended.code == 0, ended.err
    return ended


def test_all_chunks_of_a_model_are_bound(models: Any, kit: Any) -> None:
    path = models.path / "two"
    data = kit.data(kit.dumps(path, 1, LOG_PROB))
    assert sorted(data) == [
        "Module.0.0.Linear.forward.0",
        "Module.0.1.ReLU.forward.0",
        "Module.0.2.Linear.forward.0",
        "Module.1.0.Linear.forward.0",
    ]
    assert "Module.1.0.Linear.backward.0" in kit.data(kit.dumps(path, 1, UPDATE))
    assert kit.artifacts(path, "chunks") == [(2,), (2,)]


def test_a_list_of_one_chunk_is_that_model(models: Any, kit: Any) -> None:
    assert sorted(kit.data(kit.dumps(models.path / "one", 1, LOG_PROB))) == [
        "Module.0.Linear.forward.0",
        "Module.1.ReLU.forward.0",
        "Module.2.Linear.forward.0",
    ]
    assert kit.artifacts(models.path / "one", "chunks") == [(1,)]


def test_models_names_the_attribute_for_a_stage_of_one_s_own(models: Any, kit: Any) -> None:
    data = kit.data(kit.dumps(models.path / "attribute", 1, "own_method"))
    assert sorted(data) == ["Module.0.Linear.forward.0", "Module.1.ReLU.forward.0", "Module.2.Linear.forward.0"]


def test_resolve_model_finds_models_of_methods_and_functions(models: Any, kit: Any) -> None:
    path = models.path / "resolved"
    assert kit.artifacts(path, "scope", "chunks") == [("own_method", 2), ("own_function", 1)]
    assert "Module.1.0.Linear.forward.0" in kit.data(kit.dumps(path, 1, "own_method"))
    assert len(kit.data(kit.dumps(path, 1, "own_function"))) == 3


def test_operators_need_no_model(models: Any, kit: Any) -> None:
    path = models.path / "operators"
    assert kit.artifacts(path, "scope", "chunks") == [("own_method", 0), ("own_function", 0)]
    for stage in ("own_method", "own_function"):
        assert "Functional.linear.0.forward" in kit.data(kit.dumps(path, 1, stage))
        assert models.said(f"nobody knows the stage '{stage}'; it is dumped if one of that name runs", "warning")


def test_a_stage_that_nobody_knows_is_left_out_and_told_once(models: Any, kit: Any) -> None:
    assert kit.artifacts(models.path / "unknown", "status", "scope") == [("published", LOG_PROB)]
    [said] = models.said("a stage is not dumped", "warning")
    assert said["stage"] == "other_stage"
    assert "name it in stages" in said["reason"]


def test_structure_writes_the_tree_of_modules(settings: Any, kit: Any) -> None:
    folder = kit.dumps(settings.path / "structure", 1, LOG_PROB)
    assert kit.artifacts(settings.path / "structure", "status", "events") == [("published", 3)]
    assert set(json.loads((folder / "construct.json").read_text())) == {
        "Module.0.Linear.forward.0",
        "Module.1.ReLU.forward.0",
        "Module.2.Linear.forward.0",
    }


def test_level_debug_holds_what_the_code_saved_itself(settings: Any, kit: Any) -> None:
    torch = pytest.importorskip("torch")
    path = settings.path / "debug"
    folder = kit.dumps(path, 1, UPDATE)
    assert list(json.loads((folder / "debug.json").read_text())["data"]) == ["x.0.debug"]
    [file] = folder.rglob("*.pt")
    assert torch.equal(torch.load(file), torch.arange(12.0).view(3, 4))
    assert kit.folders(path) == [f"step_1/{UPDATE}/step1/rank0"]
    assert kit.artifacts(path, "status", "step", "reason") == [
        ("published", 1, None),
        ("empty", 2, "the dump is empty: the stage saved nothing with PrecisionDebugger.save"),
    ]


def test_msprobe_s_own_switch_is_named_where_it_is_off(settings: Any, kit: Any) -> None:
    path = settings.path / "off"
    assert kit.folders(path) == []
    assert kit.artifacts(path, "status", "scope", "reason") == [
        ("failed", LOG_PROB, f"dump_enable is false in {settings.path / 'off.json'}")
    ]
    assert kit.artifacts(settings.path / "on", "status", "step") == [("published", 1), ("published", 2)]


def test_msprobe_s_filters_of_modules_hold_and_an_empty_dump_is_none(settings: Any, kit: Any) -> None:
    data = kit.data(kit.dumps(settings.path / "listed", 1, LOG_PROB))
    assert list(data) == ["Module.2.Linear.forward.0"]
    assert set(data["Module.2.Linear.forward.0"]) >= {"output"}
    assert "input_args" not in data["Module.2.Linear.forward.0"]
    path = settings.path / "none"
    assert kit.folders(path) == []
    assert not (path / "step_1").exists()
    [(status, reason)] = kit.artifacts(path, "status", "reason")
    assert status == "empty"
    assert "no layer of its model that msprobe's config lets through" in reason


def test_msprobe_s_own_rank_and_step_may_select_the_same(settings: Any, kit: Any) -> None:
    assert kit.folders(settings.path / "same") == [f"step_3/{LOG_PROB}/step3/rank0"]


@pytest.mark.parametrize("first", ["actor", "critic"])
def test_colocated_roles_have_options_and_save_paths_of_their_own(roles: Any, kit: Any, first: str) -> None:
    """Whoever starts first owns the window; each stage follows its role."""
    name = f"{first}_first"
    actor, critic = roles.path / name, roles.path / f"{name}_critic"
    assert kit.folders(actor) == [f"step_{step}/{UPDATE}/step{step}/rank0" for step in (1, 2)]
    assert kit.folders(critic) == [f"step_{step}/critic_update/step{step}/rank0" for step in (1, 2)]
    assert kit.artifacts(actor, "role", "task", "step") == [("actor", "statistics", 1), ("actor", "statistics", 2)]
    assert kit.artifacts(critic, "role", "task", "step") == [("critic", "tensor", 1), ("critic", "tensor", 2)]
    for step in (1, 2):
        # Both models have layers of the same names; hooks of one dump must not be in the other.
        names = sorted(kit.data(kit.dumps(actor, step, UPDATE)))
        assert names == sorted(kit.data(kit.dumps(critic, step, "critic_update")))
        assert [entry for entry in names if ".forward.1" in entry] == []
    assert all(row.status in {"published", "joined", "not reached"} for row in read_status(actor).rows)


def test_a_role_that_is_not_profiled_on_this_rank_is_not_dumped(roles: Any, kit: Any) -> None:
    assert kit.folders(roles.path / "unselected") == [f"step_1/{LOG_PROB}/step1/rank0"]
