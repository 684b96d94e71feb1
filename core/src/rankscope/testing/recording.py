"""A backend that notes what is done to it, and goes wrong where it is told to."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope import Artifact, Availability, Context, Span, Window, hookimpl


@dataclasses.dataclass
class Record:
    """What was done to the recording backends of this process, in order.

    Attributes:
        calls: ``rec start 1 train``, ``rec enter step1``, ``rec exit update ValueError``, …: tool, hook, facts.
        threads: start and stop with the name of the thread that ran them.
        spans: each that a backend was asked to show, without its object and arguments, which no backend may keep.
        windows: each that was started.
        finished: tool and artifacts of each ``finish``.
    """

    calls: list[str] = dataclasses.field(default_factory=list)
    threads: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    windows: list[Window] = dataclasses.field(default_factory=list)
    finished: list[tuple[str, tuple[Artifact, ...]]] = dataclasses.field(default_factory=list)

    def of(self, *hooks: str) -> list[str]:
        """The calls of some hooks, or of all."""
        return [call for call in self.calls if not hooks or call.split(" ")[1] in hooks]

    def clear(self) -> None:
        """Forget everything; the lists stay the same objects."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).clear()


record = Record()
"""Core makes the backends, so they share one record; ``RecordingBackend.record`` is this."""


@dataclasses.dataclass(frozen=True)
class RecordingOptions:
    """What goes wrong, and what ``stop`` writes.

    Attributes:
        fail: hooks that raise, joined by commas; also ``enter`` and ``exit`` of a span.
        error: what they raise: ValueError, KeyboardInterrupt or SystemExit.
        write: ``now``, ``later`` (in the helper process) or ``never``.
        swallow: whether a span's ``__exit__`` returns True.
        job: finishing function for ``later``, ``module:function``; without a module it is the backend class's own.
        seconds: how long that function takes.
    """

    fail: str = ""
    error: str = "ValueError"
    write: str = "now"
    swallow: bool = False
    job: str = "finish_file"
    seconds: float = 0.0


_ERRORS: Mapping[str, type[BaseException]] = {
    "ValueError": ValueError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
}


class RecordingBackend:
    """Implements every hook; each call is a line in ``record.calls``, and each window leaves a small text file.

    Attributes:
        record: what was done to all recording backends of this process.
        context: as core made it.
        options: as core made them.
        elsewhere: what ``relocate`` names; a test puts paths in.
    """

    Options = RecordingOptions
    owns: frozenset[str] = frozenset()
    suffix = ".txt"
    record = record

    @staticmethod
    def available() -> Availability:
        """It always is."""
        return Availability(True)

    def __init__(self, context: Context, options: RecordingOptions) -> None:
        self.context = context
        self.options = options
        self.elsewhere: list[Path] = []

    def note(self, hook: str, *words: object) -> None:
        """Write down a call, and raise where the options say so."""
        record.calls.append(" ".join(str(word) for word in (self.context.tool, hook, *words)))
        if hook in {"start", "stop"}:
            record.threads.append((f"{self.context.tool} {hook}", threading.current_thread().name))
        if hook in self.options.fail.split(","):
            raise _ERRORS[self.options.error](f"broken {hook}")

    @hookimpl
    def start(self, window: Window) -> None:
        """Note it."""
        record.windows.append(window)
        self.note("start", window.step, window.scope)

    @hookimpl
    def step(self, window: Window, span: Span | None) -> None:  # noqa: ARG002
        """Note it."""
        self.note("step", span.stage if span else None)

    @hookimpl
    def annotate(self, span: Span) -> Any:
        """Note it, and show the span as a row."""
        record.spans.append(_bare(span))
        self.note("annotate", span.stage)
        return self.row(span)

    def row(self, span: Span) -> Any:
        """The context manager of a span; a subclass may give another one."""
        return RecordingRow(self, span.stage)

    @hookimpl
    def stop(self, window: Window) -> None:
        """Note it, and write the file."""
        self.note("stop", window.step, window.scope)
        if self.options.write == "never":
            return
        with self.context.store.reserve(window, suffix=self.suffix) as file:
            if self.options.write == "later":
                file.staged.write_text(f"step {window.step}")
                file.finish_later(self._job(), {"seconds": self.options.seconds})
            else:
                file.temporary.write_text(f"step {window.step}")
                file.publish(events=1)

    @hookimpl
    def relocate(self, window: Window) -> list[Path]:
        """Note it, and name what is elsewhere."""
        self.note("relocate", window.step)
        return [path for path in self.elsewhere if path.exists()]

    @hookimpl
    def finish(self, artifacts: Sequence[Artifact]) -> None:
        """Note it."""
        record.finished.append((self.context.tool, tuple(artifacts)))
        self.note("finish", len(artifacts))

    def _job(self) -> str:
        job = self.options.job
        return job if ":" in job else f"{type(self).__module__}:{job}"


class RecordingRow:
    """A span of the recording backend.

    Args:
        backend: that shows it.
        stage: its label.
    """

    def __init__(self, backend: RecordingBackend, stage: str) -> None:
        self.backend, self.stage = backend, stage

    def __enter__(self) -> None:
        self.backend.note("enter", self.stage)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.backend.note("exit", self.stage, *([kind.__name__] if kind else []))
        return self.backend.options.swallow


def _bare(span: Span) -> Span:
    parent = None if span.parent is None else _bare(span.parent)
    return dataclasses.replace(span, instance=None, args=(), kwargs={}, parent=parent)


def finish_file(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """The finishing function, called in the helper process; it prints, which must hurt nobody."""
    print("a finishing function that prints")  # noqa: T201
    time.sleep(arguments["seconds"])
    temporary.write_text(staged.read_text() + " finished")
    return {"events": 7}
