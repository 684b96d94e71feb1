"""Trainers of other libraries, with the real libraries: the right steps, stages, names; what happens on errors."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.status import Row, read_status

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trainers"
SCRIPTS = {"huggingface_sft": "transformers", "lightning_fit": "lightning", "accelerate_loop": "accelerate"}

pytestmark = pytest.mark.torch


def needs(*libraries: str) -> pytest.MarkDecorator:
    absent = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


def run(tmp_path: Path, program: str, *, fails: bool = False, launcher: tuple[str, ...] = ()) -> str:
    """Run a program that has the examples on its path, in a process of its own; what it said on stderr."""
    (tmp_path / "program.py").write_text(program)
    environ = {
        **os.environ,
        "PYTHONPATH": str(EXAMPLES),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "RANKSCOPE_STRICT": "1",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "program.py")],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert bool(done.returncode) is fails, done.stdout + done.stderr
    return done.stderr


def config(tmp_path: Path, **facts: Any) -> dict[str, Any]:
    options = {"contents": ["cpu"], **facts.pop("options", {})}
    common = {"tool": "torch", "steps": [2, 4], "save_path": str(tmp_path / "out"), **facts}
    common["global_tool_config"] = {"torch": options}
    return {"global_profiler": common, "trainer": {"profiler": {"enable": True, "ranks": "all"}}}


def rows(tmp_path: Path) -> list[Row]:
    return list(read_status(tmp_path / "out").rows)


def stages(row: Row) -> list[str]:
    with gzip.open(row.path) as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(found, key=lambda event: event["ts"])]
    return [name for name in names if name.startswith(("train_step", "validate", "micro_batch"))]


@pytest.mark.parametrize("script", [pytest.param(name, marks=needs(library)) for name, library in SCRIPTS.items()])
def test_an_example_leaves_one_file_for_each_step(tmp_path: Path, script: str) -> None:
    run(tmp_path, f"import {script}\n{script}.main({config(tmp_path)!r}){'.train()' if 'hugging' in script else ''}\n")
    found = rows(tmp_path)
    assert [(row.role, row.step, row.status) for row in found] == [
        ("trainer", 2, "published"),
        ("trainer", 4, "published"),
    ]
    for row in found:
        batches = ["micro_batch0", "micro_batch1"] if script == "accelerate_loop" else []
        assert stages(row) == ["train_step", *batches]


@pytest.mark.torchrun
@pytest.mark.parametrize("script", [pytest.param(name, marks=needs(library)) for name, library in SCRIPTS.items()])
def test_on_two_ranks(tmp_path: Path, script: str) -> None:
    more = ", devices=2, strategy='ddp'" if script == "lightning_fit" else ""
    tail = ".train()" if "hugging" in script else ""
    program = f"import {script}\nif __name__ == '__main__':\n    {script}.main({config(tmp_path)!r}{more}){tail}\n"
    run(tmp_path, program, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    assert [(row.rank, row.step, row.status) for row in rows(tmp_path)] == [
        (rank, step, "published") for rank in (0, 1) for step in (2, 4)
    ]
    assert all("-of-2_" in row.path for row in rows(tmp_path))


@needs("transformers")
def test_a_schedule_counts_optimizer_steps(tmp_path: Path) -> None:
    source = config(
        tmp_path, steps="1-6", profile_continuous_steps=True, options={"schedule": {"wait": 2, "active": 2}}
    )
    run(tmp_path, f"import huggingface_sft\nhuggingface_sft.main({source!r}).train()\n")
    [row] = rows(tmp_path)
    assert "_mb2-3." in row.path
    assert row.status == "published"


@needs("transformers")
def test_a_resumed_run_says_that_steps_are_over(tmp_path: Path) -> None:
    program = f"""
import huggingface_sft
huggingface_sft.main(None, max_steps=4, save_strategy="steps", save_steps=3).train()
trainer = huggingface_sft.main({config(tmp_path, steps=[2, 5])!r}, max_steps=6, save_strategy="no")
trainer.train(resume_from_checkpoint="outputs/hf/checkpoint-3")
"""
    said = run(tmp_path, program)
    assert "some configured steps are in the past (2): this run begins with step 4" in said
    assert [row.step for row in rows(tmp_path) if row.status == "published"] == [5]


RAISING = {
    "huggingface_sft": """
import huggingface_sft
trainer = huggingface_sft.main({config})
original = trainer.compute_loss
def compute_loss(*args, **more):
    if trainer.state.global_step == 3:
        raise RuntimeError("the loss is NaN")
    return original(*args, **more)
trainer.compute_loss = compute_loss
trainer.train()
""",
    "lightning_fit": """
import lightning_fit
class Bad(lightning_fit.Line):
    def training_step(self, batch):
        if self.global_step == 3:
            raise RuntimeError("the loss is NaN")
        return super().training_step(batch)
lightning_fit.main({config}, Bad())
""",
}


@pytest.mark.parametrize("script", [pytest.param(name, marks=needs(SCRIPTS[name])) for name in RAISING])
def test_a_step_that_raises_is_saved_and_raises(tmp_path: Path, script: str) -> None:
    said = run(tmp_path, RAISING[script].format(config=config(tmp_path)), fails=True)
    assert "RuntimeError: the loss is NaN" in said
    assert [(row.step, row.status) for row in rows(tmp_path)] == [(2, "published"), (4, "aborted")]


@needs("lightning")
def test_a_validation_inside_a_window_is_a_stage(tmp_path: Path) -> None:
    source = config(tmp_path, steps="1-3", profile_continuous_steps=True)
    run(tmp_path, f"import lightning_fit\nlightning_fit.main({source!r}, max_steps=4, val_check_interval=4)\n")
    [row] = rows(tmp_path)
    assert stages(row) == ["train_step", "train_step", "validate", "train_step"]


@needs("lightning")
def test_two_optimizers_make_one_step_of_a_batch(tmp_path: Path) -> None:
    program = f"""
import torch, lightning_fit
class Two(lightning_fit.Line):
    automatic_optimization = False
    def training_step(self, batch):
        for optimizer in self.optimizers():
            self.manual_backward(super().training_step(batch))
            optimizer.step()
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]
lightning_fit.main({config(tmp_path, steps=[1, 2, 3])!r}, Two(), max_steps=6, accumulate_grad_batches=1)
"""
    run(tmp_path, program)
    assert [(row.step, row.status) for row in rows(tmp_path)] == [(n, "published") for n in (1, 2, 3)]


@needs("transformers")
def test_a_wrong_config_stops_before_the_first_step(tmp_path: Path) -> None:
    source = config(tmp_path)
    source["trainer"]["profiler"]["rank"] = 1
    said = run(tmp_path, f"import huggingface_sft\nhuggingface_sft.main({source!r}).train()\n", fails=True)
    assert "trainer.profiler.rank: unknown key 'rank'. Did you mean 'ranks'?" in said
