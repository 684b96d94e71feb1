"""What a config will do in a run of a given size: role by rank by step by tool, with the reason of every no."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rankscope.config import Config, RoleConfig, tool_options
from rankscope.errors import ConfigError
from rankscope.ranges import compact

_STAGE = "anystage"
_ROLE = "anyrole"


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One line of the plan.

    Attributes:
        role: name of the role; ``*`` for the section that stands in for every role.
        rank: global rank; None where the line holds for all.
        step: training step; None where the line holds for all.
        tool: the tool; None where the line holds for all.
        profiled: yes or no.
        reason: why, in words.
        file: pattern of the names of its artifacts, or None.
    """

    role: str
    rank: int | None
    step: int | None
    tool: str | None
    profiled: bool
    reason: str
    file: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The whole plan.

    Attributes:
        rows: one for each role, rank, step and tool that is profiled; one where a whole role, rank or step is not.
        warnings: what is probably not meant, in words.
        notes: what is good to know of the options, in words of the tools.
    """

    rows: list[PlanRow]
    warnings: list[str]
    notes: list[str] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


@dataclasses.dataclass(frozen=True)
class _Tool:
    name: str
    discrete: bool
    suffix: str
    planned: Callable[[int, int], str] | None = None


def make_plan(
    config: Config,
    *,
    world_size: int,
    total_steps: int | None = None,
    roles: Iterable[str] | None = None,
    registry_module: Any = None,
) -> Plan:
    """Work out what will be profiled, without starting anything.

    Args:
        config: the loaded config.
        world_size: number of ranks of every role.
        total_steps: number of steps of the run, if it is known.
        roles: names of roles, also joined ones; by default the role of every section.
        registry_module: stands in for `rankscope.registry` in tests.

    Raises:
        ConfigError: a role's name is ambiguous, or the parts of a joined role contradict each other.
        ValueError: ``world_size`` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; a run has at least one rank")
    chosen = config.roles() if roles is None else [config.role(name) for name in roles]
    rows: list[PlanRow] = []
    warnings = [*config.warnings, *_about_steps(config, total_steps)]
    notes: list[str] = []
    undecided = False
    for role in chosen:
        warnings.extend(_about_role(role, world_size))
        if not role.enable or not role.tools or not config.active:
            reason = role.why_off or "no step is set: global_profiler.steps"
            rows.append(PlanRow(role.role or "*", None, None, None, False, reason))
            continue
        tools = _tools(role, config, registry_module, warnings, notes)
        rows.extend(_rows(role, tools, config, world_size, total_steps))
        undecided = undecided or role.ranks.local
    if any(row.profiled for row in rows) or undecided:
        warnings.extend(config.notes)
    else:
        warnings.append("nothing will be profiled: " + _why_nothing(config, chosen))
    command = config.global_profiler.finish_hook_cmd or any(role.finish_hook_cmd for role in chosen)
    if command and not any(role.enable for role in chosen):
        warnings.append("finish_hook_cmd is set but no role is enabled, so it will not run")
    return Plan(rows, list(dict.fromkeys(warnings)), list(dict.fromkeys(notes)))


def _about_steps(config: Config, total_steps: int | None) -> Iterator[str]:
    steps = config.global_profiler.steps
    if not steps:
        yield "global_profiler.steps is not set, so nothing is profiled"
    elif total_steps is not None and steps[-1] > total_steps:
        late = [step for step in steps if step > total_steps]
        yield f"beyond the run's last step {total_steps}: {'step' if len(late) == 1 else 'steps'} {compact(late)}"


def _about_role(role: RoleConfig, world_size: int) -> Iterator[str]:
    name = role.role or role.path
    if role.enable or not role.paths:
        yield from role.notes
    if not role.enable:
        if role.follows:
            yield f"{name} follows {role.follows}, which is not enabled"
        return
    yield from (f"{name}: {warning}" for warning in role.ranks.warnings(world_size))
    listed = role.ranks.listed()
    if listed is not None and not any(rank < world_size for rank in listed):
        yield f"{name} is enabled but its ranks select nobody ({role.ranks.explain()}, world size {world_size})"
    if role.finish_hook_cmd is not None:
        yield from (f"{name}.finish_hook_ranks: {warning}" for warning in role.finish_ranks.warnings(world_size))


def _tools(
    role: RoleConfig, config: Config, registry_module: Any, warnings: list[str], notes: list[str]
) -> list[_Tool]:
    """What the plan needs to know of a role's tools; one that cannot be loaded is planned with the bare config."""
    from rankscope.registry import advice, availability

    if registry_module is None:
        from rankscope import registry as registry_module
    tools = []
    for name in role.tools:
        try:
            factory = registry_module.load(name, role.tool_path)
            answer = availability(factory)
            if answer.why:
                works = "" if answer.available else " cannot work"
                warnings.append(f"{role.tool_path}: tool {name!r}{works} on this machine: {answer.why}")
            options, common = tool_options(factory, role, name)
            discrete = common.discrete
            notes.extend(f"{name}: {text}" for text in advice(factory, options))
            suffix = str(getattr(factory, "suffix", ""))
            planned = getattr(factory, "planned", None)
        except ConfigError as error:
            warnings.extend(str(problem) for problem in error.problems)
            discrete, suffix, planned = role.options(name).get("discrete") is True, "", None
        tools.append(_Tool(name, discrete, suffix, planned))
        if discrete and config.global_profiler.profile_continuous_steps:
            warnings.append(
                f"{role.path}: {name} has discrete true, so each stage gets a file of its own and "
                "global_profiler.profile_continuous_steps has no effect on it"
            )
    return tools


def _rows(
    role: RoleConfig, tools: list[_Tool], config: Config, world_size: int, total_steps: int | None
) -> Iterator[PlanRow]:
    name = role.role or "*"
    labels = _labels(config, total_steps)
    late = [step for step in config.global_profiler.steps if step not in labels]
    for step in late:
        yield PlanRow(name, None, step, None, False, f"step {step} is beyond the run's last step {total_steps}")
    if role.ranks.local:
        # Only the processes know their node and topology; the listed ranks, if any, are among those they select.
        yield PlanRow(name, None, None, None, False, f"each process decides for itself: {role.ranks.explain()}")
    for rank in range(world_size):
        selection = role.ranks.selects(rank, world_size=world_size)
        if not selection.selected:
            if not role.ranks.local:
                yield PlanRow(name, rank, None, None, False, selection.reason)
            continue
        for step, label in labels.items():
            for tool in tools:
                reason = selection.reason
                first = step if tool.discrete else label
                if first != step:
                    reason += f"; in the window that begins in step {first}"
                file = _file(role.role, tool, first, rank, world_size)
                yield PlanRow(name, rank, step, tool.name, True, reason, file)


def _labels(config: Config, total_steps: int | None) -> dict[int, int]:
    """Each step of the run that is profiled, and the step that labels its window."""
    labels: dict[int, int] = {}
    for step in config.global_profiler.steps:
        if total_steps is not None and step > total_steps:
            break
        joins = config.global_profiler.profile_continuous_steps and step - 1 in labels
        labels[step] = labels[step - 1] if joins else step
    return labels


def _file(role: str, tool: _Tool, step: int, rank: int, world_size: int) -> str:
    if tool.planned is not None:
        return str(tool.planned(step, rank))
    from rankscope.artifacts.names import file_pattern

    scope = _STAGE if tool.discrete else "train"
    pattern = file_pattern(role or _ROLE, scope, step, rank, world_size, tool.suffix)
    # Labels are cleaned, which a * would not survive.
    pattern = pattern.replace(_STAGE, "*", 1) if tool.discrete else pattern
    return pattern if role else pattern.replace(_ROLE, "*", 1)


def _why_nothing(config: Config, roles: list[RoleConfig]) -> str:
    if not roles:
        return "the config has no profiler section"
    if not any(role.enable for role in roles):
        return f"no role is enabled; set {roles[0].path}.enable"
    if not config.active:
        return "no step is set; set global_profiler.steps"
    return "no role, rank and step come together (see the reasons above)"
