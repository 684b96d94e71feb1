"""The workers of the run. Each process builds all of them, as colocated training does.

What rankscope needs of a worker: a ``DistProfiler`` in ``self.profiler``, ``@annotate`` on each stage, and
``self.profiler.step()`` after each mini-batch of an update. Nothing here asks whether profiling is on.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import ppo
import task
import torch
from model import LanguageModel, ValueModel, generate
from ppo import Batch, Settings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankscope import Config, DistProfiler, ProfiledWorker, annotate


class ActorWorker(ProfiledWorker):
    """The policy that learns, and the frozen reference it started from."""

    def __init__(
        self, profile_config: Config, rank: int, world_size: int, policy: LanguageModel, settings: Settings
    ) -> None:
        self.profiler = DistProfiler(profile_config, role="actor-ref", rank=rank, world_size=world_size)
        self.settings = settings
        self.policy = policy
        self.reference = copy.deepcopy(policy).requires_grad_(False)
        self.parallel = DistributedDataParallel(policy)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.actor_lr)
        self.shuffle = torch.Generator().manual_seed(rank)

    @annotate("actor_compute_log_prob")
    def compute_log_prob(self, batch: Batch) -> Tensor:
        return self._log_probs(self.policy, batch)

    @annotate("ref_compute_log_prob")
    def compute_ref_log_prob(self, batch: Batch) -> Tensor:
        return self._log_probs(self.reference, batch)

    @torch.no_grad()
    def _log_probs(self, model: nn.Module, batch: Batch) -> Tensor:
        parts = []
        for j, micro in enumerate(ppo.micro_batches(batch, self.settings.micro_batch)):
            with annotate(f"micro_batch{j}"):
                parts.append(answer_log_probs(model, micro["tokens"]))
        return torch.cat(parts)

    @annotate("actor_update", scheduled=True)
    def update(self, batch: Batch) -> Tensor:
        """PPO's policy updates; returns the mean loss of each."""
        settings, losses = self.settings, []
        for i, mini in enumerate(ppo.mini_batches(batch, settings.mini_batch, settings.epochs, self.shuffle)):
            with annotate(f"mini_batch{i}"):
                loss = torch.zeros(())
                micros = list(ppo.micro_batches(mini, settings.micro_batch))
                for j, micro in enumerate(micros):
                    with annotate(f"micro_batch{j}"), exchange_gradients(self.parallel, when=j == len(micros) - 1):
                        new = answer_log_probs(self.parallel, micro["tokens"])
                        part = ppo.policy_loss(
                            new, micro["log_probs"], micro["advantages"], micro["mask"], settings.clip
                        )
                        part = part / mini["mask"].sum()
                        part.backward()
                        loss += part.detach()
                optimize(self.optimizer, self.policy, settings.max_grad_norm)
                losses.append(loss)
            self.profiler.step()
        return torch.stack(losses)


class CriticWorker(ProfiledWorker):
    """The value function."""

    def __init__(
        self, profile_config: Config, rank: int, world_size: int, values: ValueModel, settings: Settings
    ) -> None:
        self.profiler = DistProfiler(profile_config, role="critic", rank=rank, world_size=world_size)
        self.settings = settings
        self.values = values
        self.parallel = DistributedDataParallel(values)
        self.optimizer = torch.optim.Adam(values.parameters(), lr=settings.critic_lr)
        self.shuffle = torch.Generator().manual_seed(rank)

    @annotate("critic_compute_values")
    @torch.no_grad()
    def compute_values(self, batch: Batch) -> Tensor:
        parts = []
        for j, micro in enumerate(ppo.micro_batches(batch, self.settings.micro_batch)):
            with annotate(f"micro_batch{j}"):
                parts.append(answer_values(self.values, micro["tokens"]))
        return torch.cat(parts)

    @annotate("critic_update", scheduled=True)
    def update(self, batch: Batch) -> Tensor:
        """The critic's updates; returns the mean loss of each."""
        settings, losses = self.settings, []
        for i, mini in enumerate(ppo.mini_batches(batch, settings.mini_batch, settings.epochs, self.shuffle)):
            with annotate(f"mini_batch{i}"):
                loss = torch.zeros(())
                micros = list(ppo.micro_batches(mini, settings.micro_batch))
                for j, micro in enumerate(micros):
                    with annotate(f"micro_batch{j}"), exchange_gradients(self.parallel, when=j == len(micros) - 1):
                        new = answer_values(self.parallel, micro["tokens"])
                        part = ppo.value_loss(
                            new, micro["values"], micro["returns"], micro["mask"], settings.value_clip
                        )
                        part = part / mini["mask"].sum()
                        part.backward()
                        loss += part.detach()
                optimize(self.optimizer, self.values, settings.max_grad_norm)
                losses.append(loss)
            self.profiler.step()
        return torch.stack(losses)


class RolloutWorker(ProfiledWorker):
    """Samples answers. Colocated with the actor, it reads the actor's weights in place."""

    def __init__(
        self,
        profile_config: Config,
        rank: int,
        world_size: int,
        policy: LanguageModel,
        settings: Settings,
        seed: int,
    ) -> None:
        self.profiler = DistProfiler(profile_config, role="rollout", rank=rank, world_size=world_size)
        self.settings = settings
        self.policy = policy
        self.sampling = torch.Generator().manual_seed(seed)

    @annotate("rollout_generate")
    def generate(self, prompts: Tensor) -> Batch:
        parts = []
        for j, micro in enumerate(prompts.split(self.settings.micro_batch)):
            with annotate(f"micro_batch{j}"):
                parts.append(generate(self.policy, micro, task.ANSWER_LENGTH, self.settings.temperature, self.sampling))
        tokens = torch.cat(parts)
        return {"tokens": tokens, "mask": ppo.answer_mask(tokens[:, task.PROMPT_LENGTH :], task.NUMBER[task.END])}


class RewardWorker(ProfiledWorker):
    """Scores answers by a rule, on their text."""

    def __init__(self, profile_config: Config, rank: int, world_size: int) -> None:
        self.profiler = DistProfiler(profile_config, role="reward", rank=rank, world_size=world_size)

    @annotate("reward_score")
    def score(self, batch: Batch) -> Tensor:
        texts = [task.decode(row) for row in batch["tokens"]]
        return torch.tensor([task.score(text[: task.PROMPT_LENGTH], text[task.PROMPT_LENGTH :]) for text in texts])


def answer_log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probabilities of the answer's tokens: the logits one place before each say how likely it was."""
    logits = model(tokens[:, :-1])[:, task.PROMPT_LENGTH - 1 :]
    return ppo.log_probs(logits, tokens[:, task.PROMPT_LENGTH :])


def answer_values(model: nn.Module, tokens: Tensor) -> Tensor:
    """The value of the state in which each token of the answer was chosen."""
    return model(tokens[:, :-1])[:, task.PROMPT_LENGTH - 1 :]


def exchange_gradients(model: DistributedDataParallel, *, when: bool) -> AbstractContextManager[None]:
    """Average gradients over the ranks in the last micro-batch only; the ones before it just accumulate."""
    return nullcontext() if when else model.no_sync()


def optimize(optimizer: torch.optim.Optimizer, model: nn.Module, max_grad_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
