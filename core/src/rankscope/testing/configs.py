"""Configs and ledgers in a test: what most tests of a backend begin and end with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.artifacts.ledger import read_ledgers


def profile_config(
    save_path: Path | str,
    tool: str | Sequence[str],
    *,
    steps: Any = (1, 2, 3),
    roles: Sequence[str] = ("actor",),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    section: Mapping[str, Any] | None = None,
    **common: Any,
) -> dict[str, Any]:
    """A config in which the roles are profiled on all ranks.

    Args:
        save_path: directory of the artifacts.
        tool: one tool, or several.
        steps: the profiled steps.
        roles: one section is made for each.
        options: by tool.
        section: more keys for each role's section.
        **common: more keys of ``global_profiler``.
    """
    own = {"enable": True, "all_ranks": True, **(section or {})}
    return {
        "global_profiler": {
            "steps": list(steps) if isinstance(steps, tuple) else steps,
            "tool": tool if isinstance(tool, str) else list(tool),
            "save_path": str(save_path),
            "global_tool_config": {name: dict(values) for name, values in (options or {}).items()},
            **common,
        },
        **{role: {"profiler": dict(own)} for role in roles},
    }


def read_ledger(save_path: Path | str, kind: str | None = None, **facts: Any) -> list[dict[str, Any]]:
    """The ledger's records of a save path: of one kind or of all, and only those that hold these facts."""
    return [
        record
        for record in read_ledgers(save_path)
        if kind in {None, record["kind"]} and all(record.get(key) == value for key, value in facts.items())
    ]


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is true.

    Raises:
        AssertionError: it did not become true in time.
    """
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= limit:
            raise AssertionError(f"it did not happen within {seconds:g} seconds")
        time.sleep(0.02)
