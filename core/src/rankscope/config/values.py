"""Plain frozen data, and how single values of a config are read."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rankscope.errors import Problem, did_you_mean, listing

T = TypeVar("T")

IGNORED = frozenset({"_target_", "_convert_", "_recursive_", "_partial_", "_args_"})
"""Keys that Hydra reads and nobody else."""


class OptionError(ValueError):
    """Several values are wrong; raised by an options class to name each of its fields.

    Attributes:
        problems: pairs of field (dotted for a nested one) and what is wrong with it.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems: list[tuple[str, str]] = list(problems)
        super().__init__("; ".join(f"{field}: {message}" if field else message for field, message in self.problems))

    def __reduce__(self) -> tuple[type[OptionError], tuple[list[tuple[str, str]]]]:
        return (type(self), (self.problems,))


def problems_of(error: ValueError, path: str) -> list[Problem]:
    """An error as problems below ``path``: one each where it names fields, else one."""
    pairs = getattr(error, "problems", None)
    if not pairs:
        return [Problem(path, str(error))]
    return [Problem(f"{path}.{field}" if field else path, message) for field, message in pairs]


class FrozenMapping(Mapping[str, Any]):
    """A mapping that cannot be changed, can be pickled and compares like a dict."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = {key: freeze(value) for key, value in (items or {}).items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[type[FrozenMapping], tuple[dict[str, Any]]]:
        return (type(self), (self._items,))


def freeze(value: Any) -> Any:
    """Plain data without a list or dict in it."""
    if isinstance(value, FrozenMapping):
        return value
    if isinstance(value, Mapping):
        return FrozenMapping({str(key): item for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """The same as dicts and lists, for whoever changes or prints it."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    return value


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with what ``above`` sets: nested mappings merge, null inherits."""
    merged = dict(below)
    for key, value in above.items():
        if value is None:
            merged.setdefault(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = overlay(merged[key], value)
        else:
            merged[key] = value
    return merged


class MappingView(Mapping[str, Any]):
    """A frozen dataclass that can be read like a mapping of its public fields."""

    def __getitem__(self, key: str) -> Any:
        if key not in self._names():
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, key: object) -> bool:
        return key in self._names()

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
        return tuple(field.name for field in fields if not field.name.startswith("_"))


class Reader:
    """Reads the keys of one mapping and collects everything that is wrong."""

    def __init__(self, values: Mapping[str, Any], path: str, problems: list[Problem]) -> None:
        self.values = values
        self.path = path
        self.problems = problems

    def read(self, key: str, parse: Callable[[Any], T], default: T) -> T:
        """The parsed value; the default where it is null, missing or wrong (which is noted)."""
        value = self.values.get(key)
        if value is None:
            return default
        try:
            return parse(value)
        except ValueError as error:
            self.problems.extend(problems_of(error, f"{self.path}.{key}"))
            return default

    def refuse_unknown(self, known: Iterable[str], misplaced: Mapping[str, str]) -> None:
        """Note each key that is not known, with the nearest one, or where it belongs."""
        names = list(known)
        for key in self.values:
            if key in names or key in IGNORED:
                continue
            if key in misplaced:
                message = f"{key!r} does not belong here; {misplaced[key]}"
            else:
                message = f"unknown key {key!r}.{did_you_mean(key, names)} Known: {listing(names)}"
            self.problems.append(Problem(f"{self.path}.{key}", message))


def boolean(value: Any) -> bool:
    """``true`` or ``false``, also as texts."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("true", "false"):
        return word == "true"
    raise ValueError(f"{value!r} is neither true nor false")


def seconds(value: Any, *, zero: bool) -> float:
    """A finite number of seconds, above zero or from zero on."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number of seconds") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"{value!r} is out of range; write {'0 or more' if zero else 'more than 0'} seconds")
    return number


def at_least_one(value: Any) -> int:
    """A whole number from 1 on."""
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a whole number from 1 on")
    return value


def choice(value: Any, choices: tuple[str, ...]) -> str:
    """One word of a few."""
    if not isinstance(value, str) or value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ValueError(f"{value!r} is no choice; choices: {listing(choices)}.{hint}")
    return value


def names(value: Any) -> tuple[str, ...]:
    """One name, a comma text or a list of names; each once, in order."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"{value!r} is neither a name nor a list of names")
    words = []
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{item!r} is not a name")
        words.append(item.strip())
    if not any(words):
        return ()
    if not all(words):
        raise ValueError(f"{value!r} has an empty name in it")
    return tuple(dict.fromkeys(words))


def directory(value: Any) -> str:
    """An absolute directory: ``~`` and ``$VARIABLES`` expanded, relative to where we are now."""
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is not a path")
    text = os.path.expandvars(str(value).strip())
    if "\0" in text:
        raise ValueError("a path cannot hold a zero byte")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"{text!r} is a URL; profiles are written to a directory of this machine. Name one, and let "
            "finish_hook_cmd upload $RANKSCOPE_PROFILE_SAVE_PATH"
        )
    unset = re.search(r"\$\{?(\w+)\}?", text)
    if unset is not None:
        raise ValueError(f"the environment variable {unset[1]!r} in {str(value)!r} is not set")
    expanded = os.path.expanduser(text)  # noqa: PTH111  # Path.expanduser raises where the home is unknown
    if expanded.startswith("~"):
        raise ValueError(f"the home directory in {text!r} is not known")
    return os.path.abspath(expanded)  # noqa: PTH100  # resolves no links: the path must mean the same on each node


def command(value: Any) -> str | tuple[str, ...] | None:
    """A shell text, a list of words, or ``@file`` whose text is the command; None when it is empty."""
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("@"):
            return text or None
        file = Path(text[1:]).expanduser()
        try:
            return file.read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the command from {str(file)!r}: {error}") from None
    if isinstance(value, list | tuple):
        for word in value:
            if not isinstance(word, str):
                raise ValueError(f"{word!r} is not a text; every word of the command must be one")
        return tuple(value) or None
    raise ValueError(f"{value!r} is neither a command nor a list of words")


def blocks(value: Any) -> FrozenMapping:
    """Options by tool; a tool's null counts as no option."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a mapping from a tool to its options")
    wrong = [
        (str(tool), f"{block!r} is not a mapping of options")
        for tool, block in value.items()
        if tool not in IGNORED and block is not None and not isinstance(block, Mapping)
    ]
    if wrong:
        raise OptionError(wrong)
    return FrozenMapping({str(tool): plain(block or {}) for tool, block in value.items() if tool not in IGNORED})


def plain(value: Any) -> Any:
    """The value without the keys that only Hydra reads; enumerations by value or name, paths as texts."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if key not in IGNORED}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str | int | float | bool) else value.name
    if isinstance(value, Path):
        return str(value)
    return value
