"""Checks that several tools make of their options; each gives pairs of field and message, for an `OptionError`."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope.errors import did_you_mean, listing


def check_choices(field: str, given: Iterable[str], choices: Iterable[str], *, also: str = "") -> list[tuple[str, str]]:
    """One problem for each value that is no choice, with all choices and the nearest one.

    Args:
        field: the option.
        given: its values.
        choices: what may be given.
        also: words behind the choices.
    """
    known = list(choices)
    return [
        (field, f"has no choice {value!r}; choices: {listing(known)}{also}.{did_you_mean(value, known)}")
        for value in given
        if value not in known
    ]


def check_token_window(start: int | None, end: int | None) -> list[tuple[str, str]]:
    """Problems of ``profile_token_start`` and ``profile_token_end``, the token window of a rollout engine."""
    names = (("profile_token_start", start), ("profile_token_end", end))
    wrong = [(name, f"must be 0 or more, got {value}") for name, value in names if value is not None and value < 0]
    if start is not None and end is not None and end <= start:
        wrong.append(("profile_token_end", f"must be greater than profile_token_start ({start}), got {end}"))
    return wrong
