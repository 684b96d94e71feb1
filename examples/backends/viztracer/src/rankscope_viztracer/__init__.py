"""The viztracer tool: a timeline of every Python function call of a window.

Source of the interface: viztracer 1.1.1, ``viztracer/viztracer.py`` (``VizTracer``) and ``tracer.py`` (``add_raw``,
``dump``).
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rankscope import Availability, Context, OptionError, Span, Window, hookimpl


@dataclass(frozen=True)
class VizTracerOptions:
    """What ``tool_config.viztracer`` may hold.

    Attributes:
        tracer_entries: calls that are kept; when there are more, the earliest are lost.
        max_stack_depth: calls that are deeper are left out; -1 for no limit.
        min_duration_us: calls that took less, in microseconds, are left out.
        c_functions: also calls of functions that are written in C.
        arguments: also the arguments of each call.
        log_async: show the tasks of asyncio apart from each other.
        discrete: a file for each stage instead of one for the whole step.
    """

    tracer_entries: int = 1_000_000
    max_stack_depth: int = -1
    min_duration_us: float = 0.0
    c_functions: bool = False
    arguments: bool = False
    log_async: bool = False
    discrete: bool = False

    def __post_init__(self) -> None:
        if self.tracer_entries < 1:
            raise OptionError([("tracer_entries", f"must be 1 or more, got {self.tracer_entries}")])


class VizTracerBackend:
    """Runs a tracer in each window."""

    Options = VizTracerOptions
    owns: frozenset[str] = frozenset({"sys.setprofile"})
    thread_bound = True  # Python's hook for calls belongs to the thread that sets it
    suffix = ".json.gz"
    viewer = "https://ui.perfetto.dev"

    @staticmethod
    def available() -> Availability:
        """Whether viztracer is installed."""
        if importlib.util.find_spec("viztracer") is None:
            return Availability(False, "viztracer is not installed", "pip install viztracer")
        return Availability(True)

    def __init__(self, context: Context, options: VizTracerOptions) -> None:
        self.context = context
        self.options = options
        self._tracer: Any = None
        self._hook_of_threads: Any = None

    @hookimpl
    def start(self, window: Window) -> None:
        """Begin to trace, unless somebody traces already."""
        if sys.getprofile() is not None or _tracer_of_somebody():
            self.context.store.missing(window, "another Python profiler runs in this process; it is left alone")
            return
        import viztracer

        options = self.options
        self._hook_of_threads = threading.getprofile()  # the tracer sets its own, and leaves it
        self._tracer = viztracer.VizTracer(
            tracer_entries=options.tracer_entries,
            max_stack_depth=options.max_stack_depth,
            min_duration=options.min_duration_us,
            ignore_c_function=not options.c_functions,
            log_func_args=options.arguments,
            log_async=options.log_async,
            register_global=False,
            verbose=0,
            process_name=f"{self.context.role} rank {self.context.rank}",
        )
        self._tracer.start()

    @hookimpl
    def annotate(self, span: Span) -> AbstractContextManager[object] | None:
        """A row for each stage, above the calls."""
        return self._row(span.stage) if self._tracer is not None else None

    @contextmanager
    def _row(self, label: str) -> Iterator[None]:
        tracer = self._tracer
        began = tracer.getts()
        try:
            yield
        finally:
            if tracer is self._tracer:  # else the window ended meanwhile
                tracer.add_raw({"ph": "X", "cat": "stage", "name": label, "ts": began, "dur": tracer.getts() - began})

    @hookimpl
    def stop(self, window: Window) -> None:
        """Stop, write the raw data, and leave the rest to rankscope's helper process."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        tracer.stop()
        threading.setprofile(self._hook_of_threads)
        facts = {"role": window.role, "rank": self.context.rank, "step": window.step, "options": asdict(self.options)}
        with self.context.store.reserve(window, suffix=self.suffix) as file:
            tracer.dump(str(file.staged), sanitize_function_name=True)
            tracer.clear()
            file.finish_later("rankscope_viztracer.finish:pack", facts)


def _tracer_of_somebody() -> bool:
    module = sys.modules.get("viztracer")
    tracer = module.get_tracer() if module is not None else None
    return bool(tracer is not None and tracer.enable)
