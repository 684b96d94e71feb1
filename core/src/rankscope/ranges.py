"""Texts such as ``1-3,5,10-20:5`` as numbers: what steps and ranks have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

LIMIT = 1_000_000
"""Most numbers that one text may stand for: beyond it, it is a slip of the keyboard."""

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+)(?:\s*:\s*(\d+))?)?")


def expand(text: str, *, least: int) -> Iterator[int]:
    """The numbers of a text: single ones, ``first-last`` (both included) and ``first-last:every``, joined by commas.

    Args:
        text: what the user wrote; blanks do not matter, an empty text stands for no number.
        least: smallest number allowed.

    Raises:
        ValueError: with the piece that cannot be read quoted in it.
    """
    if not text.strip():
        return
    for piece in (part.strip() for part in text.split(",")):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"cannot read {piece!r}; write numbers and ranges such as 1-3,5,10-20:5")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        yield from span(first, last, 1 if match[3] is None else int(match[3]), least=least, piece=piece)


def span(first: int, last: int, every: int, *, least: int, piece: str) -> range:
    """The range from ``first`` to ``last`` (included), checked; ``piece`` is quoted in errors.

    Raises:
        ValueError: below ``least``, reversed, a stride below 1, or more than ``LIMIT`` numbers.
    """
    if first < least:
        raise ValueError(f"{piece!r}: the smallest number here is {least}")
    if last < first:
        raise ValueError(f"{piece!r} is a reversed range; write {last}-{first}")
    if every < 1:
        raise ValueError(f"{piece!r}: the stride must be at least 1")
    numbers = range(first, last + 1, every)
    if len(numbers) > LIMIT:
        raise ValueError(f"{piece!r} stands for {len(numbers)} numbers; at most {LIMIT} are accepted")
    return numbers


def compact(numbers: Iterable[int], *, most: int = 8) -> str:
    """Ascending numbers as a text: ``0-7,16``; after ``most`` pieces only the count of all is told."""
    pieces: list[str] = []
    first: int | None = None
    last = -1
    count = 0
    for number in numbers:
        count += 1
        if first is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            pieces.append(_piece(first, last))
        first = last = number
    if first is not None:
        pieces.append(_piece(first, last))
    if len(pieces) <= most:
        return ",".join(pieces)
    return f"{','.join(pieces[:most])},… ({count} in all)"


def _piece(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
