"""How full the device and the host process are, and lines that say so.

Zeros wherever there is no device in use. Looking at a device that this process does not use yet would create a context
on it, which takes hundreds of megabytes; so nothing here does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rankscope import device, topology
from rankscope.errors import did_you_mean, listing
from rankscope.log import LEVELS, get_logger

_F = TypeVar("_F", bound=Callable[..., Any])

UNITS = {"GB": 1024**3, "MB": 1024**2, "KB": 1024}
FRACTIONS = {"inference": 0.95, "training": 0.9}
"""Shares of the device's memory that usually fit the purpose: training needs room outside torch's allocator."""

_log = get_logger()


@dataclasses.dataclass(frozen=True)
class MemoryInfo:
    """Memory in ``unit``, rounded.

    Attributes:
        allocated: in tensors of this process.
        reserved: held by torch's allocator of this process.
        peak_allocated: the most that was allocated since the start or the last `reset_peak_memory`.
        used: of the whole device, by all processes, as its driver says.
        total: size of the device.
        host_rss: resident memory of this process on the host.
        host_peak: the most that was resident.
        unit: ``GB``, ``MB`` or ``KB``, counted in 1024s.
    """

    allocated: float
    reserved: float
    peak_allocated: float
    used: float
    total: float
    host_rss: float
    host_peak: float
    unit: str


def memory_info(unit: str = "GB", precision: int = 2) -> MemoryInfo:
    """Memory of the current device and of this process.

    Args:
        unit: ``GB``, ``MB`` or ``KB``.
        precision: digits after the point.

    Raises:
        ValueError: unknown unit. Nothing else: what cannot be found out is 0.
    """
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is not one of {listing(UNITS)}.{did_you_mean(str(unit).upper(), UNITS)}")
    module = device.initialised_device_module()
    free, total = _free_and_total(module)
    host = _host_bytes()
    sizes = {
        "allocated": _bytes(module, "memory_allocated"),
        "reserved": _bytes(module, "memory_reserved"),
        "peak_allocated": _bytes(module, "max_memory_allocated"),
        "used": total - free,
        "total": total,
        "host_rss": host.get("VmRSS", 0),
        "host_peak": host.get("VmHWM", 0),
    }
    return MemoryInfo(**{name: round(size / UNITS[unit], precision) for name, size in sizes.items()}, unit=unit)


def log_memory_usage(head: str, logger: Any = None, level: int | str = "info", rank: int | None = 0) -> None:
    """Log one line about memory.

    Args:
        head: what the line begins with.
        logger: a ``logging.Logger``, or anything with ``info(text)`` and the like; rankscope's own without one.
        level: name or number of the level.
        rank: only this rank of the process group logs; all do when it is None or there is no group.

    Raises:
        ValueError: unknown level.
    """
    number = _level(level)
    group = topology.process_group()
    if rank is None or group is None or group[0] == rank:
        _emit(head, logger, number)


log_gpu_memory_usage = log_memory_usage


class MemoryLogger:
    """Decorator: one line about memory before and one after each call, the latter also when the call raises.

    Works on functions and coroutine functions, and keeps their name and documentation.
    """

    def __init__(self, role: str, logger: Any = None, level: int | str = "info", log_only_rank_0: bool = True) -> None:
        """Set up the lines.

        Args:
            role: what each line begins with.
            logger: as for `log_memory_usage`.
            level: name or number of the level.
            log_only_rank_0: other ranks of the process group stay quiet. Asked at each call: the group usually begins
                after the function was decorated.

        Raises:
            ValueError: unknown level.
        """
        self.role = role
        self._logger = logger
        self._level = _level(level)
        self._rank = 0 if log_only_rank_0 else None

    def __call__(self, function: _F) -> _F:
        """Wrap a function."""
        name = getattr(function, "__name__", type(function).__name__)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                self._say("before", name)
                try:
                    return await function(*args, **kwargs)
                finally:
                    self._say("after", name)

            return asynchronous  # type: ignore[return-value]

        @functools.wraps(function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            self._say("before", name)
            try:
                return function(*args, **kwargs)
            finally:
                self._say("after", name)

        return synchronous  # type: ignore[return-value]

    def _say(self, when: str, name: str) -> None:
        log_memory_usage(f"[{self.role}] {when} {name}", self._logger, self._level, self._rank)


GPUMemoryLogger = MemoryLogger


def free_device_memory(rounds: int = 3, enough: int = 1024**3) -> int:
    """Give unused memory of torch's allocator back to the device.

    Args:
        rounds: at most so often; garbage that one round collects frees blocks for the next.
        enough: no further round once a round has freed fewer bytes than this.

    Returns:
        Bytes that were given back; 0 without a device in use.
    """
    module = device.initialised_device_module()
    if module is None:
        return 0
    import gc

    before = last = _bytes(module, "memory_reserved")
    for _ in range(rounds):
        gc.collect()
        _quietly(module, "empty_cache")
        now = _bytes(module, "memory_reserved")
        if last - now < enough:
            break
        last = now
    return max(before - _bytes(module, "memory_reserved"), 0)


def reset_peak_memory() -> bool:
    """Count the peak from now on; False without a device in use."""
    return _quietly(device.initialised_device_module(), "reset_peak_memory_stats")


def limit_device_memory(share: float | str) -> bool:
    """Let torch's allocator take at most this share of the device; False without a device in use.

    Args:
        share: above 0 and at most 1, or ``inference`` (0.95) or ``training`` (0.9).

    Raises:
        ValueError: neither a share nor one of the words.
    """
    fraction = FRACTIONS.get(share) if isinstance(share, str) else share
    if fraction is None or not 0 < fraction <= 1:
        raise ValueError(f"share={share!r} is neither above 0 and at most 1 nor one of {listing(FRACTIONS)}")
    return _quietly(device.initialised_device_module(), "set_per_process_memory_fraction", fraction)


def _emit(head: str, logger: Any, number: int) -> None:
    info = memory_info()
    name = max((name for name, least in LEVELS.items() if least <= number), key=LEVELS.__getitem__, default="debug")
    if logger is None:
        facts = {key: value for key, value in dataclasses.asdict(info).items() if key != "unit"}
        getattr(_log, name)(f"{head}, memory in {info.unit}", **facts)
        return
    text = (
        f"{head}, memory allocated ({info.unit}): {info.allocated:.2f}, memory reserved ({info.unit}): "
        f"{info.reserved:.2f}, device memory used/total ({info.unit}): {info.used:.2f}/{info.total:.2f}, "
        f"host memory resident ({info.unit}): {info.host_rss:.2f}"
    )
    try:
        if isinstance(logger, (logging.Logger, logging.LoggerAdapter)):
            logger.log(number, text)
        else:
            getattr(logger, name)(text)
    except Exception as error:  # noqa: BLE001  # somebody else's handler
        _log.debug("memory line lost", head=head, error=f"{type(error).__name__}: {error}")


def _level(level: int | str) -> int:
    if isinstance(level, int):
        return level
    number = LEVELS.get(level.lower())
    if number is None:
        raise ValueError(f"level={level!r} is not one of {listing(LEVELS)}.{did_you_mean(level.lower(), LEVELS)}")
    return number


def _bytes(module: Any, question: str) -> int:
    try:
        return int(getattr(module, question)())
    except Exception:  # noqa: BLE001  # no device, no such question on this device, or a driver that fails
        return 0


def _free_and_total(module: Any) -> tuple[int, int]:
    try:
        free, total = module.mem_get_info()
        return int(free), int(total)
    except Exception:  # noqa: BLE001
        return 0, 0


def _quietly(module: Any, action: str, *arguments: Any) -> bool:
    try:
        getattr(module, action)(*arguments)
    except Exception:  # noqa: BLE001  # None, too, has no such action
        return False
    return True


def _host_bytes() -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return {
            line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))
        }
    except (OSError, ValueError, IndexError):
        return {}
