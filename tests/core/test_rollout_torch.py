"""Real traces of the torch profiler: of two processes of one group, and of engines that record themselves."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_kit import config, names, rows, servers

from rankscope.rollout import Layout, RolloutProfiler
from rankscope.rollout.whole import read_info

pytestmark = pytest.mark.torch

PROGRAM = """
import os, sys, torch, torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    tensor = torch.full((8,), float(rank))
    dist.all_reduce(tensor)
profile.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``rank0.json.gz`` and ``rank1.json.gz`` of a process group of two."""
    folder = tmp_path_factory.mktemp("traces")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(folder)], env=environ) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return folder


def test_a_real_trace_says_its_rank(traces: Path) -> None:
    found = [read_info(traces / f"rank{rank}.json.gz") for rank in range(2)]
    assert [(one.is_trace, one.rank, one.world_size) for one in found] == [(True, 0, 2), (True, 1, 2)]


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [
        ("dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{{ns}}.pt.trace.json.gz", Layout(tp=2)),
        # What the name does not say, the trace does: which copy of the model, and which process.
        ("3f2a1-rank-0.{{ns}}{rank}.pt.trace.json.gz", Layout(dp=2)),
        ("node17_471{rank}.{{ns}}.pt.trace.json.gz", None),
    ],
)
def test_real_traces_of_an_engine_find_their_gpu(
    tmp_path: Path, traces: Path, pattern: str, layout: Layout | None
) -> None:
    out = tmp_path / "out"
    files = [pattern.format(rank=rank) for rank in range(2)]
    with servers(tmp_path, {"names": files, "traces": str(traces)}, gpus=2) as engines:
        rollout = RolloutProfiler(
            config(out, steps=[2]),
            engine="vllm",
            replicas=[engines[0].url],
            layout=layout,
            gpus_per_replica=2,
            patience=10.0,
        )
        rollout.start_profile(step=2)
        engines[0].forward(2)
        rollout.stop_profile()
        assert [artifact.rank for artifact in rollout.relocate_profile()] == [0, 1]
        rollout.close_profile()
    for rank, name in enumerate(names(out)):
        assert name.startswith(f"rollout-replica0-globalrank{rank}_step2_")
        assert (out / name).read_bytes() == (traces / f"rank{rank}.json.gz").read_bytes()
    assert rows(out) == [(0, 2, "published"), (1, 2, "published")]


def test_a_name_that_contradicts_its_trace_is_not_believed(tmp_path: Path, traces: Path) -> None:
    """The two files have each other's names."""
    out = tmp_path / "out"
    files = [f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{{ns}}.pt.trace.json.gz" for rank in (1, 0)]
    with (
        servers(tmp_path, {"names": files, "traces": str(traces)}, gpus=2) as engines,
        RolloutProfiler(
            config(out), engine="vllm", replicas=[engines[0].url], layout=Layout(tp=2), patience=5.0
        ) as rollout,
    ):
        rollout.start_profile(step=1)
        rollout.stop_profile()
        found = rollout.relocate_profile()
        assert ["the name contradicts the trace" in one.facts["warnings"][0] for one in found] == [True, True]
    assert [name.split("_")[:2] for name in names(out)] == [["rollout-replica0", "step1"]] * 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_that_record_themselves(tmp_path: Path, engine: str) -> None:
    """Each window of a server's real profiler holds the passes that were made in it, no more and no less."""
    out = tmp_path / "out"
    with (
        servers(tmp_path, {"engine": engine, "torch": True}) as engines,
        RolloutProfiler(
            config(out, steps=[1, 3]), engine=engine, replicas=[engines[0].url], layout=Layout(), patience=20.0
        ) as rollout,
    ):
        for n in (1, 2, 3):
            rollout.start_profile(step=n)
            engines[0].forward(n)
            rollout.stop_profile()
            rollout.relocate_profile()
    found = {}
    for name in names(out):
        trace = json.loads(gzip.decompress((out / name).read_bytes()))
        products = [event for event in trace["traceEvents"] if event.get("name") == "aten::matmul"]
        found[name.split("_")[1]] = len(products)
    assert found == {"step1": 1, "step3": 3}
