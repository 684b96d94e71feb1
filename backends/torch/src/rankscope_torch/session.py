"""Torch's profiler session: one a process, silently stolen by whoever starts next. Here it is guarded.

Sources: torch 2.13.0, ``torch/autograd/profiler.py`` (``_is_profiler_enabled``, ``profile._start_trace``) and
``torch/profiler/profiler.py`` (``_KinetoProfile``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import threading
from pathlib import Path
from typing import Any

from rankscope_torch.forked import guard_children

_OURS = 1
"""Stands where torch puts True when a profiler starts: as true as that, yet another start or stop replaces it."""

_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Torch 2.13 imports its compiler for a profiler, which sets this to its default; the environment is the training's."""


class SessionLost(Exception):  # noqa: N818 - a state of affairs that is told, not a programming error
    """The capture cannot be saved; the text says why."""


def foreign_active(torch: Any) -> bool:
    """Whether somebody else's torch profiler runs in this process."""
    flag = torch.autograd.profiler._is_profiler_enabled  # noqa: SLF001
    if flag is True:
        return True
    if flag == _OURS:  # an earlier capture of ours that was given up, e.g. because its thread ended
        torch.autograd.profiler._set_is_profiler_enabled(False)  # noqa: SLF001
        return False
    return bool(torch._C._autograd._profiler_enabled())  # noqa: SLF001


@dataclasses.dataclass
class Capture:
    """One session of torch's profiler, for one file. A new object each time: a used one records nothing.

    Attributes:
        profile: torch's object.
        all_threads: whether any thread may stop it.
        thread, thread_name: who started it.
        started_ns: when recording began, in nanoseconds since the epoch; 0 while it only warms up.
    """

    profile: Any
    torch: Any
    all_threads: bool = False
    thread: int = 0
    thread_name: str = ""
    started_ns: int = 0
    prepared: bool = False

    def prepare(self) -> None:
        """Let the device side warm up; nothing is kept yet."""
        if not self.prepared:
            guard_children()
            self.profile.prepare_trace()
            self.prepared = True

    def start(self, now_ns: int) -> None:
        """Record from now on."""
        self.prepare()
        self.profile.start_trace()
        self.torch.autograd.profiler._is_profiler_enabled = _OURS  # noqa: SLF001
        self.thread, self.thread_name = threading.get_ident(), threading.current_thread().name
        self.started_ns = now_ns

    def stop(self) -> None:
        """End the session.

        Raises:
            SessionLost: it is not ours to end any more, or ends without data; ``save`` would crash the process.
        """
        flag = self.torch.autograd.profiler._is_profiler_enabled  # noqa: SLF001
        if flag is True:
            raise SessionLost("another torch profiler was started inside this window and still runs; it is left alone")
        if flag != _OURS:
            raise SessionLost("another torch profiler was started and stopped inside this window, which ended this one")
        here = threading.current_thread()
        if self.thread != threading.get_ident() and not self.all_threads:
            # Ending it here yields nothing, yet a session that is never ended crashes the process when that exits.
            self.profile.stop_trace()
            raise SessionLost(
                f"it was started on thread {self.thread_name!r}, which has ended, and torch cannot stop it on "
                f"{here.name!r}; set all_threads: true to stop it anywhere"
            )
        self.profile.stop_trace()
        results = self.profile.profiler.kineto_results
        start_ns = getattr(results, "trace_start_ns", None)
        if results is None or (start_ns is not None and start_ns() == 0):
            raise SessionLost("torch ended the session without data")

    def drop(self) -> None:
        """Give up a session that only warmed up: end it and forget what it holds."""
        if self.prepared and not self.started_ns:
            # Torch offers no way to unprepare; a session that records nothing is the way.
            self.profile.start_trace()
            self.profile.stop_trace()

    def release(self) -> None:
        """Let go of torch's object, which frees all events."""
        self.profile = None

    def save(self, path: Path) -> None:
        """Write the raw trace. Torch reports no failure, so the file itself is looked at.

        Raises:
            OSError: there is no file, or it is empty.
        """
        self.profile.export_chrome_trace(str(path))
        if not path.exists() or path.stat().st_size == 0:
            # Half a trace would keep a full disk full; and torch has the file still open, so removing it is not enough.
            for left in (path, path.with_name(f"{path.name}.tmp")):
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(left, 0)
                    left.unlink()
            raise OSError(f"torch wrote no trace to {path} (is the disk full, or the directory gone?)")


@functools.cache
def warm_up(torch: Any) -> None:
    """A tiny capture before the first one of a process, so that what torch sets up once is not in anybody's trace."""
    activities = torch.profiler.supported_activities()
    profile = torch.profiler._KinetoProfile(activities=activities)  # noqa: SLF001 - documented by torch
    guard_children()
    compiler_cache = os.environ.get(_COMPILER_CACHE)
    profile.prepare_trace()
    if compiler_cache is None:
        os.environ.pop(_COMPILER_CACHE, None)
    profile.start_trace()
    torch.empty(0)
    profile.stop_trace()


def experimental_config(torch: Any, **wanted: Any) -> tuple[Any, list[str]]:
    """Torch's experimental options, as far as this torch has them.

    Returns:
        The object (None when nothing is wanted), and the names of options that this torch does not know.
    """
    wanted = {name: value for name, value in wanted.items() if value}
    if not wanted:
        return None, []
    factory = torch._C._profiler._ExperimentalConfig  # noqa: SLF001
    documented = inspect.getdoc(factory.__init__) or ""
    known = {name: value for name, value in wanted.items() if f"{name}:" in documented}
    return (factory(**known) if known else None), sorted(set(wanted) - set(known))
