"""A device with a caching allocator, simulated, behind the functions that torch has for it.

The signatures are those that ``inspect.signature`` told of real ones; see ``GENERATIONS``. What the simulated allocator
does with a history is what the real one of torch_npu did on a CPU, with stand-ins below it (tests/npu runs that one).
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

MEBI = 1 << 20

GENERATIONS: dict[str, str] = {
    # torch 2.14.1, torch.cuda.memory
    "cuda 2.14": (
        "enabled='all', context='all', stacks='all', max_entries=9223372036854775807, device=None, "
        "clear_history=False, compile_context=False, global_record_annotations=False, skip_actions=None, "
        "record_pinned_host_memory=False, record_cuda=True"
    ),
    # torch 2.13.0, torch.cuda.memory
    "cuda 2.13": (
        "enabled='all', context='all', stacks='all', max_entries=9223372036854775807, device=None, "
        "clear_history=False, compile_context=False, global_record_annotations=False, skip_actions=None"
    ),
    # torch 2.14.1, torch.xpu.memory
    "xpu 2.14": (
        "enabled='all', context='all', stacks='all', max_entries=9223372036854775807, clear_history=False, "
        "skip_actions=None"
    ),
    # torch_npu 2.13.0, _record_memory_history_impl, behind a function that passes everything on
    "npu 2.13": "enabled='all', context='all', stacks='all', max_entries=9223372036854775807, device=None",
    # torch 2.0, and still the one that a bool chooses: torch.cuda.memory._record_memory_history_legacy
    "legacy": (
        "enabled, record_context=True, trace_alloc_max_entries=1, trace_alloc_record_context=False, device=None, "
        "record_context_cpp=False"
    ),
}


class Device:
    """The simulated device. Nothing may touch it before it is initialised: the real one crashes then."""

    def __init__(self, kind: str = "cuda", limit: int = 1 << 40) -> None:
        self.kind = kind
        self.limit = limit
        self.initialised = False
        self.history = False
        self.options: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.snapshots = 0
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[int, dict[str, Any]] = {}
        self.cached: list[dict[str, Any]] = []
        self.reserved = 0
        self.observers: list[Callable[..., None]] = []
        self.queued: list[Callable[[], None]] = []
        self.label = ""
        self.broken: dict[str, Exception] = {}
        self._next = 1 << 30

    # What a training does.

    def initialise(self) -> None:
        """As the first tensor on it does."""
        if not self.initialised:
            for function in self.queued:
                function()
            self.initialised = True

    def alloc(self, size: int) -> int:
        self.initialise()
        if self.reserved + size > self.limit:
            self._event("oom", size=size, device_free=self.limit - self.reserved)
            for observer in self.observers:
                observer(0, size, self.limit, self.limit - self.reserved)
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self._next += size
        self._event("segment_alloc", addr=self._next, size=size)
        self.reserved += size
        frames = self._frames() if self.history and self.options["context"] else []
        self.blocks[self._next] = {
            "address": self._next,
            "size": -(-size // 512) * 512,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames,
        }
        self._event("alloc", addr=self._next, size=size)
        return self._next

    def free(self, address: int) -> None:
        block = self.blocks.pop(address)
        self.cached.append({**block, "state": "inactive", "frames": []})
        self._event("free_requested", addr=address, size=block["requested_size"])
        self._event("free_completed", addr=address, size=block["requested_size"])

    # What torch offers.

    def record(self, **given: Any) -> None:
        self._must_be_awake()
        self.records.append(given)
        if "record" in self.broken:
            raise self.broken["record"]
        legacy = "trace_alloc_max_entries" in given
        entries = given["trace_alloc_max_entries"] if legacy else given["max_entries"]
        self.history = bool(given["enabled"])
        if not self.history or given.get("clear_history"):
            self.events.clear()
        self.options = {
            "context": given["record_context"] if legacy else given["context"],
            "entries": 1 if given["enabled"] == "state" else entries,
        }

    def snapshot(self) -> dict[str, Any]:
        self._must_be_awake()
        self.snapshots += 1
        if "snapshot" in self.broken:
            raise self.broken["snapshot"]
        blocks = [*self.blocks.values(), *self.cached]
        segments = [
            {
                "device": 0,
                "address": block["address"],
                "total_size": block["size"],
                "allocated_size": block["size"] if block["state"] == "active_allocated" else 0,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "blocks": [dict(block)],
            }
            for block in blocks
        ]
        return {"segments": segments, "device_traces": [[dict(event) for event in self.events]]}

    def memory_stats(self) -> dict[str, int]:
        self._must_be_awake()
        taken = sum(block["size"] for block in self.blocks.values())
        return {"allocated_bytes.all.current": taken, "allocated_bytes.all.peak": taken, "num_ooms": 0, "other": 1}

    def _must_be_awake(self) -> None:
        assert self.initialised or self.queued, "the allocator was asked before it was there: the real one crashes"

    def _event(self, action: str, **facts: Any) -> None:
        if not self.history:
            return
        event = {"action": action, "stream": 0, "frames": self._frames(), **facts}
        if self.label:
            event["user_metadata"] = self.label
        self.events.append(event)
        del self.events[: -self.options["entries"]]

    def _frames(self) -> list[dict[str, Any]]:
        frame: Any = sys._getframe(2)
        frames = []
        while frame is not None and len(frames) < 12:
            if frame.f_code.co_filename != __file__:
                code = frame.f_code
                frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
            frame = frame.f_back
        return frames


class OutOfMemoryError(RuntimeError):
    """As torch's: known by its name."""


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("this falsifies the trainer's own numbers or holds it up")


def torch_with(device: Device, generation: str = "cuda 2.13", *, without: tuple[str, ...] = ()) -> types.ModuleType:
    """A module ``torch`` whose accelerator is this device.

    Args:
        device: the simulated one.
        generation: which signatures its functions have.
        without: names of functions that it does not offer.
    """
    torch = _module("torch")
    torch.__version__ = f"0 ({generation})"
    torch.OutOfMemoryError = OutOfMemoryError
    torch.distributed = types.SimpleNamespace(is_available=lambda: False)
    memory = _memory(device, generation)
    kind = _module(f"torch.{device.kind}")
    kind.memory = memory
    kind.is_initialized = lambda: device.initialised
    kind.is_available = lambda: True
    kind.device_count = lambda: 1
    kind._lazy_call = lambda function: function() if device.initialised else device.queued.append(function)
    kind.current_device = lambda: 0
    kind.mem_get_info = lambda: (100 * MEBI, 1000 * MEBI)
    kind.memory_stats = device.memory_stats
    kind.synchronize = kind.reset_peak_memory_stats = kind.empty_cache = _never
    setattr(torch, device.kind, kind)
    torch.accelerator = types.SimpleNamespace(
        current_accelerator=lambda: types.SimpleNamespace(type=device.kind), memory=None
    )
    binding = types.SimpleNamespace()
    setattr(binding, f"_{device.kind}_isHistoryEnabled", lambda: device._must_be_awake() or device.history)
    setattr(binding, f"_{device.kind}_attach_out_of_memory_observer", device.observers.append)
    torch._C = binding
    for name in without:
        for place in (kind, memory, binding):
            if hasattr(place, name):
                delattr(place, name)
    return torch


def _memory(device: Device, generation: str) -> types.ModuleType:
    memory = _module(f"torch.{device.kind}.memory")
    memory.simulated = device
    behind = f"def {{}}({GENERATIONS[generation]}):\n    return simulated.record(**locals())\n"
    if generation.startswith("npu"):
        code = behind.format("_record_memory_history_impl") + (
            "def _record_memory_history(enabled='all', *args, **kwargs):\n"
            "    return _record_memory_history_impl(enabled, *args, **kwargs)\n"
        )
    else:
        code = behind.format("_record_memory_history")
    exec(compile(code, "stand-in", "exec"), memory.__dict__)
    memory._snapshot = lambda device_=None, augment_with_fx_traces=False: device.snapshot()
    memory._dump_snapshot = _never  # torch_npu's starts a profiler
    memory._set_memory_metadata = lambda text: setattr(device, "label", text)
    memory._get_memory_metadata = lambda: device.label
    sys.modules[memory.__name__] = memory  # removed by the fixture
    return memory


def _module(name: str) -> Any:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module
