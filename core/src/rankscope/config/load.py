"""One way in for every kind of config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from rankscope.config.roles import Config
from rankscope.config.schema import DEFAULT_SAVE_PATH, GLOBAL, parse_global, parse_section
from rankscope.config.source import read_source
from rankscope.config.tools import inspect_tools
from rankscope.errors import ConfigError, Problem


def load_config(
    source: Any = None, overrides: Iterable[str] = (), *, check_tools: bool | Literal["names"] = True
) -> Config:
    """Read a config once, at the start of the job; hand the result, not the source, to the workers.

    Args:
        source: a mapping, the path of a YAML file, an OmegaConf config (also one composed by Hydra), a `Config`
            (returned as it is), or None for nothing configured. Only ``global_profiler`` and every
            ``<path>.profiler`` are looked at.
        overrides: ``key=value`` texts as on Hydra's command line, also with ``+`` or ``++`` in front.
        check_tools: also check the tools of enabled roles, which imports them; ``"names"`` checks that they are
            installed and imports none.

    Raises:
        ConfigError: with everything that is wrong, each with its dotted key.
    """
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    if isinstance(source, Config):
        if overrides:
            raise ConfigError("overrides apply to the source of a config, not to a Config that was already loaded")
        faults = inspect_tools(source, imports=check_tools is True)[0] if check_tools else []
        if faults:
            raise ConfigError(faults)
        return source
    found = read_source(source, overrides)
    problems = list(found.problems)
    wrong: list[Problem] = []
    common = parse_global(found.global_values, wrong)
    problems.extend(wrong)
    said = {(problem.path.removeprefix(f"{GLOBAL}."), problem.message) for problem in problems}
    sections = []
    for keys, values in found.sections.items():
        path = ".".join(keys)
        wrong = []
        sections.append(parse_section(values, path, keys[-2] if len(keys) > 1 else "", wrong))
        # A section that interpolates a bad global value repeats what is already said.
        problems.extend(p for p in wrong if (p.path.removeprefix(f"{path}."), p.message) not in said)
    config = Config(common, tuple(sections), tuple(found.warnings), _notes(found.global_values, found.sections))
    if check_tools:
        wrong, warnings = inspect_tools(config, imports=check_tools is True)
        problems.extend(wrong)
        config = dataclasses.replace(config, warnings=(*config.warnings, *warnings))
    if problems:
        raise ConfigError(problems)
    return config


def _notes(global_values: Mapping[str, Any], sections: Mapping[tuple[str, ...], Mapping[str, Any]]) -> tuple[str, ...]:
    """What relative paths were taken to mean."""
    common = global_values.get("save_path") or DEFAULT_SAVE_PATH
    given = {f"{GLOBAL}.save_path": common}
    for keys, values in sections.items():
        own = values.get("save_path")
        if own and own != common:
            given[f"{'.'.join(keys)}.save_path"] = own
    return tuple(
        f"{path} {text!r} is relative: files go to {Path.cwd() / text} on each node"
        for path, text in given.items()
        if isinstance(text, str) and text[:1] not in ("/", "~", "$")
    )
