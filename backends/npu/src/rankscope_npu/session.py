"""One capture of torch_npu's profiler, for one folder.

There is one such profiler a process, and nothing that it does wrong raises: what it prints and what it leaves is looked
at instead. Source: torch_npu 2.13.0, ``torch_npu/profiler/profiler.py`` and ``_profiler_action_controller.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope_npu import folders, vendor
from rankscope_npu.said import Said, listening
from rankscope_npu.vendor import HandlerPlace, Offer

_MOST_METADATA = 4096
"""Characters that torch_npu takes as the value of one metadata key."""


class CaptureLost(Exception):  # noqa: N818 - a state of affairs that is told, not a programming error
    """The capture did not begin or cannot be saved; the text says why."""


class Capture:
    """One session of torch_npu's profiler. A new one for each folder: a used profiler is not started again.

    Args:
        offer: makes the profiler.
        place: where handlers write to.
        folder: directory into which it writes; created.
        schedule_actions: ``torch_npu.profiler.ProfilerAction``.

    Attributes:
        said: all that torch_npu complained of so far.
        thread, thread_name: who started it.
    """

    def __init__(self, offer: Offer, place: HandlerPlace, folder: Path, schedule_actions: Any) -> None:
        self.folder = folder
        self.said = Said()
        self.thread = 0
        self.thread_name = ""
        self._offer = offer
        self._place = place
        self._actions = schedule_actions
        self._profile: Any = None
        self._warm = False
        self._remark = ""

    @property
    def trouble(self) -> str:
        """What went wrong though there may be data, in words; empty when nothing did."""
        said = f"torch_npu said: {self.said.words}" if self.said.errors else ""
        return "; ".join(filter(None, (self._remark, said)))

    def prepare(self) -> None:
        """Let the device warm up; nothing is kept yet.

        Raises:
            CaptureLost: as of ``start``.
        """
        self._warm = True
        actions = self._actions
        # A plain function: torch_npu writes the attributes of a schedule into its profiler_info.json.
        self._begin(lambda number: actions.RECORD if number else actions.WARMUP)

    def start(self) -> None:
        """Record from now on.

        Raises:
            CaptureLost: torch_npu did not begin, with what it said.
        """
        if self._profile is None:
            self._begin(None)
            return
        self._warm = False
        self._call(self._profile.step)
        if self.said.errors:
            self._abandon()
            raise CaptureLost(f"torch_npu did not begin to record: {self.said.words}")

    def stop(self, metadata: Mapping[str, Any]) -> None:
        """End it.

        Args:
            metadata: goes into torch_npu's own metadata, which stays with its folder wherever that is copied.

        Raises:
            CaptureLost: it is not ours to end any more, or torch_npu cannot end it.
        """
        try:
            self._must_be_ours()
            text = json.dumps(metadata, default=str)
            if len(text) <= _MOST_METADATA:
                with contextlib.suppress(AttributeError):
                    self._call(lambda: self._profile.add_metadata_json("rankscope", text))
            self._call(self._profile.stop)
            self._rescue()
            if self._still_runs():
                raise CaptureLost(f"torch_npu could not end the capture: {self.said.words or 'it does not say why'}")
            if threading.get_ident() != self.thread:
                self._remark = (
                    f"it began on thread {self.thread_name!r}, which has ended; on another one torch_npu finds neither "
                    "its operators nor the data of the device"
                )
        finally:
            self._let_go()

    def drop(self) -> None:
        """Give up a capture that only warmed up."""
        if self._profile is not None and self._warm:
            # A stop in the warm-up would leave torch_npu so that the next capture holds no operators.
            self._call(self._profile.step)
            self._call(self._profile.stop)
            self._let_go()

    def _begin(self, schedule: Callable[[int], Any] | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._place.remember(self.folder)
        self.thread, self.thread_name = threading.get_ident(), threading.current_thread().name
        try:
            self._call(lambda: self._make(schedule))
        except Exception as error:
            self._let_go()
            raise CaptureLost(f"torch_npu made no profiler: {error}") from error
        if not self.said.errors:  # else it may have no handler, and would write somewhere else
            self._call(self._profile.start)
        if self.said.errors or folders.inside(self.folder) is None:
            self._abandon()
            raise CaptureLost(f"torch_npu did not start: {self.said.words or 'it made no folder'}")

    def _make(self, schedule: Callable[[int], Any] | None) -> None:
        self._profile = self._offer.profile(self.folder, schedule)
        if schedule is not None:
            self._profile.record_steps = False  # its steps are mini-batches, whose rows would say ProfilerStep

    def _must_be_ours(self) -> None:
        latest, running = self._place.latest, self._place.running
        if latest is None or self._is_ours(latest):
            return
        if running is None:
            raise CaptureLost("another torch_npu profiler was started and stopped inside this window, which ended ours")
        raise CaptureLost("another torch_npu profiler was started inside this window and still runs; it is left alone")

    def _still_runs(self) -> bool:
        running = self._place.running
        return running is not None and self._is_ours(running)

    def _is_ours(self, path: Path) -> bool:
        return path.parent == Path(os.path.realpath(self.folder))

    def _rescue(self) -> None:
        """Where the outer stop failed half-way, the inner ones save the data, and let others use the profiler."""
        if self._still_runs():
            with contextlib.suppress(Exception):
                self._call(vendor.stop_recording)
            with contextlib.suppress(Exception):
                self._call(self._profile.prof_if.finalize_trace)
            if self._still_runs():
                self._place.free()

    def _abandon(self) -> None:
        """After a start that failed half-way."""
        said, self.said = self.said, Said()
        if self._still_runs():
            self._call(self._profile.stop)
        self._rescue()
        self.said = said  # what its end complains of is no news
        self._let_go()

    def _let_go(self) -> None:
        """Of the profiler, which must not stop whoever records by then when it is collected, and of the place."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stopped = True
        self._place.put_back()

    def _call(self, function: Callable[[], Any]) -> None:
        said = Said()
        try:
            with listening() as said:
                function()
        finally:
            self.said.errors += said.errors
            self.said.warnings += said.warnings
