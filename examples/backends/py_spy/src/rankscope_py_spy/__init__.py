"""The py_spy tool: samples of all Python stacks of the process, taken from outside of it.

Source of the interface: py-spy 0.4, ``py-spy record --help``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rankscope import Availability, Context, OptionError, Window, hookimpl

FORMATS = {"speedscope": ".speedscope.json", "flamegraph": ".svg", "chrometrace": ".json", "raw": ".txt"}
_PATIENCE = 15.0
"""Seconds that py-spy gets to attach, and to write its file."""

_PR_SET_PTRACER = 0x59616D61


@dataclass(frozen=True)
class PySpyOptions:
    """What ``tool_config.py_spy`` may hold.

    Attributes:
        format: speedscope, flamegraph, chrometrace or raw.
        rate: samples in a second.
        native: also the stacks of native code.
        idle: also threads that wait.
        gil: only threads that hold the interpreter's lock.
        threads: show the threads apart from each other.
        subprocesses: also child processes.
        nonblocking: do not pause the process for a sample; cheaper, and some samples are wrong.
        discrete: a file for each stage instead of one for the whole step.
    """

    format: str = "speedscope"
    rate: int = 100
    native: bool = False
    idle: bool = False
    gil: bool = False
    threads: bool = False
    subprocesses: bool = False
    nonblocking: bool = False
    discrete: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if self.format not in FORMATS:
            wrong.append(("format", f"{self.format!r} is not one of: {', '.join(FORMATS)}"))
        if not 1 <= self.rate <= 1000:
            wrong.append(("rate", f"must be between 1 and 1000, got {self.rate}"))
        if wrong:
            raise OptionError(wrong)


class PySpyBackend:
    """Runs ``py-spy record`` beside the process in each window."""

    Options = PySpyOptions
    owns: frozenset[str] = frozenset({"ptrace"})

    @staticmethod
    def available() -> Availability:
        """Whether py-spy is there and may look into this process."""
        if _program() is None:
            return Availability(False, "py-spy is not installed", "pip install py-spy")
        if _scope() >= 2 and os.geteuid() != 0:
            text = "this machine lets only root look into processes (kernel.yama.ptrace_scope is 2 or more)"
            return Availability(False, text, "run as root, or with the capability SYS_PTRACE")
        return Availability(True)

    def __init__(self, context: Context, options: PySpyOptions) -> None:
        self.context = context
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._file: Any = None

    @hookimpl
    def start(self, window: Window) -> None:
        """Start py-spy and wait until it samples."""
        file = self.context.store.reserve(window, suffix=FORMATS[self.options.format])
        said = os.fdopen(os.memfd_create("py-spy"), "w+b")  # in memory: a file would have to lie somewhere
        process = subprocess.Popen(
            self._command(file.temporary), stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        _let_in(process.pid)
        deadline = time.monotonic() + _PATIENCE
        while b"Sampling process" not in _text(said):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                file.fail(f"py-spy could not attach: {_last_line(said)}")
                said.close()
                return
            time.sleep(0.01)
        self._process, self._said, self._file = process, said, file

    @hookimpl
    def stop(self) -> None:
        """Ask py-spy to write its file, and publish it."""
        process, self._process = self._process, None
        if process is None or self._said is None:
            return
        with self._file as file, self._said as said:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                file.fail(f"py-spy did not end within {_PATIENCE:g} s and was killed")
                return
            if file.temporary.stat().st_size == 0:
                file.empty(f"py-spy wrote nothing: {_last_line(said)}")
                return
            file.publish(rate=self.options.rate)

    def _command(self, path: Path) -> list[str]:
        options = self.options
        words = [_program() or "py-spy", "record", "--pid", str(os.getpid()), "--output", str(path)]
        words += ["--format", options.format, "--rate", str(options.rate)]
        flags = ("native", "idle", "gil", "threads", "subprocesses", "nonblocking")
        return words + [f"--{flag}" for flag in flags if getattr(options, flag)]


def _program() -> str | None:
    """py-spy of this environment, or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def _let_in(pid: int) -> None:
    """Where only parents may look into processes, a child has to be allowed by name."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def _text(said: IO[bytes]) -> bytes:
    said.seek(0)
    return said.read()


def _last_line(said: IO[bytes]) -> str:
    lines = _text(said).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
