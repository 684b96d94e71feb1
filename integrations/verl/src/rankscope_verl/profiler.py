"""verl's DistProfiler, with rankscope behind it: the same constructor and methods, on the same class.

The class is changed in place, since others may have taken its name already; a profiler that rankscope does not drive
(another tool of verl, or a fault in here) is verl's own in every method.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rankscope import annotate as show
from rankscope.errors import ConfigError
from rankscope_verl import engines, options
from rankscope_verl.changes import Changes
from rankscope_verl.drive import Drive, is_inner, note_worker, outer_is_off
from rankscope_verl.install import tell
from rankscope_verl.settings import LeaveToVerlError, read

DRIVE = "_rankscope"
"""On one of verl's profilers: its `Drive`."""

_told: set[str] = set()


def change(package: ModuleType, changes: Changes) -> None:
    """In ``verl.utils.profiler``, as soon as all of it was imported."""
    module: Any = package.profile
    config: Any = package.config
    options.change(config, changes)
    kind = module.DistProfiler
    changes.replace(
        kind, "__init__", "self, rank, config, tool_config, save_file_prefix, kwargs", functools.partial(_init, module)
    )
    changes.replace(kind, "start", "self, kwargs", _start)
    changes.replace(kind, "stop", "self, run_command", _stop)
    changes.replace(kind, "step", "self", _step)
    changes.replace(kind, "run_finish_hook", "self, run_command", _run_finish_hook)
    changes.replace(
        kind,
        "annotate",
        "cls, message, color, domain, category, kwargs_outer",
        lambda old: classmethod(_annotate(old.__func__, module)),
    )
    _add_phases(module, changes)
    engines.change(package, changes)


def drive_of(profiler: Any) -> Drive | None:
    """What drives rankscope behind one of verl's profilers; None where rankscope does not."""
    found = getattr(profiler, "__dict__", {}).get(DRIVE)
    return found if isinstance(found, Drive) else None


def _init(module: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any,
        rank: int,
        config: Any = None,
        tool_config: Any = None,
        save_file_prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        driven: Drive | None = None
        if engines.selecting():
            _set_up(self, module, rank, config=config, tool_config=tool_config, prefix=save_file_prefix)
            return
        try:
            setting = None if config is None else read(config, tool_config, save_file_prefix)
            driven = None if setting is None else Drive(setting, rank, save_file_prefix)
            if driven is not None and is_inner(save_file_prefix) and outer_is_off():
                _tell_idle(driven)
            note_worker(save_file_prefix, driven=driven is not None)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in here, verl must not notice
            _tell_left(error)
            original(self, rank, config, tool_config, save_file_prefix, **kwargs)
            return
        # verl's own backends act when they are made, also where they are off; so none is made.
        _set_up(self, module, rank, config=config, tool_config=tool_config, prefix=save_file_prefix, driven=driven)

    return init


def _set_up(
    self: Any,
    module: Any,
    rank: int,
    *,
    config: Any,
    tool_config: Any,
    prefix: str | None,
    driven: Drive | None = None,
) -> None:
    """The attributes that verl's constructor sets."""
    if config is None:
        config = module.ProfilerConfig(ranks=[], enable=False, tool_config=None)
    if tool_config is None:
        tool_config = getattr(config, "tool_config", None)
    self.rank = rank
    self.config = config
    self.tool_config = tool_config
    self.save_file_prefix = prefix
    self._tool = getattr(config, "tool", None)
    self._enable = bool(config.enable)
    self._this_step = False
    self._this_rank = driven.selected if driven is not None else _default_rank(config, rank)
    self._finish_hook_cmd = getattr(config, "finish_hook_cmd", None)
    self._relocate_results = getattr(config, "relocate_results", False)
    self._finish_hook_this_rank = self._this_rank
    self._discrete = driven.setting.discrete if driven is not None else bool(getattr(tool_config, "discrete", False))
    self._impl = driven if driven is not None else module._NoOpProfiler()  # noqa: SLF001
    self.__dict__[DRIVE] = driven


def _default_rank(config: Any, rank: int) -> bool:
    if config.all_ranks:
        return True
    if config.ranks:
        return rank in config.ranks
    return rank == 0 and bool(config.enable)


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start(self: Any, **kwargs: Any) -> Any:
        driven = drive_of(self)
        if driven is None:
            return original(self, **kwargs)
        if self.check_enable() and self.check_this_rank():
            driven.start(**kwargs)
            self._this_step = True
        return None

    return start


def _stop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stop(self: Any, run_command: bool = True) -> Any:
        driven = drive_of(self)
        if driven is None:
            return original(self, run_command=run_command)
        if self.check_enable() and self.check_this_rank():
            self._this_step = False
            driven.stop()
        if self.check_enable():
            driven.relocate()
            if run_command:
                driven.finish()
        return None

    return stop


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any) -> Any:
        driven = drive_of(self)
        if driven is None:
            return original(self)
        if self.check_enable() and self.check_this_rank():
            driven.step()
        return None

    return step


def _run_finish_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_finish_hook(self: Any, run_command: bool = True) -> None:
        driven = drive_of(self)
        if driven is None:
            original(self, run_command=run_command)
        elif self.check_enable():
            driven.relocate()
            if run_command:
                driven.finish(asked=True)

    return run_finish_hook


def _annotate(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def annotate(
        cls: type,
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
        **kwargs_outer: Any,
    ) -> Callable[[Any], Any]:
        by_verl = original(cls, message, color, domain, category, **kwargs_outer)
        label = show(
            message=message,
            role=kwargs_outer.get("role"),
            scheduled=bool(kwargs_outer.get("scheduled", False)),
            color=color,
            domain=domain,
            category=category,
        )

        def decorator(function: Any) -> Any:
            lane = kwargs_outer.get("role", getattr(function, "__qualname__", "stage"))
            return _stage(function, label(function), by_verl(function), lane, module)

        return decorator

    return annotate


def _stage(function: Any, ours: Any, verls: Any, lane: str, module: Any) -> Any:
    """A decorated stage: verl's decorator where verl's own backend is behind the worker's profiler, else ours.

    Ours shows the stage in every window of the process, also for a worker whose own profiler was never started.
    """

    def left_to_verl(worker: Any) -> bool:
        profiler = getattr(worker, "profiler", None)
        return profiler is not None and DRIVE not in getattr(profiler, "__dict__", {})

    def insight(worker: Any) -> Any:
        return module.RLInsightLogger.trace_state(lane, state_lane_id=f"rank_{worker.profiler.rank}")

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def stage_async(self_instance: Any, *args: Any, **kwargs: Any) -> Any:
            if left_to_verl(self_instance):
                return await verls(self_instance, *args, **kwargs)
            if getattr(self_instance, "profiler", None) is None:
                return await ours(self_instance, *args, **kwargs)
            with insight(self_instance):
                return await ours(self_instance, *args, **kwargs)

        return stage_async

    @functools.wraps(function)
    def stage(self_instance: Any, *args: Any, **kwargs: Any) -> Any:
        if left_to_verl(self_instance):
            return verls(self_instance, *args, **kwargs)
        if getattr(self_instance, "profiler", None) is None:
            return ours(self_instance, *args, **kwargs)
        with insight(self_instance):
            return ours(self_instance, *args, **kwargs)

    return stage


def _add_phases(module: Any, changes: Changes) -> None:
    """Two more methods of verl's workers, so that all roles are stopped before the first one finishes."""
    verls: Any = importlib.import_module("verl.single_controller.base.decorator")
    everywhere = verls.register(dispatch_mode=verls.Dispatch.ONE_TO_ALL)
    for function in (end_profile, finish_profile):
        changes.put(module.DistProfilerExtension, function.__name__, everywhere(function))


def end_profile(self: Any, aborted: bool = False) -> None:
    """Close what this worker has open; ``aborted``: its training step raised."""
    driven = drive_of(self.profiler)
    if driven is not None and self.profiler.check_this_step():
        self.profiler._this_step = False  # noqa: SLF001
        driven.stop(aborted=aborted)
        driven.relocate()


def finish_profile(self: Any) -> None:
    """Every role is stopped: finish, once."""
    driven = drive_of(self.profiler)
    if driven is None:
        self.profiler.run_finish_hook(run_command=True)
    elif self.profiler.check_enable():
        driven.finish()


def _tell_idle(driven: Drive) -> None:
    """Of two roles in one process, verl starts the profiler of the outer one only."""
    path = driven.setting.path or driven.setting.role
    text = (
        f"{path} is enabled, and nothing is profiled by it: its model lives in the worker of another role, which is off"
    )
    if text not in _told:
        _told.add(text)
        tell(text, help="enable that role's profiler too")


def _tell_left(error: Exception) -> None:
    text = str(error)
    if not isinstance(error, LeaveToVerlError):
        text = f"rankscope failed, and verl's own profiler is used: {type(error).__name__}: {error}"
    if text not in _told:
        _told.add(text)
        tell(text)
