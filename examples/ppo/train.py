"""A small PPO run on CPU: torchrun --standalone --nproc-per-node 2 train.py --config profile.yaml [key=value …]."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import ppo
import task
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import GPTConfig, LanguageModel, ValueModel
from workers import ActorWorker, CriticWorker, RewardWorker, RolloutWorker

from rankscope import Config, ProfileController, load_config


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    profile_config = load_config(args.config, args.overrides)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(profile_config, args.steps, args.seed)
        dist.barrier()  # each rank has closed its controller: all files are whole
        if dist.get_rank() == 0 and profile_config.active:
            print(f"traces: {profile_config.global_profiler.save_path}")
    finally:
        dist.destroy_process_group()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    return argparse.ArgumentParser(description=__doc__, parents=[options()]).parse_intermixed_args(argv)


def options() -> argparse.ArgumentParser:
    """The words of the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", help="profiler config (YAML); without it nothing is profiled")
    parser.add_argument("--steps", type=int, default=10, help="PPO steps (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, words and sampling (default: 0)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the profiler config")
    return parser


def train(profile_config: Config, steps: int, seed: int) -> None:
    """Warm start, then ``steps`` PPO steps. Every rank runs this (SPMD), each on its own prompts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings = ppo.Settings()
    own_seed = 1000 * seed + rank  # each rank draws its own words and samples
    words = torch.Generator().manual_seed(own_seed)

    policy = warm_start(seed)
    values = ValueModel(policy.body.config)
    values.body.load_state_dict(policy.body.state_dict())

    actor = ActorWorker(profile_config, rank, world_size, policy, settings)
    critic = CriticWorker(profile_config, rank, world_size, values, settings)
    rollout = RolloutWorker(profile_config, rank, world_size, policy, settings, own_seed + 500)
    reward = RewardWorker(profile_config, rank, world_size)

    controller = ProfileController(profile_config, workers=[actor, critic, rollout, reward], total_steps=steps)
    try:
        for n in range(1, steps + 1):
            began = time.perf_counter()
            with controller.step(n):
                batch = rollout.generate(task.prompts(settings.prompts, words))
                batch["scores"] = reward.score(batch)
                batch["log_probs"] = actor.compute_log_prob(batch)
                batch["ref_log_probs"] = actor.compute_ref_log_prob(batch)
                batch["values"] = critic.compute_values(batch)
                rewards = ppo.token_rewards(
                    batch["scores"], batch["log_probs"], batch["ref_log_probs"], batch["mask"], settings.kl_coefficient
                )
                batch["advantages"], batch["returns"] = ppo.advantages(
                    rewards, batch["values"], batch["mask"], settings.gamma, settings.lam
                )
                critic_losses = critic.update(batch)
                actor_losses = actor.update(batch)
            report(n, batch, actor_losses, critic_losses, time.perf_counter() - began)
    finally:
        controller.close()


def warm_start(seed: int, updates: int = 100, examples: int = 128, noise: float = 0.3) -> LanguageModel:
    """A policy that has seen noisy demonstrations; the same on every rank."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(GPTConfig(len(task.ALPHABET), task.PROMPT_LENGTH + task.ANSWER_LENGTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(updates):
        tokens = task.demonstrations(examples, noise, generator)
        logits = model(tokens[:, :-1])[:, task.PROMPT_LENGTH - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, task.PROMPT_LENGTH :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def report(n: int, batch: ppo.Batch, actor_losses: torch.Tensor, critic_losses: torch.Tensor, seconds: float) -> None:
    """One line a step, averaged over all ranks, printed by rank 0."""
    reward = ppo.mean_over_ranks(batch["scores"])
    kl = ppo.mean_over_ranks(batch["log_probs"] - batch["ref_log_probs"], batch["mask"])
    actor, critic = ppo.mean_over_ranks(actor_losses), ppo.mean_over_ranks(critic_losses)
    if dist.get_rank() == 0:
        print(
            f"step {n:3d}  reward {reward:.3f}  kl {kl:+.4f}  actor loss {actor:+.4f}  critic loss {critic:.4f}  "
            f"{seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
