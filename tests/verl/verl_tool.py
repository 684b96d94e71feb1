"""A tool of somebody else: it keeps a diary of what it is told. Imports rankscope's public names only."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope import Availability, Context, Span, Window, hookimpl

ENTRY_POINTS = "[rankscope.backends]\ndiary = verl_tool:DiaryBackend\nbroken = verl_tool:BrokenBackend\n"
CONTEXTS: list[Context] = []
FINISHED: list[str] = []


@dataclass(frozen=True)
class DiaryOptions:
    mood: str = "good"


class DiaryBackend:
    Options = DiaryOptions
    suffix = ".diary"

    @staticmethod
    def available() -> Availability:
        return Availability(True)

    def __init__(self, context: Context, options: DiaryOptions) -> None:
        self.context = context
        self.lines = [f"mood {options.mood}"]
        CONTEXTS.append(context)

    @hookimpl
    def start(self, window: Window) -> None:
        self.lines.append(f"start {window.step} {window.scope}")

    @hookimpl
    def step(self, window: Window, span: Span | None) -> None:
        self.lines.append(f"step {span.stage if span else None}")

    @hookimpl
    def annotate(self, span: Span) -> Any:
        return self._row(span)

    @contextmanager
    def _row(self, span: Span) -> Any:
        self.lines.append(f"enter {span.stage} {type(span.instance).__name__}")
        try:
            yield
        finally:
            self.lines.append(f"leave {span.stage}")

    @hookimpl
    def stop(self, window: Window) -> None:
        lines, self.lines = self.lines, []
        with self.context.store.reserve(window, suffix=".diary") as file:
            file.temporary.write_text("\n".join(lines))
            file.publish(events=len(lines))

    @hookimpl
    def finish(self, artifacts: Any) -> None:
        FINISHED.append(f"{self.context.role} {len(artifacts)}")


class BrokenBackend(DiaryBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        raise RuntimeError("broken on purpose")


def install(folder: Path) -> Path:
    info = folder / "diary_tools-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: diary-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def diary(save_path: Path, pattern: str = "*") -> list[list[str]]:
    """The lines of each diary, in the order of their names."""
    return [path.read_text().splitlines() for path in sorted(save_path.glob(f"{pattern}.diary"))]
