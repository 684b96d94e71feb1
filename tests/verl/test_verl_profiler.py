"""verl's DistProfiler with rankscope behind it: its whole API, stages, files, faults, several workers in a process."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_tool
from verl.utils.profiler import DistProfiler, DistProfilerExtension, ProfilerConfig
from verl.utils.profiler.config import TorchProfilerToolConfig
from verl_tool import diary

from rankscope import ConfigError, shutdown
from rankscope_verl import profiler
from rankscope_verl.profiler import drive_of

pytestmark = pytest.mark.usefixtures("tools_folder")


class Worker(DistProfilerExtension):
    """As verl's workers use it; the stages are decorated when the class is made."""

    def __init__(self, config: Any, rank: int = 0, prefix: str | None = "actor_rollout_ref") -> None:
        DistProfilerExtension.__init__(self, DistProfiler(rank=rank, config=config, save_file_prefix=prefix))
        self.ran: list[Any] = []

    @DistProfiler.annotate(color="red", role="actor_update", scheduled=True)
    def update_actor(self, batches: int = 2) -> str:
        for number in range(batches):
            self.train_batch(number)
            self.profiler.step()
        return "updated"

    @DistProfiler.annotate()
    def train_batch(self, number: int) -> None:
        self.ran.append(number)
        torch.ones(2).sum()

    @DistProfiler.annotate(role="fails")
    def fail(self) -> None:
        self.ran.append("fail")
        raise KeyError("the stage's own")

    @DistProfiler.annotate(message="wait")
    async def wait(self) -> str:
        self.ran.append("wait")
        await asyncio.sleep(0)
        return "waited"


class Bare:
    """Library code without a profiler."""

    @DistProfiler.annotate(role="library")
    def run(self) -> str:
        return "ran"


def config(save_path: Path, tool: str | None = "diary", **facts: Any) -> ProfilerConfig:
    given = {"enable": True, "ranks": [0], "save_path": str(save_path), "tool_config": {}, **facts}
    return ProfilerConfig(tool=tool, **given)


def finished(save_path: Path) -> list[str]:
    for handle in shutdown.handles():
        handle.close()
    return sorted(path.name.split("_pid")[0] for path in save_path.glob("*_pid*"))


# The API.


def test_a_run_of_a_tool_that_somebody_else_made(save_path: Path) -> None:
    worker = Worker(config(save_path, tool_config={"diary": {"mood": "fine"}}))
    assert (worker.profiler.check_enable(), worker.profiler.check_this_rank()) == (True, True)
    assert not worker.profiler.check_this_step()
    assert not worker.profiler.is_discrete_mode()
    verl_tool.FINISHED.clear()
    for step in (1, 2):
        worker.start_profile(role="train", profile_step=step)
        assert worker.profiler.check_this_step()
        assert worker.update_actor(1) == "updated"
        worker.stop_profile(run_command=step == 2)
        assert not worker.profiler.check_this_step()
    assert finished(save_path) == [f"actor-rollout-ref_train_step{step}_rank0-of-1" for step in (1, 2)]
    first, second = diary(save_path)
    assert first == [
        "mood fine",
        "start 1 train",
        "enter step1 NoneType",
        "enter actor_update Worker",
        "enter train_batch Worker",
        "leave train_batch",
        "step actor_update",
        "leave actor_update",
        "leave step1",
    ]
    assert second == [line.replace("step1", "step2").replace("start 1", "start 2") for line in first[1:]]
    assert verl_tool.FINISHED == ["actor-rollout-ref 2"]


def test_a_torch_trace_has_our_name_and_facts(save_path: Path) -> None:
    options = TorchProfilerToolConfig(contents=["cpu"], compression=1)
    worker = Worker(config(save_path, "torch", tool_config={"torch": options}), prefix="ref")
    worker.start_profile(profile_step=5)
    worker.update_actor()
    worker.stop_profile()
    assert finished(save_path) == ["ref_train_step5_rank0-of-1"]
    trace = json.loads(gzip.decompress(next(save_path.glob("*.json.gz")).read_bytes()))
    assert trace["distributedInfo"]["rank"] == 0
    assert (trace["rankscope"]["role"], trace["rankscope"]["step"]) == ("ref", 5)
    assert trace["rankscope"]["options"]["compression"] == 1
    rows = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"actor_update", "train_batch"} <= rows


def test_several_tools_at_once(save_path: Path) -> None:
    worker = Worker(config(save_path, "torch, diary", tool_config={"torch": {"contents": ["cpu"]}}))
    worker.start_profile(role="train", profile_step=1)
    worker.update_actor()
    worker.stop_profile()
    assert finished(save_path) == ["actor-rollout-ref_train_step1_rank0-of-1"] * 2


def test_discrete_stages_have_files_of_their_own(save_path: Path) -> None:
    worker = Worker(config(save_path, tool_config={"diary": {"discrete": True}}))
    assert worker.profiler.is_discrete_mode()
    worker.start_profile(role="train", profile_step=3)
    worker.update_actor(1)
    worker.train_batch(7)
    worker.stop_profile()
    scopes = ("actor-update", "train-batch")
    assert finished(save_path) == [f"actor-rollout-ref_{scope}_step3_rank0-of-1" for scope in scopes]
    assert diary(save_path, "*actor-update*")[0][1:5] == [
        "start 3 actor_update",
        "enter step3 NoneType",
        "enter actor_update Worker",
        "enter train_batch Worker",
    ]


@pytest.mark.parametrize(
    ("facts", "rank", "enabled", "selected"),
    [
        ({"enable": False}, 0, False, True),
        ({"enable": False, "ranks": []}, 0, False, False),
        ({"ranks": [1, 2]}, 0, True, False),
        ({"ranks": [1, 2]}, 2, True, True),
        ({"ranks": []}, 0, True, True),
        ({"ranks": []}, 1, True, False),
        ({"ranks": [], "all_ranks": True}, 7, True, True),
    ],
)
def test_who_is_profiled_is_as_in_verl(
    save_path: Path, facts: dict[str, Any], rank: int, enabled: bool, selected: bool
) -> None:
    worker = Worker(config(save_path, **facts), rank=rank)
    assert (worker.profiler.check_enable(), worker.profiler.check_this_rank()) == (enabled, selected)
    before = len(verl_tool.CONTEXTS)
    worker.start_profile(role="train", profile_step=1)
    assert worker.profiler.check_this_step() == (enabled and selected)
    worker.update_actor()
    worker.step_profile()
    worker.stop_profile()
    assert (len(verl_tool.CONTEXTS) > before) == (enabled and selected)
    assert bool(finished(save_path)) == (enabled and selected)


@pytest.mark.parametrize("tool", ["torch", "torch_memory", "nsys", "npu", "precision_debugger", "no such tool", None])
def test_what_is_off_makes_no_backend_and_is_not_looked_at(tool: str | None, save_path: Path) -> None:
    for made in (DistProfiler(0, config(save_path, tool, enable=False)), DistProfiler(0)):
        assert type(made._impl).__name__ == "_NoOpProfiler"
        assert not made.check_enable()
        made.start(role="train")
        made.step()
        made.stop()
        made.run_finish_hook()
    assert not save_path.exists()


def test_a_mistake_in_the_config_comes_before_the_training(save_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tool named 'dairy'\. Did you mean 'diary'\?"):
        DistProfiler(0, config(save_path, "dairy"))
    with pytest.raises(ConfigError, match=r"tool_config\.diary\.mod: unknown option 'mod'\. Did you mean 'mood'"):
        DistProfiler(0, config(save_path, tool_config={"diary": {"mod": "x"}}))


def test_the_constructor_keeps_what_verl_keeps(save_path: Path) -> None:
    section = config(save_path, tool_config={"diary": {"mood": "x"}}, finish_hook_cmd="true")
    made = DistProfiler(3, section, {"mood": "y"}, "actor")
    assert (made.rank, made.config, made.tool_config, made.save_file_prefix) == (3, section, {"mood": "y"}, "actor")
    assert list(inspect.signature(DistProfiler).parameters) == [
        *("rank", "config", "tool_config", "save_file_prefix", "kwargs")
    ]
    assert str(inspect.signature(DistProfiler.stop)) == "(self, run_command: bool = True)"


# Stages.


def test_a_stage_runs_once_and_its_error_passes(save_path: Path) -> None:
    worker = Worker(config(save_path))
    worker.start_profile(role="train", profile_step=1)
    with pytest.raises(KeyError, match="the stage's own"):
        worker.fail()
    assert worker.ran == ["fail"]
    worker.stop_profile()
    assert [line for line in diary(save_path)[0] if "fails" in line] == ["enter fails Worker", "leave fails"]


def test_a_coroutine_stage_stays_one_and_is_shown_whole(save_path: Path) -> None:
    worker = Worker(config(save_path))
    assert inspect.iscoroutinefunction(worker.wait)
    worker.start_profile(role="train", profile_step=1)
    assert asyncio.run(worker.wait()) == "waited"
    worker.stop_profile()
    assert [line for line in diary(save_path)[0] if "wait" in line] == ["enter wait Worker", "leave wait"]


def test_stages_of_workers_that_were_not_started_are_shown_too(save_path: Path) -> None:
    outer = Worker(config(save_path))
    inner = Worker(config(save_path), prefix="language_model")
    disabled = Worker(config(save_path, enable=False), prefix="value_model")
    outer.start_profile(role="train", profile_step=1)
    for each in (inner, disabled):
        each.train_batch(0)
    assert Bare().run() == "ran"
    outer.stop_profile()
    shown = [line for line in diary(save_path)[0] if line.startswith("enter") and "step1" not in line]
    assert shown == ["enter train_batch Worker", "enter train_batch Worker", "enter library Bare"]


def test_stages_decorated_before_the_plugin_came_are_shown(save_path: Path) -> None:
    """verl's own decorator asks the profiler's backend."""
    verls = vars(DistProfiler)["annotate"].__func__.__wrapped__

    class Early:
        @verls(DistProfiler, color="red", role="early", scheduled=True)
        def run(self) -> str:
            self.profiler.step()
            return "ran"

    early = Early()
    early.profiler = DistProfiler(0, config(save_path), save_file_prefix="actor")  # type: ignore[attr-defined]
    assert early.run() == "ran"
    early.profiler.start(profile_step=1)  # type: ignore[attr-defined]
    assert early.run() == "ran"
    early.profiler.stop()  # type: ignore[attr-defined]
    assert diary(save_path)[0][3:6] == ["enter early Early", "step early", "leave early"]


# Several workers in one process.


def test_an_inner_worker_makes_no_handle_and_steps_for_the_outer_one(save_path: Path, compose: Any) -> None:
    section = job_section(compose)
    outer, inner = Worker(section), Worker(section, prefix="language_model")
    assert [handle.role for handle in shutdown.handles()] == ["actor-rollout-ref"]
    outer.start_profile(role="train", profile_step=1)
    inner.profiler.step()
    outer.stop_profile()
    assert "step None" in diary(save_path)[0]


def test_an_inner_worker_whose_outer_one_is_off_says_so(save_path: Path, compose: Any, said: Callable[[], str]) -> None:
    Worker(config(save_path, enable=False), prefix="actor_rollout_ref")
    said()
    Worker(job_section(compose), prefix="language_model")
    text = said()
    assert "actor_rollout_ref.actor.profiler is enabled, and nothing is profiled by it" in text
    assert shutdown.handles() == ()


def test_supervised_fine_tuning_has_a_worker_of_its_own(save_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    section = {
        "_target_": "verl.utils.profiler.ProfilerConfig",
        "tool": "diary",
        "enable": True,
        "save_path": str(save_path),
        "tool_config": {"diary": {}},
    }
    job = OmegaConf.create({"trainer": {"profile_interval": [3, 4]}, "profiler": section})
    worker = Worker(omega_conf_to_dataclass(job.profiler), prefix="language_model")
    worker.start_profile()  # the trainer of SFT says neither role nor step
    for number in (3, 4):
        worker.train_batch(number)
        worker.step_profile()
    worker.stop_profile()
    assert finished(save_path) == ["language-model_train_step3_rank0-of-1"]
    assert verl_tool.CONTEXTS[-1].steps == (3, 4)


def test_colocated_roles_share_a_window(save_path: Path) -> None:
    actor, critic = Worker(config(save_path), prefix="actor"), Worker(config(save_path), prefix="value_model")
    for worker in (actor, critic):
        worker.start_profile(role="train", profile_step=1)
    for worker in (actor, critic):
        worker.update_actor(1)
        worker.stop_profile()
    assert finished(save_path) == ["actor_train_step1_rank0-of-1"]
    assert [line for line in diary(save_path)[0] if line == "enter actor_update Worker"] == [
        "enter actor_update Worker"
    ]


def test_a_worker_that_was_thrown_away_gives_its_tools_back(save_path: Path) -> None:
    Worker(config(save_path, "nsys")).profiler._rankscope.handle  # noqa: B018
    assert len(shutdown.handles()) == 1
    worker = Worker(config(save_path, "torch", tool_config={"torch": {"contents": ["cuda"]}}))
    assert drive_of(worker.profiler).handle.tools[0].name == "torch"  # type: ignore[union-attr]
    assert [handle.section.tools for handle in shutdown.handles()] == [("torch",)]


# Relocation and the finish command.


def test_the_finish_command_runs_once_at_the_end(save_path: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = f'echo "$VERL_PROFILE_ROLE $VERL_PROFILE_RANK $VERL_PROFILE_ARTIFACTS" >> {told}'
    worker = Worker(config(save_path, finish_hook_cmd=command))
    for step in (1, 2, 3):
        worker.start_profile(role="train", profile_step=step)
        worker.stop_profile(run_command=step >= 2)
        assert told.exists() == (step >= 2)
    worker.profiler.run_finish_hook()
    assert told.read_text() == "actor-rollout-ref 0 2\n"


@pytest.mark.parametrize(
    ("facts", "rank", "runs"),
    [
        ({"finish_hook_ranks": [1]}, 1, True),
        ({"finish_hook_ranks": [1]}, 0, False),
        ({"finish_hook_all_ranks": True}, 5, True),
        ({}, 1, False),
        ({}, 0, False),
    ],
)
def test_the_finish_command_where_nothing_was_captured(
    save_path: Path, tmp_path: Path, facts: dict[str, Any], rank: int, runs: bool
) -> None:
    told = tmp_path / "told"
    worker = Worker(config(save_path, finish_hook_cmd=f"touch {told}", **facts), rank=rank)
    worker.stop_profile(run_command=False)
    assert not told.exists()
    worker.stop_profile(run_command=True)
    assert told.exists() == runs
    assert shutdown.handles() == ()


def test_somebody_else_may_ask_for_the_finish_command_alone(save_path: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    made = DistProfiler(0, config(save_path, finish_hook_cmd=f'echo "$VERL_PROFILE_SAVE_PATH" >> {told}'))
    made.run_finish_hook(run_command=False)
    assert not told.exists()
    made.run_finish_hook()
    made.run_finish_hook()
    assert told.read_text() == f"{save_path}\n"


def test_the_phases_of_a_trainer(save_path: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    worker = Worker(config(save_path, finish_hook_cmd=f"touch {told}"))
    worker.start_profile(role="train", profile_step=1)
    worker.end_profile(aborted=True)
    assert not worker.profiler.check_this_step()
    assert not told.exists()
    worker.finish_profile()
    assert told.exists()
    worker.end_profile()
    assert finished(save_path) == ["actor-rollout-ref_train-aborted_step1_rank0-of-1"]


# Faults.


@pytest.mark.usefixtures("lenient")
def test_a_broken_tool_costs_the_trace_and_nothing_else(save_path: Path, said: Callable[[], str]) -> None:
    worker = Worker(config(save_path, "broken"))
    worker.start_profile(role="train", profile_step=1)
    assert worker.update_actor() == "updated"
    worker.stop_profile()
    assert worker.ran == [0, 1]
    assert "broken on purpose" in said()


@pytest.mark.usefixtures("lenient")
def test_a_mistake_of_ours_in_the_constructor_gives_verls_own_profiler(
    save_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(profiler, "read", fail)
    options = TorchProfilerToolConfig(contents=["cpu"])
    section = config(save_path, "torch", tool_config={"torch": options})
    made = DistProfiler(0, section, options, "actor")
    assert type(made._impl).__module__ == "verl.utils.profiler.torch_profile"
    assert "verl's own profiler is used: ZeroDivisionError: a mistake of ours" in said()
    worker = Worker.__new__(Worker)
    worker.profiler, worker.ran = made, []
    worker.start_profile(role="train", profile_step=1)
    assert worker.profiler.check_this_step()
    worker.update_actor()
    worker.stop_profile()
    (trace,) = save_path.iterdir()
    assert trace.name.startswith("actor_train_step1_rank0")
    rows = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "actor_update" in {event["name"] for event in rows}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("method", ["start", "stop", "step", "relocate", "finish"])
def test_a_mistake_of_ours_in_a_step_ends_the_profiling_only(
    method: str, save_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    worker = Worker(config(save_path))
    handle = drive_of(worker.profiler).handle  # type: ignore[union-attr]
    monkeypatch.setattr(handle, method, fail)
    for step in (1, 2):
        worker.start_profile(role="train", profile_step=step)
        assert worker.update_actor() == "updated"
        worker.stop_profile(run_command=step == 2)
    assert worker.ran == [0, 1, 0, 1]
    text = said()
    assert text.count("rankscope failed inside of verl and is off in this worker") == 1
    assert f"call={method}" in text
    monkeypatch.undo()


def test_a_tool_whose_package_is_missing_is_verls_own(
    save_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    from rankscope import registry

    found = {name: infos for name, infos in registry.providers().items() if name != "torch"}
    monkeypatch.setattr(registry, "providers", lambda: found)
    options = TorchProfilerToolConfig(contents=["cpu"])
    for _ in range(2):
        made = DistProfiler(0, config(save_path, "torch", tool_config={"torch": options}), options, "actor")
        assert drive_of(made) is None
        assert type(made._impl).__module__ == "verl.utils.profiler.torch_profile"
    assert said().count("pip install rankscope-torch") == 1


def test_a_tool_that_cannot_work_here_is_verls_own(
    save_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    from rankscope import Availability, registry

    monkeypatch.setattr(registry, "availability", lambda factory: Availability(False, "it is too old"))
    options = TorchProfilerToolConfig(contents=["cpu"])
    for rank, verls_own in ((0, True), (1, False)):
        made = DistProfiler(rank, config(save_path, "torch", tool_config={"torch": options}), options, "actor")
        assert (drive_of(made) is None) == verls_own
    assert said().count("that of rankscope cannot work here: it is too old") == 1
    with pytest.raises(ConfigError, match="tool 'diary' cannot work here: it is too old"):
        DistProfiler(0, config(save_path))


def job_section(compose: Any) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    key = "actor_rollout_ref.actor.profiler"
    made = compose("global_profiler.tool=diary", "global_profiler.steps=[1]", f"{key}.enable=true")
    return omega_conf_to_dataclass(made.actor_rollout_ref.actor.profiler)
