"""A clock that stands still and ranks without a launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

_SOME_DAY = 1_700_000_000_000_000_000


class FakeClock:
    """Nanoseconds since the epoch that pass only when a test says so.

    It stands in for ``Context.clock``. ``with clock.installed():`` gives it to every handle that is made meanwhile::

        clock = FakeClock()
        with clock.installed():
            handle = DistProfiler(config, role="actor", rank=0)
        clock.advance(1.5)

    Attributes:
        now: what it shows.
    """

    def __init__(self, now: int = _SOME_DAY) -> None:
        self.now = now

    def __call__(self) -> int:
        """What it shows."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += round(seconds * 1e9)

    @contextlib.contextmanager
    def installed(self) -> Iterator[FakeClock]:
        """Handles that are made in the block name their files by this clock and give it to their backends."""
        from rankscope.profiler import DistProfiler

        original = DistProfiler._store  # noqa: SLF001 - the kit is part of core

        def store(handle: DistProfiler, tool: str) -> Any:
            made = original(handle, tool)
            made.clock = self
            return made

        with mock.patch.object(time, "time_ns", self), mock.patch.object(DistProfiler, "_store", store):
            yield self


@dataclasses.dataclass(frozen=True)
class FakeWorld:
    """Ranks of a job that nobody launched; a test asks for the place of each.

    Attributes:
        size: number of ranks.
        local_size: ranks on each node; by default all are on one.
        dimensions: size of each parallel dimension, the one that varies fastest first, e.g. ``{"tp": 2, "pp": 2}``.
    """

    size: int = 2
    local_size: int | None = None
    dimensions: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def place(self, rank: int) -> dict[str, Any]:
        """Arguments for ``DistProfiler``: rank, world size and topology.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} does not exist: the world size is {self.size}")
        topology = {}
        rest = rank
        for name, size in self.dimensions.items():
            rest, topology[name] = divmod(rest, size)
        return {"rank": rank, "world_size": self.size, "topology": topology}

    def environment(self, rank: int, *, master_port: int = 29500) -> dict[str, str]:
        """The variables that torchrun would set for a rank."""
        local = self.local_size or self.size
        return {
            "RANK": str(self.place(rank)["rank"]),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(master_port),
        }
