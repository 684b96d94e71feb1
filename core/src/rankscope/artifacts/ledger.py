"""The ledger: what was planned, captured and published, and why not; one JSON-lines file a process.

Only the standard library is used here: the helper process and the command line import this module.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import numbers
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope.artifacts.names import clean_label

FOLDER = ".rankscope"
"""Folder inside the save path that holds the ledgers and files that are not whole yet."""

_DEEPEST = 8
_LONGEST_TEXT = 32_768
_MOST_FAILURES = 100


class Ledger:
    """Appends records to ``save_path/.rankscope/<host>-<pid>.jsonl``.

    A record is one line, written by one call of the operating system to a file opened for appending: it survives a kill
    of this process, and processes that meet in a file cannot tear each other's lines. Writing never raises. The pid is
    looked up at each write, so a forked child gets a file of its own.

    Kinds of records: ``controller`` (the steps that the run has), ``plan`` (is this rank profiled, when, and why not),
    ``window`` (opened, closed), ``join`` (a role shares the window of another one), ``artifact`` (published, failed,
    empty or exporting), ``fault``, ``finish`` (how the finish command ended) and ``close`` (the handle's end).

    Args:
        save_path: directory of the artifacts.
        host: host name; None asks the operating system.
        run_id: the same for all processes of a run where a launcher says so; None makes one for this object.
        on_failure: is told once, in words, when a record could not be written.
        pid: the process that the records are of, where another one writes them for it; None is the one that writes.

    Attributes:
        failures: the first hundred records' failures, in words.
    """

    def __init__(
        self,
        save_path: str | os.PathLike[str],
        host: str | None = None,
        run_id: str | None = None,
        on_failure: Callable[[str], object] | None = None,
        pid: int | None = None,
    ) -> None:
        self._pid = pid
        self.save_path = Path(save_path)
        self.host = host if host is not None else socket.gethostname()
        self.run_id = run_id if run_id is not None else f"{time.time_ns():x}-{os.getpid()}"
        self.failures: list[str] = []
        self._on_failure = on_failure
        self._reported = False
        self._lock = threading.RLock()  # a signal handler may write while the same thread is writing
        self._lock_pid = os.getpid()

    @property
    def path(self) -> Path:
        """The file of this process."""
        return self.save_path / FOLDER / f"{clean_label(self.host) or 'host'}-{self._pid or os.getpid()}.jsonl"

    def write(self, kind: str, /, **facts: Any) -> bool:
        """Append one record.

        Time, host, pid and run id are added; a fact of the same name wins, so that a helper can write for its parent.

        Returns:
            Whether the line was written; if not, ``failures`` says why.
        """
        pid = os.getpid()
        try:
            record = {
                "kind": kind,
                "time": _now(),
                "host": self.host,
                "pid": self._pid or pid,
                "run_id": self.run_id,
                **facts,
            }
            line = json.dumps(_plain(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"
            if self._lock_pid != pid:  # the lock of the parent may have been held at the fork
                self._lock, self._lock_pid = threading.RLock(), pid
            with self._lock:
                self._append(line)
        except Exception as error:  # noqa: BLE001  # a record is never worth a training run
            self._failed(f"ledger record {kind!r} was not written to {self.save_path}: {_text(error)}")
            return False
        return True

    def _append(self, line: bytes) -> None:
        path = self.path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o644)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, flags, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line  # a full disk, or a killed process with this pid, left half a line
            written = os.write(file, line)
        finally:
            os.close(file)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes fitted")

    def _failed(self, text: str) -> None:
        if len(self.failures) < _MOST_FAILURES:
            self.failures.append(text)
        if self._reported or self._on_failure is None:
            return
        self._reported = True
        try:
            self._on_failure(text)
        except Exception as error:  # noqa: BLE001  # as above
            self.failures.append(f"reporting failed: {_text(error)}")


def read_ledgers(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of all ledgers of a save path, file by file in the order of their lines.

    Half lines (a process was killed, a disk was full), unreadable files and files of others are passed over.

    Args:
        directory: a save path, or its ``.rankscope`` folder.
    """
    folder = Path(directory)
    if folder.name != FOLDER:
        folder = folder / FOLDER
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except OSError:
        return []
    return [record for path in files for record in _read(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        known = {"kind": str, "host": str, "pid": int, "time": str, "run_id": str}
        if all(isinstance(record.get(key), kind) for key, kind in known.items()):
            records.append(record)
    return records


def _now() -> str:
    now = time.time_ns()
    seconds, rest = divmod(now, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 1000:06d}Z"


def _plain(value: Any, depth: int = 0) -> Any:
    """The value in the words of JSON; what has no such word becomes text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth + 1)
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}… ({len(value)} characters)"
    # The abstract numbers know numpy's. A tensor is not asked for its number: that could wait for a device.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [_plain(item, depth + 1) for item in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = (field.name for field in dataclasses.fields(value))
            return {name: _plain(getattr(value, name, None), depth + 1) for name in names}
    return _text(value)[:_LONGEST_TEXT]


def _text(value: object) -> str:
    try:
        if isinstance(value, BaseException):
            return f"{type(value).__name__}: {value}"
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    except Exception:  # noqa: BLE001  # the __str__ is somebody else's
        return f"<{type(value).__name__} without a text>"
