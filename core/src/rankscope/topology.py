"""Which process of the job this is: rank, world size, and the rank in each parallel dimension.

Everything is read from what is there already: modules that others imported, and the environment. Nothing is imported,
initialised or sent.
"""

from __future__ import annotations

import dataclasses
import operator
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rankscope.host import host_name
from rankscope.log import first_time, get_logger, warn_once

DIMENSIONS = ("tp", "pp", "dp", "cp", "ep")
"""The dimensions that come first in a name, in this order; others follow by name."""

Provider = Callable[[], "Mapping[str, int | tuple[int, int]]"]
"""Tells the dimensions that it knows: ``{"sp": (rank, size)}``, or ``{"sp": rank}`` where the size is unknown."""

_LAUNCHERS = (  # rank, world size, local rank; the more specific launcher first (mpirun inside an allocation)
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_MEGATRON_MODULES = ("megatron.core.parallel_state", "megatron.core.mpu", "megatron.mpu")
_MEGATRON_NAMES = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
}

_log = get_logger()
_providers: dict[str, Provider] = {}
_own_run_id: tuple[int, str] | None = None


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where this process stands in the job.

    Attributes:
        rank: global rank, as the user's ``ranks`` mean it: the given one where one was given.
        world_size: number of ranks that ``rank`` is counted in; None when nobody knows it.
        dimensions: rank in each known parallel dimension.
        sizes: size of each dimension, where known.
        group_rank: rank in torch's default process group, also where it differs from ``rank``; None without a group.
        group_world_size: size of that group, or None.
        local_rank: rank on this node as the launcher says, or None.
        source: where ``rank`` comes from: ``given``, ``process group``, the name of a variable, or ``default``.
    """

    rank: int
    world_size: int | None
    dimensions: Mapping[str, int]
    sizes: Mapping[str, int]
    group_rank: int | None
    group_world_size: int | None
    local_rank: int | None
    source: str


def detect(
    rank: int | None = None,
    world_size: int | None = None,
    topology: Mapping[str, int | tuple[int, int]] | None = None,
) -> Topology:
    """Find out where this process stands.

    What is given wins; then torch's process group if it is initialised, then the launcher's variables, then rank 0 of
    an unknown world. A world size is only taken from a source that agrees about the rank: ranks of a worker group are
    not counted in the world of another group.

    Args:
        rank: global rank of this worker.
        world_size: number of ranks.
        topology: rank, or (rank, size), in each parallel dimension; wins over what Megatron and the providers say.

    Raises:
        ValueError: a given number is no rank, no size, or the rank does not fit the world.
    """
    given = None if rank is None else _index("rank", rank, least=0)
    given_world = None if world_size is None else _index("world_size", world_size, least=1)
    given_dimensions = {name: _dimension(name, value) for name, value in (topology or {}).items()}

    group = process_group()
    launcher, launched_rank, launched_world, local_rank = _launched()
    candidates = [("given", given, given_world)]
    if group is not None:
        candidates.append(("process group", *group))
    candidates.append((launcher, launched_rank, launched_world))

    source, chosen = next(((name, value) for name, value, _ in candidates if value is not None), ("default", 0))
    worlds = (world for _, value, world in candidates if world is not None and value in (None, chosen))
    world = next(worlds, None)
    if world is not None and chosen >= world:
        if given_world is not None:
            raise ValueError(f"rank {chosen} ({source}) does not fit world_size={world}: ranks are 0 to {world - 1}")
        world = None

    dimensions = {**_megatron(), **_provided(), **given_dimensions}
    return Topology(
        rank=chosen,
        world_size=world,
        dimensions={name: value for name, (value, _) in dimensions.items()},
        sizes={name: size for name, (_, size) in dimensions.items() if size is not None},
        group_rank=group[0] if group else None,
        group_world_size=group[1] if group else None,
        local_rank=local_rank,
        source=source,
    )


def dimensions_for_name(topology: Topology) -> dict[str, int]:
    """The dimensions that tell ranks apart: those of a size above 1 or unknown; tp, pp, dp, cp, ep, then by name."""
    names = sorted(topology.dimensions, key=lambda name: (_order(name), name))
    return {name: topology.dimensions[name] for name in names if topology.sizes.get(name, 2) > 1}


def add_provider(name: str, provider: Provider) -> None:
    """Let something else tell its dimensions (a device mesh, Ulysses, an expert group …).

    Args:
        name: of the provider; a second one of the same name replaces the first.
        provider: called at each `detect`. One that raises is named in a warning, once, and left out.
    """
    _providers[name] = provider


def remove_provider(name: str) -> None:
    """Forget a provider; an unknown name is fine."""
    _providers.pop(name, None)


def distributed() -> Any | None:
    """``torch.distributed`` when its default process group is initialised, else None."""
    module = sys.modules.get("torch.distributed")
    try:
        ready = module is not None and module.is_available() and module.is_initialized()
    except Exception:  # noqa: BLE001  # a torch that is just being imported
        return None
    return module if ready else None


def process_group() -> tuple[int, int] | None:
    """Rank and world size of torch's default process group, or None without one."""
    module = distributed()
    if module is None:
        return None
    try:
        return int(module.get_rank()), int(module.get_world_size())
    except Exception as error:  # noqa: BLE001
        _debug_once("process group", "rank in the process group unknown", error)
        return None


def run_id() -> str:
    """A name for this run of the job.

    Where a launcher says something that all processes of the run share, all ranks get the same text:

    * torchrun: its run id (the Slurm or master's address where the user set none) and MASTER_PORT, which
      torchrun picks afresh for most runs. With a fixed run id *and* a fixed port, a rerun gets the same text.
    * Ray: the Ray job, and the Slurm job around it. A new cluster counts its jobs from 1 again.
    * Slurm: job and step, and the restart after a requeue.
    * MPI: the namespace that PMIx gives to one ``mpirun``.
    * RANK and WORLD_SIZE set by hand: MASTER_ADDR and MASTER_PORT.

    Else it is unique to this process, and the same at every call in it.
    """
    slurm = _joined("slurm", _env("SLURM_JOB_ID"), *_nonzero("SLURM_RESTART_COUNT"))
    master = _joined("master", _env("MASTER_ADDR") or "localhost", _env("MASTER_PORT"))
    torchrun, ray = _env("TORCHELASTIC_RUN_ID"), _ray_job()
    if torchrun:
        text = master if torchrun == "none" else _joined(torchrun, _env("MASTER_PORT"))
        if torchrun == "none" and slurm:
            text = _joined(slurm, _env("MASTER_PORT") or "0")
    elif ray:
        text = _joined("ray", ray, *([slurm] if slurm else []))
    elif slurm and _env("SLURM_STEP_ID"):
        text = _joined(slurm, _env("SLURM_STEP_ID"))
    else:
        by_hand = master if _env("RANK") and _env("WORLD_SIZE") else ""
        text = _env("PMIX_NAMESPACE") or by_hand or slurm
    return re.sub(r"[^A-Za-z0-9.=+-]+", "-", text or "").strip("-")[:80] or _process_run_id()


def _process_run_id() -> str:
    global _own_run_id
    if _own_run_id is None or _own_run_id[0] != os.getpid():  # a forked child is a process of its own
        _own_run_id = (os.getpid(), f"{host_name()}-{os.getpid()}-{secrets.token_hex(4)}")
    return _own_run_id[1]


def _joined(*parts: str) -> str:
    """The parts with hyphens; empty as soon as one is missing."""
    return "-".join(parts) if all(parts) else ""


def _env(name: str) -> str:
    return os.environ.get(name, "").strip()


def _nonzero(name: str) -> tuple[str, ...]:
    return (_env(name),) if _env(name) not in ("", "0") else ()


def _ray_job() -> str:
    """Ray's job id: workers have it in the environment, the driver only in Ray's own context."""
    ray = sys.modules.get("ray")
    try:
        if ray is not None and ray.is_initialized():
            return str(ray.get_runtime_context().get_job_id())
    except Exception as error:  # noqa: BLE001
        _debug_once("ray job", "Ray's job id unknown", error)
    return _env("RAY_JOB_ID")


def _launched() -> tuple[str, int | None, int | None, int | None]:
    for names in _LAUNCHERS:
        rank, world, local = (_number(name) for name in names)
        if rank is not None or world is not None:
            return names[0], rank, world or None, local
    return "", None, None, None


def _number(name: str) -> int | None:
    text = _env(name)
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    if first_time(("environment", name, text)):
        _log.debug("variable ignored: no rank or size", variable=name, value=text)
    return None


def _megatron() -> dict[str, tuple[int, int | None]]:
    state = next((sys.modules[name] for name in _MEGATRON_MODULES if name in sys.modules), None)
    if state is None:
        return {}
    try:
        if not state.model_parallel_is_initialized():
            return {}
    except Exception as error:  # noqa: BLE001
        _debug_once("megatron", "Megatron's parallel state unknown", error)
        return {}
    found: dict[str, tuple[int, int | None]] = {}
    for dimension, words in _MEGATRON_NAMES.items():
        try:
            found[dimension] = (int(getattr(state, f"get_{words}_rank")()), None)
            found[dimension] = (found[dimension][0], int(getattr(state, f"get_{words}_world_size")()))
        except Exception as error:  # noqa: BLE001, PERF203  # versions differ in what they have and assert
            _debug_once(f"megatron {dimension}", f"Megatron does not tell {dimension}", error)
    return found


def _provided() -> dict[str, tuple[int, int | None]]:
    found: dict[str, tuple[int, int | None]] = {}
    for name, provider in list(_providers.items()):
        try:
            found.update({dimension: _dimension(dimension, value) for dimension, value in provider().items()})
        except Exception as error:  # noqa: BLE001, PERF203
            warn_once(
                _log,
                ("topology provider", name),
                "topology provider failed: its dimensions are missing in file names",
                provider=name,
                error=f"{type(error).__name__}: {error}",
            )
    return found


def _dimension(name: str, value: int | tuple[int, int]) -> tuple[int, int | None]:
    if not isinstance(value, (tuple, list)):
        return _index(f"topology[{name!r}]", value, least=0), None
    if len(value) != 2:
        raise ValueError(f"topology[{name!r}]={value!r} is neither a rank nor (rank, size)")
    rank, size = _index(f"topology[{name!r}]", value[0], least=0), _index(f"size of {name}", value[1], least=1)
    if rank >= size:
        raise ValueError(f"topology[{name!r}]={value!r}: rank {rank} does not fit size {size}")
    return rank, size


def _index(name: str, value: Any, *, least: int) -> int:
    try:
        number = operator.index(value)  # also numpy's integers; no floats, no text
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {least}")
    return number


def _order(dimension: str) -> int:
    return DIMENSIONS.index(dimension) if dimension in DIMENSIONS else len(DIMENSIONS)


def _debug_once(key: str, event: str, error: Exception) -> None:
    if first_time(("topology", key)):
        _log.debug(event, error=f"{type(error).__name__}: {error}")
