"""The ``runtime_env`` of a Ray actor: what the tools of its process need, and what the user wants of his own."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rankscope import environment
from rankscope.errors import ConfigError, Problem
from rankscope.launch import LaunchPlan, LaunchPlanner
from rankscope.log import get_logger

_PATH = "runtime_env"
_FORWARDED = (environment.STRICT, environment.DISABLE, environment.LOG_LEVEL, environment.LOG_FORMAT)
"""Ray's workers inherit the environment of their node's raylet, not the driver's."""


def runtime_env(
    config: Any,
    *,
    roles: Iterable[str] | None = None,
    rank: int = 0,
    world_size: int | None = None,
    local_rank: int | None = None,
    total_steps: int | None = None,
    base: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> dict[str, Any]:
    """The ``runtime_env`` with which the actor of one rank is to be started.

    A rank that is not profiled gets ``base`` as it is. Else what its tools need goes into it: environment variables,
    ``nsight`` options, entries of other tools. Whatever the user has set stays: a variable of his own wins, and a
    warning says what the tool wanted; ``py_executable`` is kept, also where a tool has to start the process; an entry
    that cannot be shared, such as a second ``nsight``, is refused::

        ActorWorker.options(runtime_env=runtime_env(config, roles=["actor"], rank=0, world_size=8)).remote(...)

    Args:
        config: as of `DistProfiler`.
        roles: the roles that will live in the process; by default every role of the config.
        rank: its global rank.
        world_size: number of ranks, or None.
        local_rank: rank in its node, or None.
        total_steps: last step of the run, where it is known.
        base: the user's own ``runtime_env``; left alone.
        overrides: ``key=value`` texts on top of the config.

    Raises:
        ConfigError: everything that is wrong with the config, or an entry that both sides want differently.
    """
    planner = LaunchPlanner(config, roles=roles, world_size=world_size, total_steps=total_steps, overrides=overrides)
    return _merge(planner.plan(rank, local_rank), base)


def runtime_envs(
    config: Any,
    *,
    world_size: int,
    roles: Iterable[str] | None = None,
    total_steps: int | None = None,
    base: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The ``runtime_env`` of every rank, as ``runtime_env`` gives it for one; much faster where there are many.

    Args:
        config: as of `DistProfiler`.
        world_size: number of ranks.
        roles: the roles that will live in each process; by default every role of the config.
        total_steps: last step of the run, where it is known.
        base: the user's own ``runtime_env``; left alone.
        overrides: ``key=value`` texts on top of the config.

    Raises:
        ConfigError: as of `runtime_env`.
    """
    planner = LaunchPlanner(config, roles=roles, world_size=world_size, total_steps=total_steps, overrides=overrides)
    return [_merge(planner.plan(rank), base) for rank in range(world_size)]


def _merge(plan: LaunchPlan, base: Mapping[str, Any] | None) -> dict[str, Any]:
    merged: dict[str, Any] = dict(base or {})
    if not plan.tools:
        return merged
    wanted = plan.ray
    variables = {**_settings(), **wanted.pop("env_vars", {})}
    _merge_variables(merged, variables, plan)
    for key, value in wanted.items():
        _merge_entry(merged, key, value, plan)
    _keep_python(merged, plan)
    _check_cupti(merged, plan)
    return merged


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in _FORWARDED if name in os.environ}


def _merge_variables(merged: dict[str, Any], variables: Mapping[str, str], plan: LaunchPlan) -> None:
    own = dict(merged.get("env_vars") or {})
    for name, value in variables.items():
        if own.setdefault(name, value) != value and name not in _FORWARDED:
            get_logger().warning(
                f"{_PATH}.env_vars has its own {name}, which is kept; a tool of this actor may not work with it",
                own=own[name],
                wanted=value,
                tools=",".join(tool.tool for tool in plan.tools if name in _variables_of(tool)) or "?",
            )
    if own:
        merged["env_vars"] = own


def _variables_of(tool: Any) -> set[str]:
    return {*tool.launch.env, *(tool.launch.runtime_env.get("env_vars") or {})}


def _merge_entry(merged: dict[str, Any], key: str, value: Any, plan: LaunchPlan) -> None:
    for name in (key, f"_{key}"):  # a RuntimeEnv of Ray keeps nsight under _nsight
        if merged.get(name) not in (None, value):
            tools = ", ".join(repr(tool.tool) for tool in plan.tools if key in tool.launch.runtime_env)
            text = f"it is {merged[name]!r}, and tool {tools} needs {value!r}; an actor can have one of them only: "
            raise ConfigError(
                [Problem(f"{_PATH}.{key}", text + f"take it out, or leave {tools} out of this role's tool")]
            )
        if merged.get(name) is not None:
            return
    merged[key] = value


def _keep_python(merged: dict[str, Any], plan: LaunchPlan) -> None:
    """Where a tool has to start the process, it starts the user's Python.

    Ray 2.x starts a process with ``nsight`` by the ``python`` of PATH, whatever ``py_executable`` says; so here the
    wrapper goes into ``py_executable`` itself. So does the command of a tool that knows nothing of Ray.
    """
    python = merged.get("py_executable")
    nsight = merged.get("nsight")
    ours = any("nsight" in tool.launch.runtime_env for tool in plan.tools)
    if python and ours and isinstance(nsight, Mapping):
        del merged["nsight"]
        merged["py_executable"] = f"{_nsys(nsight)} {python}"
        return
    for tool in plan.tools:
        entries = set(tool.launch.runtime_env) - {"env_vars"}
        if tool.launch.command_prefix and not entries:
            merged["py_executable"] = (
                f"{shlex.join(tool.launch.command_prefix)} {python or shlex.quote(sys.executable)}"
            )


def _nsys(options: Mapping[str, str]) -> str:
    """The command that Ray would make of the options (``_private/runtime_env/nsight.py``); they are quoted already."""
    words = ["nsys", "profile"]
    for name, value in options.items():
        words += [f"--{name}={value}"] if len(name) > 1 else [f"-{name}", str(value)]
    return " ".join(words)


def _check_cupti(merged: Mapping[str, Any], plan: LaunchPlan) -> None:
    """CUPTI serves one tool in a process; the user's own nsight is kept, and it is said who will miss what."""
    own = merged.get("nsight") or merged.get("_nsight")
    tools = [tool.tool for tool in plan.tools if "cupti" in tool.owned and "nsight" not in tool.launch.runtime_env]
    if own and tools:
        get_logger().warning(
            f"{_PATH}.nsight and tool {tools[0]!r} both need CUPTI, which serves one of them only: the other will see "
            "no device activity",
            reasons="; ".join(plan.reasons.values()),
        )
