"""Programs that the tests run under nsys: ``python nsys_scenarios.py NAME SAVE_PATH [ARGUMENT ...]``."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from rankscope import DistProfiler, annotate


def handle(save_path: str, role: str = "actor", **facts: object) -> DistProfiler:
    path = Path(save_path)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return DistProfiler(path.parent / f"{path.name}.yaml", role=role, rank=rank, world_size=world, **facts)


@annotate("actor_update", scheduled=True, color="red", category="training")
def update(batches: int = 2) -> None:
    for number in range(batches):
        with annotate(f"mini_batch{number}", color="#00ff80"):
            pass


def spans(save_path: str) -> None:
    """Every kind of span, in two windows."""

    @annotate("slow", domain="rollout", color="olive")
    async def slow(began: asyncio.Event) -> None:
        began.set()
        await asyncio.sleep(0.02)

    @annotate("quick", domain="rollout")
    async def quick(began: asyncio.Event) -> None:
        await began.wait()

    async def both() -> None:
        began = asyncio.Event()
        await asyncio.gather(slow(began), quick(began))

    @annotate("items")
    def items() -> Iterator[int]:
        yield 1
        yield 2

    @annotate("broken", color="no such colour")
    def broken() -> None:
        with annotate("inner"):
            raise ValueError("of the training")

    with handle(save_path) as profiler:
        profiler.start(step=1)
        update()
        asyncio.run(both())
        assert list(items()) == [1, 2]
        try:
            broken()
        except ValueError as error:
            print("raised", error)
        with annotate("after ü \u4e2d"):
            thread = threading.Thread(target=update, args=(1,))
            thread.start()
            thread.join()
        profiler.stop()
        update()  # between windows: in no report
        profiler.start(step=2)
        with annotate("second"):
            pass
        profiler.stop(last=True)
        print("finished", len(profiler.artifacts))


def stages(save_path: str) -> None:
    """Discrete: a window for each stage of one step, one of which raises."""
    with handle(save_path) as profiler:
        profiler.start(step=1)
        update()
        try:
            with annotate("compute_log_prob"), annotate("nested"):
                raise KeyError("of the training")
        except KeyError:
            pass
        profiler.stop(last=True)


def roles(save_path: str) -> None:
    """Two roles of one process that take turns; nobody said how many windows there will be."""
    actor, critic = handle(save_path, "actor"), handle(save_path, "critic")
    for step in (1, 2):
        for profiler, stage in ((critic, "critic_update"), (actor, "actor_update")):
            profiler.start(step=step)
            with annotate(stage):
                pass
            profiler.stop()
    critic.finish()
    print("after the first role", len(list(Path(save_path).glob("*.nsys-rep"))))
    actor.finish()
    print("after the second role", len(list(Path(save_path).glob("*.nsys-rep"))))
    critic.close()
    actor.close()


def aborted(save_path: str) -> None:
    """The step raises, and the program with it; fewer windows than planned."""
    with handle(save_path) as profiler:
        profiler.start(step=1)
        try:
            update()
            raise RuntimeError("out of memory")
        finally:
            profiler.stop(aborted=True)


def killed(save_path: str) -> None:
    """Killed in its second window."""
    profiler = handle(save_path)
    profiler.start(step=1)
    update()
    profiler.stop()
    profiler.start(step=2)
    with annotate("last words"):
        pass
    os.kill(os.getpid(), 9)


def orphaned(save_path: str) -> None:
    """nsys is killed in the middle, and the training goes on."""
    with handle(save_path) as profiler:
        profiler.start(step=1)
        update()
        profiler.stop()
        os.kill(int(os.environ["QUADD_AGENT_PID"]), 9)
        profiler.start(step=2)
        update()
        profiler.stop(last=True)


def windows(save_path: str, count: str = "2") -> None:
    """So many windows, one a step."""
    with handle(save_path) as profiler:
        for step in range(1, int(count) + 1):
            profiler.start(step=step)
            update()
            profiler.stop(last=step == int(count))


def pair(save_path: str) -> None:
    """Two processes below one nsys."""
    first = handle(save_path)
    first.start(step=1)
    update()
    first.stop()
    subprocess.run([sys.executable, __file__, "windows", save_path, "1"], check=True)
    first.finish()
    first.close()


def nothing(save_path: str) -> None:
    """No configured step is ever reached."""
    with handle(save_path):
        pass


def controller(save_path: str) -> None:
    """What a driver does: ranges of its own, no windows."""
    import nvtx

    with nvtx.annotate("dispatch", domain="driver"):
        pass


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
