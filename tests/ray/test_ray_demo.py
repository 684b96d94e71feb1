"""The demo with Ray, as a user starts it: a driver, actors of four roles, real torch traces."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_kit import kill_processes_of

from rankscope.cli import main

pytest.importorskip("ray", reason="Ray is not installed; install it with: pip install ray")

pytestmark = pytest.mark.torch

STAGES = {
    "actor-ref": {"actor_compute_log_prob", "ref_compute_log_prob", "actor_update"},
    "critic": {"critic_compute_values", "critic_update"},
    "rollout": {"rollout_generate"},
    "reward": {"reward_score"},
}


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where Ray puts its files; what still runs there in the end is ended."""
    folder = Path(tempfile.mkdtemp(prefix="rs-"))
    yield folder
    kill_processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_each_role_leaves_its_own_traces(tmp_path: Path, ray_folder: Path) -> None:
    words = ["--engine", "ray", "--nproc", "1", "--steps", "2", "--dir", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "demo", *words, "global_profiler.steps=[2]"],
        env={**os.environ, "RAY_TMPDIR": str(ray_folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["complete"]
    rows = {row["role"]: row for row in report["rows"]}
    assert rows.keys() == STAGES.keys()
    for role, stages in STAGES.items():
        row = rows[role]
        assert (row["step"], row["rank"], row["status"]) == (2, 0, "published")
        assert {stage["name"] for stage in row["stages"]} == stages
        path = Path(row["path"])
        assert path.parent == tmp_path
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert trace["distributedInfo"]["rank"] == 0
        names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        assert names >= stages
    assert "step   2  reward" in done.stderr


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))
    assert main(["demo", "--engine", "ray"]) == 2
    assert "the demo needs ray; install it with: pip install ray" in capsys.readouterr().err
