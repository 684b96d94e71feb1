"""ProfiledWorker: what a controller drives, as a mix-in for worker classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.profiler import DistProfiler
    from rankscope.types import Artifact


class ProfiledWorker:
    """Gives a worker the methods that a ProfileController calls; they act on ``self.profiler``.

    A worker without a profiler, or with None, is driven too and does nothing::

        class ActorWorker(ProfiledWorker):
            def __init__(self, config, rank, world_size):
                self.profiler = DistProfiler(config, role="actor", rank=rank, world_size=world_size)
    """

    profiler: DistProfiler = None  # type: ignore[assignment]  # a worker without one is driven, too

    def start_profile(self, *, step: int | None = None, scope: str | None = None) -> None:
        """Open the window of a step."""
        if self.profiler is not None:
            self.profiler.start(step=step, scope=scope)

    def stop_profile(self, *, last: bool = False) -> None:
        """Close it. ``last`` is for workers that relocate and finish by themselves; here the next phases do that."""
        del last
        if self.profiler is not None:
            self.profiler.stop()

    def abort_profile(self) -> None:
        """The step raised: close its window, and let the file's name say so. ``stop_profile`` follows."""
        if self.profiler is not None:
            self.profiler.stop(aborted=True)

    def advance_profile(self, *, step: int) -> None:
        """The next step begins inside an open window."""
        if self.profiler is not None:
            self.profiler.advance(step=step)

    def step_profile(self) -> None:
        """One update mini-batch is done."""
        if self.profiler is not None:
            self.profiler.step()

    def relocate_profile(self) -> tuple[Artifact, ...]:
        """Bring files that tools wrote elsewhere to the save path."""
        return () if self.profiler is None else self.profiler.relocate()

    def finish_profile(self) -> None:
        """The last window is over: finish once."""
        if self.profiler is not None:
            self.profiler.finish()

    def close_profile(self, timeout: float | None = None) -> None:
        """End of the worker: save, wait for exports, finish."""
        if self.profiler is not None:
            self.profiler.close(timeout)
