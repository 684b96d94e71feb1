"""The finish command: the user's own command, run once when the captures of a process are complete.

It can neither hurt nor hold up the training: no terminal input, a process group of its own, a time limit, bounded
output, and nothing that goes wrong is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rankscope.artifacts.ledger import FOLDER, Ledger
from rankscope.artifacts.names import clean_label
from rankscope.environment import PROFILE_PREFIX, VERL_PROFILE_PREFIX
from rankscope.types import Artifact

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a finish command may take."""

TERM_GRACE = 5.0
"""Seconds between the polite and the hard end of a command that takes too long."""

DRAIN_GRACE = 0.5
"""Seconds in which output is still read after the command ended: a background child may keep the pipe open for ever."""

PACE = 0.05
"""Seconds between two looks where nothing can be waited for."""

MAX_LINES = 2_000
MAX_BYTES = 1 << 20
MAX_LINE = 4_000
"""Bounds on what is logged: lines, bytes, and characters of one line. The rest is read and counted."""

_NAMES = (
    "SAVE_PATH",
    "TOOL",
    "RANK",
    "PID",
    "ROLE",
    "STEP",
    "STEPS",
    "WORLD_SIZE",
    "HOST",
    "RUN_ID",
    "ARTIFACTS",
    "MANIFEST",
)
_claims: dict[tuple[int, str], object] = {}


@dataclasses.dataclass(frozen=True)
class FinishResult:
    """How the command ended.

    Attributes:
        exit_code: of the command, negative for a signal; None if it did not start.
        timed_out: whether it was ended because of the time limit.
        seconds: how long it ran.
        launched: whether it started.
        error: what went wrong on our side, in words.
    """

    exit_code: int | None
    timed_out: bool
    seconds: float
    launched: bool
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command did its work."""
        return self.exit_code == 0 and not self.timed_out


def claim_once(save_path: str | os.PathLike[str]) -> bool:
    """True for the first caller of this process and save path, False for all others; a forked child starts anew."""
    ours = object()
    return _claims.setdefault((os.getpid(), os.path.abspath(save_path)), ours) is ours  # noqa: PTH100  # "" is allowed


def write_manifest(save_path: Path, artifacts: Iterable[Artifact], name: str, /, **facts: Any) -> Path:
    """Write the list of a process's artifacts as ``save_path/.rankscope/<name>.json``, whole or not at all.

    Raises:
        OSError: the save path cannot be written.
    """
    listed = [
        {
            "path": str(artifact.path),
            "bytes": artifact.bytes,
            "checksum": artifact.checksum,
            "tool": artifact.tool,
            "role": artifact.role,
            "rank": artifact.rank,
            "step": artifact.step,
            "scope": artifact.scope,
        }
        for artifact in artifacts
    ]
    path = save_path / FOLDER / f"{clean_label(name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        temporary.write_text(json.dumps({**facts, "artifacts": listed}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


class FinishCommand:
    """One run of the finish command of one process.

    Args:
        command: a text for ``/bin/sh -c``, or a list of words that is run without a shell.
        save_path: directory of the artifacts; empty text is passed on as such.
        tool, role, rank, step, steps, world_size, host, run_id: for the command's environment; what is unknown (None or
            empty) is not set there, and a value inherited from a parent is removed.
        artifacts: this process's files; they are listed in the manifest.
        timeout: seconds; None for no limit.
        ledger: gets one ``finish`` record.
        output: gets each line, prefix included; rankscope's log when None.
        prefix: begins each line of output.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        save_path: str | os.PathLike[str] = "",
        tool: str = "",
        role: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        steps: Iterable[int] = (),
        world_size: int | None = None,
        host: str = "",
        run_id: str = "",
        artifacts: Sequence[Artifact] = (),
        timeout: float | None = DEFAULT_TIMEOUT,
        ledger: Ledger | None = None,
        output: Callable[[str], object] | None = None,
        prefix: str | None = None,
    ) -> None:
        self.command = command if isinstance(command, str) else [str(word) for word in command]
        self.save_path = os.fspath(save_path)
        self.timeout = timeout
        self.artifacts = tuple(artifacts)
        self.result: FinishResult | None = None
        self._ledger = ledger
        self._output = output
        self._prefix = (
            prefix if prefix is not None else "finish command:" if rank is None else f"finish command [{rank}]:"
        )
        self._role, self._rank, self._step = role, rank, step
        self._facts: dict[str, str | None] = {
            "SAVE_PATH": self.save_path,
            "TOOL": tool or None,
            "RANK": _text(rank),
            "PID": str(os.getpid()),
            "ROLE": role or None,
            "STEP": _text(step),
            "STEPS": ",".join(str(number) for number in steps) or None,
            "WORLD_SIZE": _text(world_size),
            "HOST": host or socket.gethostname(),
            "RUN_ID": run_id or None,
            "ARTIFACTS": str(len(self.artifacts)),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def environment(self, manifest: Path | None = None, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of the command: the inherited one, and each fact under rankscope's and verl's names."""
        environ = dict(os.environ if inherited is None else inherited)
        facts = {**self._facts, "MANIFEST": None if manifest is None else str(manifest)}
        for prefix in (PROFILE_PREFIX, VERL_PROFILE_PREFIX):
            for name in _NAMES:
                environ.pop(prefix + name, None)
            environ.update({prefix + name: value for name, value in facts.items() if value is not None})
        return environ

    def start(self) -> None:
        """Run it in the background; `wait` gives the result. Late in the process's life it runs at once instead."""
        if self._thread is not None or self.result is not None:
            return
        thread = threading.Thread(target=self.run, name="rankscope-finish", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no new threads while the interpreter shuts down (Python 3.12 and later)
            self.run()
        else:
            self._thread = thread

    def wait(self, timeout: float | None = None) -> FinishResult | None:
        """The result, or None while the command still runs after so many seconds (or was never started)."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.result

    def terminate(self, *, kill: bool = False) -> None:
        """End a running command and all its children; `wait` then returns soon."""
        process = self._process
        if process is not None and self.result is None:
            _signal_group(process.pid, signal.SIGKILL if kill else signal.SIGTERM)

    def run(self) -> FinishResult:
        """Run it here and now. Never raises an Exception; a second call gives the first result."""
        if self.result is not None:
            return self.result
        began = time.monotonic()
        try:
            result = self._run(began)
        except Exception as error:  # noqa: BLE001  # the user's command is never worth a training run
            self.terminate(kill=True)
            launched = self._process is not None
            result = FinishResult(None, False, time.monotonic() - began, launched, f"{type(error).__name__}: {error}")
        self._report(result)
        self.result = result
        return result

    def _run(self, began: float) -> FinishResult:
        words = ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else self.command
        if not words or (isinstance(self.command, str) and not self.command.strip()):
            return FinishResult(None, False, 0.0, False, "the command is empty")
        environ = self.environment(self._manifest())
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=environ,
            start_new_session=True,
        )
        self._process = process
        pipe = process.stdout
        assert pipe is not None  # noqa: S101  # asked for above
        lines = _Lines(self._say)
        try:
            timed_out = _attend(process, pipe, lines, None if self.timeout is None else began + self.timeout)
        finally:
            pipe.close()
            lines.close()
        return FinishResult(process.returncode, timed_out, time.monotonic() - began, True)

    def _manifest(self) -> Path | None:
        if not self.save_path:
            return None
        labels = [f"manifest-{self._facts['HOST']}-{os.getpid()}", *([self._role] if self._role else [])]
        known = {"SAVE_PATH": "save_path", "RUN_ID": "run_id", "HOST": "host"}
        facts = {key: self._facts[name] for name, key in known.items()}
        try:
            return write_manifest(
                Path(self.save_path).absolute(),
                self.artifacts,
                "-".join(labels),
                **facts,
                pid=os.getpid(),
                role=self._role,
                rank=self._rank,
            )
        except OSError as error:
            self._say(f"the manifest could not be written: {error}")
            return None

    def _report(self, result: FinishResult) -> None:
        took = f"after {result.seconds:.1f} s"
        if result.error:
            self._say(f"{'failed' if result.launched else 'could not be started'}: {result.error}")
        elif result.timed_out:
            self._say(f"was ended {took}: the limit is {self.timeout} s")
        else:
            self._say(f"exit code {result.exit_code} {took}")
        if self._ledger is not None:
            self._ledger.write(
                "finish",
                command=self.command,
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                seconds=round(result.seconds, 3),
                launched=result.launched,
                error=result.error,
                role=self._role,
                rank=self._rank,
                step=self._step,
                path=self.save_path,
                artifacts=len(self.artifacts),
            )

    def _say(self, line: str) -> None:
        text = f"{self._prefix} {line}" if self._prefix else line
        if self._output is None:
            from rankscope.log import get_logger

            get_logger().info(text)
            return
        try:
            self._output(text)
        except Exception as error:  # noqa: BLE001  # a broken callback must not stop the reading of the pipe
            self._output = None
            self._say(
                f"the output callback failed ({type(error).__name__}: {error}); output goes to the log from here on"
            )


def _attend(process: subprocess.Popen[bytes], pipe: IO[bytes], lines: _Lines, deadline: float | None) -> bool:
    """Read output until the process ends, or end it at the deadline. Returns whether the deadline struck.

    What counts is the process, not the pipe: a child in the background may hold the pipe for as long as it likes.
    """
    timed_out = False
    with _Exit(process) as ended, selectors.DefaultSelector() as selector:
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ)
        if ended.file is not None:
            selector.register(ended.file, selectors.EVENT_READ)

        def read_until(limit: float | None, done: Callable[[], bool], pace: float | None = ended.pace) -> None:
            while not done():
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    return
                pauses = [pause for pause in (left, pace) if pause is not None]
                for key, _ in selector.select(min(pauses, default=None)):
                    if key.fileobj is pipe and not _read(pipe, lines):
                        selector.unregister(pipe)

        def over() -> bool:
            if process.poll() is None:
                return False
            if ended.file is not None and ended.file in selector.get_map():
                selector.unregister(ended.file)  # it stays ready from now on: nothing could be waited for
            return True

        read_until(deadline, over)
        if process.returncode is None:
            timed_out = True
            _signal_group(process.pid, signal.SIGTERM)
            hard = time.monotonic() + TERM_GRACE
            read_until(hard, over)
            read_until(hard, lambda: over() and not _group_exists(process.pid), PACE)
            _signal_group(process.pid, signal.SIGKILL)
            read_until(time.monotonic() + TERM_GRACE, over)  # a process that hangs in the kernel cannot be killed
        read_until(time.monotonic() + DRAIN_GRACE, lambda: pipe not in selector.get_map(), PACE)
    return timed_out


def _read(pipe: IO[bytes], lines: _Lines) -> bool:
    """Take what the pipe holds; False at its end."""
    try:
        data = os.read(pipe.fileno(), 1 << 16)
    except BlockingIOError:
        return True
    if data:
        lines.feed(data)
    return bool(data)


class _Exit:
    """A file that becomes ready when a process ends; where there is no pidfd, a pace to look at."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.file: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
            self.file = os.pidfd_open(process.pid)
        self.pace = PACE if self.file is None else None

    def __enter__(self) -> _Exit:  # noqa: PYI034  # private
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            os.close(self.file)


class _Lines:
    """Turns any bytes into lines of text that may stand in a log, and no more of them than a log can bear."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rest = b""
        self._skipping = False  # inside a line that was cut already
        self._lines = self._bytes = 0
        self._left_out_lines = self._left_out_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the output."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            if self._skipping:
                self._skipping = False
                self._left_out_bytes += len(line)
            else:
                self._line(line)
        if self._skipping:
            self._left_out_bytes += len(self._rest)
            self._rest = b""
        elif len(self._rest) > 4 * MAX_LINE:
            self._line(self._rest)
            self._rest, self._skipping = b"", True

    def close(self) -> None:
        """The output is over."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if self._left_out_lines or self._left_out_bytes:
            self._say(f"… {self._left_out_lines} more lines, {self._left_out_bytes} bytes of output not shown")

    def _line(self, line: bytes) -> None:
        if self._lines >= MAX_LINES or self._bytes >= MAX_BYTES:
            self._left_out_lines += 1
            self._left_out_bytes += len(line)
            return
        self._lines += 1
        # A progress bar overwrites its line; what a terminal would show at the end is what counts.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
        if len(text) > MAX_LINE:
            self._left_out_bytes += len(line)
            text = text[:MAX_LINE] + "… (cut)"
        self._bytes += len(text)
        self._say("".join(sign if sign.isprintable() or sign == "\t" else "\ufffd" for sign in text))


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)
