"""Runs in rankscope's helper process: light imports only."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope import NothingRecorded


def pack(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """Check the raw trace, add what it is of, and compress it.

    Raises:
        NothingRecorded: no call and no stage is in it.
    """
    trace = json.loads(staged.read_bytes().decode("utf-8", "replace"))
    calls = sum(event.get("ph") == "X" for event in trace["traceEvents"])
    if not calls:
        raise NothingRecorded("the window holds no call of a Python function")
    trace["rankscope"] = dict(arguments)
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(trace, file)
    return {"events": calls}
