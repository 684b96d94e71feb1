"""Whether the tools that a config names exist, fit together and accept their options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rankscope.config.options import CommonOptions, build_options, split_common
from rankscope.config.roles import Config
from rankscope.config.schema import GLOBAL, RoleConfig
from rankscope.errors import ConfigError, Problem, did_you_mean, listing


def check_tools(config: Config, registry_module: Any = None) -> list[Problem]:
    """Everything that is wrong with the tools of a config.

    Names that nobody knows are always wrong. Whether a tool is installed, and its options, matter only for a role that
    is enabled while steps are set: only then is the tool imported.

    Args:
        config: the parsed config.
        registry_module: stands in for `rankscope.registry` in tests.
    """
    return inspect_tools(config, registry_module)[0]


def inspect_tools(
    config: Config, registry_module: Any = None, *, imports: bool = True
) -> tuple[list[Problem], list[str]]:
    """The problems of `check_tools`, and what is allowed but has no effect, in words.

    Without ``imports`` the names of tools are checked, and none is imported.
    """
    registry = _registry(registry_module)
    problems: list[Problem] = []
    warnings: list[str] = []
    continuous = config.global_profiler.profile_continuous_steps
    for tool in config.global_profiler.tool:
        problems.extend(_name(config, tool, f"{GLOBAL}.tool", registry, needed=False))
    for role in config.roles():
        needed = role.enable and bool(config.global_profiler.steps)
        if role.enable and not role.tools:
            problems.append(
                Problem(
                    f"{role.path}.tool",
                    f"the role is enabled but has no tool; set it, or {GLOBAL}.tool. "
                    f"Installed: {listing(registry.installed())}",
                )
            )
        usable = []
        for tool in role.tools:
            wrong = _name(config, tool, role.tool_path, registry, needed=needed)
            problems.extend(wrong)
            if not wrong:
                usable.append(tool)
        if needed and imports:
            problems.extend(_use(role, usable, registry, continuous, warnings))
            warnings.extend(_idle_blocks(config, role, registry))
    return list(dict.fromkeys(problems)), list(dict.fromkeys(warnings))


def tool_options(factory: Any, role: RoleConfig, tool: str) -> tuple[Any, CommonOptions]:
    """The tool's own options, validated, and the common ones.

    Args:
        factory: what the tool's entry point names.
        role: the resolved role.
        tool: one of its tools.

    Raises:
        ConfigError: with every problem, each at the key where the value was set.
    """
    common, options, problems = _options(role, tool, factory)
    if problems:
        raise ConfigError(problems)
    return options, common


def _registry(registry_module: Any) -> Any:
    if registry_module is not None:
        return registry_module
    from rankscope import registry

    return registry


def _name(config: Config, tool: str, path: str, registry: Any, *, needed: bool) -> list[Problem]:
    allowed = config.global_profiler.allow_tools
    if allowed is not None and tool not in allowed:
        return [Problem(path, f"tool {tool!r} is not in {GLOBAL}.allow_tools ({listing(allowed)})")]
    if not needed and registry.known(tool):
        return []
    problem = registry.check(tool, path)
    return [] if problem is None else [problem]


def _use(role: RoleConfig, tools: list[str], registry: Any, continuous: bool, warnings: list[str]) -> list[Problem]:
    """Import the tools of a role that will be profiled, and check their options and what they own."""
    problems: list[Problem] = []
    owners: dict[str, str] = {}
    for tool in tools:
        try:
            factory = registry.load(tool, role.tool_path)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        common, options, wrong = _options(role, tool, factory)
        problems.extend(wrong)
        for resource in sorted(_owned(role, tool, factory, options, problems)):
            owner = owners.setdefault(resource, tool)
            if owner != tool:
                problems.append(
                    Problem(
                        role.tool_path,
                        f"tools {owner!r} and {tool!r} of {role.role or role.path} both need {resource!r}, which only "
                        "one of them can have in a process; choose one, or options with which one does not need it",
                    )
                )
        if common.discrete and continuous:
            warnings.append(
                f"{role.path}: {tool} has discrete true, so each stage gets a file of its own and "
                f"{GLOBAL}.profile_continuous_steps has no effect on it"
            )
    return problems


def _owned(role: RoleConfig, tool: str, factory: Any, options: Any, problems: list[Problem]) -> frozenset[str]:
    """What the tool needs for itself; nobody can know with options that are wrong."""
    from rankscope.registry import owned

    if options is None:
        return frozenset()
    try:
        return owned(factory, options)
    except Exception as error:  # noqa: BLE001  # somebody else's code
        problems.append(Problem(role.tool_path, f"tool {tool!r}: owns failed: {type(error).__name__}: {error}"))
        return frozenset()


def _idle_blocks(config: Config, role: RoleConfig, registry: Any) -> Iterator[str]:
    """Options of tools that nobody knows: most likely a slip in the tool's name."""
    places = (
        (f"{role.path}.tool_config", role.tool_config),
        (f"{GLOBAL}.global_tool_config", config.global_profiler.global_tool_config),
    )
    for path, blocks in places:
        for block in blocks:
            if not registry.known(block):
                hint = did_you_mean(block, [*role.tools, *registry.installed()])
                yield f"{path}.{block} has no effect: no tool has that name.{hint}"


def _options(role: RoleConfig, tool: str, factory: Any) -> tuple[CommonOptions, Any, list[Problem]]:
    options_class = getattr(factory, "Options", None)
    path = role.options_path(tool)
    common, rest, problems = split_common(options_class, role.options(tool), path)
    options, more = build_options(options_class, rest, path)
    return common, options, [_at_origin(role, tool, path, problem) for problem in (*problems, *more)]


def _at_origin(role: RoleConfig, tool: str, path: str, problem: Problem) -> Problem:
    key = problem.path.removeprefix(path).removeprefix(".")
    return Problem(role.options_path(tool, key), problem.message) if key else problem
