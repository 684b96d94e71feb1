"""What a snapshot says: how much was taken over time, the peak, and by which stacks.

Works on the plain containers of a snapshot, whoever made it: CUDA's, XPU's and NPU's have one form, and newer versions
only add keys. Sizes are bytes that were asked for, as the events count them; the allocator rounds each block up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rankscope_torch_memory.reading import SnapshotError

Frame = tuple[str, int, str]
"""File, line, function; the innermost frame of a stack comes first."""

_MOST = 20_000_000
"""Blocks or events that are looked at. A small malicious file can hold the same list any number of times."""

_TAKEN = "active_allocated"


@dataclasses.dataclass(frozen=True)
class Live:
    """An allocation that was alive at some moment.

    Attributes:
        bytes: its size.
        frames: the frames as the snapshot has them; None where none were recorded.
        stage: the text that the backend attached to it, or empty.
    """

    bytes: int
    frames: Any = None
    stage: str = ""


@dataclasses.dataclass(frozen=True)
class Group:
    """Live allocations of one stack.

    Attributes:
        bytes: of all of them.
        blocks: how many.
        frames: the stack; empty where none was recorded.
    """

    bytes: int
    blocks: int
    frames: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """An allocation that failed.

    Attributes:
        event: its number in the history.
        bytes: that were asked for.
        free: bytes that the device said are free, or None.
        frames: where.
    """

    event: int
    bytes: int
    free: int | None
    frames: tuple[Frame, ...]


class DeviceMemory:
    """One device in a snapshot.

    Attributes:
        index: number of the device.
        allocated: bytes in live allocations at the end.
        reserved: bytes that the allocator holds of the device at the end.
        unused: bytes of it that no block in use takes.
        largest_unused: the largest free block.
        segments: number of pieces in which it is held.
        events: how many the history has.
        allocated_over_time, reserved_over_time: bytes before the first event and after each.
    """

    def __init__(self, index: int, segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]) -> None:
        self.index = index
        self._trace = trace
        self._blocks: dict[int, Live] = {}
        self.reserved = self.unused = self.largest_unused = 0
        self.segments = len(segments)
        for segment in segments:
            self._add(segment)
        self.allocated = sum(block.bytes for block in self._blocks.values())
        self.events = len(trace)
        self._free = "free_requested" if any(e.get("action") == "free_requested" for e in trace) else "free_completed"
        self.allocated_over_time = _levels(self._changes({"alloc": 1, self._free: -1}), self.allocated)
        self.reserved_over_time = _levels(
            self._changes({"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}),
            self.reserved,
        )

    def _add(self, segment: Mapping[str, Any]) -> None:
        self.reserved += _int(segment, "total_size")
        at = _whole(segment.get("address"))
        for block in _mappings(segment.get("blocks"), "blocks"):
            size = _int(block, "size")
            if block.get("state") == _TAKEN:
                address = _whole(block.get("address", at))
                asked = _int(block, "requested_size") if "requested_size" in block else size
                self._blocks[address] = Live(asked, block.get("frames"), _stage(block))
            elif block.get("state") == "inactive":
                self.unused += size
                self.largest_unused = max(self.largest_unused, size)
            at += size

    def _changes(self, signs: Mapping[str, int]) -> list[int]:
        return [
            sign * _int(event, "size") if (sign := signs.get(_text(event.get("action")), 0)) else 0
            for event in self._trace
        ]

    # The peak.

    @property
    def peak_allocated(self) -> int:
        """The most that was in live allocations at once, as far as the history goes back."""
        return max(self.allocated_over_time)

    @property
    def peak_reserved(self) -> int:
        """The most that the allocator held of the device, likewise."""
        return max(self.reserved_over_time)

    @property
    def peak_event(self) -> int:
        """Number of events after which the peak was reached; 0: before the first."""
        return self.allocated_over_time.index(self.peak_allocated)

    # What was alive.

    def live_at_end(self) -> list[Live]:
        """What is allocated at the moment of the snapshot."""
        return list(self._blocks.values())

    def live_at(self, events: int) -> list[Live]:
        """What was allocated after so many events of the history."""
        live = self._before_history()
        for event in self._trace[:events]:
            action, address = event.get("action"), _whole(event.get("addr"))
            if action == "alloc":
                live[address] = Live(_int(event, "size"), event.get("frames", ()), _stage(event))
            elif action == self._free:
                live.pop(address, None)
        return list(live.values())

    def _before_history(self) -> dict[int, Live]:
        born: set[int] = set()
        found: dict[int, Live] = {}
        for event in self._trace:
            action, address = event.get("action"), _whole(event.get("addr"))
            if action == "alloc":
                born.add(address)
            elif action == self._free:
                if address in born:
                    born.discard(address)
                else:
                    found.setdefault(address, Live(_int(event, "size")))
        found.update({address: block for address, block in self._blocks.items() if address not in born})
        return found

    def failures(self) -> list[OutOfMemory]:
        """Allocations that failed, in the order of the history."""
        return [
            OutOfMemory(
                number,
                _int(event, "size"),
                _int(event, "device_free") if "device_free" in event else None,
                frames_of(event.get("frames")),
            )
            for number, event in enumerate(self._trace, start=1)
            if event.get("action") == "oom"
        ]


def devices(snapshot: Mapping[str, Any]) -> list[DeviceMemory]:
    """The devices that a snapshot says something about, in order.

    Raises:
        SnapshotError: it has not the form of a snapshot.
    """
    segments: dict[int, list[Mapping[str, Any]]] = {}
    blocks = 0
    for segment in _mappings(snapshot.get("segments"), "segments"):
        segments.setdefault(_int(segment, "device") if "device" in segment else 0, []).append(segment)
        blocks += len(_mappings(segment.get("blocks"), "blocks"))
        if blocks > _MOST:
            raise SnapshotError(f"it holds more than {_MOST} blocks")
    traces = [_mappings(trace, "device_traces") for trace in snapshot.get("device_traces", ())]
    if sum(map(len, traces)) > _MOST:
        raise SnapshotError(f"it holds more than {_MOST} events")
    numbers = sorted({*segments, *(number for number, trace in enumerate(traces) if trace)})
    return [
        DeviceMemory(number, segments.get(number, ()), traces[number] if 0 <= number < len(traces) else ())
        for number in numbers
    ]


def by_stack(live: Iterable[Live]) -> list[Group]:
    """Allocations grouped by stack, the largest group first."""
    # By identity first: a list of frames is looked at once, however often it is used.
    same: dict[int, list[Any]] = {}
    for item in live:
        known = same.setdefault(id(item.frames), [item.frames, 0, 0])
        known[1] += item.bytes
        known[2] += 1
    return _grouped((frames_of(frames), size, count) for frames, size, count in same.values())


def by_stage(live: Iterable[Live]) -> list[tuple[str, int, int]]:
    """Stage, bytes and number of the allocations that carry one, the largest first; empty where none does."""
    live = list(live)
    if not any(item.stage for item in live):
        return []
    groups = _grouped(((("", 0, item.stage),), item.bytes, 1) for item in live)
    return [(group.frames[0][2], group.bytes, group.blocks) for group in groups]


def _grouped(items: Iterable[tuple[tuple[Frame, ...], int, int]]) -> list[Group]:
    sums: dict[tuple[Frame, ...], list[int]] = {}
    for frames, size, count in items:
        known = sums.setdefault(frames, [0, 0])
        known[0] += size
        known[1] += count
    groups = [Group(size, count, frames) for frames, (size, count) in sums.items()]
    return sorted(groups, key=lambda group: (-group.bytes, group.frames))


def frames_of(frames: Any) -> tuple[Frame, ...]:
    """A stack of a snapshot as tuples; what is no frame is left out."""
    if not isinstance(frames, (list, tuple)):
        return ()
    return tuple(
        (_text(frame.get("filename")), _whole(frame.get("line")), _text(frame.get("name")))
        for frame in frames[:1000]
        if isinstance(frame, Mapping)
    )


def statistics(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a ledger should know of a snapshot: bytes now and at the peak, of all devices together, events."""
    found = devices(snapshot)
    return {
        "events": sum(device.events for device in found),
        "allocated_bytes": sum(device.allocated for device in found),
        "reserved_bytes": sum(device.reserved for device in found),
        "peak_allocated_bytes": sum(device.peak_allocated for device in found),
        "peak_reserved_bytes": sum(device.peak_reserved for device in found),
        "largest_history": max((device.events for device in found), default=0),
    }


def sampled(levels: Sequence[int], width: int) -> list[int]:
    """The highest level in each of ``width`` stretches of equal length; fewer where there are fewer levels."""
    count = min(width, len(levels))
    edges = [len(levels) * number // count for number in range(count + 1)]
    return [max(levels[begin:end]) for begin, end in pairwise(edges)]


def _levels(changes: Sequence[int], end: int) -> list[int]:
    """The level before the first change and after each, known that it ends at ``end``."""
    level = end - sum(changes)
    levels = [level]
    for change in changes:
        level += change
        levels.append(level)
    return levels


def _mappings(found: Any, name: str) -> list[Mapping[str, Any]]:
    if found is None:
        return []
    if not isinstance(found, (list, tuple)) or not all(isinstance(item, dict) for item in found):
        raise SnapshotError(f"it is no memory snapshot: its {name!r} are no list of mappings")
    return list(found)


def _int(mapping: Mapping[str, Any], key: str) -> int:
    value = mapping.get(key, 0)
    if type(value) is not int or not -(1 << 62) < value < 1 << 62:
        raise SnapshotError(f"it is no memory snapshot: {key} is {type(value).__name__}, not a number of bytes")
    return value


def _whole(value: Any) -> int:
    return value if type(value) is int and abs(value) < 1 << 62 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _stage(event: Mapping[str, Any]) -> str:
    return _text(event.get("user_metadata"))
