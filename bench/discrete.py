"""Many stages with a file each in one process: does it stay as fast and as small as at the beginning?"""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import Report, Settings, child, memory_mb, rankscope_handle, rounds, verl_handle

ABOUT = "500 discrete stages in one process: time of the first and the last ones, memory, files"


def run(settings: Settings) -> Report:
    """Fresh processes, one way after the other."""
    report = Report("discrete")
    stages = 20 if settings.quick else 500
    ways = ["rankscope", *(["verl"] if settings.verl else [])]

    def one(way: str) -> dict[str, Any]:
        return child("discrete", {"way": way, "stages": stages}, python=settings.verl if way == "verl" else None)

    found = rounds(1 if settings.quick else 3, ways, one)
    edge = _edge(stages)
    names = {
        f"a stage, first {edge}": ("first", "ms"),
        f"a stage, last {edge}": ("last", "ms"),
        "memory gained after the first tenth": ("gained", "MB"),
        "files after the last stage and close": ("files", "files"),
        "whole files": ("whole", "files"),
        "bytes of files": ("megabytes", "MB"),
    }
    for what, (key, unit) in names.items():
        for way, results in found.items():
            report.add(way, what, unit, [result[key] for result in results])
    for way in ways:
        report.ratio(
            f"a stage, last / first: {way}",
            report.find(way, f"a stage, last {edge}"),
            report.find(way, f"a stage, first {edge}"),
            target=1.2 if way == "rankscope" else None,
        )
        wanted = report.add("", "stages", "files", [stages]) if way == "rankscope" else report.find("", "stages")
        report.ratio(
            f"whole files / stages: {way}",
            report.find(way, "whole files"),
            wanted,
            target=1 if way == "rankscope" else None,
            at_least=True,
        )
    what = f"a stage, last {edge}"
    report.ratio(f"{what}: rankscope / verl", report.find("rankscope", what), report.find("verl", what))
    report.series = [one for one in report.series if one.way]
    return report


def _edge(stages: int) -> int:
    return max(5, stages // 10)


# In the child.


def measure(arguments: dict[str, Any]) -> dict[str, float]:
    """One process, all stages."""
    import torch

    torch.set_num_threads(1)
    stages = arguments["stages"]
    edge = _edge(stages)
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as place:
        folder = Path(place)
        rankscope = arguments["way"] == "rankscope"
        handle = (rankscope_handle if rankscope else verl_handle)(folder, ["cpu"], discrete=True)
        worker = _worker(torch, handle, rankscope=rankscope)
        if rankscope:
            handle.start(step=1)
        else:
            handle.start(role="train", profile_step=1)
        seconds = []
        before = 0.0
        for number in range(stages):
            began = time.perf_counter()
            worker.stage()
            seconds.append(time.perf_counter() - began)
            if number + 1 == edge:
                before = memory_mb()
        gained = memory_mb() - before
        if rankscope:
            handle.stop()
            handle.close(timeout=300)
        else:
            handle.stop(run_command=False)
        paths = list(folder.glob("*.json.gz"))
        return {
            "first": 1000 * statistics.median(seconds[:edge]),
            "last": 1000 * statistics.median(seconds[-edge:]),
            "gained": gained,
            "files": len(paths),
            "whole": sum(_is_whole(path) for path in paths),
            "megabytes": sum(path.stat().st_size for path in paths) / 1e6,
        }


def _worker(torch: Any, handle: Any, *, rankscope: bool) -> Any:
    if rankscope:
        from rankscope import annotate

        decorate = annotate("actor_update")
    else:
        from verl.utils.profiler import DistProfiler

        decorate = DistProfiler.annotate(role="actor_update")
    values = torch.ones(8, 8)

    class Worker:
        profiler = handle

        @decorate
        def stage(self) -> None:
            for _ in range(100):
                torch.relu(values @ values)

    return Worker()


def _is_whole(path: Path) -> bool:
    with contextlib.suppress(OSError, EOFError, ValueError), gzip.open(path, "rb") as file:
        return any(event.get("name") == "aten::relu" for event in json.load(file)["traceEvents"])
    return False
