"""Errors that a user can act on, and the words they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.types import Fault


class RankscopeError(Exception):
    """Base of every error that rankscope raises on purpose."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a config.

    Attributes:
        path: dotted key, as the user would write it on the command line (``actor.profiler.ranks``).
        message: what is wrong with the value, and the way out.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(RankscopeError, ValueError):
    """Everything that is wrong with a config, in one error raised before training.

    Attributes:
        problems: each problem with its dotted key, in the order in which they were found.
    """

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        self.problems: tuple[Problem, ...] = tuple(dict.fromkeys(problems))
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the profiler config:\n{lines}"

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return (type(self), (self.problems,))


class BackendError(RankscopeError):
    """A backend breaks the contract (a hook wrapper, an unknown hook, a class instead of an instance)."""


class CommandError(RankscopeError):
    """What keeps a command of ``rankscope`` from doing its work: shown as one message, exit status 2."""


class FaultError(RankscopeError):
    """Strict mode: what backends raised during one call, all together.

    Attributes:
        faults: each caught exception with the tool, hook and step it came from.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults: tuple[Fault, ...] = tuple(faults)
        super().__init__("; ".join(str(fault) for fault in self.faults))
        if self.faults:
            self.__cause__ = self.faults[0].error

    def __reduce__(self) -> tuple[type[FaultError], tuple[tuple[Fault, ...]]]:
        return (type(self), (self.faults,))


def error_text(error: BaseException) -> str:
    """``ValueError: the message``, also where the exception's own text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - somebody else's __str__
        return f"{type(error).__name__} without a text"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that ``name`` most likely meant, or None."""
    import difflib  # only a mistake needs it

    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`` Did you mean 'torch'?`` or an empty text; to be appended to a message."""
    match = nearest(name, choices)
    return f" Did you mean {match!r}?" if match else ""


def listing(choices: Iterable[object]) -> str:
    """Choices as text: ``cpu, cuda, memory``; ``none`` when there are none."""
    return ", ".join(str(choice) for choice in choices) or "none"
