"""Snapshots as text: who holds the memory, by stack, and how it went over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rankscope import human_size
from rankscope_torch_memory.analysis import Frame, Group, sampled

NO_STACK = "(no stack: allocated before the history began, or without one)"

_OF_TORCH = ("-packages/torch/", "-packages/torch_npu/", "/rankscope/annotate.py")
"""Where code lives that nobody looks for; our own wrapper of a stage stands in between."""

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-~=+*#"


def stack_lines(groups: Sequence[Group], total: int, *, top: int, frames: int) -> Iterator[str]:
    """The largest groups as lines: bytes, share, number of blocks, and the stack, innermost frame first.

    Args:
        groups: as of ``by_stack``.
        total: bytes of all of them.
        top: at most so many groups.
        frames: at most so many frames of each.
    """
    yield f"{'bytes':>10}  {'share':>7}  {'blocks':>7}  stack, innermost first"
    for group in groups[:top]:
        first, *rest = shown(group.frames, frames)
        share = f"{100 * group.bytes / total:.1f} %" if total else "-"
        yield f"{human_size(group.bytes):>10}  {share:>7}  {group.blocks:>7}  {first}"
        yield from (f"{'':>30}{frame}" for frame in rest)
    left = groups[top:]
    if left:
        size, blocks = sum(group.bytes for group in left), sum(group.blocks for group in left)
        yield f"{human_size(size):>10}  {'':>7}  {blocks:>7}  ({len(left)} more)"


def shown(frames: Sequence[Frame], most: int) -> list[str]:
    """The frames of a stack worth a line: the innermost, then those outside of torch and of ourselves."""
    if not frames:
        return [NO_STACK]
    python = [frame for frame in frames if _is_python(frame)] or list(frames)
    chosen = [python[0], *(frame for frame in python[1:] if not _is_of_torch(frame))][:most]
    lines = [clean(f"{name or '?'} ({file}:{line})") for file, line, name in chosen]
    hidden = len(frames) - len(chosen)
    return [*lines, f"… {hidden} more"] if hidden else lines


def _is_python(frame: Frame) -> bool:
    """Whether it is no C++ frame: those have no file, or one of another kind."""
    return frame[0].endswith(".py") or frame[0].startswith("<")


def _is_of_torch(frame: Frame) -> bool:
    return any(part in frame[0] for part in _OF_TORCH)


def clean(text: str) -> str:
    """The text without what could steer a terminal: a file may say anything."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def bars(levels: Sequence[int], *, width: int, plain: bool = False) -> str:
    """A level over time as a line of bars, from the lowest to the highest value that there is.

    Args:
        levels: at least one.
        width: at most so many bars.
        plain: use ASCII only.
    """
    signs = _PLAIN_BARS if plain else _BARS
    values = sampled(levels, width)
    low, high = min(levels), max(levels)
    if low == high:
        return signs[0] * len(values)
    return "".join(signs[(value - low) * (len(signs) - 1) // (high - low)] for value in values)


def indented(lines: Iterable[str]) -> Iterator[str]:
    """Two blanks before each line."""
    return (f"  {line}" for line in lines)
