"""Real file names of the engines, as their sources make them: what is read, and of which GPU they are.

A row that names no GPU is one that must not be guessed; a wrong one would be worse than none.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.rollout import Layout, parse_relocated
from rankscope.rollout.engine import Engine, EngineFile
from rankscope.rollout.names import locate, relocated_name
from rankscope.rollout.sglang import SglangEngine
from rankscope.rollout.trtllm import TrtllmEngine
from rankscope.rollout.vllm import VllmEngine
from rankscope.rollout.whole import TraceInfo

NS = "1796005044617453119"
END = f".{NS}.pt.trace.json.gz"
TP2, TP4 = Layout(tp=2), Layout(tp=4)
VLLM, SGLANG, TRTLLM = VllmEngine(), SglangEngine(), TrtllmEngine()
OURS = "rankscope-step7-0badcafe"


def parsed(engine: Engine, name: str) -> EngineFile:
    file = engine.parse(name)
    assert file is not None, name
    return file


def place(
    engine: Engine,
    name: str,
    width: int,
    layout: Layout | None = None,
    beside: tuple[str, ...] = (),
    info: TraceInfo | None = None,
) -> int | None:
    seen = [parsed(engine, one) for one in beside]
    return locate(engine, parsed(engine, name), tuple(range(width)), layout=layout, seen=seen, info=info).local


# What is read.


@pytest.mark.parametrize(
    ("engine", "name", "kind", "rank", "coordinates"),
    [
        (VLLM, f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", "trace", 1, {"dp": 0, "pp": 0, "tp": 1, "dcp": 0, "ep": 1}),
        (VLLM, f"{OURS}_dp1_pp0_tp0_dcp0_ep0_rank0{END}", "trace", 0, {"dp": 1, "pp": 0, "tp": 0, "dcp": 0, "ep": 0}),
        (VLLM, f"dp9_dp0_pp1_tp3_dcp1_ep7_rank7{END}", "trace", 7, {"dp": 0, "pp": 1, "tp": 3, "dcp": 1, "ep": 7}),
        (
            VLLM,
            f"dp0_pp0_tp0_pcp1_dcp0_ep0_rank4{END}",
            "trace",
            4,
            {"dp": 0, "pp": 0, "tp": 0, "pcp": 1, "dcp": 0, "ep": 0},
        ),
        (
            VLLM,
            "dp0_pp0_tp1_dcp0_ep1_rank1.1796005044617453119.pt.trace.json",
            "trace",
            1,
            {"dp": 0, "pp": 0, "tp": 1, "dcp": 0, "ep": 1},
        ),
        (
            VLLM,
            "dp0_pp0_tp1_dcp0_ep1_rank1.profiler_out.txt",
            "table",
            1,
            {"dp": 0, "pp": 0, "tp": 1, "dcp": 0, "ep": 1},
        ),
        (VLLM, f"rank3{END}", "trace", 3, {}),
        (VLLM, f"warm_rank3{END}", "trace", 3, {}),
        (VLLM, f"3f2a1-rank-1{END}", "trace", 1, {}),
        (VLLM, f"host-rank-2-xyz-rank-0{END}", "trace", 0, {}),
        (VLLM, f"actor-rank-1{END}", "trace", 1, {}),
        (VLLM, f"gpu-rank-7.cluster_4711{END}", "trace", None, {}),
        (VLLM, f"node17_4711{END}", "trace", None, {}),
        (VLLM, f"node17_4711.async_llm{END}", "frontend", None, {}),
        (VLLM, f"dp0_pp0_tp0_rank0_4711.async_llm{END}", "frontend", None, {}),
        (VLLM, "profiler_out_1.txt", "table", None, {}),
        (SGLANG, "1700000000.1234567-TP-1.trace.json.gz", "trace", None, {"tp": 1}),
        (
            SGLANG,
            "1700000000.12-TP-3-DP-1-PP-0-EP-2.trace.json.gz",
            "trace",
            None,
            {"tp": 3, "dp": 1, "pp": 0, "ep": 2},
        ),
        (SGLANG, f"{OURS}-1700000000.12-TP-0-EP-0-DECODE.trace.json.gz", "trace", None, {"tp": 0, "ep": 0}),
        (SGLANG, "a-TP-9-1700000000.12-TP-0-PP-1-EXTEND.trace.json.gz", "trace", None, {"tp": 0, "pp": 1}),
        (SGLANG, "1700000000.12-TP-1-memory.pickle", "memory", None, {"tp": 1}),
        (SGLANG, "rpd-1700000000.12-TP-1.trace.json.gz", "unknown", None, {"tp": 1}),
        (SGLANG, "merged-1700000000.12.trace.json.gz", "unknown", None, {}),
        (TRTLLM, "trtllm-trace-1796005044-0badcafe-rank-3.json", "trace", 3, {}),
        (TRTLLM, "trace-rank-3.json", "trace", 3, {}),
        (TRTLLM, "trace.json", "trace", None, {}),
    ],
)
def test_what_a_name_says(engine: Engine, name: str, kind: str, rank: int | None, coordinates: dict[str, int]) -> None:
    file = parsed(engine, name)
    assert (file.kind, file.rank, dict(file.coordinates)) == (kind, rank, coordinates)


@pytest.mark.parametrize("engine", [VLLM, SGLANG, TRTLLM])
@pytest.mark.parametrize("name", ["README.md", "notes.txt", "model.safetensors", "config.json", "x.json.gz.tmp"])
def test_other_names_are_none_of_theirs(engine: Engine, name: str) -> None:
    assert engine.parse(name) is None


def test_our_prefix_is_read_and_not_shown() -> None:
    file = parsed(VLLM, f"{OURS}_dp0_pp0_tp1_dcp0_ep1_rank1{END}")
    assert (file.prefix, file.stamp, file.shown) == (OURS, int(NS), f"dp0_pp0_tp1_dcp0_ep1_rank1{END}")
    file = parsed(SGLANG, f"{OURS}-1700000000.5-TP-0.trace.json.gz")
    assert (file.prefix, file.stamp, file.shown) == (OURS, 1700000000500000000, "1700000000.5-TP-0.trace.json.gz")
    somebody = parsed(VLLM, f"warm_dp0_pp0_tp1_dcp0_ep1_rank1{END}")
    assert (somebody.prefix, somebody.shown) == ("", somebody.name)


# Of which GPU.


@pytest.mark.parametrize(
    ("name", "width", "layout", "beside", "expected"),
    [
        # vLLM's names since 2026; rank counts within one copy of the model.
        (f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", 2, TP2, (), 1),
        (f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 2, TP2, (), 0),
        (f"dp0_pp1_tp0_dcp0_ep0_rank2{END}", 4, Layout(tp=2, pp=2), (), 2),
        (f"dp1_pp0_tp0_dcp0_ep0_rank0{END}", 2, Layout(dp=2), (), 1),
        (f"dp1_pp0_tp1_dcp0_ep3_rank1{END}", 4, Layout(tp=2, dp=2), (), 3),
        (f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", 4, Layout(tp=2, dp=2), (f"dp1_pp0_tp0_dcp0_ep2_rank0{END}",), 1),
        # A dense model's copies are engines of their own, all of which say dp0: which one it is, nobody can tell.
        (f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 2, Layout(dp=2), (), None),
        (f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", 4, Layout(tp=2, dp=2), (), None),
        # Without a layout the files beside it must leave one possibility.
        (f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", 2, None, (), 1),
        (f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 2, None, (), None),
        (f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 2, None, (f"dp0_pp0_tp1_dcp0_ep1_rank1{END}",), 0),
        (f"dp1_pp0_tp0_dcp0_ep0_rank0{END}", 2, None, (), 1),
        (f"dp1_pp0_tp0_dcp0_ep0_rank0{END}", 8, None, (), None),
        (f"dp1_pp0_tp0_dcp0_ep0_rank0{END}", 8, None, (f"dp3_pp0_tp1_dcp0_ep0_rank1{END}",), 2),
        # A layout that the name contradicts is not believed.
        (f"dp1_pp0_tp0_dcp0_ep0_rank0{END}", 2, TP2, (), None),
        (f"dp0_pp0_tp5_dcp0_ep5_rank5{END}", 4, TP4, (), None),
        # Older names do not say which copy.
        (f"3f2a1-rank-1{END}", 2, TP2, (), 1),
        (f"3f2a1-rank-1{END}", 2, None, (), 1),
        (f"3f2a1-rank-0{END}", 2, None, (), None),
        (f"3f2a1-rank-0{END}", 2, None, (f"3f2a1-rank-1{END}",), 0),
        (f"3f2a1-rank-0{END}", 4, Layout(tp=2, dp=2), (), None),
        (f"node17_4711{END}", 2, TP2, (), None),
        ("profiler_out_1.txt", 2, TP2, (), None),
        # One GPU, one possibility; but the front end runs on none.
        (f"node17_4711{END}", 1, None, (), 0),
        (f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 1, None, (), 0),
        (f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", 1, None, (), None),
        (f"node17_4711.async_llm{END}", 1, None, (), None),
    ],
)
def test_vllm(name: str, width: int, layout: Layout | None, beside: tuple[str, ...], expected: int | None) -> None:
    assert place(VLLM, name, width, layout, beside) == expected


ATTENTION = Layout(tp=4, dp=2, dp_attention=True)


@pytest.mark.parametrize(
    ("name", "width", "layout", "beside", "expected"),
    [
        ("1700.5-TP-1.trace.json.gz", 2, TP2, (), 1),
        ("1700.5-TP-1.trace.json.gz", 2, None, (), 1),
        ("1700.5-TP-0.trace.json.gz", 8, None, (), 0),
        ("1700.5-TP-1-EP-1.trace.json.gz", 2, None, (), 1),
        ("1700.5-TP-9.trace.json.gz", 8, None, (), None),
        # Pipelines: the size of TP must be known.
        ("1700.5-TP-0-PP-1.trace.json.gz", 4, Layout(tp=2, pp=2), (), 2),
        ("1700.5-TP-0-PP-1.trace.json.gz", 4, None, (), None),
        ("1700.5-TP-0-PP-1.trace.json.gz", 4, None, ("1700.5-TP-1-PP-1.trace.json.gz",), None),
        # Copies of the model, or data parallel attention within the TP group: the same names.
        ("1700.5-TP-1-DP-1.trace.json.gz", 4, Layout(tp=2, dp=2), (), 3),
        ("1700.5-TP-3-DP-1.trace.json.gz", 4, ATTENTION, (), 3),
        ("1700.5-TP-1-DP-1.trace.json.gz", 4, None, (), None),
        ("1700.5-TP-3-DP-1.trace.json.gz", 4, None, (), 3),
        ("1700.5-TP-1-DP-0.trace.json.gz", 4, None, ("1700.5-TP-3-DP-1.trace.json.gz",), 1),
        ("1700.5-TP-1-DP-1-PP-1.trace.json.gz", 8, Layout(tp=2, pp=2, dp=2), (), 7),
        # A layout that the name contradicts.
        ("1700.5-TP-1.trace.json.gz", 4, Layout(tp=2, pp=2), (), None),
        ("1700.5-TP-3-DP-1.trace.json.gz", 4, Layout(tp=2, dp=2), (), None),
        # Memory snapshots name TP alone.
        ("1700.5-TP-1-memory.pickle", 2, TP2, (), 1),
        ("1700.5-TP-1-memory.pickle", 4, Layout(tp=2, pp=2), (), None),
        ("1700.5-TP-1-memory.pickle", 4, ATTENTION, (), 1),
        ("1700.5-TP-1-memory.pickle", 8, None, (), None),
        ("1700.5-TP-1-memory.pickle", 8, None, ("1700.5-TP-0.trace.json.gz",), 1),
        ("1700.5-TP-1-memory.pickle", 8, None, ("1700.5-TP-0-PP-1.trace.json.gz",), None),
        ("merged-1700.5.trace.json.gz", 2, TP2, (), None),
    ],
)
def test_sglang(name: str, width: int, layout: Layout | None, beside: tuple[str, ...], expected: int | None) -> None:
    assert place(SGLANG, name, width, layout, beside) == expected


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("trtllm-trace-1796005044-0badcafe-rank-3.json", 4, 3),
        ("trace-rank-3.json", 4, 3),
        ("trace-rank-4.json", 4, None),
        ("trace.json", 4, None),
        ("trace.json", 1, 0),
    ],
)
def test_trtllm(name: str, width: int, expected: int | None) -> None:
    assert place(TRTLLM, name, width) == expected


# What the trace itself says.


@pytest.mark.parametrize(
    ("engine", "name", "width", "layout", "info", "expected"),
    [
        # It decides where the name does not.
        (VLLM, f"3f2a1-rank-0{END}", 4, None, (2, 4), 2),
        (VLLM, f"node17_4711{END}", 4, None, (3, 4), 3),
        (VLLM, f"dp1_pp0_tp0_dcp0_ep0_rank0{END}", 4, None, (2, 4), 2),
        (VLLM, f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 4, Layout(tp=2, dp=2), (0, 4), 0),
        (SGLANG, "1700.5-TP-0-PP-1.trace.json.gz", 4, None, (2, 4), 2),
        (SGLANG, "1700.5-TP-1-DP-1.trace.json.gz", 4, None, (1, 2), 3),
        (SGLANG, "1700.5-TP-1-DP-0.trace.json.gz", 4, None, (1, 2), 1),
        # It contradicts the name: nobody knows.
        (VLLM, f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", 2, TP2, (0, 2), None),
        (VLLM, f"dp1_pp0_tp0_dcp0_ep0_rank0{END}", 4, Layout(tp=2, dp=2), (1, 4), None),
        (VLLM, f"dp1_pp0_tp1_dcp0_ep0_rank1{END}", 4, None, (2, 4), None),
        (SGLANG, "1700.5-TP-1.trace.json.gz", 2, TP2, (0, 2), None),
        (TRTLLM, "trace-rank-1.json", 2, TP2, (0, 2), None),
        # Copies of a dense model: each a group of its own, and no name tells them apart.
        (VLLM, f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 2, Layout(dp=2), (0, 1), None),
        (VLLM, f"dp0_pp0_tp0_dcp0_ep0_rank0{END}", 4, TP4, (0, 2), None),
        (VLLM, f"3f2a1-rank-1{END}", 4, TP4, (1, 2), None),
        # The group of the whole job, or of something else.
        (VLLM, f"node17_4711{END}", 4, None, (2, 64), 2),
        (VLLM, f"dp0_pp0_tp1_dcp0_ep1_rank1{END}", 2, TP2, (40, 64), 1),
        (VLLM, f"3f2a1-rank-1{END}", 2, TP2, (0, 64), None),
        (VLLM, f"3f2a1-rank-1{END}", 2, TP2, (0, 1), 1),
    ],
)
def test_a_trace_is_believed_where_its_name_agrees(
    engine: Engine, name: str, width: int, layout: Layout | None, info: tuple[int, int], expected: int | None
) -> None:
    assert place(engine, name, width, layout, info=TraceInfo(True, *info)) == expected


def engine_names(layout: Layout, *, dense: bool, old: bool) -> list[tuple[str, int]]:
    """All names of a vLLM engine with that layout, and the GPU that each is of."""
    found = []
    for local in range(layout.gpus):
        at, rank = layout.coordinates(local), local % layout.group
        dp = 0 if dense else at["dp"]
        name = f"3f2a1-rank-{rank}" if old else f"dp{dp}_pp{at['pp']}_tp{at['tp']}_dcp0_ep0_rank{rank}"
        found.append((f"{name}.{10**18 + local}.pt.trace.json.gz", local))
    return found


@given(
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    style=st.sampled_from(["", "dense", "old"]),
    known=st.booleans(),
    data=st.data(),
)
def test_vllm_is_never_placed_on_a_wrong_gpu(tp: int, pp: int, dp: int, style: str, known: bool, data: Any) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp)
    files = engine_names(layout, dense=style == "dense", old=style == "old")
    present = data.draw(st.lists(st.sampled_from(files), min_size=1, unique=True))
    beside = tuple(name for name, _ in present)
    for name, local in present:
        assert place(VLLM, name, layout.gpus, layout if known else None, beside) in {None, local}
    if not style or dp == 1:
        complete = tuple(name for name, _ in files)
        assert [place(VLLM, name, layout.gpus, layout, complete) for name, _ in files] == [local for _, local in files]


@given(
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    attention=st.booleans(),
    known=st.booleans(),
    data=st.data(),
)
def test_sglang_is_never_placed_on_a_wrong_gpu(
    tp: int, pp: int, dp: int, attention: bool, known: bool, data: Any
) -> None:
    layout = Layout(tp=tp * dp if attention else tp, pp=pp, dp=dp, dp_attention=attention)
    files = []
    for local in range(layout.gpus):
        at = layout.coordinates(local)
        name = f"1700.5-TP-{at['tp']}" + (f"-DP-{at['dp']}" if dp > 1 else "") + (f"-PP-{at['pp']}" if pp > 1 else "")
        files.append((f"{name}.trace.json.gz", local))
    present = data.draw(st.lists(st.sampled_from(files), min_size=1, unique=True))
    beside = tuple(name for name, _ in present)
    for name, local in present:
        assert place(SGLANG, name, layout.gpus, layout if known else None, beside) in {None, local}
        assert place(SGLANG, name, layout.gpus, layout) == local


# Names in the save path.


def test_a_relocated_name_is_read_back() -> None:
    name = relocated_name(4, 8, 3, "dp0_pp0_tp0_dcp0_ep0_rank0.17.pt.trace.json.gz")
    assert name == "rollout-replica4-globalrank8_step3_dp0_pp0_tp0_dcp0_ep0_rank0.17.pt.trace.json.gz"
    back = parse_relocated(name)
    assert back is not None
    assert (back.replica, back.rank, back.step, back.engine) == (
        4,
        8,
        3,
        "dp0_pp0_tp0_dcp0_ep0_rank0.17.pt.trace.json.gz",
    )
    verl = parse_relocated("rollout-replica4_actor-rank-0.17.pt.trace.json.gz")
    assert verl is not None
    assert (verl.replica, verl.rank, verl.step, verl.engine) == (4, None, None, "actor-rank-0.17.pt.trace.json.gz")
    assert parse_relocated("actor_train_step1_rank0_pid7_20260101000000000.json.gz") is None
