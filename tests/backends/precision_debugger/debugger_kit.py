"""What the tests of the precision_debugger backend share, in the test process and in the processes that they start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankscope.artifacts.ledger import read_ledgers

TOOL = "precision_debugger"


def config(save_path: Path | str, *roles: str, common: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A config that profiles every rank of these roles (actor by default) with these options of the tool."""
    return {
        "global_profiler": {
            "tool": TOOL,
            "steps": [1, 2, 3],
            "save_path": str(save_path),
            "global_tool_config": {TOOL: options},
            **(common or {}),
        },
        **{role: {"profiler": {"enable": True, "ranks": "all"}} for role in roles or ("actor",)},
    }


def own_options(values: dict[str, Any], role: str, **options: Any) -> dict[str, Any]:
    """The config, with options of the tool for one role."""
    values[role]["profiler"]["tool_config"] = {TOOL: options}
    return values


def msprobe_json(path: Path, **values: Any) -> str:
    """Write a config file of msprobe; its path."""
    task = values.get("task", "statistics")
    content = {"task": task, "dump_path": "/nowhere", "rank": [], "step": [], "level": "L0", task: {}, **values}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


def folders(save_path: Path) -> list[str]:
    """Every folder below the save path that holds files, relative to it; neither rankscope's own nor those inside."""
    found = {path.parent.relative_to(save_path) for path in save_path.rglob("*") if path.is_file()}
    return sorted(
        str(path) for path in found if path.parts[:1] not in {(), (".rankscope",)} and path.name != "dump_tensor_data"
    )


def dumps(save_path: Path, step: int, stage: str, rank: int = 0) -> Path:
    """Where the dump of a stage has to lie."""
    return save_path / f"step_{step}" / stage / f"step{step}" / f"rank{rank}"


def data(folder: Path) -> dict[str, Any]:
    """The entries of a dump."""
    entries: dict[str, Any] = json.loads((folder / "dump.json").read_text())["data"]
    return entries


def ledger(save_path: Path, kind: str, **facts: Any) -> list[dict[str, Any]]:
    """Ledger records of a kind that hold these facts."""
    return [
        record
        for record in read_ledgers(save_path)
        if record["kind"] == kind and all(record.get(key) == value for key, value in facts.items())
    ]


def artifacts(save_path: Path, *keys: str) -> list[tuple[Any, ...]]:
    """These facts of every line about an artifact, in order."""
    return [tuple(record.get(key) for key in keys) for record in ledger(save_path, "artifact")]


def messages(stderr: str, level: str | None = None) -> Iterator[dict[str, Any]]:
    """rankscope's messages in a text that was logged with RANKSCOPE_LOG_FORMAT=json."""
    for line in stderr.splitlines():
        if line.startswith('{"logger": "rankscope"'):
            message = json.loads(line)
            if level in {None, message["level"]}:
                yield message
