"""From what verl hands to a worker to a config of rankscope."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rankscope.errors import ConfigError, Problem
from rankscope_verl import SWITCH
from rankscope_verl.job import job_of
from rankscope_verl.options import MORE

VERLS_OWN = frozenset({"nsys", "npu", "torch", "torch_memory", "precision_debugger"})
"""Tools that verl has without us."""

ROLES: Mapping[str, str] = {"value_model": "critic"}
"""verl names workers without a role of their own by their model; the critic is the only one with a value model."""

NAMELESS = "worker"
"""Role of a profiler that nobody named."""


_LEFT = "verl's own profiler is used for tool"


class LeaveToVerlError(Exception):
    """verl's own profiler is to do it; the text says why."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one of verl's profilers stands for.

    Attributes:
        role: as in names of files, ``actor-rollout-ref``.
        path: dotted key of its section in the job's config, or empty.
        config: for `rankscope.DistProfiler`; the role has a section of its own in it.
        tools: names of its tools.
        discrete: whether the first of them has a file for each stage.
        steps: the profiled steps; None where nobody knows, since the section came without its config.
    """

    role: str
    path: str
    config: Any
    tools: tuple[str, ...]
    discrete: bool
    steps: tuple[int, ...] | None

    def check(self, rank: int) -> None:
        """Look at everything that making a handle looks at, without making one.

        Args:
            rank: of the worker; on one that is not selected no tool is imported.

        Raises:
            ConfigError: as of `read`.
            LeaveToVerlError: the tool is one of verl's, and rankscope's cannot work here.
        """
        from rankscope.config import inspect_tools

        section = self.config.role(self.role)
        selected = bool(section.ranks.selects(rank).selected)
        try:
            problems, _ = inspect_tools(self.config, imports=selected)
            if problems:
                raise ConfigError(problems)
            for tool in self.tools if selected else ():
                self._check_tool(tool, section)
        except ConfigError as error:
            raise at_path(error, self.role, self.path) from None

    def _check_tool(self, tool: str, section: Any) -> None:
        from rankscope import registry
        from rankscope.config import tool_options

        factory = registry.load(tool, section.tool_path)
        tool_options(factory, section, tool)  # where the steps are unknown, nobody has looked at them yet
        answer = registry.availability(factory)
        if answer.available:
            return
        if self.tools == (tool,) and tool in VERLS_OWN:
            raise LeaveToVerlError(f"{_LEFT} {tool!r}: that of rankscope cannot work here: {answer.why}")
        raise ConfigError([Problem(section.tool_path, f"tool {tool!r} cannot work here: {answer.why}")])


def read(config: Any, tool_config: Any, prefix: str | None) -> Setting | None:
    """What a worker's ``profiler`` section asks for; None where it asks for nothing.

    Args:
        config: verl's ProfilerConfig, or a config node with the same keys.
        tool_config: options of its tool, as verl picked them.
        prefix: what verl puts before file names: the worker's role, or the kind of its model.

    Raises:
        ConfigError: everything that is wrong, at the keys of the job's config where they are known.
        LeaveToVerlError: its tool is one of verl's, and rankscope's is not installed.
    """
    section = mapping(config)
    tools = _tools(section)
    if not section.get("enable"):
        return None
    job = job_of(config) or {}
    common = dict(job.get("common") or {})
    known = "common" in job
    if known and not common.get("steps"):
        return None
    if not tools:
        _tell_no_tool(job)
        return None
    _check_installed(tools)
    role = ROLES.get(prefix or "", prefix or NAMELESS).replace("_", "-")
    blocks = _blocks(getattr(config, "tool_config", None), tools)
    picked = plain(tool_config)
    if len(tools) == 1 and isinstance(picked, dict) and picked and tools[0] not in picked:
        blocks[tools[0]] = picked
    path = str(job.get("path") or "")
    source = {
        "global_profiler": common if known else {"steps": [1]},
        role: {"profiler": {**_section(section, tools), "tool_config": blocks}},
    }
    try:
        loaded = _load(source, known=known)
    except ConfigError as error:
        raise at_path(error, role, path) from None
    discrete = bool(blocks.get(tools[0], {}).get("discrete"))
    return Setting(role, path, loaded, tools, discrete, loaded.global_profiler.steps if known else None)


def at_path(error: ConfigError, role: str, path: str) -> ConfigError:
    """The same error with the keys that the user wrote."""
    ours = f"{role}.profiler"
    problems = [
        Problem(path + problem.path.removeprefix(ours), problem.message)
        if path and problem.path.startswith(ours)
        else problem
        for problem in error.problems
    ]
    last = problems[-1]
    hint = f"{last.message} ({SWITCH}=0 leaves the profiling to verl)"
    return ConfigError([*problems[:-1], dataclasses.replace(last, message=hint)])


def _load(source: dict[str, Any], *, known: bool) -> Any:
    from rankscope import Config, load_config

    loaded = load_config(source, check_tools=False)
    if known:
        return loaded
    common = dataclasses.replace(loaded.global_profiler, steps=())
    facts = {field.name: getattr(loaded, field.name) for field in dataclasses.fields(Config)}
    return _driven()(**{**facts, "global_profiler": common})


def _driven() -> type:
    """A config without steps that is active nevertheless: whoever drives it knows them."""
    from rankscope_verl.driven import DrivenConfig

    return DrivenConfig


def _section(section: Mapping[str, Any], tools: tuple[str, ...]) -> dict[str, Any]:
    """The section's keys as rankscope reads them."""
    kept = ("save_path", "relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks")
    found = {key: section[key] for key in kept if section.get(key) not in (None, "???")}
    ranks = list(section.get("ranks") or ())
    # msprobe has a choice of ranks in its own file; without one here, verl asks it on every rank.
    everywhere = bool(section.get("all_ranks")) or (not ranks and tools == ("precision_debugger",))
    found.update(tool=list(tools), enable=True, all_ranks=everywhere)
    if isinstance(section.get("global_tool_config"), dict):
        found["global_tool_config"] = section["global_tool_config"]
    if ranks and not everywhere:
        found["ranks"] = ranks
    return found


def _tools(section: Mapping[str, Any]) -> tuple[str, ...]:
    value = section.get("tool")
    if value in (None, "???"):
        return ()
    words = value.split(",") if isinstance(value, str) else list(value)
    return tuple(dict.fromkeys(str(word).strip() for word in words if str(word).strip()))


def _check_installed(tools: tuple[str, ...]) -> None:
    from rankscope import registry

    if len(tools) == 1 and tools[0] in VERLS_OWN and tools[0] not in registry.providers():
        hint = f"pip install {registry.FIRST_PARTY[tools[0]]}"
        raise LeaveToVerlError(f"{_LEFT} {tools[0]!r}: that of rankscope is not installed ({hint})")


def _tell_no_tool(job: Mapping[str, Any]) -> None:
    from rankscope_verl.install import tell

    path = job.get("path") or "a role"
    tell(f"{path} is enabled but has no tool: nothing is profiled there; set global_profiler.tool")


def _blocks(value: Any, tools: tuple[str, ...]) -> dict[str, Any]:
    """Options by tool. By hand, some hand over the options of the one tool without its name."""
    found = plain(value)
    if not isinstance(found, dict):
        return {}
    if dataclasses.is_dataclass(value) and tools[0] not in found:
        return {tools[0]: found}
    return {str(name): block for name, block in found.items() if isinstance(block, dict)}


def mapping(config: Any) -> Mapping[str, Any]:
    """A ProfilerConfig, config node or mapping as a plain mapping of its keys."""
    found = plain(config)
    return found if isinstance(found, dict) else {}


def plain(value: Any) -> Any:
    """Plain data of verl's config objects: dataclasses, config nodes, mappings and lists, however nested."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        facts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {key: plain(item) for key, item in {**facts, **vars(value).get(MORE, {})}.items()}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value
