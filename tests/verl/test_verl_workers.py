"""verl's own worker classes on a CPU: what they profile, in files of ours."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verl_tool
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorkerConfig
from verl_tool import diary
from verl_workers import CpuActorWorker, CpuTrainingWorker, batch

from rankscope import shutdown

pytestmark = pytest.mark.usefixtures("tools_folder")

Compose = Callable[..., Any]
ACTOR = "actor_rollout_ref.actor.profiler"
STEPS = ("global_profiler.steps=[1,2]",)
TORCH = ("global_profiler.tool=torch", f"{ACTOR}.enable=true", f"{ACTOR}.tool_config.torch.contents=[cpu]", *STEPS)
DIARY = ("global_profiler.tool=diary", f"{ACTOR}.enable=true", *STEPS)


def train(worker: Any, steps: tuple[int, ...] = (1, 2), mini_batches: int = 2) -> None:
    """What verl's trainer calls of an actor, step by step."""
    for step in steps:
        worker.start_profile(role="train", profile_step=step)
        worker.compute_log_prob(batch())
        worker.update_actor(batch(num_mini_batch=mini_batches))
        worker.stop_profile(run_command=step == steps[-1])
    for handle in shutdown.handles():
        handle.close()


def actor(config: Any, role: str = "actor") -> Any:
    worker = CpuActorWorker(config.actor_rollout_ref, role)
    worker.init_model()
    return worker


def critic(config: Any) -> Any:
    """As verl's trainers make it."""
    made = omega_conf_to_dataclass(config.critic)
    worker = CpuTrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=made.model,
            engine_config=made.engine,
            optimizer_config=made.optim,
            checkpoint_config=made.checkpoint,
            profiler_config=omega_conf_to_dataclass(config.critic.profiler),
        )
    )
    worker.reset()
    worker.set_loss_fn(print)
    return worker


def names(save_path: Path) -> list[str]:
    found = [path.name for path in save_path.glob("*_pid*")]
    return sorted(name.split("_pid")[0] + (f" {name.split('_')[-1]}" if "_mb" in name else "") for name in found)


def rows(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation" and "DataLoader" not in event["name"]]
    return [event["name"] for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"]))]


def test_a_step_of_the_actor_is_one_trace_with_all_its_stages(compose: Compose, save_path: Path) -> None:
    train(actor(compose(*TORCH)))
    assert names(save_path) == [f"actor_train_step{step}_rank0-of-1" for step in (1, 2)]
    mini_batch = ["train_batch", "micro_batch0", "micro_batch1"]
    for path in save_path.glob("*.json.gz"):
        assert [name for name in rows(path) if not name.startswith("step")] == [
            "actor_compute_log_prob",
            "actor_update",
            *["mini_batch0", *mini_batch],
            *["mini_batch1", *mini_batch],
        ]
    ledgers = [json.loads(line) for path in (save_path / ".rankscope").glob("*.jsonl") for line in path.open()]
    plans = [line for line in ledgers if line["kind"] == "plan"]
    assert [(plan["role"], plan["steps"], plan["profiled"]) for plan in plans] == [("actor", [1, 2], True)]


def test_discrete_stages_and_their_schedule(compose: Compose, save_path: Path) -> None:
    options = f"{ACTOR}.tool_config.torch"
    schedule = (f"{options}.schedule.active=1", f"{options}.schedule.skip_first=1", f"{options}.schedule.repeat=1")
    train(actor(compose(*TORCH, f"{options}.discrete=true", *schedule)), (2,))
    assert [name.rpartition(" ")[2].split(".")[0] for name in names(save_path)][-1] == "mb1"
    assert [name.split(" ")[0] for name in names(save_path)] == [
        "actor_actor-compute-log-prob_step2_rank0-of-1",
        "actor_actor-update_step2_rank0-of-1",
    ]


def test_a_tool_of_somebody_else_in_verls_worker(compose: Compose, save_path: Path) -> None:
    train(actor(compose(*DIARY, f"+{ACTOR}.tool_config.diary.mood=merry")), (1,), mini_batches=1)
    (lines,) = diary(save_path)
    assert lines == [
        "mood merry",
        "start 1 train",
        "enter step1 NoneType",
        "enter actor_compute_log_prob CpuActorWorker",
        "leave actor_compute_log_prob",
        "enter actor_update CpuActorWorker",
        "enter train_batch CpuTrainingWorker",
        "leave train_batch",
        "step actor_update",
        "leave actor_update",
        "leave step1",
    ]
    assert verl_tool.CONTEXTS[-1].steps == (1, 2)


def test_the_reference_in_its_own_worker(compose: Compose, save_path: Path) -> None:
    section = "actor_rollout_ref.ref.profiler"
    worker = actor(compose("global_profiler.tool=diary", *STEPS, f"{section}.enable=true"), "ref")
    worker.start_profile(profile_step=1)  # verl's trainer gives the reference no scope
    worker.compute_ref_log_prob(batch())
    worker.stop_profile()
    assert names(save_path) == ["ref_train_step1_rank0-of-1"]
    assert "enter ref_compute_log_prob CpuActorWorker" in diary(save_path)[0]


@pytest.mark.parametrize("discrete", [False, True])
def test_the_critic_has_stages_with_names(compose: Compose, save_path: Path, discrete: bool) -> None:
    blocks = f"+critic.profiler.tool_config.diary.discrete={str(discrete).lower()}"
    worker = critic(compose("global_profiler.tool=diary", *STEPS, "critic.profiler.enable=true", blocks))
    worker.start_profile(profile_step=1)
    worker.infer_batch(batch())
    worker.train_mini_batch(batch(num_mini_batch=2))
    worker.stop_profile()
    scopes = ["compute-values", "critic-update"] if discrete else ["train"]
    assert names(save_path) == [f"critic_{scope}_step1_rank0-of-1" for scope in scopes]
    lines = [line for one in diary(save_path) for line in one if line.startswith(("enter c", "step "))]
    assert lines == [
        "enter compute_values CpuTrainingWorker",
        "enter critic_update CpuTrainingWorker",
        "step critic_update",
        "step critic_update",
    ]


def test_a_worker_that_is_not_profiled_behaves_as_ever(compose: Compose, save_path: Path) -> None:
    worker = actor(compose())
    train(worker)
    assert not save_path.exists()
    assert len(worker.actor.engine.module) == 2
