"""The test run's side of the server: hand over scenarios, hear how they came out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from rankscope.testing.server import main; main(sys.argv[1])"
_OURS = ("RANKSCOPE_", "VERL_")
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_")
_TO_LOAD = 120.0
"""Seconds that a server has until it is ready: heavy libraries, a slow disk."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a scenario came out.

    Attributes:
        status: ``held``, ``broken``, ``skipped``, or ``none`` where its process did not live to say.
        seen: what was seen, or why it was skipped.
        mend: what the author can do about it.
        code: exit status of the process; None: it did not end in time.
        output: what it printed.
    """

    status: str
    seen: str = ""
    mend: str = ""
    code: int | None = 0
    output: str = ""


class LaneClosed(Exception):  # noqa: N818 - a state of affairs
    """The server is gone; the text holds what it said last."""


class Lane:
    """One server process.

    Args:
        folder: for its output.
        preload: modules that it imports before the first scenario.
        load: modules of test classes that it loads before the first scenario: name and path.
        width: how many scenarios may run at once.
        variables: more environment variables.
    """

    def __init__(
        self,
        folder: Path,
        *,
        preload: Sequence[str] = (),
        load: Sequence[Mapping[str, str]] = (),
        width: int = 1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log = folder / "server.txt"
        self._results: dict[str, dict[str, Any]] = {}
        self._answers = b""
        self._asked: dict[str, dict[str, Any]] = {}
        environ = {name: value for name, value in os.environ.items() if not name.startswith((*_OURS, *_LAUNCHERS))} | {
            "RANKSCOPE_LOG_FORMAT": "json",
            "PYTHONDONTWRITEBYTECODE": "1",
            **(variables or {}),
        }
        setup = {"preload": list(preload), "load": [dict(one) for one in load], "width": width}
        path = [str(Path(entry).absolute()) for entry in sys.path]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(setup), *path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                cwd=folder,
                start_new_session=True,  # a Ctrl-C is for the test run, which then ends this one
            )
        self._jobs, self._answering = _pipe(self._process.stdin), _pipe(self._process.stdout)
        self._until = time.monotonic() + _TO_LOAD

    def submit(self, job: Mapping[str, Any]) -> None:
        """Hand over a scenario; it is played as soon as there is room.

        Args:
            job: ``id``, ``rule``, ``folder``, ``facts`` of the tool, ``subject``: module and name of the test class.

        Raises:
            LaneClosed: the server is gone.
        """
        self._asked[job["id"]] = dict(job)
        self._until += float(job["facts"]["seconds"]) + 5.0
        try:
            self._jobs.write(json.dumps(job).encode() + b"\n")
            self._jobs.flush()
        except OSError as error:
            raise self._dead() from error

    def result(self, job: str) -> Result:
        """Wait for a scenario that was handed over.

        Raises:
            LaneClosed: the server is gone, or hangs.
        """
        while job not in self._results:
            self._take()
        found = self._results[job]
        folder = Path(self._asked[job]["folder"])
        try:
            output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            output = ""
        return Result(found["status"], found.get("seen", ""), found.get("mend", ""), found["code"], output)

    def close(self) -> None:
        """End the server, and with it whatever it still plays."""
        with contextlib.suppress(OSError):  # it has died already
            self._jobs.close()
        self._answering.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _take(self) -> None:
        poller = select.poll()
        poller.register(self._answering, select.POLLIN)
        if not poller.poll(max(0.0, self._until - time.monotonic()) * 1000):
            raise self._dead()
        block = os.read(self._answering.fileno(), 1 << 16)
        if not block:
            raise self._dead()
        *lines, self._answers = (self._answers + block).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._results[answer["id"]] = answer

    def _dead(self) -> LaneClosed:
        log = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
        return LaneClosed(f"the process that plays the rules has ended or hangs; it said:\n{log}")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("the process has no pipe")
    return pipe
