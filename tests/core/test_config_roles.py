from __future__ import annotations

import pytest

from rankscope.config import ConfigError, intersect_roles, load_config, merge_roles


def load(sections, **common):
    source = {"global_profiler": common}
    for path, values in sections.items():
        place = source
        for key in path.split("."):
            place = place.setdefault(key, {})
        place["profiler"] = values
    return load_config(source, check_tools=False)


def test_null_inherits_from_the_global_part_and_a_value_wins():
    config = load(
        {
            "a": {"enable": True},
            "b": {
                "tool": "nsys",
                "save_path": "/b",
                "relocate_results": False,
                "finish_hook_cmd": "",
                "finish_hook_all_ranks": False,
                "finish_hook_ranks": [4],
            },
        },
        tool="torch",
        save_path="/g",
        relocate_results=True,
        finish_hook_cmd="upload",
        finish_hook_all_ranks=True,
        finish_hook_ranks=[1],
    )
    a, b = config.role("a"), config.role("b")
    assert (a.tools, a.save_path, a.relocate_results) == (("torch",), "/g", True)
    assert (a.finish_hook_cmd, a.finish_hook_all_ranks, a.finish_hook_ranks) == ("upload", True, (1,))
    assert (b.tools, b.save_path, b.relocate_results) == (("nsys",), "/b", False)
    assert (b.finish_hook_cmd, b.finish_hook_all_ranks, b.finish_hook_ranks) == (None, False, (4,))
    assert (a.tool_path, b.tool_path) == ("global_profiler.tool", "b.profiler.tool")


def test_finish_ranks_fall_back_to_the_profiled_ranks():
    config = load({"a": {"ranks": [2, 3]}, "b": {"ranks": [2], "finish_hook_ranks": "per_node"}})
    assert config.role("a").finish_ranks.listed() == (2, 3)
    assert config.role("b").finish_ranks.selects(8, local_rank=0).selected
    assert load({"a": {"finish_hook_all_ranks": True}}).role("a").finish_ranks.all


def test_options_of_a_tool_are_laid_over_the_global_ones():
    config = load(
        {
            "a": {
                "global_tool_config": {"torch": {"depth": 2}},
                "tool_config": {"torch": {"contents": None, "schedule": {"active": 3}}, "nsys": None},
            }
        },
        global_tool_config={"torch": {"contents": ["cpu"], "depth": 1, "schedule": {"wait": 1, "active": 1}}},
    )
    role = config.role("a")
    assert role.options("torch") == {"contents": ["cpu"], "depth": 2, "schedule": {"wait": 1, "active": 3}}
    assert role.options("nsys") == role.options("unheard_of") == {}
    assert role.options_path("torch") == "a.profiler.tool_config.torch"
    assert role.options_path("torch", "schedule.active") == "a.profiler.tool_config.torch.schedule.active"
    assert role.options_path("torch", "schedule.wait") == "global_profiler.global_tool_config.torch.schedule.wait"


@pytest.mark.parametrize("name", ["ref", "rollout"])
def test_ref_and_rollout_follow_the_actor(name):
    config = load({"m.actor": {"enable": True, "ranks": [3]}, f"m.{name}": {"ranks": []}}, tool="torch")
    role = config.role(name)
    assert role.enable
    assert role.ranks.listed() == (3,)
    assert role.follows == "m.actor.profiler"
    assert f"{name} follows m.actor" in role.notes[0]


def test_an_explicit_enable_does_not_follow():
    config = load({"actor": {"enable": True, "ranks": [3]}, "ref": {"enable": False}, "rollout": {"enable": True}})
    assert not config.role("ref").enable
    assert config.role("ref").ranks.default
    assert config.role("rollout").ranks.listed() == (3,)
    assert config.role("rollout").follows == ""


def test_a_followed_role_may_choose_its_own_ranks():
    config = load({"actor": {"enable": True, "all_ranks": True}, "ref": {"ranks": [5]}, "rollout": {"ranks": "none"}})
    assert config.role("ref").ranks.listed() == (5,)
    assert config.role("rollout").ranks.nobody


def test_rollout_takes_relocation_and_finish_command_from_the_actor():
    config = load(
        {
            "actor": {"relocate_results": True, "finish_hook_cmd": "x", "finish_hook_ranks": [1]},
            "rollout": {},
            "ref": {},
        }
    )
    rollout, ref = config.role("rollout"), config.role("ref")
    assert (rollout.relocate_results, rollout.finish_hook_cmd, rollout.finish_hook_ranks) == (True, "x", (1,))
    assert (ref.relocate_results, ref.finish_hook_cmd, ref.finish_hook_ranks) == (False, None, ())


def test_a_follower_takes_the_actors_tools_when_the_job_has_none():
    config = load({"actor": {"enable": True, "tool": "torch"}, "ref": {}})
    assert config.role("ref").tools == ("torch",)
    assert config.role("ref").tool_path == "actor.profiler.tool"


def test_a_critic_follows_nobody():
    config = load({"actor": {"enable": True}, "critic": {}}, tool="torch")
    assert not config.role("critic").enable
    assert config.role("critic").why_off == "role 'critic' is not enabled: set critic.profiler.enable"


def test_the_neighbouring_actor_is_followed():
    config = load({"one.actor": {"enable": True}, "two.actor": {"enable": False}, "two.ref": {}, "one.ref": {}})
    assert config.role("one.ref").enable
    assert not config.role("two.ref").enable
    assert "two.actor.profiler" in config.role("two.ref").why_off


def test_all_ranks_beside_ranks_is_noted():
    role = load({"a": {"enable": True, "all_ranks": True, "ranks": [1]}}).role("a")
    assert role.ranks.all
    assert "a.profiler.ranks has no effect" in role.notes[0]


def test_lookup_by_name_path_and_either_dash():
    config = load({"x.reward_model": {"enable": True}})
    for name in ("reward_model", "reward-model", "x.reward_model", "x.reward-model.profiler"):
        assert config.role(name).enable
        assert config.role(name).role == name


def test_the_shorter_path_wins_and_a_tie_is_an_error():
    config = load({"a.rollout": {"ranks": [1]}, "b.c.rollout": {"ranks": [2]}})
    assert config.role("rollout").ranks.listed() == (1,)
    assert config.role("c.rollout").ranks.listed() == (2,)
    tie = load({"a.rollout": {}, "b.rollout": {}})
    with pytest.raises(ConfigError, match=r"a\.rollout\.profiler, b\.rollout\.profiler"):
        tie.role("rollout")


def test_an_unknown_role_is_off_and_says_why():
    role = load({"actor": {}, "critic": {}}).role("actro")
    assert not role.enable
    assert role.why_off == "no profiler section for role 'actro'; sections: actor, critic. Did you mean 'actor'?"


def test_a_section_at_the_root_stands_in_for_every_role():
    config = load_config({"profiler": {"enable": True, "tool": "torch"}}, check_tools=False)
    role = config.role("language-model")
    assert (role.role, role.paths, role.enable) == ("language-model", ("profiler",), True)


def test_a_joined_role_is_the_union_of_its_parts():
    config = load(
        {
            "m.actor": {"enable": True, "tool_config": {"torch": {"contents": ["cpu"], "schedule": {"active": 2}}}},
            "m.ref": {"enable": True, "ranks": [3], "tool_config": {"torch": {"schedule": {"wait": 1}}}},
            "m.rollout": {"enable": False, "ranks": [9], "save_path": "/elsewhere", "relocate_results": True},
        },
        tool="torch",
        global_tool_config={"torch": {"contents": [], "discrete": True}},
    )
    for name in ("actor-rollout-ref", "actor_rollout_ref"):
        role = config.role(name)
        assert role.role == name
        assert role.enable
        assert role.ranks.listed() == (0, 3)
        assert role.relocate_results is False
        assert role.paths == ("m.actor.profiler", "m.ref.profiler", "m.rollout.profiler")
        assert role.options("torch") == {"contents": ["cpu"], "discrete": True, "schedule": {"active": 2, "wait": 1}}


def test_a_joined_role_where_the_first_part_is_off_takes_the_other_ones_options():
    config = load(
        {
            "actor": {"enable": False, "tool_config": {"torch": {"contents": ["cuda"]}}},
            "ref": {"enable": True, "ranks": [1], "tool_config": {"torch": {"contents": ["cpu"]}}},
        },
        tool="torch",
    )
    role = config.role("actor-ref")
    assert role.options("torch") == {"contents": ["cpu"]}
    assert role.ranks.listed() == (1,)
    assert role.path == "ref.profiler"


def test_parts_that_contradict_each_other_are_named():
    config = load(
        {
            "actor": {
                "enable": True,
                "tool": "torch",
                "save_path": "/a",
                "finish_hook_cmd": "x",
                "tool_config": {"torch": {"schedule": {"active": 1}}, "nsys": {"a": 1}},
            },
            "ref": {
                "enable": True,
                "tool": "torch, nsys",
                "save_path": "/b",
                "finish_hook_cmd": "y",
                "tool_config": {"torch": {"schedule": {"active": 2}}, "npu": {"a": 1}},
            },
        }
    )
    with pytest.raises(ConfigError) as caught:
        config.role("actor-ref")
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert set(found) == {
        "ref.profiler.tool",
        "ref.profiler.save_path",
        "ref.profiler.finish_hook_cmd",
        "ref.profiler.tool_config.torch.schedule.active",
    }
    assert all("actor" in message and "ref" in message for message in found.values())


def test_a_part_that_follows_gives_way_with_a_note():
    config = load(
        {
            "actor": {"enable": True, "tool_config": {"torch": {"contents": ["cpu"]}}},
            "ref": {"tool_config": {"torch": {"contents": []}}, "save_path": "/ref"},
        },
        tool="torch",
        save_path="/g",
    )
    role = config.role("ref-actor")
    assert role.options("torch") == {"contents": ["cpu"]}
    assert role.save_path == "/g"
    assert any("contents" in note and "follows" in note for note in role.notes)


def test_options_of_tools_that_are_not_selected_never_contradict():
    config = load(
        {
            "actor": {"enable": True, "tool_config": {"npu": {"level": 1}}},
            "rollout": {"enable": True, "tool_config": {"npu": {"level": 2}}},
        },
        tool="torch",
    )
    assert config.role("actor-rollout").enable


def test_a_joined_role_may_have_parts_without_a_section():
    role = load({"actor": {"enable": True}}, tool="torch").role("actor-rollout-ref")
    assert role.enable
    assert "rollout, ref" in role.notes[-1]
    assert not load({"actor": {"enable": True}}).role("actor-banana").enable


def test_greedy_names_in_a_joined_role():
    config = load({"reward": {"enable": False}, "reward_model": {"enable": True, "ranks": [7]}, "actor": {}})
    assert config.role("actor_reward_model").ranks.listed() == (7,)


def test_disabled_parts_make_a_disabled_role():
    role = load({"actor": {}, "ref": {}}).role("actor-ref")
    assert not role.enable
    assert role.paths == ("actor.profiler", "ref.profiler")


def test_finish_ranks_of_a_union():
    config = load(
        {
            "actor": {"enable": True, "ranks": [2]},
            "ref": {"enable": True, "ranks": [5], "finish_hook_ranks": [0]},
        },
        finish_hook_cmd="x",
    )
    merged = merge_roles([config.role("actor"), config.role("ref")])
    assert merged.finish_hook_ranks == (0, 2)
    only_one = load(
        {"actor": {"enable": True}, "ref": {"enable": True, "finish_hook_cmd": "x", "finish_hook_ranks": [4]}}
    )
    role = only_one.role("actor-ref")
    assert (role.finish_hook_cmd, role.finish_hook_ranks) == ("x", (4,))


def test_merging_one_role_changes_nothing():
    role = load({"actor": {"enable": True}}).role("actor")
    assert merge_roles([role, role]) == role
    with pytest.raises(ConfigError):
        merge_roles([])


def test_intersection():
    config = load(
        {
            "a": {"enable": True, "ranks": "0-3", "relocate_results": True},
            "b": {"enable": True, "ranks": [3, 4]},
            "c": {"enable": False, "ranks": [9]},
        },
        tool="torch",
    )
    a, b, c = config.roles()
    assert intersect_roles([a, b]).ranks.listed() == (3,)
    assert intersect_roles([a, b]).relocate_results is False
    none = intersect_roles([a, b, c])
    assert not none.enable
    assert none.ranks.nobody
