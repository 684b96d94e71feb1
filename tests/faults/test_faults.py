"""Whatever happens, the training ends as it would have without profiling, and the ledger tells what came of it."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_table
import pytest
from fault_matrix import SCENARIOS, Scenario
from kit import left_over, messages, partial_overlaps, until

from rankscope.artifacts.ledger import read_ledgers
from rankscope.artifacts.status import read_status

pytestmark = pytest.mark.torch

LABELS = re.compile(r"rollout|update|mini_batch\d|level\d|call|block|model|gradients|forward|backward|in_child")
"""All stages of the programs."""

Told = dict[int, set[tuple[str, str]]]

CELLS = [
    pytest.param(scenario, mode, contents, id=f"{scenario.name}-{mode}-{contents}")
    for scenario in SCENARIOS
    for mode, contents in scenario.cells
]


def told(save_path: Path, tool: str = "torch") -> Told:
    """For each step, states and reasons as ``rankscope status`` tells them."""
    found: Told = defaultdict(set)
    for row in read_status(save_path).rows:
        if row.tool == tool and row.step is not None:
            found[row.step].add((row.status, row.reason))
    return dict(found)


def fits(found: Told, expected: dict[int, str]) -> bool:
    if found.keys() != expected.keys():
        return False
    return all(
        any({status for status, _ in found[step]} == set(way.split("+")) for way in expected[step].split("|"))
        for step in expected
    )


def check_whole(path: Path) -> None:
    """A file under a final name: whole, strict JSON, and rows that nest."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    document = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8"), parse_constant=refuse)
    if "gate" not in document:
        assert document["traceName"] == path.name
        assert document["traceEvents"]
        # Between torch's own rows and frames it is torch's business; ours have to nest with everything.
        cut = {event["name"] for event in document["traceEvents"] if _cut_off(event)}
        ours = {event["name"] for event in document["traceEvents"] if LABELS.fullmatch(event["name"])} - cut
        overlaps = partial_overlaps(document["traceEvents"])
        assert [pair for pair in overlaps if ours.intersection(pair)] == []


def _cut_off(event: dict[str, Any]) -> bool:
    """Whether a row was still running at the end of the capture."""
    return "finished" in event.get("args", {}) or "unfinished" in event.get("args", {})


def check_files(save_path: Path) -> None:
    """Only whole files under final names, and the ledger's files are those."""
    if not save_path.is_dir():
        return
    for path in save_path.iterdir():
        if path.name != ".rankscope":
            assert path.name.endswith(".json.gz"), path
            check_whole(path)
    for record in read_ledgers(save_path):
        if record["kind"] == "artifact" and record["status"] == "published":
            assert record["path"].endswith(".json.gz")


def check_growth(notes: dict[str, Any]) -> None:
    """Neither memory nor open files grow with the number of windows."""
    for name, factor, slack in (("resident", 1.25, 32 << 20), ("files", 1.0, 2)):
        seen = notes[name]
        third = len(seen) // 3
        middle, last = sorted(seen[third : 2 * third]), sorted(seen[2 * third :])
        assert last[third // 2] <= middle[third // 2] * factor + slack, (name, seen)


def check_waited(notes: dict[str, Any]) -> None:
    """The step after the hang waited once for the other thread (a second here), and no more."""
    assert notes["seconds"] < 10


NOTES: dict[str, Callable[[dict[str, Any]], None]] = {"many_sessions": check_growth, "hanging_stop": check_waited}
"""What is looked at beside the common checks."""


@pytest.mark.parametrize(("scenario", "mode", "contents"), CELLS)
def test_fault(
    scenario: Scenario,
    mode: str,
    contents: str,
    fault_server: Any,
    unprofiled: Callable[[Scenario, str], Any],
    small_disk: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    disk = small_disk(scenario.disk) if scenario.disk else tmp_path
    save_path = disk / "out"
    ended = fault_server.run(
        tmp_path / "run",
        save_path,
        program=scenario.program,
        arguments=dict(scenario.arguments),
        on=True,
        mode=mode,
        contents=[contents],
        seconds=scenario.seconds,
        env={"TMPDIR": str(disk)} if scenario.disk else {},
    )
    plain = unprofiled(scenario, mode)
    assert (plain.code, messages(plain.err)) == (scenario.code, []), plain.err
    assert (ended.code, ended.said) == (plain.code, plain.said), ended.err
    if plain.code:
        assert _last_words(ended.err) == _last_words(plain.err)
    check_ledger(scenario, mode, save_path, ended)
    check_files(save_path)
    NOTES.get(scenario.program, lambda notes: None)(ended.notes)
    if scenario.clean:
        assert left_over(save_path) == []


def test_the_table_in_the_documentation_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert fault_table.section() in page, "run: python tests/faults/fault_table.py"


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    """Half a file, words that are no JSON, rows that overlap, and a stranger's file."""
    row = {"ph": "X", "pid": 1, "tid": 1, "cat": "user_annotation"}
    for number, events in enumerate(
        (
            [{**row, "name": "update", "ts": 0.0, "dur": 2.0}, {**row, "name": "rollout", "ts": 1.0, "dur": 3.0}],
            [{**row, "name": "update", "ts": float("nan"), "dur": 1.0}],
            [],
        )
    ):
        path = tmp_path / f"{number}.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceName": path.name, "traceEvents": events}).encode()))
        with pytest.raises((AssertionError, ValueError)):
            check_files(tmp_path)
        whole = {"traceName": path.name, "traceEvents": [{**row, "name": "update", "ts": 0.0, "dur": 1.0}]}
        path.write_bytes(gzip.compress(json.dumps(whole).encode()))
        check_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EOFError):
        check_files(tmp_path)
    path.rename(tmp_path / "x.json.gz.part")
    with pytest.raises(AssertionError):
        check_files(tmp_path)
    assert fits({1: {("published", ""), ("died", "gone")}}, {1: "published|died+published"})
    assert not fits({1: {("published", "")}}, {1: "died+published"})
    assert not fits({1: {("published", "")}, 2: {("published", "")}}, {1: "published"})


def _last_words(err: str) -> str:
    """The line of an exception that ended the process."""
    lines = [line for line in err.splitlines() if not line.startswith(('{"logger"', "USDT:"))]
    return lines[-1] if lines and not lines[-1].startswith(" ") else ""


def check_ledger(scenario: Scenario, mode: str, save_path: Path, ended: Any) -> None:
    expected = scenario.expects(mode)
    if scenario.ends:  # the helper goes on by itself
        with contextlib.suppress(AssertionError):
            until(lambda: fits(told(save_path), expected), 20)
    found = told(save_path)
    assert fits(found, expected), f"{found}\n{ended.err}"
    for step in found:
        for status, reason in found[step]:
            assert reason or status in {"published", "joined"}, (step, status)
            assert scenario.why.get(status, "") in reason
    if scenario.other is not None:
        assert fits(told(save_path, "gate"), dict(scenario.other)), told(save_path, "gate")
    if scenario.said:
        assert any(scenario.said in str(message) for message in messages(ended.err)), ended.err
