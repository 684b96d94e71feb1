"""Processes of a cluster; for the tests and the fixtures of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def kill_processes_of(folder: Path) -> None:
    """End all processes of a cluster, by their ids, until there are none."""
    deadline = time.monotonic() + 10
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def processes_of(folder: Path) -> list[int]:
    """Processes that name a folder in their command line, or have a file open in it: agents of Ray hide the former."""
    found = set(processes_with(str(folder)))
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(folder) in os.readlink(link):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})


def processes_with(text: str) -> list[int]:
    """Processes whose command line holds a text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found
