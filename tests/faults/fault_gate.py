"""A second backend beside torch that strikes, breaks or hangs at a chosen moment, and what makes it known."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope import Availability, Context, Span, Window, hookimpl

ENTRY_POINTS = """\
[rankscope.backends]
gate = fault_gate:GateBackend
"""

BOUND = 60.0
"""Seconds after which whatever waits for something here goes on, so that nothing waits for ever."""

armed: dict[str, Callable[[], object]] = {}
"""What is done, once, in a hook of the step and stage that the fault is about."""


@dataclasses.dataclass(frozen=True)
class GateOptions:
    """``step`` and ``scope``: where it acts. ``job``: its files are finished by this function in the helper."""

    step: int = 2
    job: str = ""
    flag: str = ""


class GateBackend:
    Options = GateOptions
    owns: frozenset[str] = frozenset()
    suffix = ".json.gz"

    @staticmethod
    def available() -> Availability:
        return Availability(True)

    def __init__(self, context: Context, options: GateOptions) -> None:
        self.context = context
        self.options = options
        self.window: Window | None = None

    def _pass(self, hook: str) -> None:
        window = self.window
        if (
            window is not None
            and window.step == self.options.step
            and window.scope.removesuffix("-aborted")
            in {
                "train",
                "update",
            }
        ):
            action = armed.pop(hook, None)
            if action is not None:
                action()

    @hookimpl
    def start(self, window: Window) -> None:
        self.window = window
        self._pass("start")

    @hookimpl
    def annotate(self, span: Span) -> None:
        self._pass("annotate")

    @hookimpl
    def step(self, window: Window) -> None:
        self._pass("step")

    @hookimpl
    def stop(self, window: Window) -> None:
        self._pass("stop")
        self.window = None
        if not self.options.job:
            self.context.store.missing(window, "this tool writes nothing", status="empty")
            return
        with self.context.store.reserve(window, suffix=self.suffix) as file:
            file.staged.write_text("{}")
            arguments = {"parent": os.getpid(), "flag": self.options.flag, "step": window.step}
            file.finish_later(f"fault_gate:{self.options.job}", arguments)


# Finishing functions, for the helper process.


def _wait_for(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + BOUND
    while not condition() and time.monotonic() < limit:
        time.sleep(0.005)


def _write(temporary: Path) -> dict[str, Any]:
    with gzip.open(temporary, "wt") as file:
        json.dump({"gate": True}, file)
    return {"events": 1}


def finish_at_once(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return _write(temporary)


def finish_after_strike(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """In the second step: not before the training process has struck, or is gone."""
    if arguments["step"] == 2:
        Path(arguments["flag"] + ".working").touch()
        _wait_for(lambda: Path(arguments["flag"]).exists() or os.getppid() != arguments["parent"])
    return _write(temporary)


def die_once(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """In the second step: the helper is killed with half a file written; the next one finds the flag and works."""
    flag = Path(arguments["flag"])
    if arguments["step"] == 2 and not flag.exists():
        flag.touch()
        temporary.write_bytes(b"half")
        os.kill(os.getpid(), 9)
    return _write(temporary)


def install(directory: Path) -> Path:
    """Write the metadata of a distribution that brings this tool."""
    info = directory / "fault_gate_tools-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fault-gate-tools\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return directory
