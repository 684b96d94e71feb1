"""Actors of the tests. They live in a module that workers can import, and know nothing of Ray themselves."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from rankscope import DistProfiler, ProfiledWorker, annotate
from rankscope.integrations.actors.inside import ProfiledRayActor


class Worker(ProfiledRayActor):
    """One role."""

    def __init__(self, config: Any, role: str, rank: int, world_size: int) -> None:
        self.profiler = DistProfiler(config, role=role, rank=rank, world_size=world_size)

    def work(self, seconds: float = 0.0) -> int:
        with annotate("actor_update"):
            time.sleep(seconds)
        return os.getpid()

    def pid(self) -> int:
        return os.getpid()

    def calls(self, *hooks: str) -> list[str]:
        import recording

        return recording.calls(*hooks)

    def threads(self) -> list[tuple[str, str]]:
        import recording

        return recording.THREADS

    def wait_for_file(self, path: Path) -> None:
        while not path.exists():
            time.sleep(0.02)


class PlainWorker(ProfiledWorker):
    """With the methods that a controller needs, and without the mix-in."""

    def __init__(self, config: Any, role: str, rank: int, world_size: int) -> None:
        self.profiler = DistProfiler(config, role=role, rank=rank, world_size=world_size)

    def pid(self) -> int:
        return os.getpid()


class Colocated(Worker):
    """Two roles in one process; only the first one's profiler is the actor's own."""

    def __init__(self, config: Any, rank: int, world_size: int) -> None:
        super().__init__(config, "actor", rank, world_size)
        self.critic = DistProfiler(config, role="critic", rank=rank, world_size=world_size)


class Broken(Worker):
    """Its own methods raise, some with what does not travel."""

    def start_profile(self, *, step: int | None = None, scope: str | None = None) -> None:
        class Local(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("this does not travel")

        raise Local(f"no start in step {step}")


class Strict(Worker):
    """Faults of its tools are raised."""

    def __init__(self, *arguments: Any) -> None:
        os.environ["RANKSCOPE_STRICT"] = "1"
        super().__init__(*arguments)


class Async(Worker):
    """Its methods run on the event loop."""

    async def serve(self, seconds: float = 0.0) -> str:
        with annotate("rollout_generate"):
            await asyncio.sleep(seconds)
        return threading.current_thread().name


class Stubborn(Worker):
    """Sleeps in its stop."""

    def stop_profile(self, *, last: bool = False) -> None:
        time.sleep(3)
        super().stop_profile(last=last)


class NoWorker:
    """Cannot be profiled."""

    def pid(self) -> int:
        return os.getpid()
