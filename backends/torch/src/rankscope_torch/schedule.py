"""Which mini-batches are recorded: pure arithmetic, with the numbers of ``torch.profiler.schedule``."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rankscope_torch.options import ScheduleOptions

Phase = Literal["idle", "warmup", "record"]


@dataclasses.dataclass(frozen=True)
class MiniBatchSchedule:
    """What to do in each mini-batch, counted from 0.

    Attributes:
        options: the numbers.
        cycles: how many cycles there are; 0 for no limit.
    """

    options: ScheduleOptions
    cycles: int = 0

    def phase(self, index: int) -> Phase:
        """What to do in this mini-batch."""
        position = self._position(index)
        if position is None or position < self.options.wait:
            return "idle"
        return "warmup" if position < self.options.wait + self.options.warmup else "record"

    def begins(self, index: int) -> bool:
        """Whether a new stretch of recorded mini-batches begins here, even right after another one."""
        position = self._position(index)
        return position is not None and position == self.options.wait + self.options.warmup

    @property
    def first(self) -> int:
        """The first recorded mini-batch."""
        wait = 0 if self.options.skip_first_wait else self.options.wait
        return self.options.skip_first + wait + self.options.warmup

    @property
    def from_the_top(self) -> bool:
        """Whether recording begins with the window, so that earlier stages are in the file too."""
        return self.phase(0) == "record"

    def _position(self, index: int) -> int | None:
        """Place within the cycle; None outside of all cycles."""
        index -= self.options.skip_first
        if index < 0:
            return None
        if self.options.skip_first_wait:
            index += self.options.wait
        length = self.options.wait + self.options.warmup + self.options.active
        cycle, position = divmod(index, length)
        return position if self.cycles == 0 or cycle < self.cycles else None
