"""Ask a running nsys to write the reports that it has put off, from inside the process that it traces."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence

from rankscope_nsys.attached import Attached, untraced

Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]

_WORDS = re.compile(r"\s+")


def session_name(listing: str, session: str) -> str:
    """The name of a session in the output of ``nsys sessions list``; empty where it is not there.

    Only the session that traces this process may be touched; others on this machine are other people's.
    """
    for line in listing.splitlines():
        words = _WORDS.split(line.strip(), maxsplit=4)
        if len(words) == 5 and words[0] == session:
            return words[4]
    return ""


def write_reports_now(attached: Attached, seconds: float, run: Run | None = None) -> str:
    """Let nsys end its collecting and write its reports; the application goes on.

    With ``--capture-range-end=repeat`` nsys 2023.4 writes nothing before the application ends. ``nsys stop`` makes it
    write at once. It opens no capture range after that.

    Args:
        attached: the nsys of this process.
        seconds: how long it may take.
        run: runs a command with a time limit; replaced by tests.

    Returns:
        Why it did not, or an empty text.
    """
    run = run or _run
    deadline = time.monotonic() + seconds
    try:
        listed = run([attached.program, "sessions", "list"], seconds)
        name = session_name(listed.stdout, attached.session)
        if not name:
            return f"nsys does not list its session {attached.session}"
        done = run([attached.program, "stop", f"--session={name}"], max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"nsys was not done within {seconds:g} seconds (report_wait)"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode != 0:
        return " ".join((done.stdout + " " + done.stderr).split())[-300:] or f"exit status {done.returncode}"
    return ""


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        env=untraced(os.environ),
        check=False,
    )
