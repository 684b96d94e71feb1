"""How large a capture has become, while it is recorded: an estimate, since torch does not tell.

Torch keeps what it records on the C heap of the process. The heap's growth since the start, divided by what one event
takes with these contents, gives the number of events; the sizes below were measured with torch 2.13.0 on a CPU. What
the training itself allocates on the heap meanwhile counts too, so a window may well end early. After each file the true
number of events corrects the estimate for the next window.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope_torch.options import TorchOptions

CHECK_EVERY = 0.02
"""Seconds between two looks at the heap."""

_MEBI = 1 << 20
_PROBE = 4 << 20


@dataclasses.dataclass(frozen=True)
class EventSize:
    """Bytes that one event takes: while it is recorded, at most when the capture is stopped, and in the raw trace."""

    recorded: float
    stopped: float
    raw: float


_PLAIN = EventSize(209, 1710, 288)
_SHAPES = EventSize(441, 4000, 441)
_MEMORY = EventSize(101, 2020, 328)
_STACK = EventSize(233, 1715, 288)
_ALL = EventSize(187, 2790, 379)


def event_size(options: TorchOptions) -> EventSize:
    """What an event takes with these contents."""
    shapes, memory, stack = (options.wants(name) for name in ("shapes", "memory", "stack"))
    if memory:
        return _ALL if shapes or stack else _MEMORY
    if shapes:
        return _SHAPES
    return _STACK if stack else _PLAIN


class _MallInfo2(ctypes.Structure):
    _fields_ = [  # the order is glibc's
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
        )
    ]


def heap_meter() -> Callable[[], int]:
    """A function that tells the bytes in use on the C heap; resident memory where the C library cannot tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return resident_bytes
    mallinfo2.restype = _MallInfo2

    def heap() -> int:
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)

    return heap if _sees_what_is_allocated(heap) else resident_bytes


def _sees_what_is_allocated(heap: Callable[[], int]) -> bool:
    """Whether the C library is the one that allocates; with a preloaded jemalloc or tcmalloc it knows of nothing."""
    process = ctypes.CDLL(None)
    process.malloc.restype, process.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    process.free.argtypes = [ctypes.c_void_p]
    before = heap()
    block = process.malloc(_PROBE)
    after = heap()
    process.free(block)
    return after - before >= _PROBE // 2


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


class Budget:
    """Says when a window has had enough.

    Args:
        options: with the limits ``max_events``, ``max_trace_mb`` and ``max_host_mb``.
        meter: tells the heap's size; replaced by tests.
        clock: seconds; replaced by tests.
    """

    def __init__(
        self,
        options: TorchOptions,
        *,
        meter: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usual = self._size = event_size(options)
        self._limits: list[tuple[str, float, Callable[[float], float]]] = []
        if options.max_events is not None:
            self._limits.append(("max_events", options.max_events, lambda events: events))
        if options.max_trace_mb is not None:
            self._limits.append(("max_trace_mb", options.max_trace_mb, lambda events: events * self._size.raw / _MEBI))
        if options.max_host_mb is not None:
            self._limits.append(
                ("max_host_mb", options.max_host_mb, lambda events: events * self._size.stopped / _MEBI)
            )
        self._meter = meter if meter is not None else heap_meter() if self._limits else lambda: 0
        self._clock = clock
        self._began = 0
        self._next = 0.0
        self.last_raw_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._limits)

    def begin(self) -> None:
        """A capture starts."""
        if self._limits:
            self._began = self._meter()
            self._next = self._clock() + CHECK_EVERY

    def spent(self) -> str | None:
        """Why the window should end now, in words; None while it may go on. Cheap between two looks."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + CHECK_EVERY
        events = self.grown() / self._size.recorded
        for name, limit, amount in self._limits:
            if amount(events) >= limit:
                return f"{name}={limit:g} is reached (about {events:,.0f} events)"
        return None

    def grown(self) -> int:
        """Bytes that the heap grew by since the capture started; 0 without limits, where nobody looked."""
        return max(0, self._meter() - self._began) if self._limits else 0

    def expected_bytes(self, grown: int) -> int:
        """About how large the raw trace is going to be: from the heap's growth, else as large as the last one."""
        return max(int(grown / self._size.recorded * self._size.raw), self.last_raw_bytes)

    def learn(self, facts: dict[str, Any]) -> None:
        """Take a finished file's true numbers: heap growth per event and raw bytes per event of this very training."""
        events, grown, raw = facts.get("events"), facts.get("heap_grown"), facts.get("raw_bytes")
        if not events or events < 1000 or not raw:
            return
        recorded, usual = self._size.recorded, self._usual.recorded
        if grown and grown > 0:
            # What the training itself allocated is in it too; more than four times the usual is not torch's doing.
            recorded = min(max(grown / events, usual / 4), usual * 4)
        self._size = dataclasses.replace(self._size, recorded=recorded, raw=raw / events)
