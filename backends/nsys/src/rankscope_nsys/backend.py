"""NsysBackend: the hooks."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope import Artifact, Availability, Context, Launch, Span, Window, hookimpl
from rankscope.log import first_time, warn_once
from rankscope_nsys import collecting, launching
from rankscope_nsys.attached import foreign_injection
from rankscope_nsys.capture import range_problem
from rankscope_nsys.ends import SUFFIX, report_name
from rankscope_nsys.index import CaptureRange
from rankscope_nsys.options import NsysOptions
from rankscope_nsys.ranges import Range, Ranges
from rankscope_nsys.reports import why_no_report
from rankscope_nsys.session import LAUNCH, NsysSession, current_session, register


class NsysBackend:
    """Makes NVTX ranges and drives the capture of the nsys that this process runs under; one report a window.

    nsys has to be there before the process is: `launch` says how, ``rankscope launch`` and the Ray integration do it.
    """

    Options = NsysOptions
    owns = frozenset({"cupti", "cuda_profiler_api"})
    suffix = SUFFIX
    viewer = "nsys-ui FILE, or nsys stats FILE"

    @staticmethod
    def available() -> Availability:
        """Whether ranges can be made; nothing is imported. Whether nsys is there is found when a window opens."""
        if importlib.util.find_spec("nvtx") is None:
            return Availability(False, "the nvtx package is not installed", "pip install nvtx")
        if os.environ.get("NVTX_DISABLE"):
            return Availability(True, "NVTX_DISABLE is set: there will be no ranges", "unset NVTX_DISABLE")
        return Availability(True)

    @staticmethod
    def launch(options: NsysOptions, context: Context) -> Launch:
        """``nsys profile …`` in front of the command, and the same for Ray."""
        return launching.launch(options, context)

    @staticmethod
    def collect(options: NsysOptions, context: Context) -> None:
        """Fetch the reports that nsys finished only after the process had ended."""
        collecting.collect(options, context)

    def __init__(self, context: Context, options: NsysOptions) -> None:
        self.context = context
        self.options = options
        self.pid = context.pid
        self.finished = False
        self.opened = False
        self._session: NsysSession | None = None
        self._ranges: Ranges | None = None
        self._nvtx: Any = None
        self._reason = ""
        self._relocating = False
        self._windows: set[int] = set()
        register(self)

    @hookimpl
    def start(self, window: Window) -> None:
        """Open the capture range."""
        import nvtx

        self._nvtx = nvtx
        if self._ranges is None:
            self._ranges = Ranges(nvtx, self.context.logger)
        self._session = current_session(self.context)
        self._reason = self._session.begin(window, self.context, nvtx)
        if not self._reason:
            self.opened = True
            self._windows.add(window.id)
        self._warn(self._session)

    @hookimpl
    def annotate(self, span: Span) -> Range | None:
        """The range of a span."""
        return None if self._ranges is None else self._ranges.row(span)

    @hookimpl
    def stop(self, window: Window) -> None:
        """Close the capture range. The report comes later: see relocate and finish."""
        if self._session is not None:
            self._session.end(window, self.context)
        reason, self._reason = self._reason, ""
        if reason:
            self.context.store.missing(window, reason)

    @hookimpl
    def relocate(self, window: Window, last: bool) -> list[Path]:
        """The report of this window, once it is whole; at the end it is waited for."""
        self._relocating = True
        session = self._session
        entry = session.find(window.id) if session is not None else None
        if session is None or entry is None:
            return []
        if last:
            session.settle(self, self.context, self.options.report_wait)
        path = session.report(entry)
        if path is None:
            return []
        session.named(entry, path)
        return [path]

    @hookimpl
    def finish(self, artifacts: Sequence[Artifact]) -> None:
        """Bring in what is written by now, and say of the rest why it is not there."""
        self.finished = True
        session = self._session
        if session is None:
            return
        session.note_names(artifacts, self.context)
        late = session.settle(self, self.context, self.options.report_wait)
        self.bring_in()
        if not late:
            session.bring_in_for_others(self)
        for entry in self._open_entries(session):
            self._tell_missing(session, entry, late)

    def bring_in(self) -> None:
        """Move the reports of its windows to the save path; one that lies elsewhere is left, if that is the wish."""
        session = self._session
        if session is None:
            return
        for entry in self._open_entries(session):
            path = session.report(entry)
            if path is None:
                continue
            facts = {"capture_range": entry.number, "reserved": report_name(session.stem, entry.number)}
            if self._relocating or path.is_relative_to(self.context.save_path):
                name = self.context.store.adopt(path, entry.as_window(), **facts).path.name
            else:
                size = path.stat().st_size
                self.context.store.record({**entry.facts(), "path": path, "bytes": size, **facts})
                name = str(path)
            session.taken(entry, name, self.context)

    def bring_in_late(self) -> None:
        """At the end of the process: what other roles stood in the way of before."""
        session = self._session
        if session is not None and self._open_entries(session):
            session.settle(self, self.context, self.options.report_wait)
            self.bring_in()

    def _open_entries(self, session: NsysSession) -> list[CaptureRange]:
        """Its windows whose report nobody has taken; the role of a window may be that of a role which joined."""
        return [entry for entry in session.ranges if entry.window in self._windows and not session.is_taken(entry)]

    def _tell_missing(self, session: NsysSession, entry: CaptureRange, late: str) -> None:
        reason = why_no_report(session.stem, entry.number)
        # Whoever launched this process collects it. Until then the ledger has it as on its way.
        collected = bool(late and os.environ.get(LAUNCH)) and not launching.in_ray()
        if collected:
            self.context.logger.info("the report comes when this process has ended", step=entry.step, reason=late)
        self.context.store.record(
            {
                **entry.facts(),
                "status": "exporting" if collected else "failed",
                "reserved": report_name(session.stem, entry.number),
                "reason": late if collected else "; ".join(text for text in (late, reason) if text),
            }
        )

    def _warn(self, session: NsysSession) -> None:
        """Each cause once a process: how to start under nsys, or what is in the way of the ranges."""
        if session.attached is None:
            if first_time("nsys is not attached"):
                injection = foreign_injection(os.environ)
                self.context.logger.warning(
                    "nothing is captured: this process does not run under nsys",
                    help=launching.how_to_start(self.context),
                    **({} if shutil.which(self.options.nsys) else {"install": launching.INSTALL}),
                    **({injection[0]: injection[1]} if injection else {}),
                )
            return
        problem = range_problem(self._nvtx)
        if problem:
            warn_once(self.context.logger, ("nsys ranges", problem), "the reports hold no ranges", reason=problem)
