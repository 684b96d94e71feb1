"""Backends that note what is done to them, and what makes them known like installed ones.

``install`` writes the metadata of a distribution; with its directory and this file's on ``sys.path`` (or PYTHONPATH)
the tools ``rec``, ``rec2`` and ``bound`` exist as if they came from pip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope import Artifact, Availability, Context, NothingRecorded, Span, Window, hookimpl

HERE = Path(__file__).parent

CALLS: list[str] = []
"""What was done, in order: ``rec start 1 train``, ``rec enter step1``, ``rec exit update ValueError``, …"""

THREADS: list[tuple[str, str]] = []
"""Start and stop with the name of the thread that ran them."""

SPANS: list[Span] = []
WINDOWS: list[Window] = []
FINISHED: list[tuple[str, tuple[Artifact, ...]]] = []

ENTRY_POINTS = """\
[rankscope.backends]
rec = recording:RecordingBackend
rec2 = recording:SecondBackend
bound = recording:BoundBackend
"""


@dataclass(frozen=True)
class RecordingOptions:
    """What goes wrong, and what ``stop`` writes: ``now``, ``later`` (in the helper process), ``never``."""

    fail: str = ""
    error: str = "ValueError"
    write: str = "now"
    swallow: bool = False
    job: str = "finish_file"
    seconds: float = 0.0


class RecordingBackend:
    Options = RecordingOptions
    owns: frozenset[str] = frozenset()
    suffix = ".txt"

    @staticmethod
    def available() -> Availability:
        return Availability(True)

    def __init__(self, context: Context, options: RecordingOptions) -> None:
        self.context = context
        self.options = options
        self.elsewhere: list[Path] = []

    def note(self, hook: str, *words: object) -> None:
        CALLS.append(" ".join(str(word) for word in (self.context.tool, hook, *words)))
        if hook in {"start", "stop"}:
            THREADS.append((f"{self.context.tool} {hook}", threading.current_thread().name))
        if hook in self.options.fail.split(","):
            raise {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[
                self.options.error
            ](f"broken {hook}")

    @hookimpl
    def start(self, window: Window) -> None:
        WINDOWS.append(window)
        self.note("start", window.step, window.scope)

    @hookimpl
    def step(self, window: Window, span: Span | None) -> None:
        self.note("step", span.stage if span else None)

    @hookimpl
    def annotate(self, span: Span) -> Any:
        SPANS.append(span)
        self.note("annotate", span.stage)
        return self.row(span)

    def row(self, span: Span) -> Any:
        return _Row(self, span.stage)

    @hookimpl
    def stop(self, window: Window) -> None:
        self.note("stop", window.step, window.scope)
        if self.options.write == "never":
            return
        with self.context.store.reserve(window, suffix=".txt") as file:
            if self.options.write == "later":
                file.staged.write_text(f"step {window.step}")
                file.finish_later(f"recording:{self.options.job}", {"seconds": self.options.seconds})
            else:
                file.temporary.write_text(f"step {window.step}")
                file.publish(events=1)

    @hookimpl
    def relocate(self, window: Window) -> list[Path]:
        self.note("relocate", window.step)
        return [path for path in self.elsewhere if path.exists()]

    @hookimpl
    def finish(self, artifacts: Sequence[Artifact]) -> None:
        FINISHED.append((self.context.tool, tuple(artifacts)))
        self.note("finish", len(artifacts))


class _Row:
    def __init__(self, backend: RecordingBackend, stage: str) -> None:
        self.backend, self.stage = backend, stage

    def __enter__(self) -> None:
        self.backend.note("enter", self.stage)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.backend.note("exit", self.stage, *([kind.__name__] if kind else []))
        return self.backend.options.swallow


class SecondBackend(RecordingBackend):
    pass


class BoundBackend(RecordingBackend):
    thread_bound = True


# Finishing functions, for the helper process.


def finish_file(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    print("a finishing function that prints")
    time.sleep(arguments["seconds"])
    temporary.write_text(staged.read_text() + " finished")
    return {"events": 7}


def raise_error(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    temporary.write_text("half")
    raise RuntimeError("cannot be made")


def find_nothing(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    raise NothingRecorded("there was nothing to record")


def wait_for_file(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    Path(arguments["began"]).touch()
    wait_for(Path(arguments["go"]).exists)
    return finish_file(staged, temporary, name, {"seconds": 0})


def kill_itself(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), 9)
    return {}


def list_modules(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    temporary.write_text(json.dumps(sorted(sys.modules)))
    return {}


# For tests.


def clear() -> None:
    for kept in (CALLS, THREADS, SPANS, WINDOWS, FINISHED):
        kept.clear()


def calls(*hooks: str) -> list[str]:
    """The calls of some hooks, or of all."""
    return [call for call in CALLS if not hooks or call.split(" ")[1] in hooks]


def install(directory: Path) -> Path:
    """Write the metadata of a distribution that brings these tools."""
    info = directory / "recording_tools-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recording-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return directory


def config(
    save_path: Path,
    *,
    tool: str | list[str] = "rec",
    steps: Any = (1, 2, 3),
    roles: Sequence[str] = ("actor",),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    section: Mapping[str, Any] | None = None,
    **common: Any,
) -> dict[str, Any]:
    """A config in which the roles are profiled on all ranks."""
    own = {"enable": True, "all_ranks": True, **(section or {})}
    return {
        "global_profiler": {
            "steps": list(steps) if isinstance(steps, tuple) else steps,
            "tool": tool,
            "save_path": str(save_path),
            "global_tool_config": {name: dict(values) for name, values in (options or {}).items()},
            **common,
        },
        **{role: {"profiler": dict(own)} for role in roles},
    }


def ledger(save_path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    from rankscope.artifacts.ledger import read_ledgers

    return [record for record in read_ledgers(save_path) if kind is None or record["kind"] == kind]


def files(save_path: Path) -> list[str]:
    """Contents of the published files, in the order of their names."""
    return [path.read_text() for path in sorted(save_path.iterdir()) if path.is_file()] if save_path.exists() else []


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)


def environment(site: Path, **more: str) -> dict[str, str]:
    """The environment of a subprocess in which the tools are installed; faults are contained there."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    return {**environ, "PYTHONPATH": os.pathsep.join([str(site), str(HERE)]), "PYTHONUNBUFFERED": "1", **more}


def run_python(site: Path, program: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program text in another process."""
    return subprocess.run(
        [sys.executable, "-c", program, *(str(argument) for argument in arguments)],
        env=environment(site, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
