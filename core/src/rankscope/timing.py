"""Seconds by name: timers that add to a dict, and the same dict seen over all ranks.

The functions over all ranks are collective: where a process group exists, every rank of it must call them. They work on
any backend of torch.distributed, because dicts of numbers are gathered as objects.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from rankscope import device, topology
from rankscope.errors import did_you_mean, listing
from rankscope.markers import RangeHandle, mark_start_range


class _Timer:
    """One measurement at a time; as a decorator it makes itself anew for each call."""

    __slots__ = ("_began", "_handle", "_mark", "_name", "_sync", "_timing_raw")

    def __init__(
        self,
        name: str,
        timing_raw: MutableMapping[str, float],
        mark: tuple[str | None, str | None, str | None] | None,
        sync: bool,
    ) -> None:
        self._name = name
        self._timing_raw = timing_raw
        self._mark = mark
        self._sync = sync
        self._handle: RangeHandle | None = None
        self._began = 0.0

    def __enter__(self) -> None:
        if self._mark is not None:
            self._handle = mark_start_range(self._name, *self._mark)
        if self._sync:
            device.synchronize()
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._sync:
                device.synchronize()
            elapsed = time.perf_counter() - self._began
            self._timing_raw[self._name] = self._timing_raw.get(self._name, 0.0) + elapsed
        finally:
            if self._handle is not None:
                self._handle.close()

    def __call__(self, function: Any) -> Any:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

            return asynchronous

        @functools.wraps(function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            with self._again():
                return function(*args, **kwargs)

        return synchronous

    def _again(self) -> _Timer:
        return _Timer(self._name, self._timing_raw, self._mark, self._sync)


def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
    *,
    sync: bool = False,
) -> _Timer:
    """Time a block and show it as a range.

    ``with marked_timer("generate", timing): …``. The seconds are added to ``timing_raw[name]``, and the range is
    closed, also when the block raises. The same object decorates a function or a coroutine function.

    Args:
        name: key in the dict and text of the range.
        timing_raw: dict of seconds.
        color: of the range, for markers that show one.
        domain: group of ranges.
        category: kind of range, for markers that have it.
        sync: wait for the device before the clock is read, so that its work counts for the block that asked for it.
    """
    return _Timer(name, timing_raw, (color, domain, category), sync)


def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> _Timer:
    """`marked_timer` without a range."""
    return _Timer(name, timing_raw, None, False)


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "avg": _average,
    "sum": math.fsum,
    "max": max,
    "min": min,
}


def reduce_timing(timing_raw: Mapping[str, Any], op: Any = "avg") -> dict[str, float]:
    """One number per name over all ranks, on every rank.

    Args:
        timing_raw: seconds by name; ranks may have different names.
        op: ``avg``, ``sum``, ``max``, ``min``, or the ``ReduceOp`` of that name. A name is reduced over the ranks that
            have it: the average of a stage is not thinned by ranks that never ran it.

    Returns:
        A new dict with the names of all ranks, sorted. Without a process group, this rank's own seconds.

    Raises:
        ValueError: unknown ``op``.
        TypeError: a value of some rank is not a number; raised on all ranks.
    """
    reduce = _REDUCTIONS[_operation(op)]
    table = _table(timing_raw)
    return {name: reduce([value for value in row if value is not None]) for name, row in table.items()}


def gather_timing(timing_raw: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """The seconds of every rank, on every rank.

    Returns:
        For each name that any rank has, sorted, one value a rank in the order of the ranks; None where a rank lacks the
        name. Without a process group, lists of one.

    Raises:
        TypeError: a value of some rank is not a number; raised on all ranks.
    """
    return _table(timing_raw)


class RankSpread(NamedTuple):
    """How unevenly ranks took part in something.

    Attributes:
        ratio: share of the ranks that were slower than the (100-k)th percentile.
        min, max: of all ranks.
        slowest_rank: the first rank that took ``max``.
    """

    ratio: float
    min: float
    max: float
    slowest_rank: int


def rank_spread(timing: Any, k: float = 10) -> RankSpread:
    """How a number of this rank spreads over all ranks; without a process group this rank is all there is.

    Args:
        timing: seconds of this rank.
        k: per cent of the ranks that count as the tail.

    Raises:
        ValueError: k is not within 0 to 100.
        TypeError: the value of some rank is not a number; raised on all ranks.
    """
    if not 0 <= k <= 100:
        raise ValueError(f"k={k!r} is not a percentage: 0 to 100")
    values = [value for value in _table({"timing": timing})["timing"] if value is not None]
    edge = _percentile(values, 100 - k)
    slowest = max(values)
    return RankSpread(sum(value > edge for value in values) / len(values), min(values), slowest, values.index(slowest))


def topk_reduce_ratio_min_max(timing: Any, k: float = 10) -> tuple[float, float, float]:
    """Share of the ranks slower than the (100-k)th percentile, shortest and longest; ``(-1, -1, -1)`` without a group.

    Takes and raises what `rank_spread` does, which also tells the slowest rank.
    """
    if topology.distributed() is None:
        return (-1.0, -1.0, -1.0)
    return rank_spread(timing, k)[:3]


def _operation(op: Any) -> str:
    name = str(getattr(op, "name", op)).lower()  # ReduceOp.AVG prints differently in each version of torch
    if name not in _REDUCTIONS:
        raise ValueError(f"op={op!r} is not one of {listing(_REDUCTIONS)}.{did_you_mean(name, _REDUCTIONS)}")
    return name


def _percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, like ``torch.quantile``."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    share = place - below
    return ordered[below] if not share else ordered[below] + (ordered[below + 1] - ordered[below]) * share


def _table(timing_raw: Mapping[str, Any]) -> dict[str, list[float | None]]:
    own: dict[str, float | str] = {name: _number(value) for name, value in timing_raw.items()}
    ranks = _gathered(own)
    # Judged after the gathering: a rank that raised before it would leave the others waiting for it.
    wrong = [
        f"{name!r} of rank {rank} is {value}"
        for rank, timing in enumerate(ranks)
        for name, value in timing.items()
        if isinstance(value, str)
    ]
    if wrong:
        raise TypeError(f"timings must be numbers, but {'; '.join(wrong)}")
    names = sorted({name for timing in ranks for name in timing})
    return {name: [timing.get(name) for timing in ranks] for name in names}


def _gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    distributed = topology.distributed()
    if distributed is None:
        return [own]
    ranks: list[dict[str, Any]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    return ranks


def _number(value: Any) -> float | str:
    """A float, also of a tensor or array with one element; else words for what it is instead."""
    try:
        if not isinstance(value, str):
            return float(value)
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks wait for us
        return f"{type(value).__name__} ({error})"
    return f"the text {value!r}"
