"""The name of this host, as it goes into file names and ledgers."""

from __future__ import annotations

import re
import socket


def host_name() -> str:
    """Short name of this host, of letters, digits and hyphens; an address keeps all its numbers."""
    try:
        full = socket.gethostname()
    except OSError:
        full = ""
    short = full if re.fullmatch(r"[\d.]+|[\da-fA-F:]*:[\da-fA-F:.]*", full) else full.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9]+", "-", short).strip("-")[:63] or "host"
