"""The name of this host, as it goes into file names and ledgers."""

from __future__ import annotations

import re
import socket
from pathlib import Path


def host_name() -> str:
    """Short name of this host, of letters, digits and hyphens; an address keeps all its numbers."""
    try:
        full = socket.gethostname()
    except OSError:
        full = ""
    short = full if re.fullmatch(r"[\d.]+|[\da-fA-F:]*:[\da-fA-F:.]*", full) else full.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9]+", "-", short).strip("-")[:63] or "host"


def born(pid: int) -> int | None:
    """When a process of this host was started, in ticks since the boot; None when it is gone, or only a zombie.

    With it a process can be told from a later one that got the same pid, as it happens when a container is restarted.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The name in brackets may hold blanks and brackets itself: the fields begin after the last one.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
