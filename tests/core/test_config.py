from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from rankscope.config import Config, ConfigError, load_config

HYDRA_COMPOSED = """
trainer:
  experiment_name: ${oc.env:RANKSCOPE_TEST_UNSET_VARIABLE}
  device: cuda
actor_rollout_ref:
  actor:
    _target_: somewhere.ActorConfig
    lr: 1.0e-6
    profiler:
      _target_: verl.utils.profiler.ProfilerConfig
      tool: ${oc.select:global_profiler.tool,null}
      enable: false
      all_ranks: false
      ranks: []
      save_path: ${oc.select:global_profiler.save_path,null}
      relocate_results: ${oc.select:global_profiler.relocate_results,false}
      finish_hook_cmd: ${oc.select:global_profiler.finish_hook_cmd,null}
      finish_hook_all_ranks: ${oc.select:global_profiler.finish_hook_all_ranks,false}
      finish_hook_ranks: ${oc.select:global_profiler.finish_hook_ranks,[]}
      tool_config:
        torch:
          _target_: verl.utils.profiler.config.TorchProfilerToolConfig
          contents: []
          discrete: false
          schedule:
            _target_: verl.utils.profiler.config.TorchProfilerScheduleConfig
            active: 0
        nsys:
          discrete: ${oc.select:global_profiler.global_tool_config.nsys.discrete}
  ref:
    profiler:
      tool: ${oc.select:global_profiler.tool,null}
      enable: false
      ranks: []
      save_path: ${oc.select:global_profiler.save_path,null}
  rollout:
    profiler:
      tool: ${oc.select:global_profiler.tool,null}
      enable: ${oc.select:actor_rollout_ref.actor.profiler.enable,false}
      all_ranks: ${oc.select:actor_rollout_ref.actor.profiler.all_ranks,false}
      ranks: ${oc.select:actor_rollout_ref.actor.profiler.ranks,[]}
      save_path: ${oc.select:global_profiler.save_path,null}
      tool_config:
        torch:
          contents: ${oc.select:actor_rollout_ref.actor.profiler.tool_config.torch.contents,[]}
          discrete: false
          profile_token_start: null
critic:
  profiler:
    tool: ${oc.select:global_profiler.tool,null}
    enable: false
global_profiler:
  _target_: verl.utils.profiler.ProfilerConfig
  tool: null
  steps: null
  profile_continuous_steps: false
  save_path: outputs/profile
  relocate_results: false
  finish_hook_cmd: null
  finish_hook_all_ranks: false
  finish_hook_ranks: []
  global_tool_config:
    nsys:
      _target_: verl.utils.profiler.config.NsightToolConfig
      discrete: false
      worker_nsight_options:
        capture-range-end: null
    torch_memory:
      stack_depth: 32
data:
  files: ${nowhere.at.all}
"""


def load(source=None, overrides=(), **more):
    return load_config(source, overrides, check_tools=False, **more)


def problems(source=None, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.fixture
def composed(tmp_path):
    file = tmp_path / "composed.yaml"
    file.write_text(HYDRA_COMPOSED)
    return file


ON = ["global_profiler.tool=torch", "global_profiler.steps=[1,2]", "actor_rollout_ref.actor.profiler.enable=True"]


def test_a_composed_file_works_unchanged(composed):
    config = load(composed, ON)
    assert [section.path for section in config.sections] == [
        "actor_rollout_ref.actor.profiler",
        "actor_rollout_ref.ref.profiler",
        "actor_rollout_ref.rollout.profiler",
        "critic.profiler",
    ]
    assert config.global_profiler.steps == (1, 2)
    assert config.warnings == ()
    enabled = {role.role: role.enable for role in config.roles()}
    assert enabled == {"actor": True, "ref": False, "rollout": True, "critic": False}
    assert config.role("rollout").tools == ("torch",)
    assert "_target_" not in str(config)
    assert config.role("actor").options("torch") == {"contents": [], "discrete": False, "schedule": {"active": 0}}


def test_file_text_mapping_and_omegaconf_give_the_same(composed):
    tree = OmegaConf.load(composed)
    expected = load(composed, ON)
    assert load(str(composed), ON) == expected
    assert load(OmegaConf.to_container(tree), ON) == expected
    assert load(tree, ON) == expected


def test_a_frozen_hydra_object_is_read_and_not_changed(composed):
    tree = OmegaConf.load(composed)
    OmegaConf.set_struct(tree, True)
    OmegaConf.set_readonly(tree, True)
    before = OmegaConf.to_yaml(tree)
    assert load(tree, [*ON, "+actor_rollout_ref.actor.profiler.tool_config.torch.with_flops=true"]).active
    assert OmegaConf.to_yaml(tree) == before


def test_nothing_outside_the_profiler_parts_is_resolved(composed):
    assert load(composed).sections
    assert load({"a": object(), "b": {"c": "${gone}"}, "profiler": {"enable": True}}).role("x").enable


@pytest.mark.parametrize("source", [None, {}, {"trainer": {"lr": 1}}])
def test_nothing_configured(source):
    config = load(source)
    assert not config.active
    assert config.sections == ()
    assert config.global_profiler.save_path == os.path.join(os.getcwd(), "outputs", "profile")
    role = config.role("actor")
    assert not role.enable
    assert role.ranks.explain() == "rank 0 (the default)"
    assert "no profiler section for role 'actor'" in role.why_off


def test_a_loaded_config_is_returned_as_it_is():
    config = load({"actor": {"profiler": {"enable": True}}})
    assert load(config) is config
    with pytest.raises(ConfigError, match="already loaded"):
        load(config, ["a=1"])


def test_overrides():
    config = load(
        {"actor": {"profiler": {"enable": False}}},
        [
            "global_profiler.steps=1-3,7",
            "+global_profiler.tool=torch,nsys",
            "++actor.profiler.ranks=tp=0,pp=last",
            "actor.profiler.enable=true",
            "actor.profiler.tool_config.torch.contents=[cpu,cuda]",
            "critic.lr=5",
        ],
    )
    assert config.global_profiler.steps == (1, 2, 3, 7)
    role = config.role("actor")
    assert role.tools == ("torch", "nsys")
    assert role.ranks.explain() == "ranks with tp=0,pp=last"
    assert role.options("torch") == {"contents": ["cpu", "cuda"]}


@pytest.mark.parametrize("override", ["steps", "=1", "~actor.profiler", "", 5])
def test_an_override_that_is_none(override):
    assert "not of the form key=value" in problems({}, [override])[""]


def test_an_override_with_broken_yaml_is_named():
    assert "cannot be read" in problems({}, ["global_profiler.steps=[1,"])["global_profiler.steps"]


def test_an_override_with_a_slip_in_the_path_is_told():
    source = {"actor": {"profiler": {"enable": False}}}
    (warning,) = load(source, ["actr.profiler.enable=true"]).warnings
    assert "Did you mean 'actor.profiler'?" in warning
    assert load(source, ["+critic.profiler.enable=true"]).warnings == ()


def test_every_problem_comes_in_one_error():
    found = problems(
        {
            "global_profiler": {
                "stesp": [1],
                "steps": [0],
                "tool": [5],
                "save_path": "s3://bucket/run",
                "relocate_results": 1,
                "finish_hook_cmd": 7,
                "finish_hook_timeout": 0,
                "close_timeout": True,
                "finish_hook_ranks": "most",
                "global_tool_config": {"torch": [1]},
                "enable": True,
            },
            "actor": {"profiler": {"enable": "maybe", "ranks": [-1], "steps": [1], "tool_config": 3, "rank": 1}},
        }
    )
    assert "Did you mean 'steps'?" in found["global_profiler.stesp"]
    assert "steps count from 1" in found["global_profiler.steps"]
    assert "5 is not a name" in found["global_profiler.tool"]
    assert "finish_hook_cmd" in found["global_profiler.save_path"]
    assert "neither true nor false" in found["global_profiler.relocate_results"]
    assert "7 is neither" in found["global_profiler.finish_hook_cmd"]
    assert "more than 0" in found["global_profiler.finish_hook_timeout"]
    assert "not a number of seconds" in found["global_profiler.close_timeout"]
    assert "'most'" in found["global_profiler.finish_hook_ranks"]
    assert "not a mapping of options" in found["global_profiler.global_tool_config.torch"]
    assert "set for each role" in found["global_profiler.enable"]
    assert "'maybe'" in found["actor.profiler.enable"]
    assert "-1" in found["actor.profiler.ranks"]
    assert "global_profiler.steps" in found["actor.profiler.steps"]
    assert "not a mapping" in found["actor.profiler.tool_config"]
    assert "Did you mean 'ranks'?" in found["actor.profiler.rank"]
    assert len(found) == 16


def test_a_bad_global_value_is_not_repeated_by_sections_that_interpolate_it(composed):
    found = problems(composed, ["global_profiler.save_path=s3://bucket"])
    assert list(found) == ["global_profiler.save_path"]


def test_interpolations_that_cannot_be_resolved_are_named():
    found = problems(
        {
            "global_profiler": {
                "steps": "${missing.steps}",
                "finish_hook_cmd": "upload ${RANKSCOPE_PROFILE_SAVE_PATH}",
            },
            "actor": {"profiler": {"tool_config": {"torch": {"contents": ["${oc.env:RANKSCOPE_TEST_UNSET}"]}}}},
            "critic": {"profiler": "${critic}"},
        }
    )
    assert "missing.steps" in found["global_profiler.steps"]
    assert "$NAME without braces" in found["global_profiler.finish_hook_cmd"]
    assert "RANKSCOPE_TEST_UNSET" in found["actor.profiler.tool_config.torch.contents.0"]
    assert "parent node" in found["critic.profiler"]


def test_a_whole_section_by_interpolation():
    config = load({"actor": {"profiler": {"enable": True, "ranks": [2]}}, "critic": {"profiler": "${actor.profiler}"}})
    assert config.role("critic").ranks.listed() == (2,)


def test_mandatory_values_that_nobody_gave_inherit():
    config = load({"global_profiler": {"save_path": "/g"}, "actor": {"profiler": {"save_path": "???", "tool": "???"}}})
    assert config.role("actor").save_path == "/g"


def test_other_peoples_profiler_keys_are_left_alone():
    config = load(
        {
            "trainer": {"profiler": "simple"},
            "lit": {"profiler": {"_target_": "lightning.pytorch.profilers.AdvancedProfiler", "dirpath": "."}},
        }
    )
    assert config.sections == ()
    assert "lightning.pytorch" in config.warnings[0]


def test_values_that_are_no_plain_data_are_named():
    found = problems({"actor": {"profiler": {"tool_config": {"torch": {"f": object()}}}}})
    assert "not a plain value" in found["actor.profiler.tool_config.torch.f"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML"), ("- 1\n- 2\n", "does not hold a mapping"), (None, "cannot read the config")],
)
def test_files_that_hold_no_config(tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_a_hydra_file_that_was_not_composed_is_told(tmp_path):
    file = tmp_path / "raw.yaml"
    file.write_text("defaults:\n  - profiler@profiler: profiler\n")
    assert "Hydra" in load(file).warnings[0]


@pytest.mark.parametrize("source", [5, [1], object()])
def test_sources_that_are_no_config(source):
    with pytest.raises(ConfigError, match="a config is a mapping"):
        load(source)


@pytest.mark.parametrize(
    ("tool", "tools"),
    [(None, ()), ("", ()), ([], ()), ("torch", ("torch",)), ("torch, nsys", ("torch", "nsys")), (["a", "a"], ("a",))],
)
def test_tools(tool, tools):
    assert load({"global_profiler": {"tool": tool}}).global_profiler.tool == tools


def test_paths_are_made_absolute_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/of/me")
    monkeypatch.setenv("RUN_NAME", "run7")
    monkeypatch.chdir(tmp_path)

    def path(text):
        return load({"global_profiler": {"save_path": text}}).global_profiler.save_path

    assert path("~/p") == "/home/of/me/p"
    assert path("/data/$RUN_NAME/p") == "/data/run7/p"
    assert path("p/../q") == str(tmp_path / "q")
    assert path("") == str(tmp_path / "outputs" / "profile")
    config = load({"global_profiler": {"save_path": "p"}})
    monkeypatch.chdir("/")
    assert config.global_profiler.save_path == str(tmp_path / "p")
    assert f"{tmp_path / 'p'}" in config.notes[0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://b/p", "URL"),
        ("file:///p", "URL"),
        ("$RANKSCOPE_TEST_UNSET/p", "RANKSCOPE_TEST_UNSET"),
        ("~nobody-of-that-name/p", "home directory"),
        ("a\0b", "zero byte"),
        (5, "not a path"),
    ],
)
def test_paths_that_cannot_be_meant(path, message):
    assert message in problems({"global_profiler": {"save_path": path}})["global_profiler.save_path"]


def test_finish_commands(tmp_path):
    file = tmp_path / "finish.sh"
    file.write_text("upload '$RANKSCOPE_PROFILE_SAVE_PATH'\n")

    def command(value):
        return load({"global_profiler": {"finish_hook_cmd": value}}).global_profiler.finish_hook_cmd

    assert command("echo hi") == "echo hi"
    assert command(["echo", "two words"]) == ("echo", "two words")
    assert command(f"@{file}") == "upload '$RANKSCOPE_PROFILE_SAVE_PATH'"
    assert command("  ") is None
    assert command([]) is None
    for bad in ("@/nowhere/at/all", ["sleep", 5], True):
        assert "global_profiler.finish_hook_cmd" in problems({"global_profiler": {"finish_hook_cmd": bad}})


def test_finish_ranks_of_every_kind():
    def ranks(value):
        return load({"global_profiler": {"finish_hook_ranks": value}}).global_profiler.finish_hook_ranks

    assert ranks([3, "0-1"]) == (0, 1, 3)
    assert ranks("per_node") == ("per_node",)
    assert ranks([]) == ()


@pytest.mark.parametrize("truth", [True, "true", "True"])
def test_booleans_as_texts(truth):
    assert load({"global_profiler": {"strict": truth}}).global_profiler.strict is True


def test_seconds_from_texts():
    config = load({"global_profiler": {"finish_hook_timeout": "2.5", "finish_hook_wait": 0}})
    assert config.global_profiler.finish_hook_timeout == 2.5
    assert config.global_profiler.finish_hook_wait == 0.0
    for bad in ("soon", float("inf"), float("nan"), -1):
        assert problems({"global_profiler": {"finish_hook_timeout": bad}})


def test_configs_are_frozen_and_read_like_mappings():
    config = load({"global_profiler": {"global_tool_config": {"torch": {"contents": ["cpu"]}}}, "a": {"profiler": {}}})
    for view in (config, config.global_profiler, config.sections[0], config.role("a")):
        name = next(iter(view))
        assert name in view
        assert view[name] == getattr(view, name)
        assert len(view) == len(list(view)) == len(dict(view))
        assert not any(key.startswith("_") for key in view)
        assert "nonsense" not in view
        assert view.get("nonsense", 5) == 5
        with pytest.raises(KeyError):
            view["nonsense"]
        with pytest.raises(AttributeError):
            _ = view.nonsense
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(view, name, 1)
        with pytest.raises(TypeError):
            view[name] = 1
        hash(view)
    with pytest.raises(TypeError):
        config.global_profiler.global_tool_config["torch"] = {}
    with pytest.raises(TypeError):
        config.global_profiler.global_tool_config["torch"]["contents"][0] = "cuda"


def test_a_config_can_be_sent_to_workers(composed):
    config = load(composed, ON)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert isinstance(again, Config)
    assert b"omegaconf" not in pickle.dumps(config)


def test_what_options_returns_is_the_callers_own():
    config = load({"a": {"profiler": {"tool_config": {"torch": {"contents": ["cpu"], "schedule": {"active": 1}}}}}})
    role = config.role("a")
    role.options("torch")["contents"].append("cuda")
    role.options("torch")["schedule"]["active"] = 2
    assert role.options("torch") == {"contents": ["cpu"], "schedule": {"active": 1}}


def test_the_start_up_path_does_not_import_omegaconf():
    code = (
        "import sys, rankscope.config, rankscope.plan; print(sorted({'omegaconf', 'yaml', 'torch'} & {*sys.modules}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
