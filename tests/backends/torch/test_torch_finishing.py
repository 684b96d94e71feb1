"""rankscope_torch.trace.finish on raw files of all sorts: whole, damaged, cut off, empty, and large."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import NothingRecorded
from rankscope_torch import trace as finishing

BASE_NS = 1_700_000_000_000_000_000
PID = 4711

HEADER = """{
  "schemaVersion": 1,
  "deviceProperties": [
  ],
  "record_shapes": 0,
  "trace_id": "0123",
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": BASE,
  "traceEvents": [""".replace("BASE", str(BASE_NS))

TAIL = """
  ],
  "traceName": "raw.json"
}
"""


def event(
    name: str = "aten::cos",
    ts: float = 10.0,
    dur: float = 2.0,
    *,
    cat: str = "cpu_op",
    tid: int = PID,
    old: bool = False,
) -> str:
    """An event as torch 2.13 writes it, or as earlier versions did."""
    between, end = (" ", "") if old else ("\n    ", "\n    ")
    return (
        f'\n  {{\n    "ph": "X",{between}"cat": "{cat}",{between}"name": "{name}",{between}"pid": {PID},{between}'
        f'"tid": {tid},\n    "ts": {ts:.3f},{between}"dur": {dur:.3f}{end},\n'
        '    "args": {\n      "External id": 1,"Record function id": 0, "Ev Idx": 0\n    }\n  }'
    )


def row(label: str, start: float, end: float, *, tid: int = PID, cut: bool = False) -> list[Any]:
    """A row of ours, with times in microseconds after the base."""
    return [label, BASE_NS + int(start * 1000), BASE_NS + int(end * 1000), tid, "a thread", "with", cut]


@pytest.fixture
def finish(tmp_path: Path) -> Callable[..., Any]:
    """Finish a raw file; (facts, document)."""

    def run(
        raw: str | bytes, *, rows: list[Any] | None = None, labels: dict[str, str] | None = None, **metadata: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        staged, temporary = tmp_path / "raw.json", tmp_path / "out.json.gz"
        staged.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        facts = finishing.finish(
            staged,
            temporary,
            "name.json.gz",
            {
                "metadata": {"rank": 3, "world_size": 8, "pid": PID, "contents": ["cpu"], **metadata},
                "rows": rows or [],
                "labels": labels or {},
                "compression": 6,
            },
        )
        document = json.loads(gzip.decompress(temporary.read_bytes()))
        assert document["traceName"] == "name.json.gz"
        return facts, document

    return run


def raw(*events: str) -> str:
    return HEADER + ",".join(events) + TAIL


def names(document: dict[str, Any]) -> list[str]:
    return [found["name"] for found in document["traceEvents"]]


def test_a_whole_file_stays_as_it_is(finish: Callable[..., Any]) -> None:
    facts, document = finish(raw(event("aten::cos"), event("aten::sin")))
    assert facts == {"events": 2}
    assert names(document) == ["aten::cos", "aten::sin"]
    assert document["traceEvents"][0]["args"] == {"External id": 1, "Record function id": 0, "Ev Idx": 0}
    assert (document["distributedInfo"]["rank"], document["distributedInfo"]["world_size"]) == (3, 8)
    assert document["baseTimeNanoseconds"] == BASE_NS
    assert document["schemaVersion"] == 1


@pytest.mark.parametrize("world_size", [None, 2])
def test_torch_s_own_rank_is_kept_beside_ours(finish: Callable[..., Any], world_size: int | None) -> None:
    info = '"distributedInfo": {"backend": "gloo", "rank": 1, "world_size": 2},\n  "traceEvents": ['
    _, document = finish(raw(event()).replace('"traceEvents": [', info), world_size=world_size)
    assert document["distributedInfo"] == {"backend": "gloo", "rank": 3, "group_rank": 1, "world_size": 2}


@pytest.mark.parametrize("whole", [HEADER, HEADER + event(), HEADER + event() + ",", raw(event())[:-40]])
def test_a_file_that_is_cut_off_is_no_trace(finish: Callable[..., Any], whole: str) -> None:
    with pytest.raises(finishing.TraceInvalid, match="cut off"):
        finish(whole)


@pytest.mark.parametrize("whole", [b"", b"{}", b"\x00\xff" * 100, HEADER[:40].encode()])
def test_a_file_without_events_is_no_trace(finish: Callable[..., Any], whole: bytes) -> None:
    with pytest.raises(finishing.TraceInvalid, match="no traceEvents"):
        finish(whole)


@pytest.mark.parametrize(
    "events",
    [
        (),
        (event("PyTorch Profiler (0)", cat="Trace"), event("Buffer Flush", cat="overhead")),
        ('\n  {\n    "name": "process_name", "ph": "M", "ts": 1.000, "pid": 1, "tid": 0,\n    "args": {}\n  }',),
    ],
)
def test_a_trace_of_nothing_is_not_kept(finish: Callable[..., Any], events: tuple[str, ...]) -> None:
    with pytest.raises(NothingRecorded, match="no operator"):
        finish(raw(*events))


def test_rows_of_ours_alone_are_something(finish: Callable[..., Any]) -> None:
    facts, document = finish(raw(), rows=[row("stage", 5, 9)])
    assert (facts["events"], facts["rows_added"]) == (1, 1)
    assert names(document) == ["thread_name", "stage"]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b'say "hi"', 'say "hi"'),
        (b"back\\slash", "back\\slash"),
        (b"control\x01character", "control\x01character"),
        (b"tab\there", "tab\there"),
        (b"not \xff\xfe UTF-8", "not \ufffd\ufffd UTF-8"),
        (b'"', '"'),
        (b"}", "}"),
        ("größer".encode(), "größer"),
    ],
)
def test_names_that_are_no_json_are_repaired_and_the_rest_stays(
    finish: Callable[..., Any], name: bytes, shown: str, old: bool
) -> None:
    before, after = event("aten::cos").encode(), event("aten::sin").encode()
    damaged = event("NAME", old=old).encode().replace(b"NAME", name)
    facts, document = finish(HEADER.encode() + b",".join([before, damaged, after]) + TAIL.encode())
    assert names(document) == ["aten::cos", shown, "aten::sin"]
    valid = name in {b"}", "größer".encode()}
    assert facts == ({"events": 3} if valid else {"events": 3, "repaired": 1})
    assert document["traceEvents"][1]["args"]["External id"] == 1


def test_arguments_that_are_no_json_are_repaired_or_given_up(finish: Callable[..., Any]) -> None:
    quoted = event("aten::cos").replace('"Ev Idx": 0', '"Call stack": "a"b.py(1): f"')
    hopeless = event("aten::sin").replace('"Ev Idx": 0', '"Ev Idx": nan')
    facts, document = finish(raw(quoted, hopeless))
    assert facts == {"events": 2, "repaired": 2}
    first, second = document["traceEvents"]
    assert first["args"]["Call stack"] == 'a"b.py(1): f'
    assert (second["name"], second["args"]) == ("aten::sin", {"rankscope": "arguments were not valid JSON"})


def test_an_event_beyond_repair_is_left_out_and_counted(finish: Callable[..., Any]) -> None:
    facts, document = finish(raw(event("aten::cos"), event("aten::sin").replace('"ts": 10.000', '"ts": inf')))
    assert facts == {"events": 1, "dropped": 1}
    assert names(document) == ["aten::cos"]


def test_a_damaged_header_keeps_the_time_base(finish: Callable[..., Any]) -> None:
    facts, document = finish(raw(event()).replace('"trace_id": "0123"', '"role": "actor "x"'))
    assert facts == {"events": 1, "repaired": 1}
    assert document["baseTimeNanoseconds"] == BASE_NS
    assert document["rankscope"]["rank"] == 3


def test_labels_are_put_back_everywhere(finish: Callable[..., Any]) -> None:
    label = 'exact "label" \\ größer \ud83d'
    facts, document = finish(
        raw(*(event("safe#1", cat="user_annotation", ts=ts) for ts in (1.0, 20.0))), labels={"safe#1": label}
    )
    shown = label.encode("utf-8", "replace").decode()
    assert names(document) == [shown, shown]
    assert document["rankscope"]["labels"] == {"safe#1": shown}
    assert facts == {"events": 2}


def test_rows_that_do_not_nest_become_asynchronous(finish: Callable[..., Any], kit: Any) -> None:
    rows = [
        row("inside", 11, 19),
        row("across", 15, 25),
        row("around", 5, 30),
        row("across ours", 3, 12),
        row("elsewhere", 15, 25, tid=1),
        row("still running", 40, 50, cut=True),
    ]
    facts, document = finish(raw(event("aten::cos", 10, 10)), rows=rows)
    assert kit.partial_overlaps(document["traceEvents"]) == []
    phases = {found["name"]: found["ph"] for found in document["traceEvents"] if found["ph"] in "Xb"}
    assert (
        phases
        == {
            "aten::cos": "X",
            "inside": "X",
            "across": "b",
            "around": "b",
            "across ours": "b",
            "elsewhere": "X",
            "still running": "X",
        }
        or phases["across ours"] != phases["around"]
    )
    assert (facts["rows_added"], facts["rows_async"]) == (6, list(phases.values()).count("b"))
    begins = {found["id"]: found for found in document["traceEvents"] if found["ph"] == "b"}
    ends = {found["id"]: found for found in document["traceEvents"] if found["ph"] == "e"}
    assert begins.keys() == ends.keys()
    assert all(ends[key]["ts"] > begins[key]["ts"] for key in begins)
    [running] = [found for found in document["traceEvents"] if found["name"] == "still running"]
    assert running["args"]["unfinished"] is True


def test_a_row_that_torch_cut_off_is_not_shown_twice(finish: Callable[..., Any]) -> None:
    cut = event("stage", 10.0, 30.0, cat="user_annotation").replace('"Ev Idx": 0', '"finished": false, "Ev Idx": 0')
    facts, document = finish(raw(cut), rows=[row("stage", 9, 40, cut=True), row("stage", 50, 60)])
    assert [(found["name"], found["ts"]) for found in document["traceEvents"] if found["ph"] == "X"] == [
        ("stage", 10.0),
        ("stage", 50.0),
    ]
    assert facts["rows_added"] == 1


def test_frames_of_ours_are_taken_out_of_stacks(finish: Callable[..., Any], kit: Any) -> None:
    events = [
        event("train.py(3): main", 1, 50, cat="python_function"),
        event("rankscope_torch/ranges.py(83): __enter__", 8, 4, cat="python_function"),
        event("<built-in method _record_function_with_args_enter of x>", 9, 2, cat="python_function"),
        event("rankscope/annotate.py(9): wrapper", 7, 40, cat="python_function"),
        event("rankscope/examples/train.py(9): mine", 15, 2, cat="python_function"),
        event("stage", 10, 20, cat="user_annotation"),
    ]
    _, document = finish(raw(*events), contents=["cpu", "stack"])
    assert names(document) == [
        "train.py(3): main",
        "rankscope/annotate.py(9): wrapper",
        "rankscope/examples/train.py(9): mine",
        "stage",
    ]
    assert kit.partial_overlaps(document["traceEvents"]) == []


@pytest.mark.parametrize("block", [5, 6, 7, 8, 11, 31, 64, 127, 500])
def test_the_size_of_blocks_changes_nothing(
    finish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    events = [
        event("safe#1", 1, 5, cat="user_annotation"),
        event('say "hi"', 10, 1),
        event("aten::sin", 12, 30),
        event("aten::größer", 60, 3),
        event("aten::kernel", 70, 3, cat="kernel"),
    ]
    arguments: dict[str, Any] = {"rows": [row("across", 20, 50)], "labels": {"safe#1": "exact"}}
    expected = finish(raw(*events), **arguments)
    monkeypatch.setattr(finishing, "BLOCK", block)
    assert finish(raw(*events), **arguments) == expected
    assert expected[0] == {"events": 6, "device_events": 1, "repaired": 1, "rows_added": 1, "rows_async": 1}


@pytest.mark.parametrize("seed", range(20))
def test_any_damage_gives_a_valid_file_or_a_reason(finish: Callable[..., Any], seed: int) -> None:
    chance = random.Random(seed)
    whole = bytearray(raw(*(event(f"aten::op{number}", number * 10.0) for number in range(30))).encode())
    for _ in range(chance.randint(1, 12)):
        at = chance.randrange(len(whole))
        if chance.random() < 0.5:
            whole[at] = chance.randrange(256)
        else:
            del whole[at : at + chance.randint(1, 20)]
    try:
        facts, document = finish(bytes(whole))
    except (finishing.TraceInvalid, NothingRecorded):
        return
    else:
        kept = [found for found in document["traceEvents"] if found.get("ph") != "M"]
        assert facts["events"] == len(
            [found for found in kept if found.get("cat", "") not in {"", "Trace", "overhead"}]
        )


def test_a_large_file_is_streamed(tmp_path: Path) -> None:
    staged, temporary = tmp_path / "raw.json", tmp_path / "out.json.gz"
    count = 200_000
    with staged.open("w") as file:
        file.write(HEADER)
        for number in range(0, count, 1000):
            file.write("," if number else "")
            file.write(",".join(event("aten::cos", ts) for ts in range(number, number + 1000)))
        file.write(TAIL)
    size = staged.stat().st_size
    assert size > 30_000_000
    tracemalloc.start()
    try:
        facts = finishing.finish(
            staged,
            temporary,
            "name.json.gz",
            {"metadata": {"rank": 0, "world_size": 1, "pid": PID}, "compression": 1},
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert facts["events"] == count
    assert peak < size / 5, "the file is not to be held in memory"
