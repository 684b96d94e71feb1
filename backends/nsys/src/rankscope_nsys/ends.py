"""What nsys does when a capture range ends (``--capture-range-end``), and what its reports are called then."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

SUFFIX = ".nsys-rep"

_END = re.compile(r"(?:(none|stop|stop-shutdown)|(repeat|repeat-shutdown)(?::(\d+))?(?::(defer|sync|async))?)")


@dataclasses.dataclass(frozen=True)
class CaptureEnd:
    """What was asked for.

    Attributes:
        text: as it was written.
        limit: how many ranges are captured; None for all.
        ends: whether the end of a range ends its capture.
        deferred: whether reports are written only after the last range or the end of the application. So nsys 2023.4
            does with ``repeat``: with a limit it writes them all when the last range ends.
    """

    text: str
    limit: int | None
    ends: bool
    deferred: bool

    def written_by(self, ranges: int) -> bool:
        """Whether the reports of so many ranges are written by now, or are being written."""
        return self.ends and (not self.deferred or (self.limit is not None and ranges >= self.limit))


NEVER = CaptureEnd("none", None, ends=False, deferred=False)
"""The end of a range ends nothing: one report of all, when the process has ended."""


def parse_end(text: str) -> CaptureEnd | None:
    """The meaning of a value, or None where nsys would refuse it."""
    match = _END.fullmatch(text)
    if match is None:
        return None
    plain, repeat, count, mode = match.groups()
    if plain is not None:
        return CaptureEnd(text, None if plain == "none" else 1, ends=plain != "none", deferred=False)
    if count == "0" or (repeat == "repeat-shutdown" and count is None):
        return None
    return CaptureEnd(text, int(count) if count else None, ends=True, deferred=mode in {None, "defer"})


def report_name(stem: str, number: int) -> str:
    """What the report of a range is called in ledgers, whatever name nsys gives it in the end."""
    return f"{Path(stem).name.removesuffix(SUFFIX)}.{number}{SUFFIX}"


def report_paths(stem: str, number: int) -> list[Path]:
    """What the report of a range may be called.

    nsys 2023.4 appends the number of the range, but not where only one was captured.

    Args:
        stem: the output as nsys was told, with its patterns filled in.
        number: which range of the process, counted from 1.
    """
    stem = stem.removesuffix(SUFFIX)
    numbered = Path(f"{stem}.{number}{SUFFIX}")
    return [numbered, Path(f"{stem}{SUFFIX}")] if number == 1 else [numbered]
