"""The whole config, and from its sections to one role's settings: inheritance, lookup by name, merging."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankscope.config.schema import GLOBAL, SECTION, GlobalConfig, RoleConfig, RoleSection
from rankscope.config.values import FrozenMapping, MappingView, overlay
from rankscope.errors import ConfigError, Problem, did_you_mean, listing
from rankscope.ranks import DEFAULT, EVERY_RANK, NO_RANK, RankSelector

ACTOR = "actor"
FOLLOWERS = frozenset({"ref", "rollout"})
"""Roles that inherit from the actor: they usually share its processes."""

COLOCATED = frozenset({ACTOR, "critic", "ref", "reward", "rollout"})
"""Words that a joined role may hold although the config has no section for them."""


@dataclasses.dataclass(frozen=True)
class Config(MappingView):
    """A whole config: plain, frozen, picklable.

    Attributes:
        global_profiler: when, where, and what all roles have in common.
        sections: every ``<path>.profiler``, in the order of the config.
        warnings: what was left out or has no effect, in words.
        notes: facts that matter only when something is profiled.
    """

    global_profiler: GlobalConfig = dataclasses.field(default_factory=GlobalConfig)
    sections: tuple[RoleSection, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        """Whether any step is to be profiled at all."""
        return bool(self.global_profiler.steps)

    def role(self, name: str) -> RoleConfig:
        """The settings of a role after inheritance and merging.

        Args:
            name: ``actor``; a longer dotted path (``actor_rollout_ref.actor``) where several sections end alike; or a
                joined role (``actor-rollout-ref``), whose parts are merged by union. ``-`` and ``_`` mean the same.

        Returns:
            The role; a disabled one, with a note, when the config has no section for it.

        Raises:
            ConfigError: several sections fit, or the parts of a joined role contradict each other.
        """
        wanted = _normal(name).removesuffix(f".{SECTION}")
        section = self._section(wanted)
        if section is not None:
            return self.resolve(section, role=name)
        joined = self._joined(name, wanted)
        if joined is not None:
            return joined
        root = next((section for section in self.sections if not section.role), None)
        if root is not None:
            return self.resolve(root, role=name)
        known = [section.role for section in self.sections]
        note = f"no {SECTION} section for role {name!r}; sections: {listing(known)}.{did_you_mean(wanted, known)}"
        return RoleConfig(name, save_path=self.global_profiler.save_path, notes=(note,))

    def roles(self) -> list[RoleConfig]:
        """The settings of every section's role, in the order of the config."""
        return [self.resolve(section) for section in self.sections]

    def resolve(self, section: RoleSection, *, role: str | None = None) -> RoleConfig:
        """One section's settings, with everything that it inherits.

        A null inherits from the global part. Beyond that, ``ref`` and ``rollout`` follow the actor: ``enable`` in both;
        the choice of ranks where ``enable`` is inherited, and always in ``rollout``; and in ``rollout`` also relocation
        and the finish command. A followed role takes the actor's tools when the job has none.
        """
        common = self.global_profiler
        actor = self._followed(section)
        follows = actor is not None and section.enable is None
        upper = actor if actor is not None and _normal(section.role) == "rollout" else None
        notes = []
        if actor is not None and follows:
            notes.append(f"{section.role} follows {actor.name}, because {section.path}.enable is not set")
        chooser = section
        if actor is not None and not section.chooses_ranks and (follows or upper is not None):
            chooser = actor
        if chooser.all_ranks and chooser.ranks is not None:
            notes.append(f"{chooser.path}.ranks has no effect, because all_ranks is true")
        tools, tool_path = section.tool or common.tool, f"{section.path}.tool"
        if not section.tool or section.tool == common.tool:
            tool_path = f"{GLOBAL}.tool" if common.tool else tool_path
        if not tools and actor is not None and follows:
            tools, tool_path = actor.tool or (), f"{actor.path}.tool"

        def inherited(key: str) -> Any:
            return _first(section[key], upper[key] if upper is not None else None, common[key])

        return RoleConfig(
            role=section.role if role is None else role,
            paths=(section.path,),
            tools=tools,
            enable=bool(actor.enable if actor is not None and follows else section.enable),
            ranks=EVERY_RANK if chooser.all_ranks else chooser.ranks or DEFAULT,
            save_path=section.save_path or common.save_path,
            relocate_results=inherited("relocate_results"),
            finish_hook_cmd=inherited("finish_hook_cmd") or None,
            finish_hook_all_ranks=inherited("finish_hook_all_ranks"),
            finish_hook_ranks=inherited("finish_hook_ranks"),
            tool_config=section.tool_config,
            global_tool_config=FrozenMapping(overlay(common.global_tool_config, section.global_tool_config)),
            follows=actor.path if actor is not None and follows else "",
            notes=tuple(notes),
            _tool_path=tool_path,
        )

    def _section(self, wanted: str) -> RoleSection | None:
        """The section with that name or path; the shortest path wins, a tie is an error."""
        fitting = [
            section for section in self.sections if section.role and f".{_normal(section.name)}".endswith(f".{wanted}")
        ]
        if not fitting:
            return None
        fitting.sort(key=lambda section: section.path.count("."))
        if len(fitting) > 1 and fitting[0].path.count(".") == fitting[1].path.count("."):
            paths = listing(section.path for section in fitting)
            raise ConfigError(f"role {wanted!r} could be any of {paths}; name it by its longer path")
        return fitting[0]

    def _followed(self, section: RoleSection) -> RoleSection | None:
        """The actor's section that a ref or rollout section inherits from: its neighbour, else the only one."""
        if _normal(section.role) not in FOLLOWERS:
            return None
        parent = section.name.rpartition(".")[0]
        beside = f"{parent}.{ACTOR}" if parent else ACTOR
        actors = [other for other in self.sections if _normal(other.role) == ACTOR]
        for other in actors:
            if other.name == beside:
                return other
        return actors[0] if len(actors) == 1 else None

    def _joined(self, name: str, wanted: str) -> RoleConfig | None:
        """The union of the sections that the parts of a joined name stand for; None when it is no such name."""
        roles = {_normal(section.role) for section in self.sections if section.role}
        words = wanted.split("_")
        found: list[str] = []
        missing: list[str] = []
        while words:
            for size in range(len(words), 0, -1):
                part = "_".join(words[:size])
                if part in roles or (size == 1 and part in COLOCATED):
                    (found if part in roles else missing).append(part)
                    words = words[size:]
                    break
            else:
                return None
        parts = [self.role(part) for part in dict.fromkeys(found)]
        if not parts:
            return None
        root = next((section for section in self.sections if not section.role), None)
        if missing and root is not None:
            parts.append(self.resolve(root, role=missing[0]))
            missing = []
        merged = merge_roles(parts)
        notes = [*merged.notes]
        if missing:
            notes.append(f"no {SECTION} section for {listing(missing)} of {name}")
        return dataclasses.replace(merged, role=name, notes=tuple(notes))


def merge_roles(roles: Sequence[RoleConfig]) -> RoleConfig:
    """The union: one process that is all of these roles is profiled wherever one of them is.

    Only enabled roles count. Ranks are joined with the default taken as rank 0; an option set in one role only is
    taken; where two set it differently, that is an error, unless one of them merely follows the other.

    Raises:
        ConfigError: two enabled roles contradict each other; both are named.
    """
    roles = _distinct(roles)
    enabled = [role for role in roles if role.enable]
    name = "-".join(role.role for role in roles)
    if not enabled or len(roles) == 1:
        first = roles[0]
        return dataclasses.replace(first, role=name, paths=_paths(roles), notes=_notes(roles))
    paths = {path for role in enabled for path in role.paths}
    enabled.sort(key=lambda role: role.follows in paths)
    merged = _Union(enabled[0])
    for role in enabled[1:]:
        merged.add(role, yields=role.follows in paths)
    if merged.problems:
        raise ConfigError(merged.problems)
    ranks = enabled[0].ranks
    for role in enabled[1:]:
        ranks = ranks.union(role.ranks)
    with_command = [role for role in enabled if role.finish_hook_cmd is not None] or enabled
    return dataclasses.replace(
        merged.role,
        role=name,
        paths=_paths([*enabled, *roles]),
        ranks=ranks,
        relocate_results=any(role.relocate_results for role in enabled),
        finish_hook_all_ranks=any(role.finish_hook_all_ranks for role in with_command),
        finish_hook_ranks=_finish_union(with_command),
        notes=(*_notes(enabled), *merged.notes),
    )


def intersect_roles(roles: Sequence[RoleConfig]) -> RoleConfig:
    """The intersection: profiled only where every role is; nobody when their ranks have none in common.

    Raises:
        ConfigError: the roles contradict each other in tools, paths, commands or options.
    """
    roles = _distinct(roles)
    merged = _Union(roles[0])
    for role in roles[1:]:
        merged.add(role, yields=False)
    if merged.problems:
        raise ConfigError(merged.problems)
    ranks, finish = roles[0].ranks, roles[0].finish_ranks
    for role in roles[1:]:
        ranks, finish = ranks.intersection(role.ranks), finish.intersection(role.finish_ranks)
    listed = any(role.finish_hook_ranks for role in roles)
    return dataclasses.replace(
        merged.role,
        role="-".join(role.role for role in roles),
        paths=_paths(roles),
        enable=all(role.enable for role in roles),
        ranks=ranks,
        relocate_results=all(role.relocate_results for role in roles),
        finish_hook_all_ranks=all(role.finish_hook_all_ranks for role in roles),
        finish_hook_ranks=finish.written() if listed else (),
        notes=_notes(roles),
    )


class _Union:
    """Joins what two roles of one process cannot both have; notes what contradicts."""

    def __init__(self, role: RoleConfig) -> None:
        self.role = role
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def add(self, other: RoleConfig, *, yields: bool) -> None:
        """Join one more role; with ``yields`` the first one's values win."""
        mine = self.role

        def differ(path: str, left: Any, right: Any) -> None:
            text = f"{right!r} of {other.role} contradicts {left!r} of {mine.role}"
            if yields:
                self.notes.append(f"{path}: {text}, which {other.role} follows")
            else:
                self.problems.append(
                    Problem(path, f"{text} ({mine.path}); both run in one process: give both the same value")
                )

        tools = mine.tools or other.tools
        if other.tools and set(tools) != set(other.tools):
            differ(other.tool_path, listing(tools), listing(other.tools))
        if mine.save_path != other.save_path:
            differ(f"{other.path}.save_path", mine.save_path, other.save_path)
        command = mine.finish_hook_cmd if mine.finish_hook_cmd is not None else other.finish_hook_cmd
        if other.finish_hook_cmd not in (None, command):
            differ(f"{other.path}.finish_hook_cmd", command, other.finish_hook_cmd)
        selected = {*tools, *other.tools}
        self.role = dataclasses.replace(
            mine,
            tools=tools,
            finish_hook_cmd=command,
            tool_config=_blocks(
                mine.tool_config, other.tool_config, selected, lambda key: f"{other.path}.tool_config.{key}", differ
            ),
            global_tool_config=_blocks(
                mine.global_tool_config,
                other.global_tool_config,
                selected,
                lambda key: f"{other.path}.global_tool_config.{key}",
                differ,
            ),
        )


def _blocks(
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    selected: set[str],
    path: Callable[[str], str],
    differ: Callable[[str, Any, Any], None],
) -> FrozenMapping:
    joined = dict(left)
    for tool, block in right.items():
        report = differ if tool in selected else None
        joined[tool] = _join(joined.get(tool, {}), block, path(tool), report)
    return FrozenMapping(joined)


def _join(
    left: Mapping[str, Any], right: Mapping[str, Any], path: str, differ: Callable[[str, Any, Any], None] | None
) -> dict[str, Any]:
    joined = dict(left)
    for key, value in right.items():
        have = joined.get(key)
        if have is None:
            joined[key] = value
        elif isinstance(have, Mapping) and isinstance(value, Mapping):
            joined[key] = _join(have, value, f"{path}.{key}", differ)
        elif value is not None and value != have and key != "name" and differ is not None:
            differ(f"{path}.{key}", have, value)
    return joined


def _finish_union(roles: list[RoleConfig]) -> tuple[int | str, ...]:
    """Listed ranks of all; a role that lists none means its profiled ranks."""
    if not any(role.finish_hook_ranks for role in roles):
        return ()
    ranks = NO_RANK
    for role in roles:
        ranks = ranks.union(RankSelector.parse(role.finish_hook_ranks) if role.finish_hook_ranks else role.ranks)
    return ranks.written()


def _distinct(roles: Sequence[RoleConfig]) -> list[RoleConfig]:
    if not roles:
        raise ConfigError("there is no role to merge")
    return list(dict.fromkeys(roles))


def _paths(roles: Sequence[RoleConfig]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for role in roles for path in role.paths))


def _notes(roles: Sequence[RoleConfig]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for role in roles for note in role.notes))


def _normal(name: str) -> str:
    return name.strip().replace("-", "_")


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)
