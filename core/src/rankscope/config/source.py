"""From whatever the user has (mapping, YAML file, OmegaConf or Hydra config) to plain global and role mappings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.config.schema import GLOBAL, SECTION
from rankscope.config.values import plain
from rankscope.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

_DEEPEST = 24
"""Levels below a section at which an interpolation is taken to point to itself."""

_BRACES = (
    "; ${...} is an interpolation of the config. For a variable of the shell write $NAME without braces, or put the "
    "command into a file and write @file"
)


@dataclasses.dataclass
class Source:
    """What was found.

    Attributes:
        global_values: the plain ``global_profiler`` mapping.
        sections: plain mapping of each ``<path>.profiler``, by its keys on the way.
        problems: what could not be read, each with its dotted key.
        warnings: what was left out, and why.
    """

    global_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sections: dict[tuple[str, ...], Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


def read_source(source: Any, overrides: Iterable[str] = ()) -> Source:
    """Find and resolve the profiler parts of a config; nothing else in it is looked at.

    Raises:
        ConfigError: the source cannot be opened at all.
    """
    from omegaconf import OmegaConf

    found = Source()
    tree = _open(source)
    before = {keys for keys, _ in _section_keys(OmegaConf.to_container(tree, resolve=False))}
    tree = _override(tree, list(overrides), found, before)
    raw = OmegaConf.to_container(tree, resolve=False)
    if (
        isinstance(raw, dict)
        and isinstance(raw.get("defaults"), list)
        and not before
        and isinstance(source, str | Path)
    ):
        found.warnings.append(
            f"{source} has a Hydra defaults list and no profiler section: hand over what Hydra composes of it"
        )
    if isinstance(raw, dict) and raw.get(GLOBAL) is not None:
        values = _Resolver(found.problems).child(tree, GLOBAL, GLOBAL)
        if isinstance(values, Mapping):
            found.global_values = values
        elif values is not None:
            found.problems.append(Problem(GLOBAL, f"{values!r} is not a mapping"))
    for keys, target in _section_keys(raw):
        path = ".".join(str(key) for key in keys)
        if target and not target.startswith(("verl.", "rankscope")):
            found.warnings.append(f"{path} is left alone: its _target_ {target} is not ours")
            continue
        parent: Any = tree
        for key in keys[:-1]:
            parent = parent[key]
        values = _Resolver(found.problems).child(parent, keys[-1], path)
        if isinstance(values, Mapping):
            found.sections[tuple(str(key) for key in keys)] = values
        elif values is not None:
            found.warnings.append(f"{path} is left alone: {values!r} is not a mapping")
    return found


def _open(source: Any) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if source is None:
        return OmegaConf.create({})
    if isinstance(source, DictConfig):
        return source
    try:
        if isinstance(source, Mapping):
            return OmegaConf.create(dict(source), flags={"allow_objects": True})
        if isinstance(source, str | Path):
            return _load(Path(source).expanduser())
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config cannot be read: {error}") from error
    raise ConfigError(
        f"a config is a mapping, a path of a YAML file or an OmegaConf DictConfig, not {type(source).__name__}"
    )


def _load(file: Path) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf
    from yaml import YAMLError

    try:
        tree = OmegaConf.load(file)
    except YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {str(file)!r}: {error}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{file} does not hold a mapping")
    return tree


def _override(tree: DictConfig, overrides: list[str], found: Source, before: set[tuple[Any, ...]]) -> DictConfig:
    """The tree with ``key=value`` texts merged in; the user's own object stays as it is."""
    from omegaconf import OmegaConf

    if not overrides:
        return tree
    additions: list[Any] = []
    for override in overrides:
        text = override.lstrip("+") if isinstance(override, str) else ""
        key, equals, _ = text.partition("=")
        key = key.strip()
        if not equals or not key or key.startswith("~"):
            found.problems.append(Problem("", f"override {override!r} is not of the form key=value"))
            continue
        try:
            additions.append(OmegaConf.from_dotlist([text]))
        except Exception as error:  # noqa: BLE001  # the YAML reader and OmegaConf have many
            found.problems.append(Problem(key, f"override {override!r} cannot be read: {_first_line(error)}"))
            continue
        warning = _new_section(override, key, before)
        if warning:
            found.warnings.append(warning)
    base = tree.copy()
    OmegaConf.set_readonly(base, False)
    OmegaConf.set_struct(base, False)
    try:
        merged: Any = OmegaConf.merge(base, *additions)
    except Exception as error:  # noqa: BLE001
        found.problems.append(Problem("", f"overrides {overrides} cannot be applied: {_first_line(error)}"))
        return tree
    result: DictConfig = merged
    return result


def _new_section(override: str, key: str, before: set[tuple[Any, ...]]) -> str:
    """A warning where an override without ``+`` names a section that the config does not have."""
    words = key.split(".")
    if override.startswith("+") or not before or SECTION not in words or words[0] == GLOBAL:
        return ""
    section = words[: words.index(SECTION) + 1]
    known = {".".join(str(word) for word in keys) for keys in before}
    path = ".".join(section)
    if path in known:
        return ""
    return f"override {override!r} makes a new section {path!r}.{did_you_mean(path, sorted(known))}"


def _section_keys(raw: Any, keys: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], str]]:
    """Keys on the way to each ``profiler`` in unresolved data, with its ``_target_``."""
    sections: list[tuple[tuple[Any, ...], str]] = []
    if not isinstance(raw, dict):
        return sections
    for key, value in raw.items():
        if not keys and key == GLOBAL:
            continue
        here = (*keys, key)
        if key == SECTION:
            if isinstance(value, dict):
                sections.append((here, str(value.get("_target_") or "")))
            elif isinstance(value, str) and "${" in value:
                sections.append((here, ""))
        else:
            sections.extend(_section_keys(value, here))
    return sections


class _Resolver:
    """Turns a part of a tree into plain data, one leaf at a time, so that every bad leaf is named."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def child(self, parent: Any, key: Any, path: str, depth: int = 0) -> Any:
        """The resolved value of one key; None where it is missing or cannot be resolved."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            if OmegaConf.is_missing(parent, key):
                return None
            value = parent[key]
        except (OmegaConfBaseException, RecursionError) as error:
            tip = _BRACES if "finish_hook_cmd" in path else ""
            self.problems.append(Problem(path, f"cannot be resolved: {_first_line(error)}{tip}"))
            return None
        return self.value(value, path, depth)

    def value(self, value: Any, path: str, depth: int) -> Any:
        """Plain data of a value."""
        from omegaconf import DictConfig, ListConfig

        if depth > _DEEPEST:
            self.problems.append(Problem(path, "is nested too deeply; does it contain itself?"))
            return None
        if isinstance(value, DictConfig):
            return {str(key): self.child(value, key, f"{path}.{key!s}", depth + 1) for key in value}
        if isinstance(value, ListConfig):
            return [self.child(value, index, f"{path}.{index}", depth + 1) for index in range(len(value))]
        if isinstance(value, Mapping):
            return {str(key): self.value(item, f"{path}.{key!s}", depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
        simple = plain(value)
        if simple is None or isinstance(simple, str | int | float | bool):
            return simple
        self.problems.append(
            Problem(path, f"{type(value).__name__} is not a plain value (text, number, list, mapping)")
        )
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
