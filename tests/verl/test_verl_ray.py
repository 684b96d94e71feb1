"""verl's worker groups in a real Ray cluster on this machine, driven by its trainer's own methods."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorkerConfig
from verl_workers import CpuActorWorker, CpuTrainingWorker, batch

from rankscope.testing import wait_for
from rankscope_verl import trainers

ACTOR, CRITIC = "actor_rollout_ref.actor.profiler", "critic.profiler"


@pytest.fixture
def cluster(tools_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DISABLE_WORKER_INIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(tools_folder)]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


class Trainer(PPOTrainer):
    def on_step_end(self) -> None:
        pass

    def on_sample_end(self) -> None:
        pass


def groups(config: Any) -> Any:
    """Actor and critic in the same two processes, as verl's trainer makes them."""
    made = omega_conf_to_dataclass(config.critic)
    critic = TrainingWorkerConfig(
        model_type="value_model",
        model_config=made.model,
        engine_config=made.engine,
        optimizer_config=made.optim,
        checkpoint_config=made.checkpoint,
        profiler_config=omega_conf_to_dataclass(config.critic.profiler),
    )
    classes = {
        "actor": RayClassWithInitArgs(ray.remote(CpuActorWorker), config=config.actor_rollout_ref, role="actor"),
        "critic": RayClassWithInitArgs(ray.remote(CpuTrainingWorker), config=critic),
    }
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(classes), device_name="cpu"
    )
    found = group.spawn(prefix_set=classes.keys())
    found["actor"].init_model()
    found["critic"].reset()
    found["critic"].set_loss_fn(print)
    return group, found["actor"], found["critic"]


def trainer(config: Any, actor: Any, critic: Any) -> Any:
    made = Trainer.__new__(Trainer)
    made.config, made.actor_rollout_wg, made.critic_wg = config, actor, critic
    made.use_critic, made.use_reference_policy = True, False
    made.prev_step_profile, made.curr_step_profile, made.next_step_profile = False, True, False
    made.global_steps, made.total_training_steps = 1, 3
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name.split("_pid")[0] for path in folder.glob("*_pid*"))


@pytest.mark.usefixtures("cluster")
def test_a_job_on_ray(compose: Any, save_path: Path, tmp_path: Path, said: Callable[[], str]) -> None:
    told = tmp_path / "told"
    config = compose(
        *("global_profiler.tool=torch", "global_profiler.steps=[1,2,3]"),
        f"global_profiler.finish_hook_cmd='echo \"$VERL_PROFILE_RANK $VERL_PROFILE_ARTIFACTS\" >> {told}'",
        *(f"{ACTOR}.enable=true", f"{ACTOR}.all_ranks=true", f"{ACTOR}.tool_config.torch.contents=[cpu]"),
        *(f"{CRITIC}.enable=true", f"{CRITIC}.ranks=[1]", f"{CRITIC}.tool=diary"),
    )
    group, actor, critic = groups(config)
    run = trainer(config, actor, critic)
    for step in (1, 2):
        run.global_steps = step
        run._start_profiling()
        group.execute_all_sync("actor_update_actor", batch(num_mini_batch=2))
        group.execute_all_sync("critic_train_mini_batch", batch(num_mini_batch=1))
        run._stop_profiling()
    expected = [f"actor_train_step{step}_rank{rank}-of-2" for step in (1, 2) for rank in (0, 1)]
    expected += [f"critic_train_step{step}_rank1-of-2" for step in (1, 2)]
    wait_for(lambda: len(names(save_path)) == len(expected), 60)
    assert names(save_path) == sorted(expected)
    assert not told.exists()

    # A rollout server would be told the step.
    folders = [str(Path(__file__).parent)]
    ask = ray.remote(num_cpus=0)(_announced)
    assert ray.get(ask.remote(folders)) == 2

    # The run ends in the third step, and one of the workers is gone.
    run.global_steps = 3
    run._start_profiling()
    group.execute_all_sync("actor_update_actor", batch(num_mini_batch=2))
    ray.kill(group.workers[1])

    def body(self: Any) -> None:
        raise FloatingPointError("loss is nan")

    with pytest.raises(FloatingPointError):
        trainers._with_an_end(body)(run)
    wait_for(told.exists, 60)
    wait_for(lambda: [name for name in names(save_path) if "step3" in name], 60)
    text = said()
    assert "some workers could not be told that the run is over" in text
    assert "ActorDiedError" in text
    assert "actor_train-aborted_step3_rank0-of-2" in names(save_path)
    wait_for(lambda: told.read_text().split(), 60)
    assert told.read_text().split() == ["0", "3"]
    lines = [json.loads(line) for path in (save_path / ".rankscope").glob("*.jsonl") for line in path.open()]
    plans = {(line["role"], line["rank"], line["tool"]): line for line in lines if line["kind"] == "plan"}
    assert {key: plan["profiled"] for key, plan in plans.items()} == {
        ("actor", 0, "torch"): True,
        ("actor", 1, "torch"): True,
        ("critic", 0, "diary"): False,
        ("critic", 1, "diary"): True,
    }


def _announced(folders: list[str]) -> int | None:
    sys.path.extend(folders)
    from rankscope_verl.step import announced

    return announced()
