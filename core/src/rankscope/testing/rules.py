"""What a rule is: a text, a scenario that plays it, and how one is found broken."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from rankscope.testing.life import Life

Scenario = Callable[["Life"], None]


class RuleBroken(Exception):  # noqa: N818 - what a scenario finds out, not an error of the kit
    """A backend breaks a rule.

    Attributes:
        seen: what was seen.
        mend: what the author can do about it.
    """

    def __init__(self, seen: str, mend: str) -> None:
        super().__init__(seen)
        self.seen = seen
        self.mend = mend


class NotHere(Exception):  # noqa: N818 - as above
    """The rule cannot be tried here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule of the contract.

    Attributes:
        name: of the rule; its test is ``test_<name>``.
        text: the rule in a sentence.
        scenario: plays it in a process of its own.
        light: that process must not have imported the tool's libraries before.
    """

    name: str
    text: str
    scenario: Scenario
    light: bool = False


RULES: dict[str, Rule] = {}
"""All rules by name, once ``rankscope.testing.scenarios`` is imported."""


@overload
def rule(scenario: Scenario) -> Scenario: ...


@overload
def rule(*, light: bool = ...) -> Callable[[Scenario], Scenario]: ...


def rule(scenario: Scenario | None = None, *, light: bool = False) -> Scenario | Callable[[Scenario], Scenario]:
    """Make a function the scenario of a rule; its name is the rule's, its docstring the text."""

    def add(function: Scenario) -> Scenario:
        name = function.__name__.rstrip("_")  # async_
        text = " ".join((inspect.getdoc(function) or "").split("\n\n", maxsplit=1)[0].split())
        RULES[name] = Rule(name, text, function, light)
        return function

    return add if scenario is None else add(scenario)
