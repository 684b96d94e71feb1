"""One window of the torch backend: opens and closes captures as the schedule says, and hands the files over."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rankscope import Context, Reservation, Schedule, ScheduleWalk, Span, Stretch, Window
from rankscope_torch.budget import Budget
from rankscope_torch.options import TorchOptions
from rankscope_torch.ranges import Labels, OwnRange, Range, TorchRange
from rankscope_torch.session import Capture, SessionLost

FINISH = "rankscope_torch.trace:finish"
SUFFIX = ".json.gz"

_COUNTED = frozenset({"cuda", "xpu"})
"""Devices whose events are told from others by their category in the trace."""


def _nests(span: Span) -> bool:
    """Whether nothing else of this thread can begin inside of the span and end after it, or the other way round.

    A ``with`` may hold an ``await`` or a ``yield``, unless an annotated plain function is around it.
    """
    if span.kind != "with":
        return span.kind == "sync"
    around = span.parent
    while around is not None and around.kind == "with":
        around = around.parent
    if around is not None:
        return around.kind == "sync"
    events = sys.modules.get("asyncio.events")
    return events is None or events._get_running_loop() is None  # noqa: SLF001 - documented for such use


@dataclasses.dataclass
class _Ready:
    """A raw trace on disk that waits for the end of the window, when all rows are known."""

    reservation: Reservation
    arguments: dict[str, Any]
    facts: dict[str, Any]
    until_ns: int


class Recorder:
    """Everything that one window records.

    Args:
        window: what is recorded.
        context: of the backend.
        options: of the backend.
        new_capture: makes a session of torch's profiler.
        functions: enter and exit of a torch range.
        labels: shared by the windows of the backend.
        describe: the metadata that goes into each file.
        device: the accelerator that is recorded, or an empty text; and what may keep torch from recording it.
        budget: says when it is enough; shared by the windows of the backend.
    """

    def __init__(
        self,
        window: Window,
        context: Context,
        options: TorchOptions,
        *,
        new_capture: Callable[[], Capture],
        functions: tuple[Any, Any],
        labels: Labels,
        describe: Callable[[Window], dict[str, Any]],
        device: tuple[str, list[str]],
        budget: Budget,
    ) -> None:
        self.window = window
        self.context = context
        self.options = options
        self._new_capture = new_capture
        self._functions = functions
        self._labels = labels
        self._describe = describe
        self._device = device
        self._budget = budget
        self._thread = threading.get_ident()
        schedule = Schedule.of(options.schedule, window)
        self._walk = ScheduleWalk(schedule) if schedule is not None else None
        self._segment: Stretch[Capture] | None = None
        self._waiting: Capture | None = None
        self._ready: list[_Ready] = []
        self._rows: list[Range] = []
        self._running: dict[TorchRange, None] = {}
        self._native = threading.get_native_id()
        self._elsewhere = 0
        self._kept = 0
        self._lost: list[str] = []

    def start(self) -> None:
        """Begin, or wait for the first scheduled mini-batch."""
        if self._walk is None:
            self._open(None, from_the_top=True)
        else:
            self._enter_phase(0)

    def step(self, span: Span | None) -> None:
        """A mini-batch is done. Those of other stages than the scheduled one do not count."""
        if self._walk is None or not self._walk.advance(span):
            return
        if self._segment is not None:
            self._segment.done += 1
        self._enter_phase(self._walk.seen)

    def row(self, span: Span) -> AbstractContextManager[object] | None:
        """The row of a span: torch's own if torch can record it here and now, else ours."""
        segment = self._segment
        if span.step is not None:
            if not self.options.step_rows:
                return None
            label = f"ProfilerStep#{span.step}"
        else:
            label = span.stage
        own = self._thread == threading.get_ident()
        here = own or self.options.all_threads
        if segment is not None:
            if not segment.begun and label.startswith("mini_batch"):
                segment.begun = True
            if here and _nests(span):
                thread = self._native if own else threading.get_native_id()
                return TorchRange(self._functions, self._running, self._labels.safe(label), (label, thread, span.kind))
        if segment is None and (span.is_batch or not self.options.keep_stages):
            return None
        if not here:
            self._elsewhere += 1
        return OwnRange(self._rows, label, span.kind)

    def spent(self) -> str | None:
        """Why the window should end now, in words."""
        return self._budget.spent() if self._segment is not None else None

    def stop(self) -> None:
        """End the window: save what is open, and hand all files over with their rows."""
        try:
            self._close_segment()
            if self._waiting is not None:
                waiting, self._waiting = self._waiting, None
                waiting.drop()
        finally:
            now = time.time_ns()
            for ready in self._ready:
                ready.arguments["rows"] = [row.plain(min(now, ready.until_ns)) for row in self._rows]
                ready.arguments["labels"] = dict(self._labels.changed)
                ready.facts["rows_of_other_threads"] = self._elsewhere
                with contextlib.suppress(OSError):  # as in _close_segment
                    ready.reservation.finish_later(FINISH, ready.arguments, **ready.facts)
            self._ready.clear()
            self._tell()

    def _enter_phase(self, index: int) -> None:
        if self._walk is None:
            return
        schedule = self._walk.schedule
        phase = schedule.phase(index)
        if self._segment is not None and (phase != "record" or schedule.begins(index)):
            self._close_segment()
        if phase == "record" and self._segment is None:
            self._open(index, from_the_top=index == 0)
        elif phase == "warmup" and self._waiting is None:
            self._waiting = self._new_capture()
            self._waiting.prepare()

    def _open(self, first: int | None, *, from_the_top: bool) -> None:
        capture, self._waiting = self._waiting or self._new_capture(), None
        self._budget.begin()
        capture.start(time.time_ns())
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self._segment = Stretch(capture, first, from_the_top)

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        until = time.time_ns()
        grown = self._budget.grown()
        began = time.perf_counter()
        try:
            segment.capture.stop()
        except SessionLost as lost:
            self._lost.append(str(lost))
            self.context.store.missing(self.window, str(lost))
            self.context.logger.error("a capture was lost", step=self.window.step, reason=str(lost))
            return
        # Ranges that are still running are not in torch's data, or cut off: they become rows of ours as well.
        self._rows.extend(running.as_row() for running in self._running)
        self._running.clear()
        if not segment.from_the_top and not segment.done and not segment.begun:
            return  # the schedule had opened it for a mini-batch that never came
        stopped = time.perf_counter()
        if not self.context.store.admit(self.window):
            segment.capture.release()
            self._lost.append("too many exports are under way")
            return
        try:
            with contextlib.ExitStack() as stack:
                reservation = self.context.store.reserve(self.window, suffix=SUFFIX, part=segment.part)
                stack.enter_context(reservation)
                segment.capture.save(reservation.stage(self._budget.expected_bytes(grown)))
                stack.pop_all()
        except OSError as error:  # the disk's fault, which the store has told: the next window may find room
            self._lost.append(str(error))
            return
        saved = time.perf_counter()
        self._budget.last_raw_bytes = raw_bytes = reservation.staged.stat().st_size
        segment.capture.release()  # torch frees its events now, where that is accounted for
        self._kept += 1
        facts: dict[str, Any] = {
            "seconds_blocked": round(time.perf_counter() - began, 6),
            "seconds_stop": round(stopped - began, 6),
            "seconds_save": round(saved - stopped, 6),
            "raw_bytes": raw_bytes,
        }
        if grown:
            facts["heap_grown"] = grown
        if self._walk is not None and segment.first is not None and (segment.done or segment.begun):
            facts["mini_batches"] = [segment.first, segment.first + max(segment.done, 1) - 1]
            facts["partial"] = segment.done < self.options.schedule.active
        arguments = {
            "metadata": {**self._describe(self.window), **facts, "start_ns": segment.capture.started_ns},
            "compression": self.options.compression,
            "device": self._device[0] if self._device[0] in _COUNTED else "",
            "suspects": self._device[1],
        }
        self._ready.append(_Ready(reservation, arguments, facts, until))

    def _tell(self) -> None:
        """Say what a user would otherwise find out from a trace that is not there."""
        if self._elsewhere:
            self.context.logger.warning(
                "annotated ranges ran on threads that torch does not profile: their rows are kept, their operators are "
                "not; all_threads: true records both",
                ranges=self._elsewhere,
                step=self.window.step,
            )
        walk = self._walk
        if walk is None or self._lost or not walk.never_began:
            return
        if not self._kept:
            self.context.store.missing(self.window, walk.never_began, status="empty")
        self.context.logger.warning(
            "no scheduled mini-batch was recorded",
            reason=walk.never_began,
            needed=walk.schedule.first + 1,
            seen=walk.seen,
            step=self.window.step,
        )
