"""A tool's options: from plain values to an instance of its frozen dataclass, with every problem named."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.config.values import IGNORED, boolean, plain, problems_of, seconds
from rankscope.errors import Problem, did_you_mean, listing

_DROPPED = IGNORED | {"name"}
"""Keys that a block may carry without being an option."""


@dataclasses.dataclass(frozen=True)
class CommonOptions:
    """Options that core reads for every tool.

    Attributes:
        discrete: every stage gets a window of its own instead of one for the whole step.
        max_seconds: a window that lasts longer is ended early and saved; None for no limit.
    """

    discrete: bool = False
    max_seconds: float | None = None


def split_common(
    options_class: Any, values: Mapping[str, Any], path: str
) -> tuple[CommonOptions, dict[str, Any], list[Problem]]:
    """Take the common options out of a tool's block.

    Args:
        options_class: the tool's dataclass. If it has a ``discrete`` field, the value stays in the block too and the
            field's default counts where none is given.
        values: the block as plain data.
        path: dotted key of the block.

    Returns:
        The common options, what is left for the tool, and what is wrong.
    """
    rest = dict(values)
    own = _fields(options_class).get("discrete")
    discrete = own is not None and own.default is True
    given = rest.get("discrete") if own is not None else rest.pop("discrete", None)
    problems: list[Problem] = []
    if given is not None:
        try:
            discrete = boolean(given)
        except ValueError as error:
            if own is None:
                problems.append(Problem(f"{path}.discrete", str(error)))
    limit = rest.pop("max_seconds", None)
    try:
        max_seconds = None if limit is None else seconds(limit, zero=False)
    except ValueError as error:
        max_seconds = None
        problems.append(Problem(f"{path}.max_seconds", str(error)))
    return CommonOptions(discrete, max_seconds), rest, problems


def build_options(options_class: Any, values: Mapping[str, Any], path: str) -> tuple[Any | None, list[Problem]]:
    """Validate a block against a dataclass, key by key.

    Null means the field's default; lists become tuples; a comma text is accepted for a list of texts; a nested
    dataclass takes a mapping. A ``ValueError`` from ``__post_init__`` is a problem at ``path``, or at each field that
    its ``problems`` (pairs of field and message) name.

    Args:
        options_class: a dataclass whose fields all have defaults.
        values: the block as plain data.
        path: dotted key of the block.

    Returns:
        The instance, or None when there is any problem, and every problem with its dotted key.
    """
    if not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        return None, [Problem(path, f"the tool declares no options: its Options is {options_class!r}, not a dataclass")]
    fields = _fields(options_class)
    hints = _hints(options_class)
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key in fields:
            if value is not None:
                try:
                    given[key] = _convert(value, hints[key], f"{path}.{key}", problems)
                except ValueError as error:
                    problems.append(Problem(f"{path}.{key}", str(error)))
        elif key not in _DROPPED:
            hint = did_you_mean(str(key), fields)
            problems.append(Problem(f"{path}.{key}", f"unknown option {key!r}.{hint} Known: {listing(fields)}"))
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(Problem(f"{path}.{name}", "a value is required"))
    instance, more = _construct(options_class, given, path)
    # With a field at its default in place of a bad value, only what is said of the fields that were given is news.
    known_bad = bool(problems)
    for problem in more:
        key = problem.path.removeprefix(f"{path}.").split(".")[0]
        if not known_bad or (problem.path != path and key in given):
            problems.append(problem)
    return (None if problems else instance), problems


def _construct(options_class: type, given: dict[str, Any], path: str) -> tuple[Any | None, list[Problem]]:
    try:
        return options_class(**given), []
    except ValueError as error:
        return None, problems_of(error, path)
    except TypeError as error:
        return None, [Problem(path, f"{options_class.__name__}: {error}")]


def _fields(options_class: Any) -> dict[str, dataclasses.Field[Any]]:
    if not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        return {}
    return {field.name: field for field in dataclasses.fields(options_class) if field.init}


def _hints(options_class: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(options_class)
    except (NameError, TypeError):  # a type that only a type checker can see: the value is passed on as it is
        return {field.name: Any for field in dataclasses.fields(options_class)}


def _convert(value: Any, hint: Any, path: str, problems: list[Problem]) -> Any:
    """The value as the hint says.

    Raises:
        ValueError: it cannot be.
    """
    hint = _without_none(hint)
    origin = typing.get_origin(hint)
    if hint is Any:
        return _tuples(value)
    if origin is typing.Literal:
        return _literal(value, typing.get_args(hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _nested(value, hint, path, problems)
    if hint in (list, tuple) or origin in (list, tuple):
        return _sequence(value, hint, path, problems)
    if hint is str:
        return _text(value)
    if hint is bool:
        return boolean(value)
    if isinstance(value, bool) and hint in (int, float):
        raise ValueError(f"{value!r} is not {_words(hint)}")
    return _tuples(_structured(value, hint))


def _nested(value: Any, hint: type, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        if isinstance(value, hint):
            return value
        raise ValueError(f"{value!r} is not a mapping of options ({listing(_fields(hint))})")
    instance, wrong = build_options(hint, value, path)
    problems.extend(wrong)
    # Stands in only so that the other fields can be judged; with a problem nothing is returned anyway.
    return hint() if wrong else instance


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    for choice in choices:
        if not isinstance(value, bool) and str(choice) == str(value):
            return choice
    hint = did_you_mean(str(value), [str(choice) for choice in choices])
    raise ValueError(f"{value!r} is not one of: {listing(choices)}.{hint}")


def _sequence(value: Any, hint: Any, path: str, problems: list[Problem]) -> tuple[Any, ...]:
    args = [arg for arg in typing.get_args(hint) if arg is not Ellipsis]
    if isinstance(value, str) and (not args or _without_none(args[0]) is not Any):
        value = [piece.strip() for piece in value.split(",") if piece.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a list")
    if typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint) and args and len(args) != len(value):
        raise ValueError(f"{value!r} has {len(value)} items; {len(args)} are wanted")
    items = []
    for index, item in enumerate(value):
        wanted = args[min(index, len(args) - 1)] if args else Any
        try:
            items.append(_convert(item, wanted, f"{path}.{index}", problems))
        except ValueError as error:
            raise ValueError(f"in {list(value)!r}: {error}") from None
    return tuple(items)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a text")
    return str(value)


def _structured(value: Any, hint: Any) -> Any:
    """Everything else is left to a structured config of one field."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        schema = dataclasses.make_dataclass("Option", [("value", hint, dataclasses.field(default="???"))])
        merged = OmegaConf.merge(OmegaConf.structured(schema), {"value": value})
        converted = OmegaConf.to_container(merged, resolve=False)
    except (OmegaConfBaseException, ValueError) as error:
        if "nsupported" in str(error) or "nexpected type" in str(error):
            return value
        raise ValueError(f"{value!r} is not {_words(hint)}") from None
    return converted["value"] if isinstance(converted, dict) else value


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]  # noqa: UP007  # built at run time


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value


def _words(hint: Any) -> str:
    simple = {int: "a whole number", float: "a number", Path: "a path", dict: "a mapping"}
    if hint in simple:
        return simple[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"one of: {listing(member.name for member in hint)}"
    if typing.get_origin(hint) in (dict, Mapping):
        return "a mapping of that kind"
    return f"of type {getattr(hint, '__name__', None) or plain(str(hint))}"
