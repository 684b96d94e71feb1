"""The arithmetic of PPO: rewards, advantages, losses, and how a batch is cut. Knows neither workers nor processes.

A batch is a dict of tensors that agree in their first size, one row a sequence. ``mask`` is 1 on the answer's tokens up
to and including its end sign; all per-token tensors have the answer's length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes are per rank."""

    prompts: int = 128
    micro_batch: int = 32
    mini_batch: int = 64
    epochs: int = 2
    temperature: float = 1.0
    actor_lr: float = 1e-3
    critic_lr: float = 2e-3
    kl_coefficient: float = 0.01
    clip: float = 0.2
    value_clip: float = 0.5
    gamma: float = 1.0
    lam: float = 0.95
    max_grad_norm: float = 1.0


def micro_batches(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in slices of ``size`` rows."""
    for start in range(0, len(batch["tokens"]), size):
        yield {key: value[start : start + size] for key, value in batch.items()}


def mini_batches(batch: Batch, size: int, epochs: int, generator: torch.Generator) -> Iterator[Batch]:
    """``epochs`` times all rows, shuffled, ``size`` of them at a time: one optimizer update each."""
    for _ in range(epochs):
        for rows in torch.randperm(len(batch["tokens"]), generator=generator).split(size):
            yield {key: value[rows] for key, value in batch.items()}


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token under the logits of its place."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def answer_mask(answers: Tensor, end: int) -> Tensor:
    """1 up to and including the first end sign, then 0."""
    ended = (answers == end).cumsum(1)
    return ((ended - (answers == end).long()) == 0).float()


def token_rewards(scores: Tensor, actor: Tensor, ref: Tensor, mask: Tensor, kl_coefficient: float) -> Tensor:
    """The score on the last token of the answer, minus what each token departs from the reference policy."""
    rewards = -kl_coefficient * (actor - ref) * mask
    last = mask.sum(1).long() - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: advantages (whitened over all ranks) and returns."""
    values = values * mask
    following = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(following)
    columns = []
    for place in reversed(range(values.shape[1])):
        delta = rewards[:, place] + gamma * following - values[:, place]
        running = (delta + gamma * lam * running) * mask[:, place]
        following = values[:, place]
        columns.append(running)
    raw = torch.stack(columns[::-1], dim=1)
    return whiten(raw, mask), raw + values


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the masked places of all ranks."""
    mean = mean_over_ranks(values, mask)
    variance = mean_over_ranks((values - mean) ** 2, mask)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def mean_over_ranks(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of the (masked) values of all ranks. A collective: every rank calls it."""
    mask = torch.ones_like(values) if mask is None else mask
    total = torch.stack([(values * mask).sum(), mask.sum()])
    dist.all_reduce(total)
    return total[0] / total[1]


def policy_loss(new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Clipped PPO objective, summed over the answer's tokens."""
    ratio = (new - old).exp()
    worst = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
    return (worst * mask).sum()


def value_loss(new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Clipped squared error, summed over the answer's tokens."""
    clipped = old + (new - old).clamp(-clip, clip)
    worst = torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (worst * mask).sum()
