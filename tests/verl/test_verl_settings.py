"""From verl's config to rankscope's: its composed file, its classes of options, SFT, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler import ProfilerConfig
from verl.utils.profiler.config import NPUToolConfig, TorchProfilerScheduleConfig, TorchProfilerToolConfig

from rankscope import ConfigError
from rankscope_verl import job, settings

Compose = Callable[..., Any]
ACTOR = "actor_rollout_ref.actor.profiler"


def actor(config: Any, *, by_hydra: bool) -> Any:
    """The actor's section as verl's workers make it: the outer worker by the class, the inner one by Hydra."""
    section = config.actor_rollout_ref.actor.profiler
    return omega_conf_to_dataclass(section, *([] if by_hydra else [ProfilerConfig]))


@pytest.mark.parametrize("by_hydra", [True, False])
def test_verls_composed_config(compose: Compose, save_path: Path, by_hydra: bool) -> None:
    config = compose(
        "global_profiler.tool=torch",
        "global_profiler.steps=[2,3,7]",
        "global_profiler.profile_continuous_steps=true",
        "global_profiler.finish_hook_cmd=upload.sh",
        "+global_profiler.close_timeout=33",
        f"{ACTOR}.enable=true",
        f"{ACTOR}.ranks=[0,8]",
        f"{ACTOR}.tool_config.torch.contents=[cpu,shapes]",
        f"{ACTOR}.tool_config.torch.schedule.active=2",
    )
    found = settings.read(actor(config, by_hydra=by_hydra), None, "actor_rollout_ref")
    assert found is not None
    assert (found.role, found.path, found.tools) == ("actor-rollout-ref", ACTOR, ("torch",))
    assert (found.steps, found.discrete) == ((2, 3, 7), False)
    common, section = found.config.global_profiler, found.config.role(found.role)
    assert (common.profile_continuous_steps, common.close_timeout) == (True, 33.0)
    assert (section.save_path, section.finish_hook_cmd) == (str(save_path), "upload.sh")
    assert [rank for rank in range(10) if section.ranks.selects(rank).selected] == [0, 8]
    options = section.options("torch")
    assert options["contents"] == ["cpu", "shapes"]
    assert options["schedule"]["active"] == 2
    found.check(0)


def test_what_the_role_does_not_set_comes_from_the_global_options(compose: Compose) -> None:
    config = compose(
        "global_profiler.tool=torch_memory",
        "global_profiler.steps=[1]",
        f"{ACTOR}.enable=true",
        "global_profiler.global_tool_config.torch_memory.context=alloc",
        "global_profiler.global_tool_config.torch_memory.stacks=python",
    )
    found = settings.read(actor(config, by_hydra=True), None, "actor")
    assert found is not None
    options = found.config.role("actor").options("torch_memory")
    assert (options["context"], options["stacks"], options["trace_alloc_max_entries"]) == ("alloc", "python", 100_000)
    found.check(0)


def test_the_jobs_facts_travel_with_the_section(compose: Compose) -> None:
    config = compose("global_profiler.steps=[4]", "global_profiler.tool=torch", "critic.profiler.enable=true")
    critic = omega_conf_to_dataclass(config.critic)
    for section in (critic.profiler, omega_conf_to_dataclass(config.critic.profiler)):
        for made in (section, copy.deepcopy(section), pickle.loads(pickle.dumps(section))):
            facts = job.job_of(made)
            assert facts is not None
            assert (facts["path"], facts["common"]["steps"]) == ("critic.profiler", [4])
            assert "tool" not in facts["common"]
    # Ray sends a part of the tree with its root, as here.
    sent = pickle.loads(pickle.dumps(config.actor_rollout_ref))
    assert job.job_of(omega_conf_to_dataclass(sent.actor.profiler, ProfilerConfig))["path"] == ACTOR  # type: ignore[index]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["global_profiler.tool=torch", "global_profiler.steps=[1]"],
        ["global_profiler.tool=torch", f"{ACTOR}.enable=true"],
        ["global_profiler.tool=torch", f"{ACTOR}.enable=true", "global_profiler.steps=[]"],
    ],
)
def test_nothing_is_profiled_where_verl_profiles_nothing(compose: Compose, overrides: list[str]) -> None:
    assert settings.read(actor(compose(*overrides), by_hydra=True), None, "actor") is None


def test_a_section_without_a_tool_says_so(compose: Compose, said: Callable[[], str]) -> None:
    config = compose("global_profiler.steps=[1]", f"{ACTOR}.enable=true")
    assert settings.read(actor(config, by_hydra=True), None, "actor") is None
    assert f"{ACTOR} is enabled but has no tool" in said()


def test_a_section_that_somebody_wrote_by_hand(save_path: Path) -> None:
    options = TorchProfilerToolConfig(contents=["cpu"], discrete=True)
    for blocks in (options, {"torch": options}, {"torch": {"contents": ["cpu"], "discrete": True}}):
        config = ProfilerConfig(tool="torch", enable=True, save_path=str(save_path), tool_config=blocks)
        for picked in (None, options):
            found = settings.read(config, picked, None)
            assert found is not None
            assert (found.role, found.steps, found.discrete) == ("worker", None, True)
            assert found.config.active
            assert found.config.role("worker").options("torch")["contents"] == ["cpu"]


def test_supervised_fine_tuning_has_an_interval_instead_of_steps() -> None:
    section = {
        "_target_": "verl.utils.profiler.ProfilerConfig",
        "tool": "torch",
        "enable": True,
        "save_path": "out",
        "tool_config": {"torch": {"_target_": "verl.utils.profiler.config.TorchProfilerToolConfig"}},
    }
    for interval, steps in (([3, 5], (3, 4, 5)), ([-1, -1], None)):
        config = OmegaConf.create({"trainer": {"profile_interval": interval}, "profiler": section})
        found = settings.read(omega_conf_to_dataclass(config.profiler), None, "language_model")
        assert (found and found.steps) == steps
    config = OmegaConf.create({"trainer": {"profile_interval": [3, 5]}, "profiler": section})
    found = settings.read(omega_conf_to_dataclass(config.profiler), None, "language_model")
    assert found is not None
    assert found.config.global_profiler.profile_continuous_steps
    assert (found.role, found.path) == ("language-model", "profiler")


def test_roles_and_their_names() -> None:
    for prefix, role in (("actor_rollout_ref", "actor-rollout-ref"), ("value_model", "critic"), (None, "worker")):
        found = settings.read(ProfilerConfig(tool="torch", enable=True, tool_config=None), None, prefix)
        assert found is not None
        assert found.role == role


@pytest.mark.parametrize(
    ("facts", "selected"),
    [
        ({}, [0, 1, 2, 3]),  # as in verl: msprobe chooses by its own file
        ({"ranks": [2]}, [2]),
        ({"all_ranks": True}, [0, 1, 2, 3]),
    ],
)
def test_ranks_of_the_precision_debugger(facts: dict[str, Any], selected: list[int]) -> None:
    config = ProfilerConfig(tool="precision_debugger", enable=True, tool_config=None, **facts)
    found = settings.read(config, None, "actor")
    assert found is not None
    ranks = found.config.role("actor").ranks
    assert [rank for rank in range(4) if ranks.selects(rank).selected] == selected


# Options that verl does not have.


def test_verls_classes_take_the_options_of_our_tools() -> None:
    made = TorchProfilerToolConfig(
        contents=["flops"], compression=2, schedule=TorchProfilerScheduleConfig(active=1, stage="critic_update")
    )
    for options in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        plain = settings.plain(options)
        assert (plain["contents"], plain["compression"]) == (["flops"], 2)
        assert plain["schedule"]["stage"] == "critic_update"
        assert options.contents == ["flops"]
        assert options.get("discrete") is False
    assert settings.plain(NPUToolConfig(level="none", export_type=["db"]))["export_type"] == ["db"]


def test_the_same_from_the_command_line(compose: Compose) -> None:
    config = compose(
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        f"{ACTOR}.enable=true",
        f"+{ACTOR}.tool_config.torch.max_trace_mb=50",
        f"+{ACTOR}.tool_config.torch.schedule.stage=actor_update",
        f"{ACTOR}.tool_config.torch.contents=[cpu,flops]",
    )
    for by_hydra in (True, False):
        found = settings.read(actor(config, by_hydra=by_hydra), None, "actor")
        assert found is not None
        options = found.config.role("actor").options("torch")
        assert (options["max_trace_mb"], options["schedule"]["stage"]) == (50, "actor_update")
        found.check(0)


def test_a_value_that_neither_knows_is_still_verls_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope import registry

    monkeypatch.setattr(registry, "installed", dict)
    with pytest.raises(AssertionError, match="Profiler contents only supports"):
        TorchProfilerToolConfig(contents=["gpu"])


# What is refused, and how.


def look_at(config: Any) -> None:
    found = settings.read(config, None, "actor")
    assert found is not None
    found.check(0)


def refused(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        look_at(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (
            ["global_profiler.tool=tocrh"],
            [f"{ACTOR}.tool: no tool named 'tocrh'. Did you mean 'torch'?", "pip install rankscope-<tool>"],
        ),
        (
            ["global_profiler.tool=torch", f"{ACTOR}.tool_config.torch.contents=[gpu]"],
            [f"{ACTOR}.tool_config.torch.contents", "'gpu'", "cuda, device"],
        ),
        (
            ["global_profiler.tool=torch", f"+{ACTOR}.tool_config.torch.compresion=1"],
            [f"{ACTOR}.tool_config.torch.compresion: unknown option", "Did you mean 'compression'?"],
        ),
        (
            ["global_profiler.tool=torch", "+global_profiler.strikt=true"],
            ["global_profiler.strikt: unknown key", "Did you mean 'strict'?"],
        ),
        (["'global_profiler.tool=\"torch,nsys\"'"], [f"{ACTOR}.tool", "both need 'cupti'"]),
    ],
)
def test_mistakes_are_named_at_the_keys_that_the_user_wrote(
    compose: Compose, overrides: list[str], texts: list[str]
) -> None:
    text = refused(
        actor(
            compose("global_profiler.steps=[1]", f"{ACTOR}.enable=true", *(one.strip("'") for one in overrides)),
            by_hydra=True,
        )
    )
    for part in (*texts, "RANKSCOPE_VERL=0 leaves the profiling to verl"):
        assert part in text


def test_a_tool_of_verl_whose_package_is_missing_is_left_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope import registry

    found = {name: infos for name, infos in registry.providers().items() if name != "torch"}
    monkeypatch.setattr(registry, "providers", lambda: found)
    with pytest.raises(settings.LeaveToVerlError, match="pip install rankscope-torch"):
        settings.read(ProfilerConfig(tool="torch", enable=True, tool_config=None), None, "actor")
    assert "'torch' is not installed" in refused(
        ProfilerConfig(tool="torch,torch_memory", enable=True, save_path="out", tool_config=None)
    )
