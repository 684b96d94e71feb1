"""What the tools of a process need before it starts: environment variables, a command prefix, a Ray runtime_env."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rankscope import registry
from rankscope.artifacts.ledger import Ledger
from rankscope.artifacts.store import Store
from rankscope.config import Config, RoleConfig, load_config, tool_options
from rankscope.errors import ConfigError, Problem
from rankscope.host import host_name
from rankscope.log import get_logger
from rankscope.topology import run_id
from rankscope.types import Context, Launch


@dataclasses.dataclass(frozen=True)
class ToolLaunch:
    """One tool of a process that is going to be profiled with it.

    Attributes:
        tool: its name.
        context: what its ``launch`` was told; the pid in it is that of the launcher.
        launch: what it needs.
        owned: names of what it needs for itself in the process.
        collect: to be called once the process has ended.
    """

    tool: str
    context: Context
    launch: Launch
    owned: frozenset[str]
    collect: Callable[[], object]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in the run the process will stand."""

    rank: int
    world_size: int | None
    local_rank: int | None
    total_steps: int | None


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What one process needs before it starts.

    Attributes:
        tools: the tools that it will be profiled with, in config order.
        env: environment variables to set.
        command_prefix: words to put before its command.
        runtime_env: entries of its Ray ``runtime_env``, without ``env_vars``.
        reasons: for each role, why it is profiled or not.
        unknown: for each role that the config does not know, that it does not, in words.
    """

    tools: tuple[ToolLaunch, ...]
    env: Mapping[str, str]
    command_prefix: tuple[str, ...]
    runtime_env: Mapping[str, Any]
    reasons: Mapping[str, str]
    unknown: tuple[str, ...] = ()

    @property
    def ray(self) -> dict[str, Any]:
        """The whole Ray ``runtime_env``, ready for ``.options(runtime_env=...)``; empty where nothing is needed."""
        found = dict(self.runtime_env)
        if self.env:
            found["env_vars"] = {**found.get("env_vars", {}), **self.env}
        return found

    def collect(self) -> None:
        """After the process has ended: let each tool fetch what the process could not collect itself."""
        for tool in self.tools:
            try:
                tool.collect()
            except Exception as error:  # noqa: PERF203 - what one tool leaves behind is not the others' fault
                tool.context.logger.error(f"{tool.tool}: what it left behind could not be collected", exc_info=error)


def plan_launch(
    config: Any,
    *,
    roles: Iterable[str] | None = None,
    rank: int = 0,
    world_size: int | None = None,
    local_rank: int | None = None,
    total_steps: int | None = None,
    overrides: Iterable[str] = (),
) -> LaunchPlan:
    """Work out what a process needs before it starts, from the roles that will live in it.

    A tool that several of the roles use is asked once, for the first of them. A rank that the config does not select
    needs nothing, and none of its tools is imported.

    Args:
        config: as of `DistProfiler`.
        roles: the roles of the process; by default every role of the config.
        rank: global rank of the process. Where it stands in a topology is not known yet: ranks that are chosen by
            coordinates get what they may need.
        world_size: number of ranks, or None.
        local_rank: rank in its node, or None.
        total_steps: last step of the run, where it is known.
        overrides: ``key=value`` texts on top of the config.

    Raises:
        ConfigError: everything that is wrong with the config, or two tools that need contradicting things.
    """
    planner = LaunchPlanner(config, roles=roles, world_size=world_size, total_steps=total_steps, overrides=overrides)
    return planner.plan(rank, local_rank)


class LaunchPlanner:
    """`plan_launch` for many ranks: the config is read, and the tools are imported and their options checked, once.

    Args:
        config: as of `DistProfiler`.
        roles: the roles of each process; by default every role of the config.
        world_size: number of ranks, or None.
        total_steps: last step of the run, where it is known.
        overrides: ``key=value`` texts on top of the config.

    Raises:
        ConfigError: everything that is wrong with the config.
    """

    def __init__(
        self,
        config: Any,
        *,
        roles: Iterable[str] | None = None,
        world_size: int | None = None,
        total_steps: int | None = None,
        overrides: Iterable[str] = (),
    ) -> None:
        self._config = load_config(config, tuple(overrides), check_tools="names")
        self._world_size, self._total_steps = world_size, total_steps
        self._sections = self._config.roles() if roles is None else [self._config.role(role) for role in roles]
        self._unknown = tuple(" ".join(section.notes) for section in self._sections if not section.paths)
        self._tools: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._checked = False

    def plan(self, rank: int, local_rank: int | None = None) -> LaunchPlan:
        """The plan of one rank; see `plan_launch`.

        Raises:
            ConfigError: as of `plan_launch`.
        """
        place = _Place(rank, self._world_size, local_rank, self._total_steps)
        asked: dict[str, ToolLaunch] = {}
        reasons: dict[str, str] = {}
        for number, section in enumerate(self._sections):
            name = section.role or "*"
            selected, reasons[name] = _selected(self._config, section, place)
            for tool in section.tools if selected else ():
                if tool not in asked:
                    asked[tool] = _ask(_context(tool, self._config, section, place), section, *self._tool(tool, number))
        tools = tuple(asked.values())
        _refuse_clashes(tools)
        return LaunchPlan(
            tools,
            _merged(tools, lambda launch: launch.env, "environment variable"),
            _prefix(tools),
            _merged(tools, lambda launch: launch.runtime_env, "runtime_env entry"),
            reasons,
            self._unknown,
        )

    def _tool(self, tool: str, number: int) -> tuple[Any, Any]:
        """A tool and its options in a role, made when the first rank wants it."""
        if not self._checked:
            load_config(self._config)  # imports the tools and checks their options
            self._checked = True
        if (tool, number) not in self._tools:
            section = self._sections[number]
            factory = registry.load(tool, section.tool_path)
            self._tools[tool, number] = (factory, tool_options(factory, section, tool)[0])
        return self._tools[tool, number]


def _selected(config: Config, section: RoleConfig, place: _Place) -> tuple[bool, str]:
    if not section.enable or not section.tools:
        return False, section.why_off or "it has no tool"
    if not config.active:
        return False, "no step is set: global_profiler.steps"
    ranks = section.ranks
    selection = ranks.selects(place.rank, world_size=place.world_size, local_rank=place.local_rank)
    if not selection.selected and ranks.local:
        maybe = ranks.beforehand().selects(place.rank, world_size=place.world_size)
        if maybe.selected and (place.local_rank in {None, 0} or any(term.coordinates for term in ranks.terms)):
            return True, f"it may be profiled: {ranks.explain()}"
    return selection.selected, selection.reason


def _ask(context: Context, section: RoleConfig, factory: Any, options: Any) -> ToolLaunch:
    tool, launch = context.tool, Launch()
    if hasattr(factory, "launch"):
        try:
            launch = factory.launch(options, context)
        except ConfigError:
            raise
        except Exception as error:
            text = f"tool {tool!r} cannot say what its process needs: {type(error).__name__}: {error}"
            raise ConfigError([Problem(section.tool_path, text)]) from error
    collect = getattr(factory, "collect", None)
    return ToolLaunch(
        tool,
        context,
        launch,
        registry.owned(factory, options),
        (lambda: collect(options, context)) if collect else lambda: None,
    )


def _context(tool: str, config: Config, section: RoleConfig, place: _Place) -> Context:
    ledger = Ledger(section.save_path, host=host_name(), run_id=run_id())
    logger = get_logger(tool=tool, role=section.role, rank=place.rank)
    store = Store(
        ledger.save_path,
        tool=tool,
        role=section.role,
        rank=place.rank,
        world_size=place.world_size,
        topology={},
        host=host_name(),
        ledger=ledger,
        logger=logger,
    )
    return Context(
        tool=tool,
        role=section.role,
        rank=place.rank,
        world_size=place.world_size,
        topology={},
        host=host_name(),
        pid=os.getpid(),
        save_path=ledger.save_path,
        run_id=run_id(),
        store=store,
        logger=logger,
        clock=time.time_ns,
        steps=tuple(step for step in config.global_profiler.steps if step <= (place.total_steps or step)),
        continuous=config.global_profiler.profile_continuous_steps,
    )


def _refuse_clashes(tools: Iterable[ToolLaunch]) -> None:
    owners: dict[str, ToolLaunch] = {}
    for tool in tools:
        for resource in sorted(tool.owned):
            owner = owners.setdefault(resource, tool)
            if owner is not tool:
                text = f"tools {owner.tool!r} (of role {owner.context.role!r}) and {tool.tool!r} (of role "
                text += f"{tool.context.role!r}) both need {resource!r}, which only one can have in a process"
                raise ConfigError(f"{text}; give their roles processes of their own, or choose one tool")


def _merged(tools: Iterable[ToolLaunch], part: Callable[[Launch], Mapping[str, Any]], what: str) -> dict[str, Any]:
    """The entries of all tools in one mapping.

    Raises:
        ConfigError: two tools want different values.
    """
    merged: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for tool in tools:
        for key, value in part(tool.launch).items():
            if key == "env_vars" and isinstance(value, Mapping):
                merged[key] = {**merged.get(key, {}), **value}
            elif merged.setdefault(key, value) != value:
                text = f"tools {owners[key]!r} and {tool.tool!r} need different values of the {what} {key}"
                raise ConfigError(f"{text}: {merged[key]!r} and {value!r}; choose one of the tools")
            owners.setdefault(key, tool.tool)
    return merged


def _prefix(tools: Iterable[ToolLaunch]) -> tuple[str, ...]:
    wanting = [tool for tool in tools if tool.launch.command_prefix]
    if len(wanting) > 1:
        names = " and ".join(repr(tool.tool) for tool in wanting)
        raise ConfigError(f"tools {names} both have to start the process themselves; choose one")
    return wanting[0].launch.command_prefix if wanting else ()


def launcher_of(command: Iterable[str]) -> str:
    """The name of a launcher that starts several processes, when the command is one; else an empty text."""
    for word in _program_words(command):
        name = word.rpartition("/")[2]
        if name in _LAUNCHERS:
            return name
    return ""


_LAUNCHERS = frozenset(
    {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "mpirun", "srun"}
)


def _program_words(command: Iterable[str]) -> Iterator[str]:
    """The program, and behind a Python interpreter its module."""
    words = iter(command)
    yield next(words, "")
    for word in words:
        if word == "-m":
            yield next(words, "")
            return
        if not word.startswith("-"):
            return
