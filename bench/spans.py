"""What an annotation costs, closed (nothing is captured) and open (torch's profiler records)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import SOURCES, ChildFailed, Report, Settings, child, progress, rankscope_handle, verl_handle

ABOUT = "cost of one span: decorated, with, async, generator; window closed and open"


def run(settings: Settings) -> Report:
    """All ways in one process, in turns."""
    report = Report("spans")
    arguments = {
        "rounds": 5 if settings.quick else 31,
        "closed": 20_000 if settings.quick else 100_000,
        "open": 500 if settings.quick else 2_000,
        "captures": 4 if settings.quick else 15,
        "verl": settings.verl is not None,
        "packages": sysconfig.get_paths()["purelib"],
    }
    try:
        found = child("spans", arguments, python=settings.verl)
    except ChildFailed as error:
        if settings.verl is None:
            raise
        progress(f"spans without verl: {error}")
        found = child("spans", {**arguments, "verl": False})
    for key, samples in found.items():
        what, way = key.split("|")
        report.add(way, what, "ns", samples)
    _compare(report)
    return report


def _compare(report: Report) -> None:
    def ratio(what: str, above: str, below: str, target: float | None = None, *, at_least: bool = False) -> None:
        report.ratio(
            f"{what}: {above} / {below}",
            report.find(above, what),
            report.find(below, what),
            target=target,
            at_least=at_least,
        )

    ratio("closed, method", "rankscope", "closure", 1.1)
    ratio("closed, with", "rankscope", "null context", 1.3)
    ratio("closed, with f-string", "rankscope", "null context")
    ratio("closed, coroutine", "rankscope", "closure")
    ratio("closed, generator", "rankscope", "closure")
    ratio("closed, method", "verl", "rankscope", 15, at_least=True)
    ratio("open, method", "rankscope", "record_function", 0.5)
    ratio("open, with", "rankscope", "record_function", 0.5)
    ratio("open, method", "verl", "rankscope")
    ratio("open, coroutine", "rankscope", "record_function")
    ratio("open, generator", "rankscope", "record_function")


# In the child.

Way = Callable[[int], None]


def measure(arguments: dict[str, Any]) -> dict[str, list[float]]:
    """Nanoseconds per call, without those of the loop."""
    # verl's environment lacks what rankscope needs; its own packages stay in front.
    sys.path.append(arguments["packages"])
    sys.path.extend(str(source) for source in SOURCES)
    with tempfile.TemporaryDirectory() as folder:
        closed = _closed(_verl(Path(folder), active=False) if arguments["verl"] else None)
        found = _turns(closed, arguments["closed"], arguments["rounds"])
        handle = rankscope_handle(Path(folder), ["cpu"])
        ways = _open(_verl(Path(folder), active=True) if arguments["verl"] else None)
        for number in range(arguments["captures"]):
            if not handle.start(step=1):
                raise RuntimeError("no window was opened")
            try:
                part = _turns(ways, arguments["open"], 2)
            finally:
                handle.stop()
            if number:  # the first capture warms up
                for key, samples in part.items():
                    found.setdefault(key, []).append(min(samples))
        handle.close()
    return found


def _turns(ways: dict[str, Way], count: int, rounds: int) -> dict[str, list[float]]:
    """One round of each way after the other, the empty loop among them."""
    found: dict[str, list[float]] = {key: [] for key in ways}
    for way in ways.values():
        way(min(count, 1000))
    for _ in range(rounds):
        gc.collect()
        began = time.perf_counter_ns()
        for _ in range(count):
            pass
        loop = time.perf_counter_ns() - began
        for key, way in ways.items():
            began = time.perf_counter_ns()
            way(count)
            found[key].append((time.perf_counter_ns() - began - loop) / count)
    return found


def _verl(folder: Path, *, active: bool) -> Any:
    handle = verl_handle(folder, ["cpu"])
    handle._this_step = active  # noqa: SLF001 - so that verl's range goes into the capture that is open already
    return handle


def _calling(method: Callable[[int], Any]) -> Way:
    def way(count: int) -> None:
        for _ in range(count):
            method(1)

    return way


def _awaiting(method: Callable[[int], Any]) -> Way:
    async def loop(count: int) -> None:
        for _ in range(count):
            await method(1)

    return lambda count: asyncio.run(loop(count))


def _iterating(method: Callable[[int], Any]) -> Way:
    def way(count: int) -> None:
        for _ in range(count):
            for _ in method(1):
                pass

    return way


def _closure(function: Callable[..., Any]) -> Callable[..., Any]:
    """The least that any decorator costs which takes every call."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def _async_closure(function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


def _generator_closure(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (yield from function(*args, **kwargs))

    return wrapper


def _worker(decorate: Any, async_decorate: Any = None, generator_decorate: Any = None) -> Any:
    """An object with one method of each sort; three equal functions, since a code object is specialised by its use."""

    class Worker:
        profiler: Any = None

        @decorate
        def plain(self, batch: int) -> int:
            return batch

        @(async_decorate or decorate)
        async def coroutine(self, batch: int) -> int:
            return batch

        @(generator_decorate or decorate)
        def generator(self, batch: int) -> Any:
            yield batch

    return Worker()


def _same(function: Any) -> Any:
    return function


def _closed(verl: Any) -> dict[str, Way]:
    from rankscope import annotate

    null = contextlib.nullcontext()
    bare = _worker(_same)
    closure = _worker(_closure, _async_closure, _generator_closure)
    ours = _worker(annotate("stage"))

    def null_with(count: int) -> None:
        for _ in range(count):
            with null:
                pass

    def our_with(count: int) -> None:
        for _ in range(count):
            with annotate("stage"):
                pass

    def null_text(count: int) -> None:
        for number in range(count):
            f"mini_batch{number % 64}"
            with null:
                pass

    def our_text(count: int) -> None:
        for number in range(count):
            with annotate(f"mini_batch{number % 64}"):
                pass

    ways = {
        "closed, method|bare": _calling(bare.plain),
        "closed, method|closure": _calling(closure.plain),
        "closed, method|rankscope": _calling(ours.plain),
        "closed, with|null context": null_with,
        "closed, with|rankscope": our_with,
        "closed, with f-string|null context": null_text,
        "closed, with f-string|rankscope": our_text,
        "closed, coroutine|bare": _awaiting(bare.coroutine),
        "closed, coroutine|closure": _awaiting(closure.coroutine),
        "closed, coroutine|rankscope": _awaiting(ours.coroutine),
        "closed, generator|bare": _iterating(bare.generator),
        "closed, generator|closure": _iterating(closure.generator),
        "closed, generator|rankscope": _iterating(ours.generator),
    }
    if verl is not None:
        theirs = _verl_worker(verl)
        ways["closed, method|verl"] = _calling(theirs.plain)
        ways["closed, coroutine|verl"] = _awaiting(theirs.coroutine)
    return ways


def _open(verl: Any) -> dict[str, Way]:
    import torch

    from rankscope import annotate

    record_function = torch.profiler.record_function
    ours = _worker(annotate("stage"))
    bare = _worker(_same)

    class Recorded:
        def plain(self, batch: int) -> int:
            with record_function("stage"):
                return batch

        async def coroutine(self, batch: int) -> int:
            with record_function("stage"):
                return batch

        def generator(self, batch: int) -> Any:
            with record_function("stage"):
                yield batch

    recorded = Recorded()

    def torch_with(count: int) -> None:
        for _ in range(count):
            with record_function("stage"):
                pass

    def our_with(count: int) -> None:
        for _ in range(count):
            with annotate("stage"):
                pass

    ways = {
        "open, method|bare": _calling(bare.plain),
        "open, method|record_function": _calling(recorded.plain),
        "open, method|rankscope": _calling(ours.plain),
        "open, with|record_function": torch_with,
        "open, with|rankscope": our_with,
        "open, coroutine|record_function": _awaiting(recorded.coroutine),
        "open, coroutine|rankscope": _awaiting(ours.coroutine),
        "open, generator|record_function": _iterating(recorded.generator),
        "open, generator|rankscope": _iterating(ours.generator),
    }
    if verl is not None:
        ways["open, method|verl"] = _calling(_verl_worker(verl).plain)
    return ways


def _verl_worker(handle: Any) -> Any:
    from verl.utils.profiler import DistProfiler

    worker = _worker(DistProfiler.annotate(role="stage"))
    worker.profiler = handle
    return worker
