"""What the tests of torch_memory do with the real allocator of torch_npu, each in a process of its own.

``python memory_scenarios.py NAME FOLDER``; the last line of the output is JSON. Kernels do not run on the stand-ins for
CANN, so tensors are only made and dropped.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_npu

from rankscope import DistProfiler, ProfileController, annotate

MEBI = 1 << 20


def recorded() -> bool:
    """Whether torch_npu records its history; it crashes when it is asked before the device is in use."""
    return torch.npu.is_initialized() and torch_npu._C._npu_isHistoryEnabled()


def tensor(mebi: int) -> Any:
    return torch.empty(mebi * MEBI, dtype=torch.uint8, device="npu")


def config(path: Path, *roles: str, steps: Any = (2, 3, 5), **options: Any) -> dict[str, Any]:
    return {
        "global_profiler": {
            "tool": "torch_memory",
            "steps": list(steps),
            "save_path": str(path),
            "global_tool_config": {"torch_memory": options},
        },
        **{role: {"profiler": {"enable": True}} for role in roles or ("actor",)},
    }


def handle(path: Path, role: str = "actor", **options: Any) -> DistProfiler:
    return DistProfiler(config(path, **options), role=role, rank=0, world_size=1, total_steps=6)


def steps(path: Path) -> dict[str, Any]:
    """Six steps, three of them profiled; the device is first used in the first of them."""
    prof = handle(path)
    asleep = not torch.npu.is_initialized()
    on, kept = [], []
    peaks = []
    for step in range(1, 7):
        profiled = step in {2, 3, 5}
        if profiled:
            prof.start(step=step)
        if step > 1:
            with annotate("update"):
                kept.append(tensor(1))
                scratch = tensor(4 * step)
                del scratch
        on.append(recorded())
        if profiled:
            before = torch.npu.max_memory_allocated()
            prof.stop()
            peaks.append((before, torch.npu.max_memory_allocated()))
    prof.close()
    return {"asleep": asleep, "on": on, "peaks": peaks, "after": recorded()}


def several(path: Path) -> dict[str, Any]:
    """One file for two steps, the third at the end; more events than the history holds."""
    prof = handle(path, memory_snapshot_num_steps=2, trace_alloc_max_entries=6, stack_depth=8, kw_args={"no_such": 1})
    for step in (2, 3, 5):
        prof.start(step=step)
        for _ in range(4):
            tensor(1)
        prof.stop()
    prof.close()
    return {}


def early(path: Path) -> dict[str, Any]:
    """Recorded from the first use of the device on."""
    prof = handle(path, from_init=True, steps=(2,))
    asleep = not torch.npu.is_initialized()
    weights = tensor(8)
    on = recorded()
    prof.start(step=2)
    activations = tensor(2)
    prof.stop()
    prof.close()
    return {"asleep": asleep, "on": on, "bytes": weights.nbytes + activations.nbytes, "after": recorded()}


def state(path: Path) -> dict[str, Any]:
    """Without events."""
    prof = handle(path, history=False, steps=(2,))
    kept = [tensor(1)]
    prof.start(step=2)
    kept.append(tensor(3))
    tensor(5)
    prof.stop()
    prof.close()
    return {"after": recorded()}


def theirs(path: Path) -> dict[str, Any]:
    """The training records by itself."""
    tensor(1)
    torch.npu.memory._record_memory_history(max_entries=1000, stacks="python")
    before = tensor(1)
    prof = handle(path, steps=(2,))
    prof.start(step=2)
    inside = tensor(2)
    prof.stop()
    prof.close()
    trace = torch.npu.memory._snapshot()["device_traces"][0]
    return {
        "on": recorded(),
        "allocs": [e["size"] for e in trace if e["action"] == "alloc"],
        "kept": bool([before, inside]),
    }


def roles(path: Path) -> dict[str, Any]:
    """Two roles in one process."""
    options = config(path, "actor", "critic", steps=(1, 2))
    workers = [DistProfiler(options, role=role, rank=0, world_size=1) for role in ("actor", "critic")]
    controller = ProfileController(options, workers=workers, total_steps=2)
    kept = []
    for step in (1, 2):
        with controller.step(step):
            kept.append(tensor(step))
    for worker in workers:
        worker.close()
    return {"after": recorded()}


def oom(path: Path) -> dict[str, Any]:
    """The allocator really fails: it may use 30 % of the device, which has one GiB."""
    prof = handle(path, steps=(2,), oom_max_dumps=2)
    kept = [tensor(1)]
    torch.npu.set_per_process_memory_fraction(0.3)
    raised = []

    def greedy() -> None:
        kept.append(tensor(40))
        tensor(600)

    def attempt() -> None:
        try:
            with annotate("update"):
                greedy()
        except torch.OutOfMemoryError as error:
            raised.append([type(error).__name__, str(error), vars(error)])

    attempt()  # outside of a window: not ours to save
    prof.start(step=2)
    attempt()
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    attempt()  # one more than is allowed
    prof.stop()
    prof.close()
    return {"raised": raised}


def oom_outside(path: Path) -> dict[str, Any]:
    """Before the first profiled step, on request."""
    prof = handle(path, steps=(2,), oom_outside_steps=True)
    kept = [tensor(30)]
    torch.npu.set_per_process_memory_fraction(0.3)
    try:
        tensor(600)
    except torch.OutOfMemoryError:
        kept.clear()
    prof.close()
    return {"on": recorded()}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function for function in (steps, several, early, state, theirs, roles, oom, oom_outside)
}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]))))
