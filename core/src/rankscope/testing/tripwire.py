"""A job of which this process is the only one that ever comes: whoever waits for the others is found out."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from rankscope.testing.fakes import FakeWorld

_NAME = "rankscope_tripwire"
_COLLECTIVES = (
    "all_gather_single",
    "all_reduce_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "_allgather_base",
    "_reduce_scatter_base",
)


@contextlib.contextmanager
def lonely_rank(rank: int = 0, size: int = 2) -> Iterator[list[str]]:
    """In the block the launcher's variables name a world of two, whose master listens and never answers.

    Yields:
        What reached for the others so far; complete after the block.
    """
    calls: list[str] = []
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        variables = FakeWorld(size).environment(rank, master_port=master.getsockname()[1])
        with mock.patch.dict(os.environ, variables):
            yield calls
        poller = select.poll()
        poller.register(master, select.POLLIN)
        if poller.poll(0):
            calls.append("a connection to MASTER_ADDR:MASTER_PORT")


@contextlib.contextmanager
def torch_group(calls: list[str], rank: int = 0, size: int = 2) -> Iterator[bool]:
    """In the block torch has a process group in which every collective is noted and refused.

    Source: torch 2.13.0, ``torch/distributed/distributed_c10d.py`` (``Backend.register_backend``, which takes a
    ``ProcessGroup`` written in Python).

    Yields:
        Whether there is such a group: not where this process has not imported torch, or a torch without distributed.
    """
    torch = sys.modules.get("torch")
    if torch is None or not _has_distributed(torch):
        yield False
        return
    dist: Any = torch.distributed

    class Tripwire(dist.ProcessGroup):  # type: ignore[misc]
        """Nobody else is here."""

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return _NAME

    def refuse(name: str) -> Any:
        def collective(*_: Any, **__: Any) -> Any:
            calls.append(f"torch.distributed: {name}")
            raise RuntimeError(f"{name} in a hook: no other rank takes part")

        return collective

    def create(_store: Any, at: int, of: int, _timeout: Any) -> Any:
        if dist.is_initialized():
            calls.append("torch.distributed: new_group")
        return Tripwire(at, of)

    for name in _COLLECTIVES:
        setattr(Tripwire, name, refuse(name))
    dist.Backend.register_backend(_NAME, create, devices=["cpu"])
    dist.init_process_group(_NAME, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield True
    finally:
        dist.destroy_process_group()


def _has_distributed(torch: Any) -> bool:
    """Whether this torch (or a stand-in for it) can make process groups."""
    distributed = getattr(torch, "distributed", None)
    return distributed is not None and bool(distributed.is_available())
