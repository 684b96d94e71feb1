"""The training process's side of the helper: hand over staged files, hear how they came out, wait with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rankscope.artifacts import helper

if TYPE_CHECKING:
    from rankscope.artifacts.store import Store

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rankscope.artifacts.helper import main; main()"
_NOT_FOR_HELPER = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
_MOST_STARTS = 3
PROGRESS_EVERY = 5.0
"""Seconds between two progress lines while a process waits for its exports."""


class Exports:
    """Staged files of this process that the helper is finishing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = b""
        self._pending: dict[str, tuple[Store, dict[str, Any]]] = {}
        self._starts = 0

    @property
    def pending(self) -> int:
        """How many files are not finished yet."""
        self.poll()
        return len(self._pending)

    def submit(self, store: Store, job: Mapping[str, Any]) -> None:
        """Hand over a staged file; returns at once.

        Args:
            store: hears of the outcome.
            job: see ``helper.finish``.

        Raises:
            OSError: the job file cannot be written.
        """
        path = helper.job_file(Path(job["staged"]))
        path.write_text(json.dumps(job), encoding="utf-8")
        with self._lock:
            self.poll()
            self._pending[str(path)] = (store, dict(job))
            self._send([str(path)])

    def poll(self) -> None:
        """Take in what the helper has answered so far; never waits."""
        with self._lock:
            if self._process is not None and self._pending:
                self._take(0.0)

    def drain(self, timeout: float, progress: Callable[[int, float], object] | None = None) -> bool:
        """Wait until everything is finished.

        Args:
            timeout: most seconds.
            progress: called every few seconds with the number of files and the seconds waited so far.

        Returns:
            Whether everything is finished; if not, the helper goes on by itself.
        """
        began = told = time.monotonic()
        while True:
            with self._lock:
                if not self._pending:
                    return True
                now = time.monotonic()
                left = began + timeout - now
                if left <= 0:
                    return False
                self._take(min(left, 0.2))
            if progress is not None and now - told >= PROGRESS_EVERY:
                told = now
                progress(len(self._pending), now - began)

    def end(self) -> None:
        """No more files: the helper ends when it has worked off what it has."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            with contextlib.suppress(OSError):
                _pipe(process.stdin).close()
            if not self._pending:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
                _pipe(process.stdout).close()

    def _send(self, paths: list[str]) -> None:
        process = self._process or self._start()
        if process is None:
            self._finish_here(paths)
            return
        try:
            pipe = _pipe(process.stdin)
            pipe.write(b"".join(os.fsencode(path) + b"\n" for path in paths))
            pipe.flush()
        except OSError:
            self._restart()

    def _start(self) -> subprocess.Popen[bytes] | None:
        if self._starts >= _MOST_STARTS or not sys.executable:
            return None
        self._starts += 1
        environ = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_HELPER}
        path = [entry for entry in sys.path if entry]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, *path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,  # a Ctrl-C or a kill of the training's group is not meant for it
            )
        except (OSError, RuntimeError):  # no processes left, or the interpreter is on its way out
            return None
        self._process, self._answers = process, b""
        return process

    def _restart(self) -> None:
        """The helper died: what it had not answered is given to a new one, and in the end failed by name."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                _pipe(process.stdin).close()
            _pipe(process.stdout).close()
            process.kill()
            process.wait()
        if self._starts < _MOST_STARTS:
            self._send(list(self._pending))
            return
        for path, (store, job) in list(self._pending.items()):
            del self._pending[path]
            store.record(
                {**job["facts"], "status": "failed", "reason": f"the helper process died; raw data: {job['staged']}"}
            )

    def _finish_here(self, paths: list[str]) -> None:
        """Without a helper the file is finished in this process: slower for the training, but nothing is lost."""
        for path in paths:
            store, job = self._pending.pop(path)
            store.record(helper.finish(job), ledger=False)

    def _take(self, timeout: float) -> None:
        process = self._process
        if process is None:
            self._send(list(self._pending))
            return
        answers = _pipe(process.stdout)
        while _readable(answers, timeout):
            timeout = 0.0
            block = os.read(answers.fileno(), 1 << 16)
            if not block:
                self._restart()
                return
            self._answers += block
            *lines, self._answers = self._answers.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                found = self._pending.pop(answer["job"], None)
                if found is not None:
                    store, job = found
                    store.record({**job["facts"], **answer["outcome"]}, ledger=False)


def _readable(pipe: IO[bytes], timeout: float) -> bool:
    """Whether something can be read now; with poll, since a training process may have thousands of open files."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(timeout * 1000))


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise OSError("the helper has no pipe")
    return pipe


_current: tuple[int, Exports] | None = None


def exports() -> Exports:
    """This process's exports; a forked child has its own."""
    global _current
    if _current is None or _current[0] != os.getpid():
        _current = (os.getpid(), Exports())
    return _current[1]
