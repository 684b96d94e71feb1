"""ProfileController: drives workers step by step. Stop all, relocate all, finish once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rankscope import environment
from rankscope.artifacts.ledger import Ledger
from rankscope.config import load_config
from rankscope.gate import Closing, StepGate
from rankscope.host import host_name
from rankscope.log import get_logger, import_nothing_more
from rankscope.profiler import DistProfiler
from rankscope.topology import run_id
from rankscope.worker import ProfiledWorker

if TYPE_CHECKING:
    from typing_extensions import Self


class ControllerError(Exception):
    """Strict mode: workers raised while they were driven.

    Attributes:
        errors: what was called on which worker, and what it raised.
    """

    def __init__(self, errors: list[tuple[str, object, Exception]]) -> None:
        self.errors = errors
        super().__init__("; ".join(f"{method} on {worker!r}: {error!r}" for method, worker, error in errors))


class ProfileController:
    """Opens and closes windows on all workers at the configured steps, also when a step raises or the loop ends early.

    Example::

        controller = ProfileController(config, workers=[actor, critic], total_steps=100)
        for n in range(1, 101):
            with controller.step(n):
                train(n)
        controller.close()

    Args:
        config: as for DistProfiler; gives the steps and whether adjacent ones share a window.
        workers: what is driven: anything with ``start_profile(*, step, scope)`` and ``stop_profile(*, last)``, and,
            where it has them, ``relocate_profile()``, ``finish_profile()``, ``advance_profile(*, step)`` and
            ``abort_profile()``. A DistProfiler is driven too. The same object under several names is driven once.
        total_steps: last step of the run; steps beyond it cannot keep a window open.
        first_step: first step of this run (more than 1 after a resume).
        overrides: ``key=value`` texts on top of the config.

    Raises:
        ConfigError: everything that is wrong with the config, in one error.
        TypeError: something in ``workers`` cannot be driven.
    """

    def __init__(
        self,
        config: Any,
        *,
        workers: Iterable[Any],
        total_steps: int | None = None,
        first_step: int = 1,
        overrides: Iterable[str] = (),
    ) -> None:
        self.config = load_config(config, tuple(overrides), check_tools="names")
        common = self.config.global_profiler
        self.gate = StepGate(
            common.steps, continuous=common.profile_continuous_steps, total_steps=total_steps, first_step=first_step
        )
        self.logger = get_logger(part="controller")
        strict = environment.flag(environment.STRICT)
        self._strict = common.strict if strict is None else strict
        self._workers = _distinct(workers)
        self._closed = False
        self._pid = os.getpid()
        if self.config.active:
            for text in self.gate.warnings():
                self.logger.warning(text)
            # What is expected of a run depends on its length, which only the driver knows.
            Ledger(common.save_path, host=host_name(), run_id=run_id()).write(
                "controller", steps=self.gate.effective_steps, first_step=first_step, total_steps=total_steps
            )
            atexit.register(self._at_exit)

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Around one training step: opens a window before it and closes it after it, where the config says so.

        The step's own exception passes unchanged; a window that is open then is closed and saved first.
        """
        self.begin_step(n)
        try:
            yield
        except BaseException:
            self.abort_step(n)
            raise
        self.end_step(n)

    def begin_step(self, n: int) -> None:
        """The first half of ``step(n)``, for loops that cannot use ``with``."""
        opening = self.gate.begin(n)
        if opening is not None:
            if opening.close_first:
                self.logger.warning("the window of an earlier step was still open: closed before the next", step=n)
                self._stop_all(last=False)
            self._drive("start_profile", step=n, scope="train")
        elif self.gate.open:
            self._drive("advance_profile", step=n)

    def end_step(self, n: int) -> None:
        """The second half of ``step(n)``."""
        self._carry_out(self.gate.end(n))

    def close(self) -> None:
        """The loop is over, early or not: close what is open and finish if that is still due. Safe to repeat."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._carry_out(self.gate.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._guarded(self.close)

    def _carry_out(self, closing: Closing | None) -> None:
        if closing is None:
            return
        if closing.stop and closing.aborted:
            self._drive("abort_profile")
        if closing.stop:
            self._stop_all(last=closing.last)
        else:
            self._drive("relocate_profile")
        if closing.last:
            self._drive("finish_profile")

    def _stop_all(self, *, last: bool) -> None:
        """The phases are over all workers: the last file is there before the first upload begins."""
        self._drive("stop_profile", last=last)
        self._drive("relocate_profile")

    def abort_step(self, n: int) -> None:
        """Instead of ``end_step(n)`` when the step raised: saves what is open.

        Raises nothing, so that the step's own exception stays the one that is seen.
        """
        self._guarded(lambda: self._carry_out(self.gate.abort(n)))

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # see above
            self.logger.error("closing after an exception failed", exc_info=error)

    def _drive(self, method: str, **arguments: Any) -> None:
        errors: list[tuple[str, object, Exception]] = []
        for worker in self._workers:
            try:
                function = getattr(worker, method, None)
                if function is not None:
                    function(**arguments)
            except Exception as error:  # noqa: PERF203 - one worker must not keep the others from being driven
                errors.append((method, worker, error))
                self.logger.error("a worker raised; the others go on", method=method, worker=worker, exc_info=error)
        if errors and self._strict:
            raise ControllerError(errors)

    def _at_exit(self) -> None:
        if self._pid == os.getpid():
            import_nothing_more()
            self._guarded(self.close)


class _ProfilerAsWorker(ProfiledWorker):
    """A bare DistProfiler, driven like a worker."""

    def __init__(self, profiler: DistProfiler) -> None:
        self.profiler = profiler


def _distinct(workers: Iterable[Any]) -> list[Any]:
    driven: list[Any] = []
    seen: set[int] = set()
    for worker in workers:
        if id(worker) in seen:
            continue
        seen.add(id(worker))
        target = _ProfilerAsWorker(worker) if isinstance(worker, DistProfiler) else worker
        for method in ("start_profile", "stop_profile"):
            if not callable(getattr(target, method, None)):
                raise TypeError(f"workers: {worker!r} has no {method}(); give a ProfiledWorker or a DistProfiler")
        driven.append(target)
    return driven
