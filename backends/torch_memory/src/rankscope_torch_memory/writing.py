"""Write a snapshot so that our own reader, which builds plain containers only, can read it back for certain."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NoReturn

PROTOCOL = 4
"""Read by every Python from 3.4 on, and by the viewer of PyTorch."""

_PLAIN = (str, bytes, int, float, bool, type(None))


class _NotPlainError(Exception):
    pass


class _Writer(pickle.Pickler):
    """A pickler that writes no name of anything: plain types never come to reducer_override."""

    def reducer_override(self, obj: Any) -> NoReturn:
        raise _NotPlainError(type(obj).__name__)


def write(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write a snapshot as a pickle of plain containers; what is neither container nor plain value becomes its text.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        _write(snapshot, path)
    except _NotPlainError:
        _write(_plain(snapshot, {}), path)


def _write(snapshot: Any, path: Path) -> None:
    with path.open("wb") as file:
        _Writer(file, PROTOCOL).dump(snapshot)


def _plain(value: Any, known: dict[int, Any]) -> Any:
    """A copy of plain types; what was shared stays shared."""
    if type(value) in _PLAIN:
        return value
    if id(value) in known:
        return known[id(value)][1]
    copy: Any
    if isinstance(value, Mapping):
        copy = {}
        known[id(value)] = (value, copy)  # the original is kept, so that its id stays its own
        copy.update({_key(key): _plain(item, known) for key, item in value.items()})
    elif isinstance(value, int):
        copy = int(value)
    elif isinstance(value, float):
        copy = float(value)
    elif isinstance(value, (str, bytes)):
        copy = str(value)
    elif isinstance(value, tuple):
        copy = tuple(_plain(item, known) for item in value)
    elif isinstance(value, (Sequence, AbstractSet)):
        copy = []
        known[id(value)] = (value, copy)
        copy.extend(_plain(item, known) for item in value)
    else:
        copy = str(value)
    known[id(value)] = (value, copy)
    return copy


def _key(key: Any) -> Any:
    return key if type(key) in _PLAIN else str(key)
