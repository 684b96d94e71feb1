"""The index: which capture range of which process is which step and stage. A JSON file in the save path.

It is written anew, whole, whenever a window opens or closes, so it is there after any kind of death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankscope import Window
from rankscope.host import born

SUFFIX = ".nsys-index.json"
VERSION = 1


@dataclasses.dataclass
class CaptureRange:
    """One capture range of this process.

    Attributes:
        number: counted from 1, as nsys does.
        window: id of the window that opened it, unique in its process.
        role, rank, step, steps, scope, reason: what it covers.
        start_ns, end_ns: nanoseconds since the epoch; end_ns is 0 while it is open.
        report: file name of its report, once that is known.
    """

    number: int
    window: int
    role: str
    rank: int
    step: int | None
    steps: tuple[int, ...]
    scope: str
    reason: Any
    start_ns: int
    end_ns: int = 0
    report: str = ""

    def as_window(self) -> Window:
        """The window that it was. One that was never closed counts as aborted."""
        scope = self.scope if self.end_ns or self.scope.endswith("-aborted") else f"{self.scope}-aborted"
        return Window(
            id=self.window,
            role=self.role,
            step=self.step,
            steps=tuple(self.steps),
            scope=scope,
            reason=self.reason,
            started_ns=self.start_ns,
        )

    def facts(self) -> dict[str, Any]:
        """What the ledger says of it."""
        return {"role": self.role, "step": self.step, "scope": self.as_window().scope, "window": self.window}


@dataclasses.dataclass
class Index:
    """All capture ranges of one process.

    Attributes:
        host, pid, born, run_id: the process; born tells it from a later one with its pid (see `rankscope.host.born`).
        launch: what `launch` called it, or empty where nsys was started otherwise.
        stem: path of its reports without number and suffix.
        capture, capture_range_end: as nsys was told.
        ranges: in the order in which they were opened.
        version: of this format.
    """

    host: str
    pid: int
    born: int | None
    run_id: str
    launch: str
    stem: str
    capture: str
    capture_range_end: str
    ranges: list[CaptureRange]
    version: int = VERSION

    def alive(self, host: str) -> bool:
        """Whether the process still runs, as far as it can be seen from this host."""
        return self.host == host and self.born is not None and born(self.pid) == self.born

    def write(self, path: Path) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def read_indexes(save_path: Path) -> Iterator[tuple[Path, Index]]:
    """The indexes in a save path; what is none is passed over."""
    for path in sorted(save_path.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            ranges = [CaptureRange(**entry) for entry in facts.pop("ranges")]
            yield path, Index(ranges=ranges, **facts)
