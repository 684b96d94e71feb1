"""The part that callbacks of trainers share: a handle, a controller and the span of a step, driven by events."""

from __future__ import annotations

from typing import Any

from rankscope.annotate import annotate
from rankscope.controller import ProfileController
from rankscope.profiler import DistProfiler

STAGE = "train_step"
"""Label of the span around one optimizer step."""


class TrainerLoop:
    """One training run of a trainer that calls back: every optimizer step is a training step and one mini-batch.

    Args:
        config: as of `DistProfiler`.
        role: of this process.
        total_steps: last step of the run, or None where it is not known.
        done: optimizer steps that were done before (a resumed run).
    """

    def __init__(self, config: Any, *, role: str, total_steps: int | None, done: int = 0) -> None:
        self.profiler = DistProfiler(config, role=role, total_steps=total_steps)
        self.controller = ProfileController(
            self.profiler.config, workers=[self.profiler], total_steps=total_steps, first_step=done + 1
        )
        self.current: int | None = None
        self._step: Any = None
        self._spans: list[Any] = []

    def begin(self, step: int) -> None:
        """A step begins; one that was never ended is taken for one that raised."""
        self.abort()
        self.current = step
        self.controller.begin_step(step)
        self._step = annotate(STAGE, scheduled=True)
        self._step.__enter__()

    def end(self) -> None:
        """The step is done."""
        if self.current is None:
            return
        step, self.current = self.current, None
        self.profiler.step()
        self._leave(None)
        self.controller.end_step(step)

    def abort(self, error: BaseException | None = None) -> None:
        """The step that runs, if one does, raised."""
        if self.current is None:
            return
        step, self.current = self.current, None
        self._leave(error)
        self.controller.abort_step(step)

    def enter(self, stage: str) -> None:
        """A stage beside the steps begins, e.g. a validation."""
        span = annotate(stage)
        span.__enter__()
        self._spans.append(span)

    def leave(self) -> None:
        """It is done."""
        if self._spans:
            self._spans.pop().__exit__(None, None, None)

    def close(self) -> None:
        """The run is over, early or not."""
        self.abort()
        while self._spans:
            self.leave()
        self.controller.close()
        self.profiler.close()

    def _leave(self, error: BaseException | None) -> None:
        span, self._step = self._step, None
        if span is not None:
            span.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))
