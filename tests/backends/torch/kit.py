"""What the tests of the torch backend share, in the test process and in the processes that they start."""

from __future__ import annotations

import dataclasses
import gzip
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.artifacts.ledger import read_ledgers
from rankscope.artifacts.names import NameFields, parse_name

SLACK = 0.002
"""Microseconds: times stand in the file with three decimals, so a sum of two may be off by the last one twice."""


def config(save_path: Path | str, *roles: str, common: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A config that profiles every rank of these roles (actor by default) with these options of the torch backend."""
    section = {"profiler": {"enable": True, "ranks": "all"}}
    return {
        "global_profiler": {
            "tool": "torch",
            "steps": [1, 2, 3],
            "save_path": str(save_path),
            "global_tool_config": {"torch": {"contents": ["cpu"], **options}},
            **(common or {}),
        },
        **dict.fromkeys(roles or ("actor",), section),
    }


def op(name: str) -> None:
    """Run one operator, so that ``aten::<name>`` is in the trace of whoever records now."""
    import torch

    getattr(torch.ones(8), name)()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for something to become true; what it was."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come true within {seconds} seconds")
        time.sleep(0.01)
    return found


@dataclasses.dataclass
class Row:
    """One range of ours in a trace: an event with a duration, or a begin and an end."""

    name: str
    start: float
    end: float
    tid: int
    phase: str
    args: dict[str, Any]


class Trace:
    """A finished trace, read strictly. Making one checks what must hold for every file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name: NameFields = parse_name(path.name)  # type: ignore[assignment]
        assert self.name is not None, f"{path.name} does not follow the grammar of names"
        self.text = gzip.decompress(path.read_bytes()).decode("utf-8")
        self.document = json.loads(self.text, parse_constant=_refuse)
        self.events: list[dict[str, Any]] = self.document["traceEvents"]
        self.meta: dict[str, Any] = self.document["rankscope"]
        self.place: dict[str, Any] = self.document["distributedInfo"]
        assert self.document["traceName"] == path.name
        assert self.place["rank"] == self.meta["rank"] == self.name.rank
        assert self.place["world_size"] >= 1
        assert self.meta["step"] == self.name.step
        assert self.meta["pid"] == self.name.pid
        assert partial_overlaps(self.events) == []

    @property
    def rows(self) -> list[Row]:
        """Ranges of ours, in the order of their begin."""
        rows = []
        ends = {event["id"]: event for event in self.events if event.get("ph") == "e"}
        for event in self.events:
            if event.get("cat") != "user_annotation" or event["ph"] not in {"X", "b"}:
                continue
            end = event["ts"] + event["dur"] if event["ph"] == "X" else ends.pop(event["id"])["ts"]
            rows.append(Row(event["name"], event["ts"], end, event["tid"], event["ph"], event.get("args", {})))
        assert not ends, "an end without its begin"
        return sorted(rows, key=lambda row: row.start)

    @property
    def labels(self) -> list[str]:
        """Names of the ranges, in the order of their begin."""
        return [row.name for row in self.rows]

    @property
    def ops(self) -> set[str]:
        """Operators that were recorded, without ``aten::``."""
        return {event["name"].removeprefix("aten::") for event in self.events if event.get("cat") == "cpu_op"}

    def row(self, name: str) -> Row:
        """The only range of that name."""
        found = [row for row in self.rows if row.name == name]
        assert len(found) == 1, f"{name!r} is there {len(found)} times; there are {self.labels}"
        return found[0]


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def partial_overlaps(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of complete events of one thread that overlap without nesting; viewers throw one of them away."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            threads[event["pid"], event["tid"]].append(event)
    wrong = []
    for spans in threads.values():
        around: list[tuple[float, str]] = []
        for span in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
            start, end = span["ts"], span["ts"] + span["dur"]
            while around and around[-1][0] <= start + SLACK:
                around.pop()
            if around and end > around[-1][0] + SLACK:
                wrong.append((around[-1][1], span["name"]))
            around.append((end, span["name"]))
    return wrong


def traces(save_path: Path) -> list[Trace]:
    """All finished traces, by step and then by time; nothing else may lie in the save path."""
    paths = [path for path in save_path.iterdir() if path.name != ".rankscope"] if save_path.is_dir() else []
    assert all(path.name.endswith(".json.gz") for path in paths), paths
    found = [Trace(path) for path in paths]
    return sorted(
        found, key=lambda trace: (trace.name.step or 0, trace.document["baseTimeNanoseconds"], trace.name.time)
    )


def trace(save_path: Path) -> Trace:
    """The only trace."""
    found = traces(save_path)
    assert len(found) == 1, [trace.path.name for trace in found]
    return found[0]


def left_over(save_path: Path) -> list[str]:
    """Files of ours that are not whole, or whose work was not done."""
    folders = (save_path / ".rankscope" / name for name in ("partial", "staged"))
    return sorted(path.name for folder in folders if folder.is_dir() for path in folder.iterdir())


def ledger(save_path: Path, kind: str, **facts: Any) -> list[dict[str, Any]]:
    """Ledger records of a kind that hold these facts."""
    return [
        record
        for record in read_ledgers(save_path)
        if record["kind"] == kind and all(record.get(key) == value for key, value in facts.items())
    ]


def outcomes(save_path: Path) -> Counter[str]:
    """How often each state of an artifact was written down."""
    return Counter(record["status"] for record in ledger(save_path, "artifact"))


def messages(stderr: str, level: str | None = None) -> list[dict[str, Any]]:
    """rankscope's messages in a text that was logged with RANKSCOPE_LOG_FORMAT=json."""
    found = []
    for line in stderr.splitlines():
        if line.startswith('{"logger": "rankscope"'):
            message = json.loads(line)
            if level in {None, message["level"]}:
                found.append(message)
    return found
