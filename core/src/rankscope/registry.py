"""Backends by entry point: list without importing, resolve one, name clashes, disabled tools and what to install."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rankscope import environment
from rankscope.errors import CommandError, ConfigError, Problem, did_you_mean, listing
from rankscope.randomness import unchanged
from rankscope.types import Availability

GROUP = "rankscope.backends"

FIRST_PARTY: Mapping[str, str] = {
    "torch": "rankscope-torch",
    "torch_memory": "rankscope-torch-memory",
    "nsys": "rankscope-nsys",
    "npu": "rankscope-npu",
    "precision_debugger": "rankscope-precision-debugger",
}
"""What to install for a tool of ours: the one place where core knows tool names, and only for a message."""

COMMAND_GROUP = "rankscope.commands"
"""Entry points of commands that tools add to ``rankscope``: name = command, value = a module."""

FIRST_PARTY_COMMANDS: Mapping[str, str] = {"memory": "rankscope-torch-memory", "analyse": "rankscope-npu"}
"""What to install for a command of ours that a tool brings along."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclasses.dataclass(frozen=True)
class ToolInfo:
    """One installed tool, known from its entry point alone.

    Attributes:
        name: the entry point's name, i.e. the tool.
        distribution: name of the distribution that provides it.
        version: of that distribution.
        value: ``module:object`` of the entry point.
    """

    name: str
    distribution: str
    version: str
    value: str

    @property
    def provider(self) -> str:
        """``rankscope-torch 0.1.0``."""
        return f"{self.distribution} {self.version}".strip()


def providers() -> dict[str, list[ToolInfo]]:
    """Every entry point of the group by tool, also where several distributions claim one name. Imports none."""
    return {tool: list(infos) for tool, infos in _providers(_places()).items()}


def _places() -> tuple[tuple[str, int], ...]:
    """Where distributions may lie, with the time of the latest change: reading their metadata costs milliseconds."""
    places = []
    for path in sys.path:
        try:
            changed = os.stat(path or ".").st_mtime_ns  # noqa: PTH116 - a path object costs more than the call
        except OSError:
            changed = 0
        places.append((path, changed))
    return tuple(places)


@functools.lru_cache(maxsize=1)
def _providers(places: tuple[tuple[str, int], ...]) -> dict[str, list[ToolInfo]]:  # noqa: ARG001 - the cache's key
    found: dict[str, dict[tuple[str, str], ToolInfo]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        name, version = _provider(entry)
        info = ToolInfo(entry.name, name, version, entry.value)
        # One distribution can be seen twice on sys.path (a wheel beside its source); that is no clash.
        found.setdefault(entry.name, {}).setdefault((name.lower(), entry.value), info)
    return {tool: list(infos.values()) for tool, infos in sorted(found.items())}


def commands() -> dict[str, ToolInfo]:
    """The commands that installed distributions add to ``rankscope``. Imports none."""
    found: dict[str, ToolInfo] = {}
    for entry in sorted(importlib.metadata.entry_points(group=COMMAND_GROUP), key=lambda entry: entry.name):
        found.setdefault(entry.name, ToolInfo(entry.name, *_provider(entry), entry.value))
    return found


def load_command(name: str) -> ModuleType | None:
    """Import the module of a command that a tool brings along; None where nobody knows the name.

    Raises:
        CommandError: it belongs to a tool of ours that is not installed, or cannot be imported.
    """
    info = commands().get(name)
    if info is None:
        if name in FIRST_PARTY_COMMANDS:
            raise CommandError(f"this command comes with: pip install {FIRST_PARTY_COMMANDS[name]}")
        return None
    try:
        module = importlib.metadata.EntryPoint(name, info.value, COMMAND_GROUP).load()
    except Exception as error:
        raise CommandError(
            f"({info.value} from {info.provider}) could not be imported: {type(error).__name__}: {error}"
        ) from error
    return module  # type: ignore[no-any-return]


def _provider(entry: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution; one that was half removed has neither, and must not stop the others."""
    try:
        facts: Mapping[str, Any] = entry.dist.metadata if entry.dist is not None else {}  # type: ignore[assignment]
        name, version = ((facts[key] if key in facts else None) for key in ("Name", "Version"))  # noqa: SIM401
    except Exception:  # noqa: BLE001 - whatever lies in site-packages
        name = version = None
    return str(name or "?"), str(version or "")


def installed() -> dict[str, ToolInfo]:
    """Installed tools that are neither disabled nor claimed by more than one distribution. Imports none."""
    return {tool: infos[0] for tool, infos in providers().items() if len(infos) == 1 and not disabled(tool)}


def disabled(tool: str) -> bool:
    """Whether ``RANKSCOPE_DISABLE`` names the tool."""
    words = environment.names(environment.DISABLE)
    return tool in words or "*" in words


def known(tool: str) -> bool:
    """Whether the name means anything here: installed, or a tool of ours that could be installed."""
    return tool in FIRST_PARTY or tool in providers()


def check(tool: str, path: str) -> Problem | None:
    """What stands in the way of using the tool, found without importing it; None when nothing does.

    Args:
        tool: name from the config.
        path: dotted key that the name was read from.
    """
    found = providers()
    if tool in found:
        if disabled(tool):
            return Problem(path, f"tool {tool!r} is disabled by {environment.DISABLE}; unset it or choose another tool")
        if len(found[tool]) > 1:
            names = listing(info.provider for info in found[tool])
            return Problem(path, f"tool {tool!r} is provided by more than one distribution: {names}. Uninstall one.")
        if not _NAME.match(tool):
            return Problem(path, f"tool {tool!r} of {found[tool][0].provider} has no valid name ([a-z][a-z0-9_]*)")
        return None
    names = listing(found)
    if tool in FIRST_PARTY:
        return Problem(
            path,
            f"tool {tool!r} is not installed; install it with: pip install {FIRST_PARTY[tool]} (installed: {names})",
        )
    hint = did_you_mean(tool, sorted({*found, *FIRST_PARTY}))
    return Problem(
        path, f"no tool named {tool!r}.{hint} Installed: {names}. Install one with: pip install rankscope-<tool>"
    )


@functools.cache
def _import(info: ToolInfo) -> Any:
    entry = importlib.metadata.EntryPoint(info.name, info.value, GROUP)
    with unchanged():
        return entry.load()


def load(tool: str, path: str = "") -> Any:
    """Import one tool and return what its entry point names.

    Raises:
        ConfigError: unknown, disabled, claimed twice, or it cannot be imported (with distribution and cause).
    """
    problem = check(tool, path)
    if problem is not None:
        raise ConfigError([problem])
    info = installed()[tool]
    try:
        factory = _import(info)
    except Exception as error:
        raise ConfigError(
            [
                Problem(
                    path,
                    f"tool {tool!r} ({info.value} from {info.provider}) could not be imported: "
                    f"{type(error).__name__}: {error}",
                )
            ]
        ) from error
    if not callable(factory):
        raise ConfigError(
            [Problem(path, f"tool {tool!r} ({info.value} from {info.provider}) is {factory!r}, not a backend class")]
        )
    return factory


def availability(factory: Any) -> Availability:
    """Whether a tool can work in this process, as it says itself. Whatever its code does becomes an answer."""
    ask = getattr(factory, "available", None)
    if ask is None:  # the attribute is optional: a tool without it works wherever it can be imported
        return Availability(True)
    try:
        answer = ask()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # somebody else's code
        return Availability(False, f"available() failed: {type(error).__name__}: {error}")
    if not isinstance(answer, Availability):
        return Availability(False, f"available() returned {answer!r} and not an Availability")
    return answer


def owned(factory: Any, options: Any) -> frozenset[str]:
    """Names of what the tool needs for itself in a process, with these options."""
    owns = getattr(factory, "owns", ())
    return frozenset(owns(options) if callable(owns) else owns)


def advice(factory: Any, options: Any) -> list[str]:
    """What a user should know of these options before a run, in words of the tool; its errors are no advice."""
    ask = getattr(factory, "advice", None)
    try:
        return [str(text) for text in ask(options)] if ask is not None else []
    except Exception as error:  # noqa: BLE001  # somebody else's code
        return [f"advice() failed: {type(error).__name__}: {error}"]
