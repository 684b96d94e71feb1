"""The demo, as a user starts it: it learns, and leaves what the table says."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.torchrun]

STAGES = {
    "rollout_generate",
    "reward_score",
    "actor_compute_log_prob",
    "ref_compute_log_prob",
    "critic_compute_values",
    "actor_update",
    "critic_update",
}


def demo(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope", "demo", "--dir", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def rows(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress(path.read_bytes()).decode())
    return [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation" and event["ph"] == "X"]


def inside(row: dict[str, Any], outer: dict[str, Any]) -> bool:
    return (
        row["tid"] == outer["tid"]
        and outer["ts"] <= row["ts"]
        and (row["ts"] + row["dur"] <= outer["ts"] + outer["dur"])
    )


def test_the_demo_learns_and_leaves_whole_traces(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"^step +\d+ +reward ([\d.]+)", done.stdout + done.stderr, re.M)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    files = sorted(tmp_path.glob("*.json.gz"))
    assert len(files) == 4  # two ranks, steps 2 and 4; the roles of a process share a file
    assert all(file.name in done.stdout for file in files)
    assert "ui.perfetto.dev" in done.stdout
    for file in files:
        found = rows(file)
        names = [row["name"] for row in found]
        assert set(names) >= STAGES
        update = next(row for row in found if row["name"] == "actor_update")
        minis = [row for row in found if row["name"].startswith("mini_batch") and inside(row, update)]
        assert [row["name"] for row in minis] == [f"mini_batch{index}" for index in range(4)]
        micros = [row for row in found if row["name"].startswith("micro_batch")]
        assert all(sum(inside(micro, mini) for micro in micros) == 2 for mini in minis)


def test_its_modes_are_a_matter_of_overrides(tmp_path: Path) -> None:
    torch = "global_profiler.global_tool_config.torch"
    schedule = f"{torch}.schedule"
    done = demo(
        tmp_path,
        "--steps",
        "2",
        "global_profiler.steps=[2]",
        f"{torch}.discrete=true",
        f"{schedule}.skip_first=1",
        f"{schedule}.active=2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["complete"]
    scopes = {row["scope"].replace("-", "_") for row in report["rows"]}
    assert scopes >= STAGES
    names = [Path(row["path"]).name for row in report["rows"]]
    assert sum("_mb1-2" in name for name in names) == 4  # both updates, on both ranks; the other stages are whole
