"""How the driver's work grows with the number of ranks: planning, driving a window, the end, and reading the status."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import Report, Settings, child, peak_mb

ABOUT = "plan, driver and status for 16, 1,000 and 10,000 simulated ranks, as growth ratios"
VERL = False
SIZES = (16, 1_000, 10_000)
RANKS_A_NODE = 8
PARTS = {
    "plan": "rankscope plan, all ranks",
    "plan_few": "rankscope plan, 8 ranks of them",
    "runtime_env": "a runtime_env for each rank",
    "window": "a window: start, stop, relocate",
    "silent": "the same, every tenth rank dead",
    "finish": "the end: tools, claims, finish commands",
    "status": "rankscope status, a ledger a rank",
}
MOST_GROWTH = 1.5
"""More than this per rank, from 1,000 to 10,000 ranks, is worse than in proportion to their number."""


def run(settings: Settings) -> Report:
    """Each size in a fresh process, in turns."""
    report = Report("scale")
    sizes = (16, 200, 1_000) if settings.quick else SIZES
    samples: dict[tuple[str, int], list[float]] = {}
    memory: dict[int, list[float]] = {}
    for _ in range(1 if settings.quick else 3):
        for size in sizes:
            found = child("scale", {"size": size})
            for part, seconds in found["seconds"].items():
                samples.setdefault((part, size), []).append(1e6 * seconds / size)
            memory.setdefault(size, []).append(found["peak_mb"])
    for part, what in PARTS.items():
        series = {size: report.add(f"{size:,} ranks", what, "us a rank", samples[part, size]) for size in sizes}
        name = f"{what}: time a rank, {sizes[2]:,} / {sizes[1]:,} ranks"
        report.ratio(name, series[sizes[2]], series[sizes[1]], target=None if settings.quick else MOST_GROWTH)
    for size in sizes:
        report.add(f"{size:,} ranks", "most memory of the process", "MB", memory[size])
    report.note(
        "1 is growth in proportion to the ranks. They are simulated: their answers are there at once, so that only the "
        "driver's own work is measured, in processor time and with the garbage collector off. All are profiled, 8 on a "
        "node, unless it says otherwise."
    )
    return report


def measure(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """In the child: all parts for one size."""
    size = arguments["size"]
    os.environ["RANKSCOPE_LOG_LEVEL"] = "error"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(sys.stdout):
        seconds = {part: _timed(_PARTS[part], Path(folder, part), size) for part in PARTS}
    return {"seconds": seconds, "peak_mb": peak_mb()}


def _timed(part: Callable[[Path, int], Callable[[], object]], folder: Path, size: int) -> float:
    work = part(folder, size)
    gc.collect()
    gc.disable()  # its passes over all that the process holds come whenever they come
    began = time.process_time()
    work()
    seconds = time.process_time() - began
    gc.enable()
    return seconds


def _config(folder: Path, ranks: Any = "all") -> dict[str, Any]:
    return {
        "global_profiler": {"tool": "torch", "steps": "1-5", "save_path": str(folder), "finish_hook_cmd": "true"},
        "actor": {"profiler": {"enable": True, "ranks": ranks}},
    }


def _plan(folder: Path, size: int, ranks: Any = "all") -> Callable[[], object]:
    from rankscope import load_config
    from rankscope.plan import make_plan

    config = load_config(_config(folder, ranks))
    make_plan(config, world_size=1)  # imports the tool
    return lambda: make_plan(config, world_size=size, total_steps=100)


def _plan_few(folder: Path, size: int) -> Callable[[], object]:
    return _plan(folder, size, "0-7")


def _runtime_env(folder: Path, size: int) -> Callable[[], object]:
    from rankscope import load_config
    from rankscope.integrations.ray_env import runtime_envs

    config = load_config(_config(folder))
    runtime_envs(config, roles=["actor"], world_size=1)  # imports the tool
    return lambda: runtime_envs(config, roles=["actor"], world_size=size)


def _group(folder: Path, size: int, *, dead: bool = False) -> Any:
    from rankscope.integrations.actors.group import ActorGroup
    from rankscope.integrations.actors.members import Member

    transport = _Simulated(folder, dead=dead)
    members = [Member(rank, f"actor[{rank}]", rank) for rank in range(size)]
    return ActorGroup(members, transport, strict=False)


def _window(folder: Path, size: int, *, dead: bool = False) -> Callable[[], object]:
    group = _group(folder, size, dead=dead)

    def window() -> None:
        group.start_profile(step=1, scope="train")
        group.stop_profile()
        group.relocate_profile()

    return window


def _silent(folder: Path, size: int) -> Callable[[], object]:
    return _window(folder, size, dead=True)


def _finish(folder: Path, size: int) -> Callable[[], object]:
    group = _group(folder, size)
    group.start_profile(step=1, scope="train")
    group.stop_profile()
    return group.finish_profile


class _Simulated:
    """Actors that answer at once; each node has a directory of its own."""

    def __init__(self, folder: Path, *, dead: bool) -> None:
        from rankscope import Artifact
        from rankscope.integrations.actors.inside import HandleFacts, Place, Reply

        self._folder, self._dead = folder, dead
        self._ids = itertools.count()
        self._answers: dict[Hashable, Any] = {}
        self._handle, self._place, self._reply, self._artifact = HandleFacts, Place, Reply, Artifact

    def usable(self) -> bool:
        return True

    def call(self, member: Any, method: str, _: Mapping[str, Any]) -> Hashable:
        if self._dead and method == "stop_profile" and member.target % 10 == 9:
            return self._answer(ConnectionError("it is dead"))
        return self._answer(self._about(member.target, files=method == "relocate_profile"))

    def run(self, member: Any, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Hashable:
        if function.__name__ == "claim_directory":
            return self._answer(arguments["node"])
        return self._answer(self._about(member.target, files=function.__name__ == "finish_tools"))

    def wait(self, calls: list[Any], _: float) -> Sequence[Any]:
        return calls

    def result(self, call: Any) -> Any:
        value = self._answers.pop(call)
        if isinstance(value, Exception):
            raise value
        return value

    def explain(self, error: Exception) -> tuple[str, str]:
        return "dead", str(error)

    def _answer(self, value: Any) -> Hashable:
        call = next(self._ids)
        self._answers[call] = value
        return call

    def _about(self, rank: int, *, files: bool) -> Any:
        path = str(self._folder)
        facts = self._handle("actor", rank, 10_000, ("torch",), path, True, True, "true", False, (1,), 1, 60.0)
        place = self._place(f"node{rank // RANKS_A_NODE}", f"host{rank // RANKS_A_NODE}", rank, (facts,))
        name = Path(path, f"actor_train_step1_rank{rank}.json.gz")
        made = (self._artifact(name, "torch", "actor", rank, 1, "train", 1000),) if files else ()
        return self._reply(place, made)


def _status(folder: Path, size: int) -> Callable[[], object]:
    from rankscope.artifacts.ledger import Ledger
    from rankscope.artifacts.status import read_status

    for rank in range(size):
        who = {"role": "actor", "rank": rank, "tool": "torch"}
        ledger = Ledger(folder, host=f"host{rank // RANKS_A_NODE}", run_id="run", pid=rank + 1)
        ledger.write("plan", **who, profiled=True, steps=[1, 2], reason="all ranks are selected")
        for step in (1, 2):
            facts = {**who, "window": step, "step": step, "steps": [step], "scope": "train"}
            path = f"/out/actor_train_step{step}_rank{rank}.json.gz"
            ledger.write("window", event="open", **facts)
            ledger.write("window", event="close", **facts)
            ledger.write("artifact", status="published", path=path, bytes=1000, **facts)
    return lambda: read_status(folder)


_PARTS: dict[str, Callable[[Path, int], Callable[[], object]]] = {
    "plan": _plan,
    "plan_few": _plan_few,
    "runtime_env": _runtime_env,
    "window": _window,
    "silent": _silent,
    "finish": _finish,
    "status": _status,
}
