"""What a config holds: the global part, one section a role, and a role's resolved settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rankscope.config.values import (
    FrozenMapping,
    MappingView,
    Reader,
    at_least_one,
    blocks,
    boolean,
    choice,
    command,
    directory,
    names,
    overlay,
    seconds,
    thaw,
)
from rankscope.errors import Problem
from rankscope.ranks import DEFAULT, RankSelector
from rankscope.steps import parse_steps

GLOBAL = "global_profiler"
"""Key of the global part."""

SECTION = "profiler"
"""Key of every role's section."""

EXPORTS_FULL = ("wait", "drop")

DEFAULT_SAVE_PATH = "outputs/profile"


@dataclasses.dataclass(frozen=True)
class GlobalConfig(MappingView):
    """``global_profiler``: when, where, and what all roles have in common.

    Attributes:
        tool: the tools of every role that names none.
        steps: profiled training steps, ascending, counted from 1; none means that nothing is profiled.
        profile_continuous_steps: adjacent profiled steps share one window.
        save_path: absolute directory of the artifacts.
        relocate_results: move files that a framework wrote elsewhere into ``save_path``.
        finish_hook_cmd: command after the last window: a shell text, words, or None.
        finish_hook_all_ranks: every rank runs it.
        finish_hook_ranks: ranks that run it, written like a role's ``ranks``; empty means the profiled ranks.
        global_tool_config: default options by tool.
        strict: faults of backends are raised instead of contained.
        finish_hook_timeout: seconds until the finish command is killed.
        finish_hook_wait: most seconds that the training thread waits for the finish command.
        stage_dir: directory on a local disk where raw data is staged; None means: under ``save_path`` if that is
            local, else in the node's temporary directory.
        max_exports: files of one process that may be in export at once.
        exports_full: what becomes of one more: ``wait`` (at most ``close_timeout`` seconds) or ``drop``.
        close_timeout: most seconds that ``close()`` waits for exports.
        flush_on_sigterm: save open windows when the process is told to end.
        allow_tools: the only tools that may be used; None allows all.
    """

    tool: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    profile_continuous_steps: bool = False
    save_path: str = dataclasses.field(default_factory=lambda: directory(DEFAULT_SAVE_PATH))
    relocate_results: bool = False
    finish_hook_cmd: str | tuple[str, ...] | None = None
    finish_hook_all_ranks: bool = False
    finish_hook_ranks: tuple[int | str, ...] = ()
    global_tool_config: FrozenMapping = dataclasses.field(default_factory=FrozenMapping)
    strict: bool = False
    finish_hook_timeout: float = 1800.0
    finish_hook_wait: float = 5.0
    stage_dir: str | None = None
    max_exports: int = 32
    exports_full: str = "wait"
    close_timeout: float = 120.0
    flush_on_sigterm: bool = False
    allow_tools: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class RoleSection(MappingView):
    """One ``<path>.profiler`` as it was written; None means inherit.

    Attributes:
        path: dotted path, e.g. ``actor_rollout_ref.actor.profiler``.
        role: the component before ``profiler``; empty for a section at the root, which stands in for every role
            without a section of its own.
        tool: the role's tools.
        enable: whether the role is profiled.
        all_ranks: every rank is profiled, whatever ``ranks`` says.
        ranks: the profiled ranks; None where nobody chose.
        save_path, relocate_results, finish_hook_all_ranks, finish_hook_ranks: as in `GlobalConfig`.
        finish_hook_cmd: as in `GlobalConfig`; an empty one (``""``) switches the inherited one off.
        tool_config: options by tool; they win over the global defaults.
        global_tool_config: replaces the global defaults of the same options for this role.
    """

    path: str
    role: str
    tool: tuple[str, ...] | None = None
    enable: bool | None = None
    all_ranks: bool | None = None
    ranks: RankSelector | None = None
    save_path: str | None = None
    relocate_results: bool | None = None
    finish_hook_cmd: str | tuple[str, ...] | None = None
    finish_hook_all_ranks: bool | None = None
    finish_hook_ranks: tuple[int | str, ...] | None = None
    tool_config: FrozenMapping = dataclasses.field(default_factory=FrozenMapping)
    global_tool_config: FrozenMapping = dataclasses.field(default_factory=FrozenMapping)

    @property
    def chooses_ranks(self) -> bool:
        """Whether the section itself says which ranks."""
        return self.ranks is not None or bool(self.all_ranks)

    @property
    def name(self) -> str:
        """The path without the final ``profiler``."""
        return self.path.removesuffix(SECTION).removesuffix(".")


@dataclasses.dataclass(frozen=True)
class RoleConfig(MappingView):
    """A role's settings after inheritance and merging.

    Attributes:
        role: its name.
        paths: dotted paths of the sections it came from; empty when there is none.
        tools: names of its tools, in the order in which they start.
        enable: whether it is profiled.
        ranks: on which ranks.
        save_path: absolute directory of its artifacts.
        relocate_results: move files that a framework wrote elsewhere into ``save_path``.
        finish_hook_cmd, finish_hook_all_ranks, finish_hook_ranks: as in `GlobalConfig`.
        tool_config: the role's own options by tool.
        global_tool_config: the default options by tool.
        follows: path of the section whose ``enable`` it inherits, or empty.
        notes: what is worth saying about how this came about.
    """

    role: str
    paths: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    enable: bool = False
    ranks: RankSelector = DEFAULT
    save_path: str = ""
    relocate_results: bool = False
    finish_hook_cmd: str | tuple[str, ...] | None = None
    finish_hook_all_ranks: bool = False
    finish_hook_ranks: tuple[int | str, ...] = ()
    tool_config: FrozenMapping = dataclasses.field(default_factory=FrozenMapping)
    global_tool_config: FrozenMapping = dataclasses.field(default_factory=FrozenMapping)
    follows: str = ""
    notes: tuple[str, ...] = ()
    _tool_path: str = ""

    @property
    def path(self) -> str:
        """The first section's path; ``<role>.profiler`` when there is none."""
        return self.paths[0] if self.paths else f"{self.role}.{SECTION}"

    @property
    def tool_path(self) -> str:
        """Dotted key that the tools were read from."""
        return self._tool_path or f"{self.path}.tool"

    @property
    def why_off(self) -> str:
        """Why nothing of this role is profiled, in words; empty when it is on."""
        if self.enable:
            return "" if self.tools else f"role {self.role!r} is enabled but has no tool"
        if not self.paths:
            return " ".join(self.notes) or f"no {SECTION} section for role {self.role!r}"
        if self.follows:
            return f"role {self.role!r} is not enabled: it follows {self.follows}.enable"
        return f"role {self.role!r} is not enabled: set {self.path}.enable"

    @property
    def finish_ranks(self) -> RankSelector:
        """Ranks that run the finish command: all, else the listed ones, else the profiled ones."""
        if self.finish_hook_all_ranks:
            return RankSelector.parse(None, all_ranks=True)
        return RankSelector.parse(self.finish_hook_ranks) if self.finish_hook_ranks else self.ranks

    def options(self, tool: str) -> dict[str, Any]:
        """The tool's options as plain data: the global defaults, and over them the role's own; null inherits."""
        options = overlay(self.global_tool_config.get(tool, {}), self.tool_config.get(tool, {}))
        plain: dict[str, Any] = thaw(options)
        return plain

    def options_path(self, tool: str, key: str = "") -> str:
        """Dotted key of the tool's options; with ``key``, where that option (dotted for a nested one) was set."""
        own = f"{self.path}.tool_config.{tool}"
        if not key:
            return own
        words = key.split(".")
        if not _sets(self.tool_config.get(tool, {}), words) and _sets(self.global_tool_config.get(tool, {}), words):
            return f"{GLOBAL}.global_tool_config.{tool}.{key}"
        return f"{own}.{key}"


def _sets(values: Any, words: list[str]) -> bool:
    """Whether a nested key is there and not null."""
    for word in words:
        if not isinstance(values, Mapping):
            return True
        if values.get(word) is None:
            return False
        values = values[word]
    return True


def rank_items(value: Any) -> tuple[int | str, ...]:
    """Ranks of the finish command, checked; empty where nobody chose."""
    selector = RankSelector.parse(value)
    return () if selector.default else selector.written()


def _selector(value: Any) -> RankSelector | None:
    selector = RankSelector.parse(value)
    return None if selector.default else selector


_OF_A_ROLE = {
    **{
        key: f"it is set for each role, in <role>.{SECTION}.{key}"
        for key in ("enable", "all_ranks", "ranks", "tool_config")
    },
    **{
        key: f"it is set for each tool, in {GLOBAL}.global_tool_config.<tool>.{key}"
        for key in ("max_seconds", "discrete", "contents")
    },
}
_OF_ALL = {
    key: f"it is the same for all roles: {GLOBAL}.{key}"
    for key in (
        "steps",
        "profile_continuous_steps",
        "strict",
        "finish_hook_timeout",
        "finish_hook_wait",
        "stage_dir",
        "max_exports",
        "exports_full",
        "close_timeout",
        "flush_on_sigterm",
        "allow_tools",
    )
}


def parse_global(values: Mapping[str, Any], problems: list[Problem]) -> GlobalConfig:
    """Read ``global_profiler``; what is wrong is added to ``problems`` and its default stands in."""
    reader = Reader(values, GLOBAL, problems)
    default = GlobalConfig()
    reader.refuse_unknown(default, _OF_A_ROLE)
    return GlobalConfig(
        tool=reader.read("tool", names, ()),
        steps=reader.read("steps", parse_steps, ()),
        profile_continuous_steps=reader.read("profile_continuous_steps", boolean, False),
        save_path=reader.read("save_path", _directory, None) or default.save_path,
        relocate_results=reader.read("relocate_results", boolean, False),
        finish_hook_cmd=reader.read("finish_hook_cmd", command, None),
        finish_hook_all_ranks=reader.read("finish_hook_all_ranks", boolean, False),
        finish_hook_ranks=reader.read("finish_hook_ranks", rank_items, ()),
        global_tool_config=reader.read("global_tool_config", blocks, default.global_tool_config),
        strict=reader.read("strict", boolean, False),
        finish_hook_timeout=reader.read(
            "finish_hook_timeout", lambda value: seconds(value, zero=False), default.finish_hook_timeout
        ),
        finish_hook_wait=reader.read(
            "finish_hook_wait", lambda value: seconds(value, zero=True), default.finish_hook_wait
        ),
        stage_dir=reader.read("stage_dir", _directory, None),
        max_exports=reader.read("max_exports", at_least_one, default.max_exports),
        exports_full=reader.read("exports_full", lambda value: choice(value, EXPORTS_FULL), default.exports_full),
        close_timeout=reader.read("close_timeout", lambda value: seconds(value, zero=True), default.close_timeout),
        flush_on_sigterm=reader.read("flush_on_sigterm", boolean, False),
        allow_tools=reader.read("allow_tools", names, None),
    )


_SECTION_KEYS = tuple(key for key in RoleSection("", "") if key not in ("path", "role"))


def parse_section(values: Mapping[str, Any], path: str, role: str, problems: list[Problem]) -> RoleSection:
    """Read one role's section; what is wrong is added to ``problems`` and counts as not set."""
    reader = Reader(values, path, problems)
    reader.refuse_unknown(_SECTION_KEYS, _OF_ALL)
    return RoleSection(
        path=path,
        role=role,
        tool=reader.read("tool", names, None) or None,
        enable=reader.read("enable", boolean, None),
        all_ranks=reader.read("all_ranks", boolean, None),
        ranks=reader.read("ranks", _selector, None),
        save_path=reader.read("save_path", _directory, None),
        relocate_results=reader.read("relocate_results", boolean, None),
        finish_hook_cmd=reader.read("finish_hook_cmd", lambda value: command(value) or (), None),
        finish_hook_all_ranks=reader.read("finish_hook_all_ranks", boolean, None),
        finish_hook_ranks=reader.read("finish_hook_ranks", rank_items, None) or None,
        tool_config=reader.read("tool_config", blocks, FrozenMapping()),
        global_tool_config=reader.read("global_tool_config", blocks, FrozenMapping()),
    )


def _directory(value: Any) -> str | None:
    return None if isinstance(value, str) and not value.strip() else directory(value)
