"""Reports on the disk: which file belongs to a range, and whether nsys is done with it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rankscope_nsys.ends import SUFFIX, report_paths

_MARK = b"[END]"
"""The last bytes of a whole report of nsys 2023.4."""

_STILL = 1.0
"""Seconds without a change after which a report without that mark counts as whole."""

_PAUSE = 0.1


class Reports:
    """Looks at reports, and remembers what they looked like.

    Args:
        clock: seconds; replaced by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, tuple[int, int, float]] = {}

    def find(self, stem: str, number: int) -> Path | None:
        """The whole report of a range, or None while there is none."""
        for candidate in report_paths(stem, number):
            for path in _existing(candidate):
                if self.whole(path):
                    return path
        return None

    def whole(self, path: Path) -> bool:
        """Whether nsys has finished writing: it says so at the end of the file, or nothing changes any more."""
        if raw_beside(path) is not None:
            return False
        try:
            found = path.stat()
            if found.st_size == 0:
                return False
            with path.open("rb") as file:
                file.seek(max(0, found.st_size - len(_MARK)))
                if file.read() == _MARK:
                    return True
        except OSError:
            return False
        now = self._clock()
        size, changed, since = self._seen.get(path, (-1, -1, now))
        if (size, changed) != (found.st_size, found.st_mtime_ns):
            self._seen[path] = (found.st_size, found.st_mtime_ns, now)
            return False
        return now - since >= _STILL

    def wait(self, wanted: Iterable[tuple[str, int]], seconds: float) -> bool:
        """Wait until each of these (stem, number) has a whole report. False: some had none in time."""
        missing = list(wanted)
        deadline = self._clock() + seconds
        while True:
            missing = [(stem, number) for stem, number in missing if self.find(stem, number) is None]
            left = deadline - self._clock()
            if not missing or left <= 0:
                return not missing
            time.sleep(min(_PAUSE, left))


def raw_beside(report: Path) -> Path | None:
    """The raw data from which nsys makes a report, where it lies beside it: not made yet, or never."""
    raw = report.with_name(f"{report.name.removesuffix(SUFFIX)}.qdstrm")
    return raw if raw.exists() else None


def why_no_report(stem: str, number: int) -> str:
    """Why a range has no report, as far as its folder tells."""
    for path in report_paths(stem, number):
        raw = raw_beside(path)
        if raw is not None:
            return (
                "nsys left raw data and made no report of it; convert it with: "
                f"QdstrmImporter -i {shlex.quote(str(raw))}"
            )
    return f"nsys wrote no report of this capture range; it would be {stem}*{SUFFIX}"


def _existing(path: Path) -> list[Path]:
    """The path itself, or what fits it where nsys was to choose a free number (``%n``)."""
    if "*" not in path.name:
        return [path] if path.exists() else []
    return sorted(path.parent.glob(path.name))
