from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from rankscope.config import ConfigError, Problem, load_config
from rankscope.plan import make_plan


@dataclass(frozen=True)
class Options:
    depth: int = 1


class Tool:
    Options = Options
    suffix = ".json.gz"


class FakeRegistry:
    @staticmethod
    def load(tool, path=""):
        if tool == "gone":
            raise ConfigError([Problem(path, "tool 'gone' is not installed")])
        return Tool


def plan(sections, *, world_size=2, total_steps=None, roles=None, **common):
    source = {"global_profiler": {"save_path": "/p", "tool": "torch", **common}}
    source.update({name: {"profiler": values} for name, values in sections.items()})
    config = load_config(source, check_tools=False)
    return make_plan(config, world_size=world_size, total_steps=total_steps, roles=roles, registry_module=FakeRegistry)


def profiled(made):
    return [(row.role, row.rank, row.step, row.tool) for row in made.rows if row.profiled]


def test_a_row_for_each_role_rank_step_and_tool():
    made = plan({"actor": {"enable": True, "ranks": [1], "tool": "torch,wall"}, "critic": {}}, steps=[1, 4])
    assert profiled(made) == [
        ("actor", 1, 1, "torch"),
        ("actor", 1, 1, "wall"),
        ("actor", 1, 4, "torch"),
        ("actor", 1, 4, "wall"),
    ]
    refused = [(row.role, row.rank, row.step, row.tool, row.reason) for row in made.rows if not row.profiled]
    assert refused == [
        ("actor", 0, None, None, "rank 0 is not rank 1"),
        ("critic", None, None, None, "role 'critic' is not enabled: set critic.profiler.enable"),
    ]
    assert made.warnings == []


def test_the_dict_has_exactly_these_keys():
    made = plan({"actor": {"enable": True}}, steps=[1], world_size=1).to_dict()
    assert json.loads(json.dumps(made)) == {
        "rows": [
            {
                "role": "actor",
                "rank": 0,
                "step": 1,
                "tool": "torch",
                "profiled": True,
                "reason": "rank 0 is the default",
                "file": "actor_train_step1_rank0-of-1_*.json.gz",
            }
        ],
        "warnings": [],
        "notes": [],
    }


def test_names_of_discrete_stages_and_of_the_section_for_all_roles():
    made = plan({"actor": {"enable": True, "tool_config": {"torch": {"discrete": True}}}}, steps=[1], world_size=1)
    assert made.rows[0].file == "actor_*_step1_rank0-of-1_*.json.gz"
    config = load_config(
        {"profiler": {"enable": True, "tool": "t"}, "global_profiler": {"steps": 1}}, check_tools=False
    )
    row = make_plan(config, world_size=1, registry_module=FakeRegistry).rows[0]
    assert (row.role, row.file) == ("*", "*_train_step1_rank0-of-1_*.json.gz")


def test_adjacent_steps_share_a_window_and_its_name():
    made = plan({"actor": {"enable": True}}, steps=[1, 2, 5], profile_continuous_steps=True, world_size=1)
    assert [row.file.split("_")[2] for row in made.rows] == ["step1", "step1", "step5"]
    assert "begins in step 1" in made.rows[1].reason


def test_discrete_wins_over_continuous_steps_with_a_warning():
    made = plan(
        {"actor": {"enable": True, "tool_config": {"torch": {"discrete": True}}}},
        steps=[1, 2],
        profile_continuous_steps=True,
        world_size=1,
    )
    assert [row.file.split("_")[2] for row in made.rows] == ["step1", "step2"]
    assert "has no effect" in made.warnings[0]


@pytest.mark.parametrize(
    ("sections", "settings", "warning"),
    [
        ({"actor": {"enable": True}}, {}, "global_profiler.steps is not set"),
        ({"actor": {"enable": True}}, {"steps": [1, 8, 9], "total_steps": 5}, "last step 5: steps 8-9"),
        ({"actor": {"enable": True, "ranks": "none"}}, {"steps": [1]}, "select nobody (no rank"),
        ({"actor": {"enable": True, "ranks": [7]}}, {"steps": [1]}, "rank 7 does not exist"),
        ({"actor": {}, "ref": {}}, {"steps": [1]}, "ref follows actor.profiler, which is not enabled"),
        ({"actor": {}}, {"steps": [1]}, "nothing will be profiled: no role is enabled; set actor.profiler.enable"),
        ({}, {"steps": [1]}, "nothing will be profiled: the config has no profiler section"),
        ({"actor": {}}, {"steps": [1], "finish_hook_cmd": "x"}, "finish_hook_cmd is set but no role is enabled"),
        (
            {"actor": {"enable": True, "finish_hook_ranks": [9]}},
            {"steps": [1], "finish_hook_cmd": "x"},
            "actor.finish_hook_ranks: rank 9 does not exist",
        ),
        ({"actor": {"enable": True}}, {"steps": [1], "save_path": "p"}, "global_profiler.save_path 'p' is relative"),
        (
            {"actor": {"enable": True, "tool": "gone"}},
            {"steps": [1]},
            "actor.profiler.tool: tool 'gone' is not installed",
        ),
        ({"actor": {"enable": True}, "ref": {}}, {"steps": [1]}, "ref follows actor, because"),
    ],
)
def test_warnings(sections, settings, warning):
    assert any(warning in text for text in plan(sections, **settings).warnings)


def test_late_steps_are_one_row_each():
    made = plan({"actor": {"enable": True, "all_ranks": True}}, steps=[1, 9], total_steps=5)
    assert [(row.rank, row.step) for row in made.rows if not row.profiled] == [(None, 9)]
    assert profiled(made) == [("actor", 0, 1, "torch"), ("actor", 1, 1, "torch")]


def test_what_only_the_processes_can_tell():
    made = plan({"actor": {"enable": True, "ranks": [1, "per_node"]}}, steps=[1])
    assert profiled(made) == [("actor", 1, 1, "torch")]
    assert made.rows[0].reason == "each process decides for itself: rank 1 or local rank 0 of each node"
    only_local = plan({"actor": {"enable": True, "ranks": "tp=0"}}, steps=[1])
    assert len(only_local.rows) == 1
    assert only_local.warnings == []


def test_chosen_roles_also_joined_and_unknown_ones():
    sections = {"actor": {"enable": True}, "ref": {"enable": True, "ranks": [1]}}
    made = plan(sections, steps=[1], roles=["actor-ref", "nobody"])
    assert profiled(made) == [("actor-ref", 0, 1, "torch"), ("actor-ref", 1, 1, "torch")]
    assert made.rows[-1].role == "nobody"
    assert "no profiler section for role 'nobody'" in made.rows[-1].reason
    assert any("nobody" in warning for warning in made.warnings)


def test_a_world_of_no_rank():
    with pytest.raises(ValueError, match="at least one rank"):
        plan({}, world_size=0)


def test_ten_thousand_ranks_cost_in_proportion():
    made = plan({"actor": {"enable": True, "ranks": "0-9999:2"}}, steps="1-3", world_size=10_000)
    assert sum(row.profiled for row in made.rows) == 15_000
    assert sum(not row.profiled for row in made.rows) == 5_000
    assert max(len(row.reason) for row in made.rows) < 120
