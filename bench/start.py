"""What it costs to open a window, and to close one in which nothing ran."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import Report, Settings, child, rankscope_handle, rounds, torch_profile, verl_handle

ABOUT = "opening a window (the first one and later ones), and closing an empty one"

TORCH = "torch alone"


def run(settings: Settings) -> Report:
    """Fresh processes, one way after the other."""
    report = Report("start")
    ways = [TORCH, "rankscope", *(["verl"] if settings.verl else [])]
    later = 5 if settings.quick else 30

    def one(way: str) -> dict[str, Any]:
        return child("start", {"way": way, "later": later}, python=settings.verl if way == "verl" else None)

    found = rounds(1 if settings.quick else 7, ways, one)
    names = {
        "making the handle": "make",
        "first start": "first_start",
        "first stop, empty": "first_stop",
        "later start": "later_start",
        "later stop, empty": "later_stop",
        "slowest later stop, empty": "slowest_stop",
    }
    for what, key in names.items():
        for way, results in found.items():
            report.add(way, what, "ms", [result[key] * 1000 for result in results])
    for what in list(names)[1:-1]:
        ours, theirs, verl = (report.find(way, what) for way in ("rankscope", TORCH, "verl"))
        report.ratio(f"{what}: rankscope / {TORCH}", ours, theirs)
        if what != "first start":  # verl has loaded the same while it was imported
            report.ratio(f"{what}: rankscope / verl", ours, verl)
    report.note(
        "torch is imported before; verl's modules count as making the handle; rankscope's first stop also starts its "
        "helper process."
    )
    return report


# In the child.


def measure(arguments: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as folder:
        make = {TORCH: _torch, "rankscope": _rankscope, "verl": _verl}[arguments["way"]]
        began = time.perf_counter()
        start, stop, close = make(Path(folder))
        made = time.perf_counter() - began
        gc.collect()
        starts, stops = [], []
        for _ in range(1 + arguments["later"]):
            began = time.perf_counter()
            start()
            opened = time.perf_counter()
            stop()
            stops.append(time.perf_counter() - opened)
            starts.append(opened - began)
        close()
    return {
        "make": made,
        "first_start": starts[0],
        "first_stop": stops[0],
        "later_start": statistics.median(starts[1:]),
        "later_stop": statistics.median(stops[1:]),
        "slowest_stop": max(stops[1:]),
    }


def _torch(folder: Path) -> Any:
    profiles: list[Any] = []

    def start() -> None:
        profiles[:] = [torch_profile(["cpu"])]
        profiles[0].prepare_trace()
        profiles[0].start_trace()

    def stop() -> None:
        profiles[0].stop_trace()
        profiles[0].export_chrome_trace(str(folder / "trace.json"))
        profiles.clear()

    return start, stop, lambda: None


def _rankscope(folder: Path) -> Any:
    handle = rankscope_handle(folder, ["cpu"])
    return lambda: handle.start(step=1), handle.stop, handle.close


def _verl(folder: Path) -> Any:
    handle = verl_handle(folder, ["cpu"])
    return (
        lambda: handle.start(role="train", profile_step=1),
        lambda: handle.stop(run_command=False),
        lambda: None,
    )
