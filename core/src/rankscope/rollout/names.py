"""Which GPU a file of an engine is of, and what it is called in the save path. A rank is never guessed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from rankscope.rollout.engine import Engine, EngineFile, Place, within
from rankscope.rollout.replicas import Layout
from rankscope.rollout.whole import TraceInfo

_RELOCATED = re.compile(
    r"rollout-replica(?P<replica>\d+)(?:-globalrank(?P<rank>\d+))?_(?:step(?P<step>-?\d+)_)?(?P<engine>.+)", re.ASCII
)
_GPU_KINDS = frozenset({"trace", "table", "memory"})


@dataclasses.dataclass(frozen=True)
class RelocatedName:
    """What the name of a relocated file says.

    Attributes:
        replica: number of the replica.
        rank: global rank of the GPU, or None where the name has none: one GPU a replica, or unknown.
        step: training step, or None.
        engine: the engine's own name.
    """

    replica: int
    rank: int | None
    step: int | None
    engine: str


def relocated_name(replica: int, rank: int | None, step: int | None, engine: str) -> str:
    """``rollout-replica<n>[-globalrank<g>]_[step<S>_]<engine's name>``."""
    place = f"rollout-replica{replica}" + ("" if rank is None else f"-globalrank{rank}")
    return "_".join([place, *([] if step is None else [f"step{step}"]), engine])


def parse_relocated(name: str) -> RelocatedName | None:
    """The parts of a name that `relocated_name` (or verl, which writes no step) made; None for any other name."""
    match = _RELOCATED.fullmatch(name)
    if match is None:
        return None
    rank, step = (None if match[key] is None else int(match[key]) for key in ("rank", "step"))
    return RelocatedName(int(match["replica"]), rank, step, match["engine"])


def locate(
    engine: Engine,
    file: EngineFile,
    devices: tuple[int, ...],
    *,
    layout: Layout | None = None,
    seen: Iterable[EngineFile] = (),
    info: TraceInfo | None = None,
) -> Place:
    """Which GPU of its replica a file is of: what the trace itself says, where the name does not contradict it.

    Args:
        engine: the adapter.
        file: what the name says.
        devices: global ranks of the replica's GPUs.
        layout: the engine's, where it is known.
        seen: all files of the replica so far.
        info: what the trace says, where it could be read.
    """
    width = len(devices)
    if file.kind == "frontend":
        return Place(None, "the front end runs on no GPU")
    named = engine.place(file, width, layout, seen)
    if info is not None and info.rank is not None and info.world_size is not None:
        told = _as_told(engine, file, devices, named, (info.rank, info.world_size))
        if told is not None:
            return told
    if named.local is None and width == 1 and file.kind in _GPU_KINDS and not file.rank:
        return Place(0)
    return named


def _as_told(
    engine: Engine, file: EngineFile, devices: tuple[int, ...], named: Place, group: tuple[int, int]
) -> Place | None:
    """From the rank and world size of the engine's process group; None where they decide nothing."""
    width, (rank, world_size) = len(devices), group
    if world_size == width:
        place = within(rank, width)
        if place.local is None:
            return place
        if named.local not in {None, place.local} or not engine.agrees(file, place.local, width):
            return Place(None, _contradicts(rank))
        return place
    if world_size > width:  # the engine's group spans the whole job: its ranks may be the global ones
        if rank not in devices:
            return None
        local = devices.index(rank)
        return Place(local) if named.local in {None, local} else Place(None, _contradicts(rank))
    # One group for each copy of the model: which copy it is, only the name can tell, where the engine numbers them.
    if file.rank is not None and file.rank >= world_size:
        return None
    copy = file.coordinates.get("dp")
    if not engine.numbers_copies or copy is None:
        return Place(None, "the trace is of one of several copies of the model, and nothing says of which")
    place = within(copy * world_size + rank, width)
    if place.local is None or named.local not in {None, place.local} or not engine.agrees(file, place.local, width):
        return Place(None, _contradicts(rank))
    return place


def _contradicts(rank: int) -> str:
    return f"the name contradicts the trace, which is of rank {rank}"
