"""Which replica owns which global rank, and which of them are profiled. Pure: nothing is asked or started here."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from rankscope.errors import ConfigError
from rankscope.ranges import compact
from rankscope.ranks import RankSelector

FOLDER = "agent_loop_rollout_replica_"
"""Directory of a replica below the save path, without its number: the name that verl's tools know."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one engine spreads over the GPUs of a replica.

    GPU ``dp * (tp * pp) + pp * tp + tp`` of a replica is the one at these coordinates: the order in which vLLM and
    SGLang number theirs.

    Attributes:
        tp: size of the tensor parallel dimension.
        pp: size of the pipeline.
        dp: copies of the model.
        dp_attention: SGLang's data parallel attention: the copies share the GPUs of the tensor parallel group.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"layout: {name}={size!r} is not a size; write a whole number of at least 1")
        if self.dp_attention and self.tp % self.dp:
            raise ConfigError(f"layout: dp={self.dp} does not divide tp={self.tp}, as dp_attention needs")

    @property
    def group(self) -> int:
        """GPUs of one copy of the model."""
        return self.tp * self.pp

    @property
    def gpus(self) -> int:
        """GPUs of the whole engine."""
        return self.group * (1 if self.dp_attention else self.dp)

    def coordinates(self, local: int) -> dict[str, int]:
        """The place of one GPU of the replica in each dimension."""
        tp = local % self.tp
        dp = tp // (self.tp // self.dp) if self.dp_attention else local // self.group
        return {"tp": tp, "pp": local // self.tp % self.pp, "dp": dp}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp}


@dataclasses.dataclass(frozen=True, eq=False)
class Replica:
    """One rollout engine, as a driver or its own server knows it.

    Attributes:
        index: its number in the job, counted from 0.
        target: what starts and stops its profiler: an object (the engine itself, a Ray actor handle), or the URL of its
            server (``http://…``). None: it cannot be reached from here, only its files can.
        devices: the global ranks of its GPUs in the order of the engine's own ranks; None means ``[index * w,
            (index + 1) * w)`` with w GPUs a replica.
        directory: where its engine writes, if that is not the directory that rankscope chose.
        headers: HTTP headers, e.g. an API key. They are neither logged nor kept.
        loop: the event loop that an asynchronous engine lives in, when it is driven by the synchronous methods.
        forward_count: tells how many forward passes the engine has made in its life. Only SGLang needs it, for a token
            window that does not begin at 0.
    """

    index: int
    target: Any = dataclasses.field(default=None, repr=False)  # a URL may hold what is secret
    devices: tuple[int, ...] | None = None
    directory: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    loop: asyncio.AbstractEventLoop | None = dataclasses.field(default=None, repr=False)
    forward_count: Callable[[], int | Awaitable[int]] | None = dataclasses.field(default=None, repr=False)

    @property
    def url(self) -> str | None:
        """The URL of its server, without a slash at the end; None for a handle."""
        return self.target.rstrip("/") if isinstance(self.target, str) else None

    @property
    def shown(self) -> str:
        """The replica in words, without what may be secret in a URL."""
        url = self.url
        if url is None:
            return f"replica {self.index}"
        scheme, _, rest = url.partition("://")
        return f"replica {self.index} ({scheme}://{rest.rpartition('@')[2].partition('?')[0]})"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is profiled.

    Attributes:
        ranks: by number of the replica, the global ranks whose files are wanted, ascending; replicas without one are
            not in it.
        reason: why there is none, in words; empty when there is one.
        warnings: what in the selection cannot be meant.
    """

    ranks: Mapping[int, tuple[int, ...]]
    reason: str = ""
    warnings: tuple[str, ...] = ()


def devices_of(index: int, gpus: int) -> tuple[int, ...]:
    """The global ranks of a replica that reports none itself.

    Raises:
        ConfigError: the number of the replica is negative, or the replica has no GPU.
    """
    if index < 0 or gpus < 1:
        raise ConfigError(f"replica {index} with {gpus} GPUs: replicas count from 0 and have at least one GPU")
    return tuple(range(index * gpus, (index + 1) * gpus))


def placed(replicas: Iterable[Any], gpus: int, world_size: int | None = None) -> tuple[Replica, ...]:
    """The replicas with their devices filled in.

    Args:
        replicas: `Replica` objects, or handles and URLs, which are then numbered in their order.
        gpus: GPUs of a replica that does not say which it has.
        world_size: number of rollout GPUs of the job, if it is known.

    Raises:
        ConfigError: a number or a GPU occurs twice, a GPU does not exist, the replicas of the job do not fill it.
    """
    if world_size is not None and world_size % gpus:
        raise ConfigError(
            f"rollout: {world_size} GPUs cannot be divided into replicas of {gpus}; "
            "check tensor, pipeline and data parallel sizes of the engine"
        )
    found: dict[int, Replica] = {}
    owners: dict[int, int] = {}
    for number, given in enumerate(replicas):
        replica = given if isinstance(given, Replica) else Replica(number, given)
        devices = replica.devices
        if devices is None:
            devices = devices_of(replica.index, gpus)
        elif not devices or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in devices):
            raise ConfigError(f"replica {replica.index}: devices {devices!r} are not global ranks")
        if replica.index in found:
            raise ConfigError(f"two replicas have the number {replica.index}")
        if isinstance(replica.target, str) and not replica.target.startswith(("http://", "https://")):
            raise ConfigError(
                f"replica {replica.index}: {replica.target!r} is no URL; it begins with http:// or https://"
            )
        if len(set(devices)) < len(devices):
            raise ConfigError(f"replica {replica.index}: devices {devices!r} name a rank twice")
        for device in devices:
            if world_size is not None and device >= world_size:
                raise ConfigError(
                    f"replica {replica.index} spans ranks {compact(sorted(devices))}, but there are {world_size} "
                    f"rollout GPUs (ranks 0-{world_size - 1})"
                )
            if owners.setdefault(device, replica.index) != replica.index:
                raise ConfigError(f"rank {device} is on replica {owners[device]} and on replica {replica.index}")
        found[replica.index] = dataclasses.replace(replica, devices=tuple(devices))
    return tuple(found.values())


def choose(
    selector: RankSelector,
    replicas: Sequence[Replica],
    *,
    layout: Layout | None = None,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    complete: bool = True,
) -> Choice:
    """The replicas that own a selected rank, and which of their ranks are selected.

    ``ranks`` are global GPU ranks, as in the training roles: with two GPUs a replica, ranks 0 and 8 are on replicas 0
    and 4, and no other is profiled.

    Args:
        selector: ranks of the rollout section.
        replicas: of `placed`.
        layout: the engine's, for ranks that are given by coordinates (``tp=0``).
        world_size: number of rollout GPUs of the job.
        gpus_per_node: for ``per_node``: GPUs of a node, the first of which has a rank that they divide.
        complete: whether the replicas are all of the job; else a rank without a replica is somebody else's.
    """
    ranks: dict[int, tuple[int, ...]] = {}
    why: dict[str, None] = {}
    for replica in replicas:
        selected = []
        for local, rank in enumerate(replica.devices or ()):
            answer = selector.selects(
                rank,
                world_size=world_size,
                topology=layout.coordinates(local) if layout is not None else None,
                topology_sizes=layout.sizes if layout is not None else None,
                local_rank=rank % gpus_per_node if gpus_per_node else None,
            )
            if answer.selected:
                selected.append(rank)
            elif len(why) < _MOST_REASONS:
                why[answer.reason] = None
        if selected:
            ranks[replica.index] = tuple(sorted(selected))
    reason = "" if ranks else "; ".join(why) or "there is no replica"
    return Choice(ranks, reason, tuple(_warnings(selector, replicas, complete)))


_MOST_REASONS = 3


def _warnings(selector: RankSelector, replicas: Sequence[Replica], complete: bool) -> Iterable[str]:
    listed = selector.listed()
    if listed is None or not complete:
        return
    owned = {rank for replica in replicas for rank in replica.devices or ()}
    homeless = [rank for rank in listed if rank not in owned]
    if homeless:
        noun, verb = ("rank", "is") if len(homeless) == 1 else ("ranks", "are")
        count = "1 replica" if len(replicas) == 1 else f"{len(replicas)} replicas"
        yield f"{noun} {compact(homeless)} {verb} on no rollout replica ({count} with ranks {compact(sorted(owned))})"
