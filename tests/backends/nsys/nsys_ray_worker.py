"""The class of the Ray actors. In a module of its own: Ray then imports it in the actor's process."""

from __future__ import annotations

import os

import ray

from rankscope import DistProfiler, annotate


class Worker:
    def __init__(self, config: str, rank: int) -> None:
        self.profiler = DistProfiler(config, role="actor", rank=rank, world_size=2)

    @annotate("actor_update", scheduled=True)
    def update(self) -> int:
        return os.getpid()

    def step(self, step: int, last: bool) -> tuple[int, list[str], bool]:
        self.profiler.start(step=step)
        pid = self.update()
        self.profiler.stop(last=last)
        files = [artifact.path.name for artifact in self.profiler.artifacts]
        return pid, files, "NSYS_PROFILING_SESSION_ID" in os.environ

    def leave(self) -> None:
        self.profiler.close()
        ray.actor.exit_actor()
