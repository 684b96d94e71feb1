"""The six hooks of a backend: all that a plugin author needs to read.

A backend is a pip-installed distribution with one entry point in the group ``rankscope.backends``. The entry point's
name is the name of the tool in the config, in logs and in the ledger::

    [project.entry-points."rankscope.backends"]
    wallclock = "rankscope_wallclock:WallclockBackend"

What it names is called as ``(context, options)`` once per role and process, and only on selected ranks. The object it
returns implements any of the hooks below; every hook is optional. A whole backend::

    from dataclasses import dataclass
    from rankscope import Availability, Context, Window, hookimpl


    @dataclass(frozen=True)
    class WallclockOptions:
        unit: str = "s"  # every field needs a default


    class WallclockBackend:
        Options = WallclockOptions  # tool_config.wallclock is checked against it
        owns = frozenset()  # names of process-exclusive resources, e.g. {"kineto"}

        @staticmethod
        def available() -> Availability:  # imports nothing heavy and never raises
            return Availability(True)

        def __init__(self, context: Context, options: WallclockOptions) -> None:
            self.context = context  # touches no device, opens no file

        @hookimpl
        def start(self, window: Window) -> None:
            self.began = self.context.clock()

        @hookimpl
        def stop(self, window: Window) -> None:
            with self.context.store.reserve(window, suffix=".txt") as file:
                file.temporary.write_text(str(self.context.clock() - self.began))
                file.publish(events=1)

Rules that hold for every hook: no collectives; no change of the working directory, of os.environ or of signal handlers;
nothing that blocks without a deadline; plain positional arguments without defaults, any subset of the named ones. An
``Exception`` is contained: it becomes a fault, the backend gets one ``stop`` if it was started, and stays off in this
process; training goes on. Hook wrappers are refused. New facts come as new fields of window, span and context or as new
arguments; an old backend just does not ask for them.

What takes long need not hold up the training: write raw data to ``file.staged`` and name a function of a light module.
The helper process calls it; it writes the temporary file and returns facts for the ledger, or raises
``NothingRecorded``. Core publishes, also when the training process is killed meanwhile::

    file.finish_later("rankscope_wallclock.finish:pack", {"level": 6})  # in stop, instead of publish

    def pack(staged, temporary, name, arguments):  # in rankscope_wallclock/finish.py
        temporary.write_bytes(compress(staged.read_bytes(), arguments["level"]))
        return {"events": 1}

A file that the tool itself writes whole below the save path is told with ``store.keep(path, window)``; one that lies
elsewhere is named in ``relocate``. A directory may stand where a file does: make ``file.temporary`` one, or write into
``store.stage(window)`` from ``start`` on. ``context.about(window)`` is what a file should say of its origin.

Attributes that core reads from the entry point's object (all optional but ``Options``):

``Options``       frozen dataclass, every field with a default; a bool field ``discrete`` sets the tool's own default.
``owns``          set of names; two selected tools that own the same one in a process are a config error. Where it
                  depends on the options: a static method ``owns(options)``.
``thread_bound``  True when ``stop`` must run on the thread that ran ``start``; core then carries a foreign stop over.
``over_budget``   method -> reason or None, asked at span and step boundaries; a reason ends the window early. None, or
                  no such attribute, where nothing limits it: then it costs nothing.
``suffix``        file name ending of its artifacts, shown by ``rankscope plan``.
``planned(step, rank)``  static or class method -> text: where its file will lie below the save path, where it is not a
                  name of the store's.
``viewer``        text: how its files are opened.
``available()``   static or class method -> Availability. No: a config error before training on ranks that want it. Yes
                  with a reason: it works, and the reason says once what will be missing.
``advice(options)``  static or class method -> texts: what a user should know of these options before a run; shown by
                  ``rankscope plan`` and ``rankscope doctor``.
``launch(options, context)``  static or class method -> Launch: what the process needs before it starts. Called where
                  processes are started, by ``rankscope launch`` for one.
``collect(options, context)``  static or class method, called there when the process has ended: for files that it could
                  not collect itself; ``context.store.adopt`` moves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rankscope.types import Artifact, Span, Window

PROJECT = "rankscope"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class BackendSpecs:
    """What core calls, when, and what it promises. The argument lists are frozen by a test."""

    @hookspec
    def start(self, window: Window) -> None:
        """Begin to capture.

        Called once a window, on selected ranks, in config order, on the thread that then trains. Never called again
        before ``stop``. In discrete mode core opens one window per stage, so a backend needs no mode of its own::

            @hookimpl
            def start(self, window):
                self.recorder = Recorder()
                self.recorder.begin()
        """

    @hookspec
    def step(self, window: Window, span: Span | None) -> None:
        """One update mini-batch of an update stage is done.

        ``span`` is the scheduled stage around the call, else the innermost stage, else None. Mini-batches of several
        stages arrive here; a schedule counts those of one stage only::

            @hookimpl
            def step(self, window, span):
                self.recorder.mark(span.stage if span else "")
        """

    @hookspec
    def stop(self, window: Window) -> None:
        """End the capture and hand over what came of it.

        Called in reverse order, only where ``start`` returned, also after the training step raised. Reserve a name,
        write to the temporary file, publish; or leave what takes long to the helper process (see above)::

            @hookimpl
            def stop(self, window):
                with self.context.store.reserve(window, suffix=".bin") as file:
                    self.recorder.write(file.temporary)
                    file.publish(events=len(self.recorder))
        """

    @hookspec
    def annotate(self, span: Span) -> AbstractContextManager[object] | None:
        """Show one span in the capture: return a context manager, or None for nothing.

        Called only while a window of this tool is open. Entered in config order, left in reverse. ``__exit__`` gets the
        body's exception; its return value is ignored, so a training error can never be swallowed. It must not keep
        ``span.instance``, ``span.args`` or ``span.kwargs``::

            @hookimpl
            def annotate(self, span):
                return self.recorder.range(span.stage)
        """
        return None

    @hookspec
    def relocate(self, window: Window, last: bool) -> Iterable[Path] | None:
        """Name finished files of this tool for this window that lie elsewhere; core moves them to the save path.

        Called after ``stop`` when ``relocate_results`` is set, and once more before ``finish`` with ``last`` true; so
        it must be repeatable. A file that is still being written is left out and named at a later call; with ``last``
        it may be waited for, for a bounded time. Never deletes anything::

            @hookimpl
            def relocate(self, window, last):
                return [path for path in self.reports if self.is_whole(path, patience=10 if last else 0)]
        """
        return None

    @hookspec
    def finish(self, artifacts: Sequence[Artifact]) -> None:
        """The run's captures are complete: called exactly once, after the last window, also at an early end.

        No window is open. ``artifacts`` are this tool's files of this process. The finish command runs after it. Where
        files take long to export, it is called on a thread in the background::

            @hookimpl
            def finish(self, artifacts):
                self.context.logger.info("kept", files=len(artifacts))
        """
