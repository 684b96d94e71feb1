"""What the helper process does with a snapshot: read it back with the safe reader, and tell what it holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope import NothingRecorded
from rankscope_torch_memory.analysis import statistics
from rankscope_torch_memory.reading import load

EMPTY = "no memory of the device was allocated in this process"

MOST_READ = 256 << 20
"""Bytes: a larger file is published without being read back, which takes ten times its size in memory."""


def finish(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """Check a staged snapshot and move it to its place.

    Args:
        staged: the file that the training process wrote.
        temporary: where it goes.
        name: its final file name.
        arguments: ``max_entries``: how many events the history could hold, None without a history; ``warnings`` of the
            training process.

    Returns:
        ``events``, bytes now and at the peak, and ``warnings``.

    Raises:
        NothingRecorded: no device memory was allocated, ever.
        SnapshotError: it cannot be read back.
    """
    size = staged.stat().st_size
    warnings = arguments.get("warnings", ())
    if size > MOST_READ:
        facts: dict[str, Any] = {"warnings": [*warnings, f"the snapshot has {size >> 20} MiB and was not read back"]}
    else:
        snapshot = load(staged)
        if is_empty(snapshot):
            raise NothingRecorded(EMPTY)
        facts = described(snapshot, arguments.get("max_entries"), warnings)
    try:
        os.replace(staged, temporary)  # noqa: PTH105 - the same, and it says that it replaces
    except OSError:  # another file system
        shutil.copyfile(staged, temporary)
    return facts


def is_empty(snapshot: Mapping[str, Any]) -> bool:
    """Whether it holds neither memory nor events."""
    return not snapshot.get("segments") and not any(snapshot.get("device_traces") or ())


def described(snapshot: Mapping[str, Any], max_entries: int | None, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The ledger's facts about a snapshot, with these warnings and those of its own."""
    facts = statistics(snapshot)
    largest = facts.pop("largest_history")
    told = list(warnings)
    if max_entries is not None and largest >= max_entries:
        facts["truncated"] = True
        lost = "older ones are lost; raise trace_alloc_max_entries for more"
        told.append(f"the history was full: it holds the last {max_entries} events, {lost}")
    return {**facts, "warnings": told} if told else facts
