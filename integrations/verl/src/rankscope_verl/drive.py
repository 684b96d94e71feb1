"""Drive: a handle of rankscope behind one of verl's profilers."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rankscope import annotate
from rankscope.errors import ConfigError, FaultError
from rankscope_verl.settings import ROLES, Setting, at_path

if TYPE_CHECKING:
    from rankscope import DistProfiler

R = TypeVar("R")

INNER = "language_model"
"""Name of a worker inside of another one: verl's actor and reference each wrap one."""

_workers: tuple[int, dict[str, bool]] = (0, {})
"""Of this process: names of its workers, and whether rankscope drives them."""


def is_inner(prefix: str | None) -> bool:
    """Whether a worker of that name is part of another one of this process; then it is never started by itself."""
    return prefix == INNER and bool(_known())


def note_worker(prefix: str | None, *, driven: bool) -> None:
    """Remember that this process has a worker of that name."""
    if prefix is not None and prefix != INNER and prefix not in ROLES:
        _known()[prefix] = driven


def outer_is_off() -> bool:
    """Whether none of the workers that could start an inner one is profiled."""
    return not any(_known().values())


def forget_workers() -> None:
    """As in a new process; for tests."""
    _known().clear()


def _known() -> dict[str, bool]:
    global _workers
    if _workers[0] != os.getpid():
        _workers = (os.getpid(), {})
    return _workers[1]


def contained(method: Callable[..., R]) -> Callable[..., R | None]:
    """What goes wrong in here must not reach verl's training loop; it is told once, and then this one is off."""

    @functools.wraps(method)
    def call(self: Drive, *args: Any, **kwargs: Any) -> R | None:
        if self.broken:
            return None
        try:
            return method(self, *args, **kwargs)
        except FaultError:  # strict mode, which wants it
            raise
        except Exception as error:  # noqa: BLE001 - see above
            self.broken = True
            from rankscope_verl.install import tell

            tell(
                "rankscope failed inside of verl and is off in this worker; the training goes on",
                role=self.setting.role,
                call=method.__name__,
                reason=f"{type(error).__name__}: {error}",
            )
            return None

    return call


_handles: list[tuple[weakref.ref[Drive], DistProfiler]] = []


def _close_abandoned() -> None:
    """A worker that was thrown away must not keep its tools from those that come after it."""
    for entry in _handles[:]:
        owner, handle = entry
        if owner() is None and not handle.recording:
            _handles.remove(entry)
            handle.close()


class Drive:
    """Stands where verl has a backend: is started and stopped by the worker, and drives rankscope.

    Attributes:
        setting: what the worker's section says.
        rank: of the worker.
        save_file_prefix: as verl was given it.
        inner: whether the worker is part of another one.
        broken: after a fault of our own; then it does nothing any more.
    """

    def __init__(self, setting: Setting, rank: int, prefix: str | None) -> None:
        self.setting = setting
        self.rank = rank
        self.save_file_prefix = prefix
        self.inner = is_inner(prefix)
        self.broken = False
        self._handle: DistProfiler | None = None
        self.setting.check(rank)
        if not self.inner and setting.steps is not None:
            self.handle  # noqa: B018 - what it says and prepares must come before the training

    @property
    def handle(self) -> DistProfiler:
        """The handle, made when it is first needed: an inner worker has none until somebody starts it."""
        if self._handle is None:
            from rankscope import DistProfiler

            _close_abandoned()
            try:
                self._handle = DistProfiler(self.setting.config, role=self.setting.role, rank=self.rank)
            except ConfigError as error:
                raise at_path(error, self.setting.role, self.setting.path) from None
            _handles.append((weakref.ref(self), self._handle))
        return self._handle

    @property
    def selected(self) -> bool:
        """Whether this rank is profiled."""
        if self._handle is not None:
            return self._handle.selected
        return bool(self.setting.config.role(self.setting.role).ranks.selects(self.rank).selected)

    @contained
    def start(self, role: str | None = None, profile_step: Any = None, global_step: Any = None, **_: Any) -> None:
        """A training step begins; ``role`` is what verl calls its scope."""
        step = _number(profile_step if profile_step is not None else global_step)
        if step is None and self.setting.steps:
            step = self.setting.steps[0]  # supervised fine-tuning profiles one stretch and names no step
        self.handle.start(step=step, scope=role or None)

    @contained
    def stop(self, *, aborted: bool = False) -> None:
        """The step is over; relocation and finish are asked for by themselves."""
        if self._handle is not None:
            self._handle.stop(aborted=aborted)

    @contained
    def step(self) -> None:
        """One mini-batch is done. The inner worker calls it, for whatever the outer one has open."""
        from rankscope import windows

        if self._handle is not None:
            self._handle.step()
        else:
            windows.step()

    @contained
    def relocate(self) -> None:
        """Bring files that tools wrote elsewhere to the save path."""
        if self._handle is not None:
            self._handle.relocate()

    @contained
    def finish(self, *, asked: bool = False) -> None:
        """The last profiled step is over.

        Args:
            asked: somebody asked for the finish command by itself; then it runs also where nothing was captured.
        """
        if self._handle is not None:
            self._handle.finish()
        if self._handle is None or asked:
            self._run_command(asked=asked)

    def _run_command(self, *, asked: bool) -> None:
        """The finish command of a worker that captured nothing, where it was asked for or names this rank."""
        from rankscope import shutdown
        from rankscope.finish import FinishCommand, claim_once

        config = self.setting.config
        section = config.role(self.setting.role)
        command = section.finish_hook_cmd
        due = asked or section.finish_hook_all_ranks or section.finish_hook_ranks
        if not command or not due or self.inner or not section.finish_ranks.selects(self.rank).selected:
            return
        if self._handle is not None and shutdown.captured(self._handle):
            return  # its own finish runs it, once the last file is there
        if claim_once(section.save_path):
            common = config.global_profiler
            running = FinishCommand(
                command,
                save_path=section.save_path,
                tool=",".join(section.tools),
                role=self.setting.role,
                rank=self.rank,
                steps=common.steps,
                timeout=common.finish_hook_timeout,
            )
            running.start()
            running.wait(common.finish_hook_wait)

    def annotate(self, message: str | None = None, role: str | None = None, **facts: Any) -> Any:
        """For stages that were decorated before rankscope was put in place: verl's decorator asks its backend."""
        known = {key: facts[key] for key in ("scheduled", "color", "domain", "category") if facts.get(key) is not None}
        return annotate(message=message, role=role, **known)


def _number(step: Any) -> int | None:
    try:
        return None if step is None else int(step)
    except (TypeError, ValueError):
        return None
