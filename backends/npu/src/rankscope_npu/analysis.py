"""Run torch_npu's analysis of a folder in a process of its own, with a deadline, and find out what came of it.

In the process that calls it, ``analyse`` would fork workers, change the start method of multiprocessing, crash with its
parsers, and block for minutes; and it reports nothing. Only the standard library is used here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from rankscope_npu import folders
from rankscope_npu.said import Said, shortened

_BOOT = (
    "import sys; cut = sys.argv.index('--'); words = sys.argv[1:cut]; sys.path[:] = sys.argv[cut + 1:]; "
    "from rankscope_npu.offline import main; sys.exit(main(*words))"
)
_NO_TORCH_NPU = 3
_running: set[subprocess.Popen[bytes]] = set()
_LOGGED_ERROR = re.compile(r"\[ERROR\] \[[^\]]*\] (.*)")


@dataclasses.dataclass(frozen=True)
class Analysed:
    """What came of an analysis.

    Attributes:
        folder: of torch_npu.
        done: whether everything that was wanted is there.
        reason: why not, or what torch_npu complained of all the same.
        exports: what is there: any of db and text.
        seconds: how long it took.
    """

    folder: Path
    done: bool
    reason: str
    exports: tuple[str, ...]
    seconds: float


def analyse(folder: Path, *, exports: tuple[str, ...] = (), timeout: float = 1800.0) -> Analysed:
    """Analyse one folder.

    Args:
        folder: of torch_npu.
        exports: db, text or both; by default what was said when it was captured.
        timeout: seconds after which it is given up.
    """
    began = time.monotonic()
    wanted = exports or folders.wanted_exports(folder)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = _run(folder, wanted, timeout, output, errors)
        text, crash = _read(output), _read(errors)
    said = Said()
    said.add(text)
    found = folders.exports(folder)
    done = folders.analysed(folder, wanted)
    reason = said.words
    if code is None:
        reason = f"given up after {timeout:g} seconds" + (f": {reason}" if reason else "")
    elif not done:
        reason = _why(folder, wanted, code, said, text, crash)
    return Analysed(folder, done and code is not None, reason, found, round(time.monotonic() - began, 1))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _run(folder: Path, exports: tuple[str, ...], timeout: float, output: IO[bytes], errors: IO[bytes]) -> int | None:
    """The exit status; None when it was given up."""
    words = [sys.executable, "-I", "-c", _BOOT, str(folder), *exports, "--", *(entry for entry in sys.path if entry)]
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # it is imported by name
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environ,
            cwd=folder,
            start_new_session=True,  # its workers have to go with it
        )
    except OSError as error:
        errors.write(f"no process could be started: {error}\n".encode())
        return 1
    _running.add(process)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)
        _running.discard(process)


def end_all() -> None:
    """End what other threads are analysing: their calls return soon."""
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started: nothing of it is left, however it ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(  # noqa: PLR0917 - all that is known
    folder: Path, wanted: tuple[str, ...], code: int, said: Said, text: str, crash: str
) -> str:
    """Why something is missing, from all that torch_npu left about it."""
    if code == _NO_TORCH_NPU:
        line = next((line for line in text.splitlines() if line.startswith("torch_npu cannot be imported")), "")
        return f"{line} (is CANN's set_env.sh sourced?)"
    parts = []
    if code < 0:
        parts.append(f"torch_npu's analysis crashed: {signal.Signals(-code).name}")
    elif code > 0:
        parts.append(f"torch_npu's analysis ended with status {code}: {shortened(crash.splitlines()[-1:])}")
    if not (folder / folders.OUTPUT / folders.DONE).exists():
        parts.append("it did not come to its end")
    else:
        missing = [name for name in wanted if name not in folders.exports(folder)]
        parts.append(f"it wrote no {' and no '.join(missing)}")
    parts += said.errors
    for log in sorted((folder / "logs").glob("*.log")):
        with contextlib.suppress(OSError):
            parts += _LOGGED_ERROR.findall(log.read_text(encoding="utf-8", errors="replace"))[-1:]
    return shortened(parts)
