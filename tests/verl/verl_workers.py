"""Real workers of verl on a CPU: their engine is a small torch model, everything else is verl's own code."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

SIZE = 16
KINDS = ("language_model", "value_model")


class TinyEngine(BaseEngine):
    """Two linear layers on the CPU; forward and backward are real, so a trace has operators."""

    def __init__(self, **_: Any) -> None:
        self.module = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, 1))
        self.calls: list[str] = []

    def initialize(self) -> None:
        pass

    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def train_mode(self, **_: Any) -> Any:
        return nullcontext()

    def eval_mode(self, **_: Any) -> Any:
        return nullcontext()

    def _forward(self) -> torch.Tensor:
        return self.module(torch.ones(4, SIZE)).sum()

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        for number in range(2):
            with torch.profiler.record_function(f"micro_batch{number}"):
                self._forward().backward()
        return {}

    def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
        with torch.no_grad():
            self._forward()
        return {}

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> None:
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        return False

    def lr_scheduler_step(self) -> None:
        return None

    def to(self, *_: Any, **__: Any) -> None:
        pass


for kind in KINDS:
    if "tiny" not in EngineRegistry._engines.get(kind, {}).get("fsdp", {}).get("cpu", ""):
        EngineRegistry._engines.setdefault(kind, {}).setdefault("fsdp", {})["cpu"] = TinyEngine


def group_on_cpu() -> None:
    """verl's own choice is NCCL, which a CPU does not have; it leaves a group alone that is there already."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")


class CpuTrainingWorker(TrainingWorker):
    def __init__(self, config: Any) -> None:
        group_on_cpu()
        super().__init__(config)


class CpuActorWorker(ActorRolloutRefWorker):
    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker

    def __init__(self, config: Any, role: str, **facts: Any) -> None:
        group_on_cpu()
        super().__init__(config, role, **facts)


def make_model(folder: Path) -> str:
    """The config of a model that is never built: verl wants to read one."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def job_config(model: str, save_path: str, *overrides: str) -> Any:
    """verl's own PPO config, composed by Hydra and resolved, as its TaskRunner does."""
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(config_dir=str(Path(verl.trainer.__file__).parent / "config"), version_base=None):
        config = compose(
            config_name="ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                "+actor_rollout_ref.model.load_tokenizer=false",
                f"critic.model.path={model}",
                "+critic.model.load_tokenizer=false",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
                "critic.ppo_micro_batch_size_per_gpu=1",
                f"global_profiler.save_path={save_path}",
                *overrides,
            ],
        )
    OmegaConf.resolve(config)
    return config


def batch(**facts: Any) -> Any:
    """What verl's workers are called with; four samples."""
    from tensordict import TensorDict

    data = TensorDict({"input": torch.ones(4, SIZE)}, batch_size=[4])
    tu.assign_non_tensor(data, global_token_num=[1, 1, 1, 1], **facts)
    return data


def use_cpu_engines() -> None:
    os.environ["VERL_ENGINE_DEVICE"] = "cpu"
