"""Which training steps are profiled: one form for every way to write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankscope.ranges import LIMIT, expand, span

_KEYS = ("start", "stop", "every")


def parse_steps(value: Any) -> tuple[int, ...]:
    """Read ``global_profiler.steps``.

    Args:
        value: None or nothing (no step); a number; ``"1-3,5,10-20:5"``; a list of both; or a mapping with ``stop``
            (included), ``start`` (default 1) and ``every`` (default 1).

    Returns:
        The steps, each once, ascending. Steps count from 1.

    Raises:
        ValueError: anything else; the message quotes the piece that is wrong.
    """
    steps = set(_numbers(value))
    if len(steps) > LIMIT:
        raise ValueError(f"{len(steps)} steps are given; at most {LIMIT} are accepted")
    return tuple(sorted(steps))


def _numbers(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    if isinstance(value, bool | float):
        raise ValueError(f"{value!r} is not a step; write a whole number of at least 1")
    if isinstance(value, int):
        return _single(value)
    if isinstance(value, str):
        return expand(value, least=1)
    if isinstance(value, Mapping):
        return _interval(value)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return (number for item in value for number in _item(item))
    raise ValueError(f"cannot read {value!r} as steps; write a list or a text such as 1-3,5,10-20:5")


def _item(item: Any) -> Iterable[int]:
    if isinstance(item, int | float | str):
        return _numbers(item)
    raise ValueError(f"cannot read {item!r} as a step; write a whole number or a range such as 1-3")


def _single(step: int) -> tuple[int]:
    if step < 1:
        raise ValueError(f"{step} is not a step: steps count from 1")
    return (step,)


def _interval(value: Mapping[Any, Any]) -> range:
    unknown = [key for key in value if key not in _KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r} in steps; known: {', '.join(_KEYS)}")
    given = {key: number for key, number in value.items() if number is not None}
    for key, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"{key}: {number!r} is not a whole number")
    if "stop" not in given:
        raise ValueError("steps given as a mapping need 'stop', the last step that may be profiled")
    piece = ", ".join(f"{key}: {number}" for key, number in given.items())
    return span(given.get("start", 1), given["stop"], given.get("every", 1), least=1, piece=piece)
