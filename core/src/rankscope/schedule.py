"""A schedule over the mini-batches of an update stage, for any tool: which of them are recorded.

Pure arithmetic, with the numbers of ``torch.profiler.schedule``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, Literal, Optional, TypeVar

from rankscope.config.values import OptionError

if TYPE_CHECKING:
    from typing_extensions import Self

    from rankscope.types import Span, Window

Phase = Literal["idle", "warmup", "record"]
Capture = TypeVar("Capture")


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """A schedule over the mini-batches of the update stage; the numbers are those of ``torch.profiler.schedule``.

    Attributes:
        skip_first: mini-batches before the first cycle.
        wait: mini-batches at the start of each cycle that are not recorded.
        warmup: mini-batches in which the profiler already runs and throws its data away.
        active: mini-batches that are recorded in each cycle; 0 switches the schedule off.
        repeat: number of cycles; 0 means: in discrete mode until the stage ends, in continuous mode one.
        skip_first_wait: not 0: the first cycle has no ``wait``.
        stage: the stage whose mini-batches count; by default the first one that reports any.
    """

    skip_first: int = 0
    wait: int = 0
    warmup: int = 0
    active: int = 0
    repeat: int = 0
    skip_first_wait: int = 0
    stage: Optional[str] = None  # noqa: UP045 - OmegaConf reads this annotation on Python 3.10

    def __post_init__(self) -> None:
        wrong = [
            (name, f"must be 0 or more, got {value}")
            for name in ("skip_first", "wait", "warmup", "active", "repeat", "skip_first_wait")
            if (value := getattr(self, name)) < 0
        ]
        if self.active == 0 and (self.skip_first or self.wait or self.warmup or self.repeat):
            wrong.append(
                ("active", "is 0, which switches the schedule off, yet other numbers are set; set it to 1 or more")
            )
        if wrong:
            raise OptionError(wrong)

    @property
    def on(self) -> bool:
        """Whether there is a schedule."""
        return self.active > 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What to do in each mini-batch, counted from 0.

    Attributes:
        options: the numbers.
        cycles: how many cycles there are; 0 for no limit.
    """

    options: ScheduleOptions
    cycles: int = 0

    @classmethod
    def of(cls, options: ScheduleOptions, window: Window) -> Self | None:
        """The schedule of a window, or None where the whole window is recorded."""
        if not (options.on and window.scheduled):
            return None
        return cls(options, options.repeat or (0 if window.reason == "stage" else 1))

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


@dataclasses.dataclass
class Stretch(Generic[Capture]):
    """A stretch of a window that becomes one file.

    Attributes:
        capture: what the tool records it with.
        first: the mini-batch in which it began; None without a schedule.
        from_the_top: it began with the window, so it holds something even before the first mini-batch.
        done: mini-batches that were finished in it.
        begun: whether a mini-batch was seen to begin in it.
    """

    capture: Capture
    first: int | None = None
    from_the_top: bool = False
    done: int = 0
    begun: bool = False

    @property
    def mini_batches(self) -> tuple[int, int] | None:
        """The first and the last one that it holds."""
        if self.first is None or not (self.done or self.begun):
            return None
        return self.first, self.first + max(self.done, 1) - 1

    @property
    def part(self) -> str:
        """The part of the file's name that says which mini-batches it holds."""
        held = self.mini_batches
        if held is None:
            return ""
        return f"mb{held[0]}" if held[0] == held[1] else f"mb{held[0]}-{held[1]}"


class ScheduleWalk:
    """Counts the mini-batches of one window along its schedule.

    Attributes:
        schedule: what is walked along.
        stage: the stage whose mini-batches count; None until one is known.
        seen: how many were done.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stage: str | None = schedule.options.stage
        self.seen = 0

    def advance(self, span: Span | None) -> bool:
        """A mini-batch is done, in the stage of this span. False: it is of another stage and does not count."""
        stage = span.stage if span is not None else ""
        if self.stage is None:
            self.stage = stage
        if stage != self.stage:
            return False
        self.seen += 1
        return True

    @property
    def never_began(self) -> str:
        """Why nothing was recorded, in words; empty if the first scheduled mini-batch was reached."""
        first = self.schedule.first
        if self.seen > first:
            return ""
        where = f" in stage {self.stage!r}" if self.stage else ""
        return (
            f"the schedule records from mini-batch {first} on, so it needs at least {first + 1}; {self.seen} ran{where}"
        )
