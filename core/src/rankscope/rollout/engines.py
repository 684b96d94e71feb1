"""Engine adapters by entry point: list without importing, resolve one, name clashes, disabled ones, what to install."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from rankscope import environment
from rankscope.config.options import build_options
from rankscope.errors import ConfigError, Problem, did_you_mean, error_text, listing
from rankscope.registry import ToolInfo, disabled
from rankscope.rollout.engine import Engine

GROUP = "rankscope.engines"

OURS = ("vllm", "sglang", "trtllm")
"""Engines whose adapters come with rankscope itself."""


def providers() -> dict[str, list[ToolInfo]]:
    """Every entry point of the group by engine, also where several distributions claim one name. Imports none."""
    found: dict[str, dict[tuple[str, str], ToolInfo]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            name, version = (str(entry.dist.metadata[key]) for key in ("Name", "Version"))  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - a distribution that was half removed must not stop the others
            name, version = "?", ""
        info = ToolInfo(entry.name, name, version, entry.value)
        # One distribution can be seen twice on sys.path (a wheel beside its source); that is no clash.
        found.setdefault(entry.name, {}).setdefault((name.lower(), entry.value), info)
    return {engine: list(infos.values()) for engine, infos in sorted(found.items())}


def installed() -> dict[str, ToolInfo]:
    """Engines that are neither disabled nor claimed by more than one distribution. Imports none."""
    return {name: infos[0] for name, infos in providers().items() if len(infos) == 1 and not disabled(name)}


def check(name: str, path: str = "engine") -> Problem | None:
    """What stands in the way of using an engine's adapter, found without importing it; None when nothing does."""
    found = providers()
    if name in found:
        if disabled(name):
            return Problem(path, f"engine {name!r} is disabled by {environment.DISABLE}; unset it")
        if len(found[name]) > 1:
            names = listing(info.provider for info in found[name])
            return Problem(path, f"engine {name!r} is provided by more than one distribution: {names}. Uninstall one.")
        return None
    if name in OURS:
        return Problem(
            path,
            f"the adapter of engine {name!r} comes with rankscope, whose installation does not name it: reinstall it",
        )
    hint = did_you_mean(name, sorted({*found, *OURS}))
    return Problem(
        path,
        f"no engine named {name!r}.{hint} Installed: {listing(found)}. Another one needs a distribution with an entry "
        f"point in the group {GROUP}",
    )


@functools.cache
def _import(info: ToolInfo) -> Any:
    return importlib.metadata.EntryPoint(info.name, info.value, GROUP).load()


def load(name: str, path: str = "engine") -> Any:
    """Import one adapter and return its class.

    Raises:
        ConfigError: unknown, disabled, claimed twice, or it cannot be imported (with distribution and cause).
    """
    problem = check(name, path)
    if problem is not None:
        raise ConfigError([problem])
    info = installed()[name]
    try:
        factory = _import(info)
    except Exception as error:
        text = f"engine {name!r} ({info.value} from {info.provider}) could not be imported: {error_text(error)}"
        raise ConfigError([Problem(path, text)]) from error
    if not callable(factory):
        text = f"engine {name!r} ({info.value} from {info.provider}) is {factory!r}, not an Engine class"
        raise ConfigError([Problem(path, text)])
    return factory


def make(engine: Any, options: Any = None, *, version: str | None = None) -> Engine:
    """The adapter of an engine, with checked options.

    Args:
        engine: its name, or an `Engine` (returned as it is).
        options: a mapping of its options.
        version: of the engine.

    Raises:
        ConfigError: it cannot be had, or an option is wrong; the message names it, and what it may be.
    """
    if isinstance(engine, Engine):
        return engine
    factory = load(engine)
    checked, problems = build_options(factory.Options, dict(options or {}), "engine_options")
    if problems:
        raise ConfigError(problems)
    made = factory(checked, version=version)
    if not isinstance(made, Engine):
        raise ConfigError([Problem("engine", f"engine {engine!r} made {made!r}, which is no rankscope.rollout.Engine")])
    return made
