"""The workers of the run as Ray actors: each role has processes of its own, and a driver calls them.

What rankscope needs beyond ``workers.py``: the mix-in ``ProfiledRayActor``, before the worker's class.
"""

from __future__ import annotations

import socket
from typing import Any

import ray
import torch
import torch.distributed as dist
from model import GPTConfig, LanguageModel, ValueModel
from ppo import Batch, Settings
from torch import Tensor
from workers import ActorWorker, CriticWorker, RewardWorker, RolloutWorker

from rankscope import Config
from rankscope.integrations.ray import ProfiledRayActor

Weights = dict[str, Tensor]


class Ranked(ProfiledRayActor):
    """A role whose ranks average their gradients. It becomes its worker once all of them have found each other."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def address(self) -> str:
        """Where the ranks meet; asked of rank 0."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(self, address: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.world_size)


class RayActorWorker(Ranked, ActorWorker):
    """The policy and its reference."""

    def build(self, address: str, profile_config: Config, size: GPTConfig, weights: Weights) -> None:
        self.join(address)
        policy = LanguageModel(size)
        policy.load_state_dict(weights)
        ActorWorker.__init__(self, profile_config, self.rank, self.world_size, policy, Settings())

    def weights(self) -> Weights:
        return {name: value.detach() for name, value in self.policy.state_dict().items()}


class RayCriticWorker(Ranked, CriticWorker):
    """The value function."""

    def build(self, address: str, profile_config: Config, size: GPTConfig, weights: Weights) -> None:
        self.join(address)
        values = ValueModel(size)
        body = {name.removeprefix("body."): value for name, value in weights.items() if name.startswith("body.")}
        values.body.load_state_dict(body)
        CriticWorker.__init__(self, profile_config, self.rank, self.world_size, values, Settings())


class RayRolloutWorker(ProfiledRayActor, RolloutWorker):
    """Samples answers, from weights that are sent to it before each step."""

    def __init__(self, profile_config: Config, rank: int, world_size: int, size: GPTConfig, seed: int) -> None:
        torch.set_num_threads(1)
        super().__init__(profile_config, rank, world_size, LanguageModel(size), Settings(), seed)

    @torch.no_grad()
    def generate_with(self, weights: Weights, prompts: Tensor) -> Batch:
        self.policy.load_state_dict(weights)
        return self.generate(prompts)


class RayRewardWorker(ProfiledRayActor, RewardWorker):
    """Scores answers."""


def remote(kind: type) -> Any:
    """The Ray class of a worker. It takes no processor of Ray's account: all of them share this machine's."""
    return ray.remote(num_cpus=0)(kind)
