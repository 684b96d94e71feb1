"""How a driver ends: with an exception and without a close, and with a ray.shutdown() that came too early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; install it with: pip install ray")

import recording  # noqa: E402

PROGRAM = """
import json, sys
import ray, ray_workers
from rankscope import ProfileController
from rankscope.integrations.ray import RayGroup
address, config, how = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False)
worker = ray.remote(ray_workers.Worker).options(num_cpus=0, resources={"a": 1}).remote(config, "actor", 0, 1)
group = RayGroup(worker)
controller = ProfileController(config, workers=[group], total_steps=9)
with controller.step(1):
    ray.get(worker.work.remote())
controller.begin_step(2)
ray.get(worker.work.remote())
if how == "shutdown":
    ray.shutdown()
    controller.close()
    group.close()
    assert not ray.is_initialized(), "a new cluster was started"
elif how == "raise":
    raise SystemExit(5)
"""


def drive(cluster: Any, save_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    facts = recording.config(save_path, steps=(1, 2), finish_hook_cmd=f"echo run >> {save_path.parent}/ran")
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, cluster.address, recording.json.dumps(facts), how],
        env={**cluster.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_driver_that_ends_without_a_close_loses_nothing(cluster: Any, save_path: Path) -> None:
    done = drive(cluster, save_path, "raise")
    assert done.returncode == 5, done.stderr
    assert sorted(recording.files(save_path)) == ["step 1", "step 2"]
    assert (save_path.parent / "ran").read_text() == "run\n"


def test_a_shutdown_that_comes_too_early_is_told_and_starts_no_new_cluster(cluster: Any, save_path: Path) -> None:
    done = drive(cluster, save_path, "shutdown")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was ray.shutdown() called before the group was closed?") == 1
    assert recording.files(save_path)[0] == "step 1"
