"""Show what a memory snapshot holds: the peak, how memory went over time, and the stacks that took it.

A snapshot is a pickle, and reading a pickle can run code. This command builds plain containers only and refuses the
rest. It reads the snapshots of CUDA, XPU and NPU, whoever made them, and needs no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope import CommandError, human_size, render_table
from rankscope_torch_memory.analysis import DeviceMemory, Group, by_stack, by_stage, devices, sampled
from rankscope_torch_memory.reading import SnapshotError, bounded_memory, load
from rankscope_torch_memory.text import bars, clean, indented, stack_lines

EXAMPLES = """\
examples:
  rankscope memory outputs/profile/actor_train_step2_rank0-of-8_pid1_20270101120000000.pickle
  rankscope memory FILE --top 30 --frames 20     more stacks, and more of each
  rankscope memory FILE --json                   for programs: whole stacks, the timeline as numbers

The exit status is 2 when the file is no snapshot, is cut off, or would have to run code to be read."""

_WIDTH = 60
_MOST_FACTS = 1000
_LONGEST_FACT = 10_000
_GAP = 0.1
"""Share of the device's memory in use that may lie outside of torch's allocator before it is pointed out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a snapshot (.pickle)")
    parser.add_argument("--top", metavar="N", type=_count, default=10, help="stacks to show (default: 10)")
    parser.add_argument("--frames", metavar="N", type=_count, default=6, help="frames of each stack (default: 6)")
    parser.add_argument("--json", action="store_true", help="print JSON: {file, bytes, rankscope, devices: [...]}")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Print what the snapshot holds.

    Raises:
        CommandError: the file cannot be read, or is no snapshot.
    """
    path: Path = arguments.file.expanduser()
    try:
        with bounded_memory(path):
            snapshot = load(path)
            found = devices(snapshot)
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except SnapshotError as error:
        raise CommandError(f"{str(path)!r}: {error}") from error
    except MemoryError as error:
        raise CommandError(f"{str(path)!r}: it needs more memory than a snapshot of its size") from error
    about = _facts(snapshot.get("rankscope"))
    if arguments.json:
        print(json.dumps(_document(path, about, found, arguments.top), indent=2))  # noqa: T201
        return 0
    for line in _page(path, about, found, top=arguments.top, frames=arguments.frames):
        print(_printable(line))  # noqa: T201
    return 0


def _facts(found: Any, *, deeper: bool = True) -> dict[str, Any]:
    """What the backend wrote about the file, as far as it has the form of that: a file may hold anything there."""
    facts: dict[str, Any] = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        if isinstance(key, str) and len(facts) < _MOST_FACTS:
            if _is_short(value) or (isinstance(value, list) and all(map(_is_short, value[:_MOST_FACTS]))):
                facts[key] = value[:_MOST_FACTS] if isinstance(value, list) else value
            elif deeper and isinstance(value, dict):
                facts[key] = _facts(value, deeper=False)
    return facts


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) < _LONGEST_FACT
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


# For people.


def _page(
    path: Path, about: Mapping[str, Any], found: Sequence[DeviceMemory], *, top: int, frames: int
) -> Iterator[str]:
    yield f"{path.name}  {human_size(path.stat().st_size)}"
    yield from _origin(about)
    if not found:
        yield "no device in it has any memory or event"
    for device in found:
        yield ""
        yield f"device {device.index}"
        yield from indented(_numbers(device, about))
        if device.events:
            yield from indented(_timeline(device))
        peak = device.live_at(device.peak_event)
        yield ""
        if device.events and device.peak_event < device.events:
            yield f"  at the peak: {human_size(device.peak_allocated)} in {len(peak)} blocks"
            yield from indented(_holders(by_stack(peak), device.peak_allocated, top, frames))
            yield from _stages(by_stage(peak))
            yield ""
        end = device.live_at_end()
        yield f"  at the end: {human_size(device.allocated)} in {len(end)} blocks"
        yield from indented(_holders(by_stack(end), device.allocated, top, frames))
        for failure in device.failures():
            yield ""
            free = "" if failure.free is None else f", {human_size(failure.free)} were free on the device"
            yield f"  out of memory at event {failure.event}: {human_size(failure.bytes)} were asked for{free}"
            yield from indented(stack_lines([Group(failure.bytes, 1, failure.frames)], 0, top=1, frames=frames))


def _origin(about: Mapping[str, Any]) -> Iterator[str]:
    world = f" of {about['world_size']}" if about.get("world_size") else ""
    facts = [
        f"{name} {about[name]}{world if name == 'rank' else ''}"
        for name in ("role", "rank", "step", "scope", "host", "pid", "torch")
        if about.get(name) not in (None, "")
    ]
    if facts:
        yield clean(", ".join(facts))
    steps = about.get("steps")
    if isinstance(steps, list) and len(steps) > 1:
        yield clean(f"covers the steps {', '.join(map(str, steps))}")


def _numbers(device: DeviceMemory, about: Mapping[str, Any]) -> Iterator[str]:
    unused = _share(device.unused, device.reserved)
    yield f"allocated  {human_size(device.allocated)}"
    yield (
        f"reserved   {human_size(device.reserved)} in {device.segments} segments; {human_size(device.unused)} of it "
        f"unused{unused}, the largest piece {human_size(device.largest_unused)}"
    )
    if not device.events:
        yield "history    none: only the state at the end is known"
    else:
        yield (
            f"peak       {human_size(device.peak_allocated)} allocated, after event {device.peak_event} of "
            f"{device.events}; {human_size(device.peak_reserved)} reserved"
        )
        yield f"history    {device.events} events{_truncated(device, about)}"
    counted = _statistics(device, about).get("allocated_bytes.all.peak")
    if isinstance(counted, int):
        yield f"           torch counts a peak of {human_size(counted)} since its statistics were last reset"
    yield from _outside(device, about)


def _truncated(device: DeviceMemory, about: Mapping[str, Any]) -> str:
    return ": it was full, so older ones are lost (trace_alloc_max_entries)" if _full(device, about) else ""


def _full(device: DeviceMemory, about: Mapping[str, Any]) -> bool | None:
    """Whether older events were dropped; None when the file does not tell how many there could be."""
    most = about.get("max_entries")
    return device.events >= most if isinstance(most, int) else None


def _statistics(device: DeviceMemory, about: Mapping[str, Any]) -> Mapping[str, Any]:
    counted = about.get("statistics")
    return counted if isinstance(counted, dict) and about.get("device") == device.index else {}


def _gap(device: DeviceMemory, about: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Bytes of the device in use, all that it has, and what of the use lies outside of this process's allocator."""
    size = about.get("device_bytes")
    if not isinstance(size, dict) or about.get("device") != device.index:
        return None
    free, total = size.get("free"), size.get("total")
    if not isinstance(free, int) or not isinstance(total, int):
        return None
    return total - free, total, max(total - free - device.reserved, 0)


def _outside(device: DeviceMemory, about: Mapping[str, Any]) -> Iterator[str]:
    gap = _gap(device, about)
    if gap is None:
        return
    used, total, outside = gap
    yield f"device     {human_size(used)} of {human_size(total)} in use, as its driver says"
    if outside > _GAP * used:
        yield (
            f"           {human_size(outside)} of that{_share(outside, used)} is outside of this process's torch "
            "allocator: other processes, other allocators (of an engine that sleeps, of communication), contexts"
        )


def _share(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.0f} %)" if whole else ""


def _timeline(device: DeviceMemory) -> Iterator[str]:
    plain = not _can_print("▁█")
    for name, levels in (("allocated", device.allocated_over_time), ("reserved", device.reserved_over_time)):
        line = bars(levels, width=_WIDTH, plain=plain)
        yield f"{name:<9}  {line}  {human_size(min(levels))} to {human_size(max(levels))}"


def _holders(groups: Sequence[Group], total: int, top: int, frames: int) -> Iterator[str]:
    return stack_lines(groups, total, top=top, frames=frames) if groups else iter(("nothing",))


def _stages(stages: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    if stages:
        rows = [(clean(name) or "(none)", human_size(size), blocks) for name, size, blocks in stages]
        yield ""
        yield from indented(render_table(("stage", "bytes", "blocks"), rows, right=("bytes", "blocks")).splitlines())


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _printable(line: str) -> str:
    encoding = sys.stdout.encoding or "ascii"
    return line if _can_print(line) else line.encode(encoding, "replace").decode(encoding)


# For programs.


def _document(path: Path, about: Mapping[str, Any], found: Sequence[DeviceMemory], top: int) -> dict[str, Any]:
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "rankscope": about or None,
        "devices": [_device(device, about, top) for device in found],
    }


def _device(device: DeviceMemory, about: Mapping[str, Any], top: int) -> dict[str, Any]:
    peak = device.live_at(device.peak_event)
    gap = _gap(device, about)
    return {
        "device": device.index,
        "allocated": device.allocated,
        "reserved": device.reserved,
        "segments": device.segments,
        "unused": device.unused,
        "largest_unused": device.largest_unused,
        "outside_of_torch": None if gap is None else gap[2],
        "events": device.events,
        "history_full": _full(device, about),
        "peak": {
            "allocated": device.peak_allocated,
            "reserved": device.peak_reserved,
            "after_event": device.peak_event,
            "stacks": _stacks(by_stack(peak), top),
            "stages": [{"stage": name, "bytes": size, "blocks": blocks} for name, size, blocks in by_stage(peak)],
        },
        "end": {"stacks": _stacks(by_stack(device.live_at_end()), top)},
        "timeline": {
            "allocated": sampled(device.allocated_over_time, _WIDTH),
            "reserved": sampled(device.reserved_over_time, _WIDTH),
        },
        "out_of_memory": [dataclasses.asdict(failure) for failure in device.failures()],
    }


def _stacks(groups: Sequence[Group], top: int) -> list[dict[str, Any]]:
    return [
        {
            "bytes": group.bytes,
            "blocks": group.blocks,
            "frames": [{"file": file, "line": line, "function": name} for file, line, name in group.frames],
        }
        for group in groups[:top]
    ]
