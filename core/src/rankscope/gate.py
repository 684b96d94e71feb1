"""StepGate: when a training loop opens and closes windows, and which close is the last one.

A pure object: it starts nothing and knows no worker. A loop asks it before and after each step and does what it says::

    gate = StepGate("1-3,7", total_steps=100)
    for n in range(1, 101):
        if (opening := gate.begin(n)) is not None: ...   # start a window labelled opening.step
        train(n)
        if (closing := gate.end(n)) is not None: ...     # stop it; finish when closing.last
    if (closing := gate.close()) is not None: ...        # the loop ended, perhaps early
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from rankscope.errors import listing


@dataclasses.dataclass(frozen=True)
class Opening:
    """A window begins now.

    Attributes:
        step: the step that labels the window.
        steps: all steps that it will cover when the loop goes on as planned.
        close_first: an earlier window was never ended; stop it before this one starts.
    """

    step: int
    steps: tuple[int, ...]
    close_first: bool = False


@dataclasses.dataclass(frozen=True)
class Closing:
    """The open window ends now, or (``stop=False``) there is nothing left but to finish.

    Attributes:
        step: the step that labels the window; of the latest window when ``stop`` is false.
        last: no window follows: finish. True exactly once in a gate's life, and only if a window was opened.
        stop: whether a window is open and has to be stopped.
        aborted: the step raised, or the loop ended inside one.
    """

    step: int
    last: bool
    stop: bool = True
    aborted: bool = False


class StepGate:
    """Decides for every step of a loop whether a window opens or closes.

    It never raises on odd loops: skipped steps, a ``begin`` without ``end``, repeated and unordered steps lead to fewer
    windows, never to one that stays open after ``close()``. Once ``last`` was given nothing opens any more, since
    finish must see every artifact.

    Args:
        steps: the configured steps, in any form that ``rankscope.steps.parse_steps`` accepts.
        continuous: adjacent configured steps share one window, labelled with its first step.
        total_steps: the step with which the loop ends; None when nobody knows.
        first_step: the step with which the loop begins (after a restored checkpoint: restored + 1).

    Raises:
        ValueError: the steps cannot be understood.
    """

    def __init__(
        self, steps: Any, *, continuous: bool = False, total_steps: int | None = None, first_step: int = 1
    ) -> None:
        from rankscope.steps import parse_steps

        self._configured = tuple(sorted(set(parse_steps(steps))))
        self._continuous = continuous
        self._total = total_steps
        self._first = first_step
        self._effective = tuple(
            step for step in self._configured if step >= first_step and (total_steps is None or step <= total_steps)
        )
        self._wanted = frozenset(self._effective)
        self._window: tuple[int, ...] | None = None
        self._label: int | None = None  # of the latest window, open or not
        self._current: int | None = None  # the step that began latest, profiled or not
        self._in_step = False
        self._last_given = False
        self._over = False

    @property
    def open(self) -> bool:
        """Whether a window is open."""
        return self._window is not None

    @property
    def configured(self) -> tuple[int, ...]:
        """The steps as configured, sorted."""
        return self._configured

    @property
    def effective_steps(self) -> tuple[int, ...]:
        """The configured steps that this loop can reach."""
        return self._effective

    def warnings(self) -> list[str]:
        """What is odd about the configured steps, in words; empty when all of them can be reached."""
        found = []
        past = [step for step in self._configured if step < self._first]
        beyond = [step for step in self._configured if self._total is not None and step > self._total]
        if past:
            which = "all configured steps are" if len(past) == len(self._configured) else "some configured steps are"
            found.append(f"{which} in the past ({listing(past)}): this run begins with step {self._first}")
        if beyond:
            which = "all configured steps are" if len(beyond) == len(self._configured) else "some configured steps are"
            found.append(f"{which} beyond the end ({listing(beyond)}): this run ends with step {self._total}")
        return found

    def begin(self, step: int) -> Opening | None:
        """A step begins: the window to open, or None.

        An earlier window that was never ended is closed with the next opening (``close_first``), the next ``end`` or
        ``close()``, whichever comes first.
        """
        number = _number(step)
        self._current = number
        self._in_step = True
        if number is None or self._over or self._last_given or number not in self._wanted:
            return None
        if self._window is not None and (number in self._window if self._continuous else number == self._label):
            return None
        close_first = self._window is not None
        self._label = number
        self._window = self._run_from(number) if self._continuous else (number,)
        return Opening(number, self._window, close_first)

    def end(self, step: int) -> Closing | None:
        """A step is done: the window to close, or None."""
        number = _number(step)
        if number == self._current:
            self._in_step = False
        if self._window is None or number is None:
            return None
        if number < self._window[0] and number != self._current:
            return None  # late news of a step before the window: loops that overlap steps
        if number in self._window and number < self._window[-1]:
            return None
        return self._close(number)

    def abort(self, step: int) -> Closing | None:
        """The step raised: close now, even in the middle of a continuous stretch. None when nothing is open."""
        self._in_step = False
        if self._window is None:
            return None
        number = _number(step)
        return self._close(self._window[0] if number is None else number, aborted=True)

    def close(self) -> Closing | None:
        """The loop ended, perhaps early: close what is open, and say ``last`` unless it was said. Repeatable."""
        self._over = True
        if self._window is not None:
            return self._close(None, aborted=self._in_step)
        if self._label is None or self._last_given:
            return None
        self._last_given = True
        return Closing(self._label, last=True, stop=False)

    def _close(self, ended: int | None, *, aborted: bool = False) -> Closing:
        label = self._label
        assert label is not None  # noqa: S101  # an open window has a label
        self._window = None
        # Nothing can follow when the loop is past the highest step it can reach, whatever became of the ones before.
        last = ended is None or not any(step > ended for step in self._effective)
        self._last_given = last
        return Closing(label, last=last, aborted=aborted)

    def _run_from(self, step: int) -> tuple[int, ...]:
        run = [step]
        while run[-1] + 1 in self._wanted:
            run.append(run[-1] + 1)
        return tuple(run)


def _number(step: object) -> int | None:
    try:
        return operator.index(step)  # type: ignore[arg-type]  # numpy integers and the like
    except TypeError:
        return None
