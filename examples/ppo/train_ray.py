"""The same PPO run with Ray: one driver, and actors for each role. python train_ray.py --config profile.yaml"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import ppo
import ray
import task
import torch
import torch.distributed as dist
from ppo import Batch
from torch import Tensor
from train import options, report, warm_start
from workers_ray import RayActorWorker, RayCriticWorker, RayRewardWorker, RayRolloutWorker, remote

from rankscope import Config, ProfileController, load_config
from rankscope.integrations.ray import RayGroup, runtime_envs


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    profile_config = load_config(args.config, args.overrides)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the arithmetic asks for one
    ray.init(include_dashboard=False, logging_level="warning")
    try:
        train(profile_config, args.nproc, args.steps, args.seed)
        if profile_config.active:
            print(f"traces: {profile_config.global_profiler.save_path}")
    finally:
        ray.shutdown()
        dist.destroy_process_group()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, parents=[options()])
    parser.add_argument("--nproc", type=int, default=2, help="processes of each role; rewards have one (default: 2)")
    return parser.parse_intermixed_args(argv)


class Role:
    """The actors of a role. A call goes to all of them at once, to each with its share of the rows."""

    def __init__(self, kind: type, role: str, count: int, profile_config: Config, arguments: Any) -> None:
        needed = runtime_envs(profile_config, roles=[role], world_size=count)
        self.actors = [remote(kind).options(runtime_env=needed[rank]).remote(*arguments(rank)) for rank in range(count)]

    def call(self, method: str, rows: Any, *common: Any) -> Any:
        shares = split(rows, len(self.actors))
        calls = [
            getattr(actor, method).remote(*common, share) for actor, share in zip(self.actors, shares, strict=True)
        ]
        return join(ray.get(calls))

    def build(self, *arguments: Any) -> None:
        address = ray.get(self.actors[0].address.remote())
        ray.get([actor.build.remote(address, *arguments) for actor in self.actors])


def split(rows: Any, count: int) -> list[Any]:
    """A tensor or a batch in equal shares."""
    if isinstance(rows, Tensor):
        return list(rows.chunk(count))
    parts = {key: value.chunk(count) for key, value in rows.items()}
    return [{key: values[index] for key, values in parts.items()} for index in range(count)]


def join(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def train(profile_config: Config, nproc: int, steps: int, seed: int) -> None:
    """Warm start in the driver, then ``steps`` PPO steps."""
    settings = ppo.Settings()
    words = torch.Generator().manual_seed(1000 * seed)
    policy = warm_start(seed)
    size, start = policy.body.config, ray.put(dict(policy.state_dict()))

    def drawing(rank: int) -> tuple[Any, ...]:
        return profile_config, rank, nproc, size, 1000 * seed + 500 + rank

    actor = Role(RayActorWorker, "actor-ref", nproc, profile_config, lambda rank: (rank, nproc))
    critic = Role(RayCriticWorker, "critic", nproc, profile_config, lambda rank: (rank, nproc))
    rollout = Role(RayRolloutWorker, "rollout", nproc, profile_config, drawing)
    reward = Role(RayRewardWorker, "reward", 1, profile_config, lambda rank: (profile_config, rank, 1))
    for role in (actor, critic):
        role.build(profile_config, size, start)

    roles = {"actor": actor.actors, "critic": critic.actors, "rollout": rollout.actors, "reward": reward.actors}
    with RayGroup(roles) as group:
        controller = ProfileController(profile_config, workers=[group], total_steps=steps)
        try:
            for n in range(1, steps + 1):
                began = time.perf_counter()
                with controller.step(n):
                    batch, losses = step(actor, critic, rollout, reward, settings, words)
                report(n, batch, *losses, time.perf_counter() - began)
        finally:
            controller.close()


def step(
    actor: Role, critic: Role, rollout: Role, reward: Role, settings: ppo.Settings, words: torch.Generator
) -> tuple[Batch, tuple[Tensor, Tensor]]:
    weights = actor.actors[0].weights.remote()  # stays in Ray's store: the driver has no use for it
    prompts = task.prompts(settings.prompts * len(rollout.actors), words)
    batch = rollout.call("generate_with", prompts, weights)
    batch["scores"] = reward.call("score", batch)
    batch["log_probs"] = actor.call("compute_log_prob", batch)
    batch["ref_log_probs"] = actor.call("compute_ref_log_prob", batch)
    batch["values"] = critic.call("compute_values", batch)
    rewards = ppo.token_rewards(
        batch["scores"], batch["log_probs"], batch["ref_log_probs"], batch["mask"], settings.kl_coefficient
    )
    batch["advantages"], batch["returns"] = ppo.advantages(
        rewards, batch["values"], batch["mask"], settings.gamma, settings.lam
    )
    critic_losses = critic.call("update", batch)
    return batch, (actor.call("update", batch), critic_losses)


if __name__ == "__main__":
    main()
