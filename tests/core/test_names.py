from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.artifacts.names import (
    MAX_BYTES,
    MAX_LABEL,
    NameFields,
    clean_label,
    file_pattern,
    fit,
    format_name,
    matches,
    numbered,
    parse_name,
    time_text,
)

TIME = "20260102030405678"


def fields(**changes: Any) -> NameFields:
    return NameFields(**{"rank": 3, "pid": 77, "time": TIME, **changes})


def test_full_name() -> None:
    full = fields(
        role="actor_rollout_ref",
        scope="train",
        step=5,
        world_size=8,
        topology={"tp": 1, "pp": 0, "dp": 2, "cp": 0, "ep": 3},
        counter=2,
        part="mb3-4",
        suffix=".json.gz",
    )
    assert format_name(full) == (
        "actor-rollout-ref_train_step5_rank3-of-8_tp1-pp0-dp2-cp0-ep3_pid77_20260102030405678-2_mb3-4.json.gz"
    )


def test_shortest_name_and_step_zero() -> None:
    assert format_name(fields()) == f"rank3_pid77_{TIME}"
    assert format_name(fields(step=0)) == f"step0_rank3_pid77_{TIME}"


def test_time_is_utc_to_the_millisecond() -> None:
    assert time_text(0) == "19700101000000000"
    assert time_text(1_767_323_045_678_999_999) == "20260102030405678"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            f"value-model_train_step12_rank0-of-16_tp0-pp1-dp2-cp0_pid4242_{TIME}_mb0-3.json.gz",
            fields(
                role="value-model",
                scope="train",
                step=12,
                rank=0,
                world_size=16,
                topology={"tp": 0, "pp": 1, "dp": 2, "cp": 0},
                pid=4242,
                part="mb0-3",
                suffix=".json.gz",
            ),
        ),
        (f"rank0_pid1_{TIME}_part2.json.gz", fields(rank=0, pid=1, part="part2", suffix=".json.gz")),
        (f"actor_step3_rank0_pid1_{TIME}.json", fields(role="actor", step=3, rank=0, pid=1, suffix=".json")),
        (f"actor__rank0_pid1_{TIME}.json", fields(role="actor", rank=0, pid=1, suffix=".json")),  # verl, label lost
        (f"rank0_pid1_{TIME}.json.gz.uploaded", fields(rank=0, pid=1, suffix=".json.gz.uploaded")),
        (f"rank0_pid3_pid77_{TIME}", fields(rank=0, topology={"pid": 3})),
    ],
)
def test_names_are_read(name: str, expected: NameFields) -> None:
    assert parse_name(name) == expected


@pytest.mark.parametrize(
    "name", ["", "trace.json", "rank0_pid1_2026.json", f"a_b_c_rank0_pid1_{TIME}", f"rank0_pid1_{TIME}_mb", "rank0"]
)
def test_other_names_are_not_read(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("actor", "actor"),
        ("actor_rollout_ref", "actor-rollout-ref"),
        ("value model", "value-model"),
        ("__a//b__", "a-b"),
        ("lr=1e-3+x.y", "lr=1e-3+x.y"),
        ("../../etc", "etc"),
        ("..", None),
        ("", ""),
        ("  ", ""),
    ],
)
def test_labels(text: str, label: str | None) -> None:
    if label is None:
        assert clean_label(text).startswith("x")
        assert not clean_label(text).startswith(".")
    else:
        assert clean_label(text) == label


@pytest.mark.parametrize(("one", "other"), [("训练", "推理"), ("训练-a", "a"), ("step3", "step-3"), ("___", "###")])
def test_labels_that_would_be_lost_stay_apart(one: str, other: str) -> None:
    assert clean_label(one)
    assert clean_label(one) != clean_label(other)
    assert parse_name(format_name(fields(role=one))) != parse_name(format_name(fields(role=other)))


def test_a_label_like_a_step_is_not_read_as_one() -> None:
    parsed = parse_name(format_name(fields(role="step3")))
    assert parsed is not None
    assert parsed.step is None
    assert parsed.role.startswith("step3-")


def test_long_labels_are_cut_but_stay_apart() -> None:
    one, other = clean_label("a" * 300), clean_label("a" * 299)
    assert len(one) == len(other) == MAX_LABEL
    assert one != other


@given(st.text(max_size=80))
def test_labels_are_safe_and_stable(text: str) -> None:
    label = clean_label(text)
    assert set(label) <= set(string.ascii_letters + string.digits + ".=+-")
    assert len(label) <= MAX_LABEL
    assert clean_label(label) == label
    assert not label.startswith((".", "-"))
    assert bool(label) == bool(text.strip())


labels = st.text(max_size=70).map(clean_label)
small = st.integers(0, 10**6)
named = st.builds(
    NameFields,
    rank=small,
    pid=small,
    time=st.integers(0, 4_000_000_000 * 10**9).map(time_text),
    role=labels,
    scope=labels,
    step=st.one_of(st.none(), small),
    world_size=st.one_of(st.none(), st.integers(1, 10**6)),
    topology=st.dictionaries(st.sampled_from(["tp", "pp", "dp", "cp", "ep", "etp", "dpshard"]), small, max_size=7),
    counter=st.integers(0, 500),
    part=st.sampled_from(["", "mb0", "mb3-12", "part7"]),
    suffix=st.sampled_from(["", ".json", ".json.gz", ".pickle", ".nsys-rep"]),
)


@given(named)
def test_what_is_written_is_read_back(given_fields: NameFields) -> None:
    name = format_name(given_fields)
    assert len(name.encode()) <= MAX_BYTES
    parsed = parse_name(name)
    assert parsed is not None
    for key in ("rank", "pid", "time", "step", "world_size", "counter", "part", "suffix"):
        assert getattr(parsed, key) == getattr(given_fields, key)
    if given_fields.role and len(name) < MAX_BYTES - 90:
        assert parsed == given_fields
        assert list(parsed.topology) == list(given_fields.topology)
    assert format_name(parsed) == name


def test_a_name_stays_short_whatever_comes() -> None:
    topology = {"".join(chr(97 + int(digit)) for digit in str(number)): number for number in range(100, 140)}
    name = format_name(fields(role="r" * 400, scope="s" * 400, step=10**9, topology=topology, suffix=".json.gz"))
    assert len(name) <= MAX_BYTES
    assert parse_name(name) is not None


@pytest.mark.parametrize(
    "wrong",
    [{"rank": -1}, {"time": "2026"}, {"part": "x"}, {"suffix": "json"}, {"suffix": "./x"}, {"topology": {"tp": -1}}],
)
def test_fields_outside_the_grammar_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of a name must"):
        format_name(fields(**wrong))


@given(named)
def test_planned_patterns_match_the_names(given_fields: NameFields) -> None:
    f = given_fields
    name = format_name(f)
    if len(name) > MAX_BYTES - 90:
        return
    assert matches(name, file_pattern(f.role, f.scope, f.step, f.rank, f.world_size, f.suffix))
    assert not matches(name, file_pattern(f.role, f.scope, f.step, f.rank + 1, f.world_size, f.suffix))


def test_pattern_text() -> None:
    assert file_pattern("actor_x", "train", 3, 0, 2, ".json.gz") == "actor-x_train_step3_rank0-of-2_*.json.gz"
    assert file_pattern("actor", "", None, 0, None) == "actor_rank0_*"


def test_numbered_alternatives() -> None:
    assert numbered(f"rank0_pid1_{TIME}_mb2.json", 0) == f"rank0_pid1_{TIME}_mb2.json"
    assert numbered(f"rank0_pid1_{TIME}_mb2.json", 1) == f"rank0_pid1_{TIME}-1_mb2.json"
    assert numbered(f"rank0_pid1_{TIME}-4.json", 2) == f"rank0_pid1_{TIME}-6.json"
    assert numbered("report.nsys-rep", 3) == "report-3.nsys-rep"
    assert numbered("noext", 1) == "noext-1"
    assert numbered(".hidden", 1) == ".hidden-1"


def test_any_name_can_be_fitted() -> None:
    assert fit("short.txt") == "short.txt"
    long = "é" * 200 + ".nsys-rep"
    assert len(fit(long).encode()) <= MAX_BYTES
    assert fit(long).endswith(".nsys-rep")
    assert fit(long) != fit("é" * 201 + ".nsys-rep")
