"""A real torch without a device: one message, no file, and a training that does not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.status import read_status

pytestmark = pytest.mark.torch

PROGRAM = """\
import json, sys
import torch
from rankscope import DistProfiler, ProfileController, annotate

tool, path = json.loads(sys.argv[1]), sys.argv[2]
config = {
    "global_profiler": {
        "tool": tool,
        "steps": [1, 2, 3] if tool else None,
        "save_path": path,
        "global_tool_config": {"torch_memory": json.loads(sys.argv[3])},
    },
    "actor": {"profiler": {"enable": bool(tool)}},
    "critic": {"profiler": {"enable": bool(tool)}},
}
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@annotate("actor_update", scheduled=True)
def update():
    for number in range(2):
        with annotate(f"mini_batch{number}"):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

actor = DistProfiler(config, role="actor", rank=0, world_size=1)
critic = DistProfiler(config, role="critic", rank=0, world_size=1)
controller = ProfileController(config, workers=[actor, critic], total_steps=3)
for step in (1, 2, 3):
    with controller.step(step):
        update()
try:
    with annotate("actor_update"):
        raise torch.OutOfMemoryError("CUDA out of memory")
except torch.OutOfMemoryError:
    pass
controller.close() if hasattr(controller, "close") else None
for handle in (actor, critic):
    handle.close()
print(json.dumps({"weights": [p.tolist() for p in model.parameters()], "cuda": torch.cuda.is_initialized()}))
"""


def run(path: Path, tool: Any, **options: Any) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(tool), str(path), json.dumps(options)],
        env={**os.environ, "RANKSCOPE_STRICT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the training comes to without any profiling."""
    result, _ = run(tmp_path_factory.mktemp("without"), None)
    return result


def files(path: Path) -> list[str]:
    return sorted(found.suffix for found in path.iterdir() if found.is_file())


@pytest.mark.parametrize("options", [{}, {"from_init": True, "oom_outside_steps": True, "stages": True}])
def test_it_says_so_once_and_writes_nothing(tmp_path: Path, without: dict[str, Any], options: dict[str, Any]) -> None:
    result, told = run(tmp_path, "torch_memory", **options)
    assert result == without
    assert files(tmp_path) == []
    assert told.count("torch has no device here whose memory it can show") == 1
    rows = read_status(tmp_path).rows
    assert {row.step for row in rows} == {1, 2, 3}
    assert "no device here" in {row.reason for row in rows if row.status == "empty"}.pop()


def test_it_goes_together_with_torch(tmp_path: Path, without: dict[str, Any]) -> None:
    result, told = run(tmp_path, ["torch", "torch_memory"])
    assert result == without
    assert files(tmp_path) == [".gz", ".gz", ".gz"]
    assert told.count("torch has no device here whose memory it can show") == 1
    assert {(row.tool, row.status) for row in read_status(tmp_path).rows if row.role == "actor"} == {
        ("torch", "published"),
        ("torch_memory", "empty"),
    }
