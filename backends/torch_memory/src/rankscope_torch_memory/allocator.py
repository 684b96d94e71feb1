"""The memory allocator of the device that torch computes on, as far as the installed torch lets one look into it.

Nothing here knows a kind of device by its name only: torch is asked which accelerator it has, and that one's module is
asked for the functions. Interfaces: ``cuda/memory.py``, ``xpu/memory.py``, ``mtia/__init__.py`` and
``accelerator/memory.py`` of torch 2.4 to 2.14, ``npu/memory.py`` of torch_npu 2.13.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rankscope.device import usable
from rankscope_torch_memory.arguments import Probed
from rankscope_torch_memory.options import TorchMemoryOptions

Observer = Callable[[int, int, int, int], None]
"""Called with device, bytes that were asked for, bytes that the device has (or may use), bytes that are free."""

_WELL_KNOWN = ("cuda", "xpu", "mtia")
"""Asked where torch does not tell its accelerator (before 2.6)."""


class Allocator:
    """The functions of one kind of device.

    Args:
        name: kind of device, as in ``torch.device``.
        module: ``torch.cuda``, ``torch.npu``, …
        binding: module of C functions beside it, for what the public module does not offer.
        shared: ``torch.accelerator.memory``, asked for what the device's own module does not offer.
    """

    def __init__(self, name: str, module: Any, binding: Any = None, shared: Any = None) -> None:
        self.name = name
        self._module = module
        self._binding = binding
        places = (getattr(module, "memory", None), module, shared)
        record = _function(places, "_record_memory_history", "record_memory_history")
        snapshot = _function(places, "_snapshot", "snapshot")
        self._record = None if record is None else Probed(record)
        self._snapshot = None if snapshot is None else Probed(snapshot)
        self._dump = _function(places, "_dump_snapshot")
        self._set_label = _function(places[:1], "_set_memory_metadata")
        self._get_label = _function(places[:1], "_get_memory_metadata")

    @property
    def offers_snapshots(self) -> bool:
        """Whether its state can be had at all."""
        return self._snapshot is not None or self._dump is not None

    @property
    def offers_history(self) -> bool:
        """Whether it can record stacks and events."""
        return self._record is not None

    # The device.

    @property
    def initialised(self) -> bool:
        """Whether this process uses the device. Before that its allocator is not there: some crash when asked."""
        ready = getattr(self._module, "is_initialized", None)
        return bool(ready()) if ready is not None else True

    def when_initialised(self, function: Callable[[], None]) -> bool:
        """Have it called as soon as this process uses the device; it must not raise. False: there is no such offer."""
        later = getattr(self._module, "_lazy_call", None)
        if later is None:
            return False
        later(function)
        return True

    # The history.

    def recording(self) -> bool | None:
        """Whether anybody records; None where it cannot be asked. Only once the device is initialised."""
        asked = getattr(self._binding, f"_{self.name}_isHistoryEnabled", None)
        return None if asked is None else bool(asked())

    def record(self, mode: str, options: TorchMemoryOptions, *, clear: bool) -> tuple[set[str], bool]:
        """Record the history from now on.

        Args:
            mode: ``all``, or ``state`` for stacks of what is allocated, without events.
            options: as configured.
            clear: drop the events so far.

        Returns:
            The options that this torch does not take, and whether it could drop the events in the same call.
        """
        if self._record is None:
            return {"history"}, False
        asked = _asked(self._record, mode, options, clear=clear)
        _, refused = self._record.call({name: value for _, name, value in asked})
        lost = {option for option, name, _ in asked if name in refused and option}
        return lost, clear and "clear_history" not in refused

    def stop_recording(self) -> None:
        """Record nothing any more."""
        if self._record is not None:
            self._record.call({"enabled": False if _is_legacy(self._record) else None})

    # What it holds.

    def snapshot(self, *, events: bool = True) -> Mapping[str, Any]:
        """Its state now, as plain containers: ``segments``, ``device_traces`` and whatever else this torch tells.

        Args:
            events: False leaves out the history, where this torch can.

        Raises:
            Exception: whatever torch raises, or TypeError where that is no snapshot.
        """
        if self._snapshot is not None:
            # Not by torch_npu's _dump_snapshot: it may start a profiler of the device for data of its own.
            wanted = {} if events or not self._snapshot.takes("include_traces") else {"include_traces": False}
            found, _ = self._snapshot.call(wanted)
        else:
            found = self._through_a_file()
        if not isinstance(found, Mapping):
            raise TypeError(f"torch returned no snapshot but {type(found).__name__}")
        return found

    def _through_a_file(self) -> Any:
        from rankscope_torch_memory.reading import load

        if self._dump is None:
            raise TypeError("this torch offers no snapshot")
        with tempfile.TemporaryDirectory(prefix="rankscope-") as folder:
            path = Path(folder, "snapshot.pickle")
            self._dump(str(path))
            return load(path)

    def facts(self) -> dict[str, Any]:
        """What torch and the driver count, without the history; reading changes no statistics."""
        found: dict[str, Any] = {"kind": self.name}
        try:
            index = int(self._module.current_device())
            found["device"] = index
            free, total = self._module.mem_get_info()
            found["device_bytes"] = {"free": int(free), "total": int(total)}
        except Exception:  # noqa: BLE001, S110 - not every device tells
            pass
        try:
            stats = self._module.memory_stats()
            found["statistics"] = {name: int(stats[name]) for name in _STATISTICS if name in stats}
        except Exception:  # noqa: BLE001, S110
            pass
        return found

    # Out of memory.

    def attach_oom(self, observer: Observer) -> bool:
        """Have it called whenever an allocation fails for good. Only once the device is in use, else torch crashes.

        Returns:
            False where this torch offers none. There is no way to detach it again.
        """
        for owner, name in (
            (self._binding, f"_{self.name}_attach_out_of_memory_observer"),
            (self._binding, f"_{self.name}_attachOutOfMemoryObserver"),
            (self._module, "attach_out_of_memory_observer"),
        ):
            attach = getattr(owner, name, None)
            if attach is not None:
                attach(observer)
                return True
        return False

    # Labels.

    @property
    def offers_labels(self) -> bool:
        """Whether events can carry a text."""
        return self._set_label is not None

    def label(self, text: str) -> str:
        """Let events carry this text from now on; the text that they carried before."""
        before = str(self._get_label()) if self._get_label is not None else ""
        if self._set_label is not None:
            self._set_label(text)
        return before


_STATISTICS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)


def find(torch: Any) -> Allocator | None:
    """The allocator of the device that this process can use, or None where there is none that offers a snapshot.

    Starts no device. ``torch`` is the imported module.
    """
    shared = getattr(getattr(torch, "accelerator", None), "memory", None)
    for name in dict.fromkeys(_kinds(torch)):
        module = getattr(torch, name, None)
        if module is None or not usable(name):
            continue
        binding = _binding(module)
        allocator = Allocator(name, module, binding, shared)
        if allocator.offers_snapshots:
            return allocator
    return None


def _kinds(torch: Any) -> Iterator[str]:
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    if current is not None:
        device = current()
        if device is not None:
            yield str(device.type)
    registered = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    if registered is not None:
        yield str(registered())
    yield from _WELL_KNOWN


def _function(places: Iterable[Any], *names: str) -> Callable[..., Any] | None:
    """The first function of one of these names, in the order of the places."""
    for place in places:
        for name in names:
            found = getattr(place, name, None)
            if callable(found):
                return cast("Callable[..., Any]", found)
    return None


def _binding(module: Any) -> Any:
    """``torch._C`` for ``torch.cuda``, ``torch_npu._C`` for ``torch_npu.npu``."""
    package = str(getattr(module, "__name__", "")).partition(".")[0]
    return getattr(sys.modules.get(package), "_C", None)


def _is_legacy(record: Probed) -> bool:
    """The form that torch had up to 2.0: switched by a bool, and with other names."""
    return record.takes("trace_alloc_max_entries") and not record.takes("max_entries")


def _asked(record: Probed, mode: str, options: TorchMemoryOptions, *, clear: bool) -> list[tuple[str, str, Any]]:
    """What is asked of torch: option, argument, value. The option is empty where nobody asked for it."""
    default = TorchMemoryOptions()

    def named(option: str) -> str:
        return option if getattr(options, option) != getattr(default, option) else ""

    further = [(f"kw_args.{name}", name, _as_torch_wants(value)) for name, value in options.kw_args.items()]
    depth = [] if options.stack_depth is None else [("stack_depth", "stack_depth", options.stack_depth)]
    clearing = [("", "clear_history", True)] if clear else []
    if _is_legacy(record):
        return [
            ("", "enabled", True),
            (named("context"), "record_context", options.context != "none"),
            (named("context"), "trace_alloc_record_context", options.context in {"all", "alloc"} and mode == "all"),
            (named("trace_alloc_max_entries"), "trace_alloc_max_entries", _entries(mode, options)),
            (named("stacks"), "record_context_cpp", options.stacks == "all"),
            *depth,
            *clearing,
            *further,
        ]
    return [
        (named("history"), "enabled", mode),
        (named("context"), "context", None if options.context == "none" else options.context),
        (named("stacks"), "stacks", options.stacks),
        (named("trace_alloc_max_entries"), "max_entries", _entries(mode, options)),
        *depth,
        *clearing,
        *further,
    ]


def _entries(mode: str, options: TorchMemoryOptions) -> int:
    return options.trace_alloc_max_entries if mode == "all" else 1


def _as_torch_wants(value: Any) -> Any:
    """Lists of a config are tuples here."""
    return list(value) if isinstance(value, tuple) else value
