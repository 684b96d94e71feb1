"""A child process in our place: it gets our signals, ends with us, and its exit status becomes ours."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


def run_child(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command to its end.

    Signals that come to this process are sent on to it. When this process is killed, it is told to end as well.

    Returns:
        Its exit status; 128 plus the signal's number where a signal ended it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it was killed before this took effect
            os.kill(os.getpid(), signal.SIGTERM)

    waiting: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            waiting.append(number)
        elif number != signal.SIGINT or not _from_terminal():
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        process = subprocess.Popen(command, env=dict(environ), preexec_fn=end_with_parent)  # noqa: PLW1509
        for number in waiting:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _from_terminal() -> bool:
    """Whether Ctrl-C reached the child already, since the terminal sends it to the whole foreground group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
