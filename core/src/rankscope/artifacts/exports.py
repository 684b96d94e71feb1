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
from rankscope.artifacts.ledger import read_ledgers
from rankscope.artifacts.recover import left_over

if TYPE_CHECKING:
    from rankscope.artifacts.store import Store

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from rankscope.artifacts.helper import main; main()"
_NOT_FOR_HELPER = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
_MOST_DEATHS = 3
"""After so many deaths of helpers in a row, without an answer in between, what is pending counts as failed."""

_MOST_TRIES = 2
"""Helpers that one file may take with it: a file that kills its helper must not cost the others theirs."""

PROGRESS_EVERY = 5.0
"""Seconds between two progress lines while a process waits for its exports."""


class Exports:
    """Staged files of this process that the helper is finishing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = b""
        self._pending: dict[str, tuple[Store, dict[str, Any]]] = {}
        self._tries: dict[str, int] = {}
        self._deaths = 0
        self._sent_away: list[subprocess.Popen[bytes]] = []

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
        written = path.with_name(path.name + ".part")
        written.write_text(json.dumps(job), encoding="utf-8")
        written.replace(path)
        with self._lock:
            self.poll()
            self._pending[str(path)] = (store, dict(job))
            self._send([str(path)])

    def look_after(self, folder: Path) -> None:
        """Let the helper finish what a killed process left in a staging folder; one look when there is nothing."""
        if left_over(folder):
            with self._lock:
                self._send([str(folder)])

    def poll(self) -> None:
        """Take in what the helper has answered so far; never waits."""
        with self._lock:
            if self._process is not None and self._pending:
                self._take()

    def drain(self, timeout: float, progress: Callable[[int, float], object] | None = None, *, below: int = 1) -> bool:
        """Wait until everything is finished, or few enough files are left.

        Args:
            timeout: most seconds.
            progress: called every few seconds with the number of files and the seconds waited so far.
            below: it is enough when fewer files than this are pending.

        Returns:
            Whether everything is finished; if not, the helper goes on by itself.
        """
        began = told = time.monotonic()
        while True:
            self.poll()
            now = time.monotonic()
            left = began + timeout - now
            with self._lock:
                if len(self._pending) < below:
                    return True
                if left <= 0:
                    return False
                if self._process is None:
                    self._send(list(self._pending))
                answers = self._process.stdout if self._process is not None else None
            with contextlib.suppress(ValueError, OSError):  # another thread has just closed it, and taken a new helper
                if answers is not None:  # waiting holds no lock: the training may want to submit or poll meanwhile
                    _readable(answers, min(left, 0.2))
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
            _pipe(process.stdout).close()  # nobody listens any more; the ledger hears of it all the same
            if process.poll() is None:
                self._sent_away.append(process)
            # Whoever opens a handle after this starts afresh: a helper that was sent away is none that died, and what
            # it still works off is told to the ledger by itself.
            self._pending.clear()
            self._deaths = 0

    def forget(self) -> None:
        """In a forked child: let go of the helper's pipes. While anybody holds them, it does not end."""
        for process in (self._process, *self._sent_away):
            if process is None:
                continue
            process.returncode = 0  # not a child of this process: nothing to wait for
            for pipe in (process.stdin, process.stdout):
                raw = getattr(pipe, "raw", None)  # the buffer's own lock may have been held at the fork
                if raw is not None:
                    with contextlib.suppress(OSError, ValueError):
                        raw.close()

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
        if not sys.executable:
            return None
        self._sent_away = [process for process in self._sent_away if process.poll() is None]
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
        """The helper died: what it had not answered goes to a new one, but for a file that helpers die of."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                _pipe(process.stdin).close()
            process.kill()
            process.wait()
            self._read(process)  # what it still answered is done
            _pipe(process.stdout).close()
        self._deaths += 1
        first = next(iter(self._pending), None)  # it works in this order
        if first is not None:
            self._tries[first] = self._tries.get(first, 0) + 1
            if self._deaths >= _MOST_DEATHS:
                self._give_up(list(self._pending))
            elif self._tries[first] >= _MOST_TRIES:
                self._give_up([first])
        if self._pending:
            self._send(list(self._pending))

    def _give_up(self, paths: list[str]) -> None:
        for path in paths:
            store, job = self._pending.pop(path)
            self._tries.pop(path, None)
            store.record(
                {**job["facts"], "status": "failed", "reason": f"the helper process died; raw data: {job['staged']}"}
            )

    def _finish_here(self, paths: list[str]) -> None:
        """Without a helper the file is finished in this process: slower for the training, but nothing is lost."""
        for path in paths:
            found = self._pending.pop(path, None)
            if found is not None:  # else a folder to look after: the next process will
                store, job = found
                store.record(helper.finish(job), ledger=False)

    def _take(self) -> None:
        if self._process is not None and not self._read(self._process):
            self._restart()

    def _read(self, process: subprocess.Popen[bytes]) -> bool:
        """Take in what a helper has answered so far. False: it is gone."""
        answers = _pipe(process.stdout)
        while _readable(answers, 0.0):
            block = os.read(answers.fileno(), 1 << 16)
            if not block:
                return False
            self._answers += block
            *lines, self._answers = self._answers.split(b"\n")
            for line in lines:
                self._answered(json.loads(line))
        return True

    def _answered(self, answer: Mapping[str, Any]) -> None:
        self._deaths = 0
        self._tries.pop(answer["job"], None)
        found = self._pending.pop(answer["job"], None)
        if found is not None:
            store, job = found
            outcome, told = answer["outcome"], answer["told"]
            if outcome["status"] == "taken" and not _made_elsewhere(job):
                reason = "its raw data is gone: the folder was cleared before the file was made"
                outcome, told = {"status": "failed", "path": None, "reason": reason}, False
            store.record({**job["facts"], **outcome}, ledger=not told)


def _made_elsewhere(job: Mapping[str, Any]) -> bool:
    """Whether another process has a job in hand or has done it."""
    if Path(job["staged"]).exists() or Path(job["final"]).exists():
        return True
    reserved = job["facts"].get("reserved")
    records = read_ledgers(job["ledger"]["save_path"])
    return any(
        record["kind"] == "artifact" and record.get("reserved") == reserved and record.get("status") != "exporting"
        for record in records
    )


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


def _forget() -> None:
    global _current
    inherited, _current = _current, None
    if inherited is not None:
        inherited[1].forget()


os.register_at_fork(after_in_child=_forget)
