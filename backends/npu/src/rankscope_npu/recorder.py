"""One window of the npu backend: begins and ends captures as the schedule says, and hands their folders over."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope import Context, Schedule, ScheduleWalk, Span, Stretch, Window
from rankscope_npu.folders import SUFFIX
from rankscope_npu.marks import Mark, Marks
from rankscope_npu.options import NpuOptions
from rankscope_npu.session import Capture, CaptureLost

FINISH = "rankscope_npu.finishing:finish"


class Recorder:
    """Everything that one window records.

    Args:
        window: what is recorded.
        context: of the backend.
        options: of the backend.
        new_capture: makes a session of torch_npu's profiler that writes into a directory.
        marks: ranges of the window.
        describe: what each folder says of itself.
        records_device: whether the NPU is recorded.
    """

    def __init__(
        self,
        window: Window,
        context: Context,
        options: NpuOptions,
        *,
        new_capture: Callable[[Path], Capture],
        marks: Marks,
        describe: Callable[[Window], dict[str, Any]],
        records_device: bool,
    ) -> None:
        self.window = window
        self.context = context
        self.options = options
        self._new_capture = new_capture
        self._marks = marks
        self._describe = describe
        self._records_device = records_device
        schedule = Schedule.of(options.schedule, window)
        self._walk = ScheduleWalk(schedule) if schedule is not None else None
        self._segment: Stretch[Capture] | None = None
        self._waiting: Capture | None = None
        self._kept = 0
        self._lost = 0
        self._told: set[str] = set()

    def start(self) -> None:
        """Begin, or wait for the first scheduled mini-batch."""
        if self._walk is None:
            self._open(None, from_the_top=True)
        else:
            self._enter_phase(self._walk.schedule, 0)

    def step(self, span: Span | None) -> None:
        """A mini-batch is done. Those of other stages than the scheduled one do not count."""
        if self._walk is None or not self._walk.advance(span):
            return
        if self._segment is not None:
            self._segment.done += 1
        self._enter_phase(self._walk.schedule, self._walk.seen)

    def row(self, span: Span) -> Mark | None:
        """The range of a span."""
        if span.step is not None:
            return self._marks.mark(f"ProfilerStep#{span.step}", None) if self.options.step_rows else None
        if self._segment is not None and span.stage.startswith("mini_batch"):
            self._segment.begun = True
        return self._marks.mark(span.stage, span.domain)

    def stop(self) -> None:
        """End the window: save what is recorded."""
        try:
            self._close_segment()
        finally:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting.drop()
                shutil.rmtree(waiting.folder, ignore_errors=True)
            self._tell()

    # Segments.

    def _enter_phase(self, schedule: Schedule, index: int) -> None:
        phase = schedule.phase(index)
        if self._segment is not None and (phase != "record" or schedule.begins(index)):
            self._close_segment()
        if phase == "record" and self._segment is None:
            self._open(index, from_the_top=index == 0)
        elif phase == "warmup" and self._waiting is None:
            self._waiting = self._begun(Capture.prepare)

    def _open(self, first: int | None, *, from_the_top: bool) -> None:
        waiting, self._waiting = self._waiting, None
        capture = self._begun(Capture.start, waiting)
        if capture is not None:
            self._segment = Stretch(capture, first, from_the_top)
            self._marks.resume()

    def _begun(self, begin: Callable[[Capture], None], capture: Capture | None = None) -> Capture | None:
        """A capture, a new one if none is given, of which a step succeeded; None where it did not, which is told."""
        try:
            capture = capture or self._new_capture(self.context.store.stage(self.window))
            begin(capture)
        except OSError:  # the disk's fault, which the store has told: the next window may find room
            self._lost += 1
            return None
        except CaptureLost as lost:
            self._lose(capture, lost)
            return None
        self._say(capture)
        return capture

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        capture = segment.capture
        self._marks.pause()
        about = self._describe(self.window)
        began = time.perf_counter()
        try:
            capture.stop(about)
        except CaptureLost as lost:
            self._lose(capture, lost)
            return
        seconds = round(time.perf_counter() - began, 6)
        self._say(capture)
        if not segment.from_the_top and not segment.done and not segment.begun:
            shutil.rmtree(capture.folder, ignore_errors=True)  # opened for a mini-batch that never came
        elif self.context.store.admit(self.window):
            self._hand_over(segment, about, seconds)
        else:
            self._lost += 1
            shutil.rmtree(capture.folder, ignore_errors=True)

    def _hand_over(self, segment: Stretch[Capture], about: dict[str, Any], seconds: float) -> None:
        facts: dict[str, Any] = {"seconds_blocked": seconds}
        held = segment.mini_batches
        if self._walk is not None and held is not None:
            facts["mini_batches"] = list(held)
            facts["partial"] = segment.done < self.options.schedule.active
        arguments = {
            "about": {**about, **facts, "labels": dict(self._marks.labels.changed)},
            "device": self._records_device,
            "trouble": segment.capture.trouble,
            "analysis": self.options.analysis_timeout if self.options.analysis else None,
            "exports": list(self.options.export_type),
        }
        try:
            reservation = self.context.store.reserve(
                self.window, suffix=SUFFIX, part=segment.part, staged=segment.capture.folder
            )
            reservation.finish_later(FINISH, arguments, **facts)
        except OSError:  # as in _begun
            self._lost += 1
        else:
            self._kept += 1

    def _lose(self, capture: Capture | None, lost: CaptureLost) -> None:
        self._lost += 1
        self.context.store.missing(self.window, str(lost))
        if capture is not None:
            self._say(capture)
            shutil.rmtree(capture.folder, ignore_errors=True)

    # Words.

    def _say(self, capture: Capture) -> None:
        """Pass on what torch_npu warned of, each once."""
        for message in capture.said.warnings:
            if message not in self._told:
                self._told.add(message)
                self.context.logger.warning(f"torch_npu: {message}", step=self.window.step)

    def _tell(self) -> None:
        """Say what a user would otherwise find out from a range or a folder that is not there."""
        marks = self._marks
        if marks.refused:
            self.context.logger.warning(
                "annotated ranges were not taken by mstx: are their domains among those that are recorded?",
                ranges=marks.refused,
                step=self.window.step,
            )
        if marks.elsewhere:
            self.context.logger.warning(
                "annotated ranges ran on threads that torch_npu does not profile; with npu among the contents they are "
                "mstx ranges, which show on any thread",
                ranges=marks.elsewhere,
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
