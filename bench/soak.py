"""A long run: 2,000 steps on two ranks with a window every tenth step; memory, descriptors and files at the end.

example: python bench/soak.py --steps 2000 --every 10

Prints for each rank the resident memory and open files after a tenth of the run and at its end, and whether every
expected file is there. The exit status is 1 when one is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ENV = "RANKSCOPE_SOAK"


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _train(steps: int, every: int, save_path: str) -> None:
    """What each rank runs: small steps with an all-reduce, so that a rank that is held up holds up the other."""
    import torch
    import torch.distributed as dist

    from rankscope import DistProfiler, ProfileController, annotate

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = {
        "global_profiler": {"tool": "torch", "steps": list(range(every, steps + 1, every)), "save_path": save_path},
        "trainer": {"profiler": {"enable": True, "all_ranks": True}},
    }
    profiler = DistProfiler(config, role="trainer")
    weight = torch.randn(64, 64, requires_grad=True)

    @annotate("actor_update", scheduled=True)
    def update() -> None:
        for index in range(4):
            with annotate(f"mini_batch{index}"):
                (torch.randn(16, 64) @ weight).square().mean().backward()
            profiler.step()
        dist.all_reduce(weight.grad)

    marks = {}
    with ProfileController(config, workers=[profiler], total_steps=steps) as controller:
        for step in range(1, steps + 1):
            with controller.step(step):
                update()
            if step in (steps // 10, steps):
                marks[step] = (round(_resident_mb(), 1), _descriptors())
    profiler.close()
    print(json.dumps({"rank": dist.get_rank(), "marks": marks, "files": len(profiler.artifacts)}), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=10)
    settings = parser.parse_args()
    if ENV in os.environ:
        _train(settings.steps, settings.every, os.environ[ENV])
        return 0
    with tempfile.TemporaryDirectory(prefix="rankscope-soak-") as folder:
        environ = {**os.environ, ENV: folder, "OMP_NUM_THREADS": "1", "RANKSCOPE_LOG_LEVEL": "warning"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        command += ["--steps", str(settings.steps), "--every", str(settings.every)]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        expected = 2 * (settings.steps // settings.every)
        found = len(list(Path(folder).glob("*.json.gz")))
        left = [path.name for kind in ("partial", "staged") for path in Path(folder, ".rankscope", kind).glob("*")]
    for line in filter(lambda line: line.startswith("{"), done.stdout.splitlines()):
        facts = json.loads(line)
        (_, early), (_, late) = facts["marks"].items()
        print(
            f"rank {facts['rank']}: {early[0]} -> {late[0]} MB resident, {early[1]} -> {late[1]} open files, "
            f"{facts['files']} traces"
        )
    print(f"exit status {done.returncode}, {found} of {expected} files, {len(left)} left over")
    return 0 if done.returncode == 0 and found == expected and not left else 1


if __name__ == "__main__":
    sys.exit(main())
