"""rankscope: one config decides which process of a distributed training job captures what, when and with which tool."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Eager and light: it is on the hot path, and its module would otherwise hide the function of the same name.
from rankscope.annotate import annotate

if TYPE_CHECKING:
    from rankscope.artifacts.helper import NothingRecorded
    from rankscope.artifacts.reservation import Reservation
    from rankscope.artifacts.store import Store
    from rankscope.checks import check_choices, check_token_window
    from rankscope.config import Config, OptionError, RoleConfig, load_config
    from rankscope.controller import ControllerError, ProfileController
    from rankscope.errors import BackendError, CommandError, ConfigError, FaultError, Problem, RankscopeError
    from rankscope.gate import StepGate
    from rankscope.hookspecs import hookimpl, hookspec
    from rankscope.launch import LaunchPlan, plan_launch
    from rankscope.markers import mark_annotate, mark_end_range, mark_range, mark_start_range
    from rankscope.memory import GPUMemoryLogger, MemoryLogger, log_gpu_memory_usage, log_memory_usage, memory_info
    from rankscope.profiler import DistProfiler
    from rankscope.schedule import Schedule, ScheduleOptions, ScheduleWalk, Stretch
    from rankscope.table import human_size, render_table
    from rankscope.timing import (
        gather_timing,
        marked_timer,
        rank_spread,
        reduce_timing,
        simple_timer,
        topk_reduce_ratio_min_max,
    )
    from rankscope.types import Artifact, Availability, Context, Fault, Launch, Span, Window
    from rankscope.worker import ProfiledWorker

_HOME = {
    "rankscope.artifacts.helper": ("NothingRecorded",),
    "rankscope.artifacts.reservation": ("Reservation",),
    "rankscope.artifacts.store": ("Store",),
    "rankscope.checks": ("check_choices", "check_token_window"),
    "rankscope.config": ("Config", "OptionError", "RoleConfig", "load_config"),
    "rankscope.controller": ("ControllerError", "ProfileController"),
    "rankscope.errors": ("BackendError", "CommandError", "ConfigError", "FaultError", "Problem", "RankscopeError"),
    "rankscope.gate": ("StepGate",),
    "rankscope.hookspecs": ("hookimpl", "hookspec"),
    "rankscope.launch": ("LaunchPlan", "plan_launch"),
    "rankscope.markers": ("mark_annotate", "mark_end_range", "mark_range", "mark_start_range"),
    "rankscope.memory": (
        "GPUMemoryLogger",
        "MemoryLogger",
        "log_gpu_memory_usage",
        "log_memory_usage",
        "memory_info",
    ),
    "rankscope.profiler": ("DistProfiler",),
    "rankscope.schedule": ("Schedule", "ScheduleOptions", "ScheduleWalk", "Stretch"),
    "rankscope.table": ("human_size", "render_table"),
    "rankscope.timing": (
        "gather_timing",
        "marked_timer",
        "rank_spread",
        "reduce_timing",
        "simple_timer",
        "topk_reduce_ratio_min_max",
    ),
    "rankscope.types": ("Artifact", "Availability", "Context", "Fault", "Launch", "Span", "Window"),
    "rankscope.worker": ("ProfiledWorker",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Artifact",
    "Availability",
    "BackendError",
    "CommandError",
    "Config",
    "ConfigError",
    "Context",
    "ControllerError",
    "DistProfiler",
    "Fault",
    "FaultError",
    "GPUMemoryLogger",
    "Launch",
    "LaunchPlan",
    "MemoryLogger",
    "NothingRecorded",
    "OptionError",
    "Problem",
    "ProfileController",
    "ProfiledWorker",
    "RankscopeError",
    "Reservation",
    "RoleConfig",
    "Schedule",
    "ScheduleOptions",
    "ScheduleWalk",
    "Span",
    "StepGate",
    "Store",
    "Stretch",
    "Window",
    "annotate",
    "check_choices",
    "check_token_window",
    "gather_timing",
    "hookimpl",
    "hookspec",
    "human_size",
    "load_config",
    "log_gpu_memory_usage",
    "log_memory_usage",
    "mark_annotate",
    "mark_end_range",
    "mark_range",
    "mark_start_range",
    "marked_timer",
    "memory_info",
    "plan_launch",
    "rank_spread",
    "reduce_timing",
    "render_table",
    "simple_timer",
    "topk_reduce_ratio_min_max",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: the command line and the hot path start light."""
    if name == "__version__":
        from importlib.metadata import version

        return version("rankscope")
    if name not in _WHERE:
        raise AttributeError(f"module 'rankscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
