"""Two ranks under torchrun, and the PPO example (real msprobe, CPU)."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.status import read_status

HERE = Path(__file__).parent
EXAMPLE = Path(__file__).parents[3] / "examples" / "ppo"

pytestmark = [pytest.mark.torch, pytest.mark.torchrun]


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANKSCOPE_STRICT": "1"},
    )


def test_each_rank_has_its_folder_beside_the_other_s(tmp_path: Path, kit: Any) -> None:
    ended = torchrun(str(HERE / "debugger_scenarios.py"), "job", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert kit.folders(tmp_path) == [f"step_2/actor_update/step2/rank{rank}" for rank in (0, 1)]
    first, second = (kit.data(kit.dumps(tmp_path, 2, "actor_update", rank)) for rank in (0, 1))
    assert sorted(first) == sorted(second)
    [one], [two] = (data["Module.module.0.Linear.forward.0"]["input_args"] for data in (first, second))
    assert (one["Max"], two["Max"]) == (11.0, 22.0)  # the ranks have batches of their own
    assert read_status(tmp_path).complete

    step = tmp_path / "step_2" / "actor_update" / "step2"
    compare = ["compare", "--target_path", str(step), "--golden_path", str(step), "--output_path", str(tmp_path / "c")]
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("msprobe")), *compare],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for rank in (0, 1):
        [table] = (tmp_path / "c").glob(f"compare_result_rank{rank}_*.csv")
        rows = list(csv.DictReader(io.StringIO(table.read_text())))
        assert {row["NPU Name"].rpartition(".input")[0] for row in rows} >= {"Module.module.0.Linear.forward.0"}
        assert {row["Max diff"] for row in rows} <= {"0", "0.0", "N/A"}


def test_the_ppo_example_dumps_every_stage_that_runs_a_model(tmp_path: Path, kit: Any) -> None:
    ended = torchrun(
        str(EXAMPLE / "train.py"),
        *("--config", str(EXAMPLE / "profile.yaml"), "--steps", "2"),
        "global_profiler.tool=precision_debugger",
        f"global_profiler.save_path={tmp_path}",
    )
    assert ended.returncode == 0, ended.stderr
    stages = (
        "actor_compute_log_prob",
        "actor_update",
        "critic_compute_values",
        "critic_update",
        "ref_compute_log_prob",
    )
    assert kit.folders(tmp_path) == [f"step_2/{stage}/step2/rank{rank}" for stage in stages for rank in (0, 1)]
    for stage in stages:
        names = kit.data(kit.dumps(tmp_path, 2, stage))
        assert "Module.body.blocks.1.Block.forward.0" in names
        assert any(".backward." in name for name in names) == stage.endswith("_update")
    status = read_status(tmp_path)
    assert status.complete
    assert {(row.role, row.scope) for row in status.rows if row.status == "published"} == {
        *(("actor-ref", stage) for stage in stages if not stage.startswith("critic")),
        *(("critic", stage) for stage in stages if stage.startswith("critic")),
    }
