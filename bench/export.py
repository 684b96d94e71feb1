"""What the end of a capture costs the training: torch alone, rankscope and verl on the same work."""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.common import (
    Report,
    Settings,
    child,
    peak_mb,
    progress,
    rankscope_handle,
    rounds,
    torch_profile,
    verl_handle,
)

ABOUT = "stop of a capture of 5, 50 and 300 MB: blocked time, file size, time until the file is whole, memory"

CONTENTS = {"plain": ["cpu"], "shapes": ["cpu", "shapes"], "shapes+stack": ["cpu", "shapes", "stack"]}
TORCH = "torch alone"
_PATIENCE = 300.0


def run(settings: Settings) -> Report:
    """Every capture in a fresh process, one way after the other."""
    report = Report("export")
    ways = [TORCH, "rankscope", *(["verl"] if settings.verl else [])]
    sizes = {5: 1} if settings.quick else {size: max(3, 7 - size // 25) for size in settings.sizes}
    for name in ("shapes",) if settings.quick else CONTENTS:
        per_turn = _bytes_per_turn(name)
        for megabytes, count in sizes.items():
            turns = max(1, round(megabytes * 1e6 / per_turn))
            _captures(report, settings, ways, f"{megabytes} MB, {name}", name, turns, count, megabytes)
    _beside(report, settings, ways)
    report.note(
        "rankscope's stop has dropped torch's data when it returns; torch alone drops it when the object goes, verl in "
        "its next start. 'torch alone / verl' is what no exporter in the training process can go below."
    )
    return report


@functools.cache
def _bytes_per_turn(name: str) -> float:
    """How much a turn of the work adds to the raw trace: from two sizes, so that the header does not count."""
    small, large = (
        child("export", {"way": TORCH, "contents": CONTENTS[name], "turns": turns})["raw_bytes"]
        for turns in (100, 1100)
    )
    return (large - small) / 1000


def _run(settings: Settings, way: str, **arguments: Any) -> dict[str, Any]:
    return child("export", {"way": way, **arguments}, python=settings.verl if way == "verl" else None)


def _captures(
    report: Report, settings: Settings, ways: list[str], label: str, name: str, turns: int, count: int, megabytes: int
) -> None:
    progress(f"export, {label}: {turns:,} turns, {count} rounds")
    found = rounds(count, ways, lambda way: _run(settings, way, contents=CONTENTS[name], turns=turns))

    def add(what: str, unit: str, key: str) -> None:
        for way, results in found.items():
            report.add(way, f"{label}: {what}", unit, [result[key] for result in results if key in result])

    def ratio(what: str, above: str, below: str, target: float | None = None) -> None:
        report.ratio(
            f"{label}: {what}: {above} / {below}",
            report.find(above, f"{label}: {what}"),
            report.find(below, f"{label}: {what}"),
            target=target,
        )

    add("blocked by stop", "s", "blocked")
    add("blocked by stop, processor time alone", "s", "computed")
    add("blocked by stop, and data dropped", "s", "blocked_dropped")
    add("until the file is whole", "s", "whole")
    add("file", "MB", "megabytes")
    add("most memory of the training process", "MB", "peak")
    add("most memory of the helper process", "MB", "helper_peak")
    add("a step of training right after stop, by one without", "x", "slower")
    large = megabytes >= 50
    ratio("blocked by stop, and data dropped", "rankscope", TORCH, 1.10)
    ratio("blocked by stop", "rankscope", TORCH)
    ratio("blocked by stop", "rankscope", "verl", 0.28 if large else None)
    ratio("blocked by stop, processor time alone", "rankscope", "verl")
    ratio("blocked by stop, and data dropped", "rankscope", "verl")
    ratio("blocked by stop", TORCH, "verl")
    ratio("until the file is whole", "rankscope", "verl")
    ratio("file", "rankscope", "verl", 1.15)
    ratio("most memory of the training process", "rankscope", TORCH)


def _beside(report: Report, settings: Settings, ways: list[str]) -> None:
    """The same stop with a second Python thread in the process: one that ticks, and one that never rests."""
    per_turn = _bytes_per_turn("shapes")
    # A thread that never rests makes line-by-line compression take minutes, so this one is small.
    cases = [("busy", 1, 1 if settings.quick else 3)]
    if not settings.quick:
        cases.insert(0, ("ticker", 50, 3))
    for thread, megabytes, count in cases:
        turns = max(1, round(megabytes * 1e6 / per_turn))
        label = f"{megabytes} MB, shapes, {'a thread that ticks every 5 ms' if thread == 'ticker' else 'a busy thread'}"
        progress(f"export, {label}: {count} rounds")

        def one(way: str, thread: str = thread, turns: int = turns) -> dict[str, Any]:
            return _run(settings, way, contents=CONTENTS["shapes"], turns=turns, thread=thread)

        found = rounds(count, ways, one)
        for way, results in found.items():
            report.add(way, f"{label}: blocked by stop", "s", [result["blocked"] for result in results])
            if thread == "ticker":
                report.add(way, f"{label}: longest gap", "s", [result["gap"] for result in results])
            report.add(way, f"{label}: its work until the file is whole", "%", [result["work"] for result in results])
        what = f"{label}: blocked by stop"
        report.ratio(f"{what}: rankscope / verl", report.find("rankscope", what), report.find("verl", what))


# In the child.


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """One capture, one stop."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as folder:
        ways = {TORCH: _Torch, "rankscope": _Rankscope, "verl": _Verl}
        way = ways[arguments["way"]](Path(folder), arguments["contents"])
        for _ in range(2):  # small captures first: what happens only once in a process has its own subject
            way.start()
            _work(torch, 10)
            way.stop()
            way.wait()
            way.drop()
        thread = _THREADS[arguments["thread"]]() if arguments.get("thread") else None
        gc.collect()
        way.start()
        _work(torch, arguments["turns"])
        if thread is not None:
            thread.begin()
        began, computed = time.perf_counter(), time.thread_time()
        way.stop()
        blocked, computed = time.perf_counter() - began, time.thread_time() - computed
        freeing = time.perf_counter()
        freed = way.drop() or time.perf_counter() - freeing
        during: list[float] = []
        if thread is None:
            while way.background and not way.whole():
                during.append(_step(torch))
                if time.perf_counter() - began > _PATIENCE:
                    raise TimeoutError("the file was not whole in time")
        else:
            way.wait()
        whole = time.perf_counter() - began if way.background else blocked
        result = way.facts()
        result |= {"blocked": blocked, "computed": computed, "blocked_dropped": blocked + freed, "whole": whole}
        if thread is not None:
            result |= thread.end()
        elif during:
            after = [_step(torch) for _ in range(max(20, min(len(during), 200)))]
            result["slower"] = statistics.median(during) / statistics.median(after)
        result["peak"] = peak_mb()
        if way.background:
            result["helper_peak"] = _children_peak_mb()
        way.close()
    return result


def _children_peak_mb() -> float:
    """Most resident memory of a child that still lives: the helper process."""
    peak = 0.0
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text(encoding="ascii").split():
            for line in Path("/proc", pid, "status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    peak = max(peak, int(line.split()[1]) * 1.024 / 1000)
    return peak


def _work(torch: Any, turns: int) -> None:
    """Small operators with Python around them, as in a training loop that is bound by its launches."""
    weight, bias, values = torch.ones(8, 8), torch.ones(8), torch.ones(4, 8)

    def layer(values: Any) -> Any:
        return torch.relu(torch.addmm(bias, values, weight))

    for _ in range(turns):
        layer(layer(values)).sum()


def _step(torch: Any) -> float:
    """A small step of training; the seconds that it took."""
    began = time.perf_counter()
    values = torch.ones(64, 64)
    for _ in range(100):
        values = torch.relu(values @ values * 1e-3)
    return time.perf_counter() - began


class _Torch:
    """The floor: torch's own stop and its own raw file, nothing else."""

    background = False

    def __init__(self, folder: Path, contents: list[str]) -> None:
        self.folder = folder
        self.contents = contents
        self.profile: Any = None
        self.path = folder / "trace.json"

    def start(self) -> None:
        self.profile = torch_profile(self.contents)
        self.profile.prepare_trace()
        self.profile.start_trace()

    def stop(self) -> None:
        self.profile.stop_trace()
        self.profile.export_chrome_trace(str(self.path))

    def drop(self) -> float | None:
        self.profile = None
        return None

    def wait(self) -> None:
        pass

    def whole(self) -> bool:
        return True

    def facts(self) -> dict[str, Any]:
        return {"raw_bytes": self.path.stat().st_size}

    def close(self) -> None:
        pass


class _Files:
    def __init__(self, folder: Path, handle: Any) -> None:
        self.folder = folder
        self.handle = handle
        self.before: set[Path] = set()

    def files(self) -> set[Path]:
        return set(self.folder.glob("*.json.gz")) - self.before

    def facts(self) -> dict[str, Any]:
        (path,) = self.files()
        return {"megabytes": path.stat().st_size / 1e6}


class _Rankscope(_Files):
    background = True

    def __init__(self, folder: Path, contents: list[str]) -> None:
        super().__init__(folder, rankscope_handle(folder, contents))

    def start(self) -> None:
        self.before |= self.files()
        if not self.handle.start(step=1):
            raise RuntimeError("no window was opened")

    def stop(self) -> None:
        self.handle.stop()

    def drop(self) -> None:
        """Nothing is left to do: stop has dropped everything."""

    def whole(self) -> bool:
        return bool(self.files())

    def wait(self) -> None:
        end = time.monotonic() + _PATIENCE
        while not self.whole():
            if time.monotonic() > end:
                raise TimeoutError("the file was not whole in time")
            time.sleep(0.002)

    def close(self) -> None:
        self.handle.close()


class _Verl(_Files):
    background = False

    def __init__(self, folder: Path, contents: list[str]) -> None:
        super().__init__(folder, verl_handle(folder, contents))

    def start(self) -> None:
        self.before |= self.files()
        self.handle.start(role="train", profile_step=1)

    def stop(self) -> None:
        self.handle.stop(run_command=False)

    def drop(self) -> float:
        """Verl keeps torch's object until its next start, and then it is a cycle: the collector frees it some time.

        The seconds for that alone: those of a collection that finds it, less those of one that finds nothing.
        """
        self.handle._impl.prof = None  # noqa: SLF001
        began = time.perf_counter()
        gc.collect()
        middle = time.perf_counter()
        gc.collect()
        return max(0.0, 2 * middle - began - time.perf_counter())

    def wait(self) -> None:
        pass

    def whole(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _Ticker:
    """A thread that wants to run every 5 ms: a data loader, a heartbeat, a metrics pusher."""

    pause = 0.005

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        self.thread.start()
        while len(self.times) < 3:
            time.sleep(self.pause)
        self.times = self.times[-1:]

    def _run(self) -> None:
        while not self.done.is_set():
            self.times.append(time.perf_counter())
            time.sleep(self.pause)

    def end(self) -> dict[str, Any]:
        times = [*self.times, time.perf_counter()]
        self.done.set()
        self.thread.join()
        gap = max(late - early for early, late in itertools.pairwise(times))
        wanted = (times[-1] - times[0]) / (self.pause + 0.0001)
        return {"gap": gap, "work": 100 * len(times) / max(wanted, 1)}


class _Busy:
    """A thread that never gives the interpreter up by itself."""

    def __init__(self) -> None:
        self.count = 0
        self.began = 0.0
        self.alone = 0.0
        self.done = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        self.thread.start()
        began, count = time.perf_counter(), self.count
        time.sleep(0.1)
        self.alone = (self.count - count) / (time.perf_counter() - began)
        self.began, self.count = time.perf_counter(), 0

    def _run(self) -> None:
        while not self.done:
            self.count += 1

    def end(self) -> dict[str, Any]:
        rate = self.count / (time.perf_counter() - self.began)
        self.done = True
        self.thread.join()
        return {"work": 100 * rate / self.alone}


_THREADS = {"ticker": _Ticker, "busy": _Busy}
