"""The memray tool: who allocated host memory in a window, by Python stack.

Source of the interface: memray 1.20.0, ``memray/_memray.pyx`` (``Tracker``, ``FileReader``).
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankscope import Availability, Context, OptionError, Window, hookimpl


@dataclass(frozen=True)
class MemrayOptions:
    """What ``tool_config.memray`` may hold.

    Attributes:
        native: also the stacks of native code; makes files larger and the run slower.
        python_allocators: each allocation of Python objects, not only the memory that Python takes from the system.
        aggregate: keep one record for each place that allocates; small files, no timeline.
        interval_ms: how often the size of the process is noted, in milliseconds.
        discrete: a file for each stage instead of one for the whole step.
    """

    native: bool = False
    python_allocators: bool = False
    aggregate: bool = False
    interval_ms: int = 10
    discrete: bool = False

    def __post_init__(self) -> None:
        if self.interval_ms < 1:
            raise OptionError([("interval_ms", f"must be 1 or more, got {self.interval_ms}")])


class MemrayBackend:
    """Runs memray's tracker in each window."""

    Options = MemrayOptions
    owns: frozenset[str] = frozenset({"allocation_tracker"})
    suffix = ".memray.bin"
    viewer = "memray flamegraph FILE"

    @staticmethod
    def available() -> Availability:
        """Whether memray is installed."""
        if importlib.util.find_spec("memray") is None:
            return Availability(False, "memray is not installed", "pip install memray")
        return Availability(True)

    def __init__(self, context: Context, options: MemrayOptions) -> None:
        self.context = context
        self.options = options
        self._tracker: Any = None
        self._file: Any = None

    @hookimpl
    def start(self, window: Window) -> None:
        """Begin to track; memray allows one tracker in a process."""
        import memray

        options = self.options
        file = self.context.store.reserve(window, suffix=self.suffix)
        # The name is reserved by an empty file of ours, which memray may write over.
        destination = memray.FileDestination(str(file.temporary), overwrite=True)
        kind = memray.FileFormat.AGGREGATED_ALLOCATIONS if options.aggregate else memray.FileFormat.ALL_ALLOCATIONS
        tracker = memray.Tracker(
            destination=destination,
            native_traces=options.native,
            trace_python_allocators=options.python_allocators,
            memory_interval_ms=options.interval_ms,
            file_format=kind,
        )
        try:
            _aside(tracker.__enter__)
        except RuntimeError as error:  # somebody else's tracker runs, e.g. `memray run`: it is left alone
            file.fail(f"memray cannot track: {error}")
            return
        self._tracker, self._file = tracker, file

    @hookimpl
    def stop(self, window: Window) -> None:
        """End it and publish the file."""
        tracker, self._tracker = self._tracker, None
        file, self._file = self._file, None
        if tracker is None:
            return
        with file:
            _aside(lambda: tracker.__exit__(None, None, None))
            import memray

            with memray.FileReader(str(file.temporary)) as reader:
                found = reader.metadata
            facts = {"ended_early": window.ended} if window.ended else {}
            file.publish(events=found.total_allocations, peak_bytes=found.peak_memory, **facts)


def _aside(function: Callable[[], object]) -> None:
    """Call it on a thread of its own.

    memray follows the calls of the thread that enters the tracker from there on. Ours would be those of this hook,
    whose frames are gone when the training allocates; of all other threads it reads the whole stack.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="rankscope-memray")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
