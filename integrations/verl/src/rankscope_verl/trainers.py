"""The driver: all roles are stopped before the first one finishes, and a run that ends early ends in order."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from rankscope_verl.changes import Changes
from rankscope_verl.install import in_place, tell
from rankscope_verl.step import announce

GROUPS = ("actor_rollout_wg", "ref_policy_wg", "critic_wg")
"""Attributes of verl's trainers with the worker groups that they profile."""

LATE = "_rankscope_finishes_late"
"""On a trainer's class: its groups finish at the end of the step, when its engines have stopped, too."""

WAITING = "_rankscope_waiting"
"""On such a trainer: the groups that are to finish."""

PATIENCE = 60.0
"""Seconds that the end of a run waits for workers; one that hangs must not keep the driver from ending."""


def change_v0(module: ModuleType, changes: Changes) -> None:
    """In ``verl.trainer.ppo.ray_trainer``."""
    trainer: Any = module.RayPPOTrainer
    changes.replace(trainer, "_start_profiling", "self, do_profile", _announcing)
    changes.replace(trainer, "_stop_profiling", "self, do_profile, run_command", _in_phases)
    changes.replace(trainer, "fit", "self", _with_an_end)


def change_v1(module: ModuleType, changes: Changes) -> None:
    """In ``verl.trainer.ppo.v1.trainer_base``."""
    trainer: Any = module.PPOTrainer
    changes.replace(trainer, "_start_profiling", "self", _announcing)
    changes.replace(trainer, "_stop_profiling", "self", _in_phases)
    changes.replace(trainer, "fit", "self, agent_loop_manager", _with_an_end)


def change_separate(module: ModuleType, changes: Changes) -> None:
    """In ``verl.trainer.ppo.v1.trainer_separate_async``, which stops its rollout engines after everything else."""
    trainer: Any = module.PPOTrainerSeparateAsync
    changes.replace(trainer, "on_step_end", "self", _finishing_late)
    changes.put(trainer, LATE, True)


def _finishing_late(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_step_end(self: Any) -> Any:
        result = original(self)
        _finish(self.__dict__.pop(WAITING, ()))
        return result

    return on_step_end


def _announcing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rollout servers name their files by the step, and verl does not tell them."""

    @functools.wraps(original)
    def _start_profiling(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _steps(self):
            announce(self.global_steps)
        return original(self, *args, **kwargs)

    return _start_profiling


def _in_phases(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where verl asks each role to stop and to finish, each is asked to stop, and then each to finish."""

    @functools.wraps(original)
    def _stop_profiling(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting: list[Any] = []
        with contextlib.ExitStack() as stack:
            for group in _groups(self):
                stack.enter_context(_only_stopping(group, waiting))
            result = original(self, *args, **kwargs)
        if getattr(self, LATE, False):
            self.__dict__[WAITING] = waiting
        else:
            _finish(waiting)
        return result

    return _stop_profiling


def _finish(groups: Iterable[Any]) -> None:
    for group in groups:
        finish = getattr(group, "finish_profile", None)
        if finish is not None:
            finish()
        else:
            group.stop_profile(run_command=True)


@contextlib.contextmanager
def _only_stopping(group: Any, waiting: list[Any]) -> Iterator[None]:
    """While it lasts, a worker group that is told to finish, too, only stops, and is put on the list."""
    original = getattr(group, "stop_profile", None)
    if original is None:
        yield
        return

    def stop_profile(run_command: bool = True) -> Any:
        if run_command:
            waiting.append(group)
        return original(run_command=False)

    group.stop_profile = stop_profile  # verl sets the methods of a group on the object, too
    try:
        yield
    finally:
        group.stop_profile = original


def _with_an_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        _say_unreachable(self)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            _end(self, aborted=True)
            raise
        _end(self, aborted=False)
        return result

    return fit


def _end(trainer: Any, *, aborted: bool) -> None:
    """Save what is open and finish what is due, in workers that answer in time. Never raises an ``Exception``."""
    try:
        if not in_place() or not _steps(trainer):
            return
        deadline = time.monotonic() + PATIENCE
        groups = [group for group in _groups(trainer) if hasattr(group, "finish_profile")]
        _together([functools.partial(group.end_profile, aborted=aborted) for group in groups], deadline)
        _together([group.finish_profile for group in groups], deadline)
    except Exception as error:  # noqa: BLE001 - the run is over, and its own outcome is what counts
        tell("the end of the profiling failed", reason=f"{type(error).__name__}: {error}")


def _together(calls: list[Callable[[], Any]], deadline: float) -> None:
    """All at once. A thread each, since a worker that hangs holds up whoever waits for it."""
    problems: list[str] = []

    def guarded(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a dead worker is not the others' fault
            problems.append(f"{type(error).__name__}: {error}".splitlines()[0])

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True, name="rankscope-verl-end") for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = sum(thread.is_alive() for thread in threads)
    if late:
        problems.append(f"{late} of {len(threads)} worker groups did not answer in {PATIENCE:g} s")
    if problems:
        tell(
            "some workers could not be told that the run is over; their processes save what they have", reason=problems
        )


def _say_unreachable(trainer: Any) -> None:
    """Steps that this run cannot reach, told before it begins."""
    try:
        steps = _steps(trainer)
        if not in_place() or not steps:
            return
        from rankscope import StepGate

        total = getattr(trainer, "total_training_steps", None)
        for text in StepGate(steps, total_steps=total).warnings():
            tell(text)
    except Exception as error:  # noqa: BLE001 - a warning is not worth a run
        tell("the profiled steps could not be checked", reason=f"{type(error).__name__}: {error}")


def _steps(trainer: Any) -> list[int]:
    from omegaconf import OmegaConf

    steps = OmegaConf.select(trainer.config, "global_profiler.steps", default=None)
    return [int(step) for step in steps or ()]


def _groups(trainer: Any) -> list[Any]:
    """The worker groups that are profiled, each once."""
    found = [getattr(trainer, "actor_rollout_wg", None)]
    found.append(getattr(trainer, "ref_policy_wg", None) if getattr(trainer, "use_reference_policy", False) else None)
    found.append(getattr(trainer, "critic_wg", None) if getattr(trainer, "use_critic", False) else None)
    return list({id(group): group for group in found if group is not None}.values())
