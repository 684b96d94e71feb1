"""The nsys session of this process: which capture ranges it has seen, and where their reports are.

nsys traces the process, whatever roles live in it, so there is one session a process and all backends share it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from rankscope import Artifact, Context, Window
from rankscope.host import born
from rankscope_nsys.attached import DOMAIN, RANGE, Attached, find_attached
from rankscope_nsys.capture import CaptureSwitch, range_problem
from rankscope_nsys.control import write_reports_now
from rankscope_nsys.index import SUFFIX, CaptureRange, Index
from rankscope_nsys.reports import Reports

LAUNCH = "RANKSCOPE_NSYS_LAUNCH"
"""Set by `launch` for the process: a name by which the launcher finds its index afterwards."""

FOLDER = Path(".rankscope", "nsys")
"""Where reports lie in the save path until they are whole."""


class User(Protocol):
    """A backend, as the session sees it."""

    pid: int
    finished: bool
    opened: bool

    def bring_in(self) -> None:
        """Fetch the reports of its windows, as far as there are any."""

    def bring_in_late(self) -> None:
        """Have them written first."""


class NsysSession:
    """What this process knows of the nsys that traces it.

    Args:
        attached: that nsys, or None.
        context: of the backend that is the first to open a window.
        write_now: asks nsys for its reports; replaced by tests.

    Attributes:
        ranges: the capture ranges so far.
        leaving: whether the process is on its way out.
    """

    def __init__(
        self,
        attached: Attached | None,
        context: Context,
        write_now: Callable[[Attached, float], str] = write_reports_now,
    ) -> None:
        self.attached = attached
        self.ranges: list[CaptureRange] = []
        self.leaving = False
        self.reports = Reports()
        self._lock = threading.RLock()
        self._write_now = write_now
        self._asked = False
        self._late = ""
        self._taken: set[int] = set()
        self._named: dict[str, CaptureRange] = {}
        self._switch: CaptureSwitch | None = None
        self._index_failed = False
        self._claimed = ""
        if attached is not None:
            self._index = Index(
                host=context.host,
                pid=os.getpid(),
                born=born(os.getpid()),
                run_id=context.run_id,
                launch=os.environ.get(LAUNCH, ""),
                stem=attached.stem,
                capture=attached.capture,
                capture_range_end=attached.end.text,
                ranges=self.ranges,
            )
            mark = f"{time.time_ns() // 1_000_000:x}"
            name = f"rank{context.rank}_{context.host}_pid{os.getpid()}-{mark}{SUFFIX}"
            self.index_path = context.save_path / name
            self._claimed = self._claim(context)
            if attached.stem:
                with contextlib.suppress(OSError):  # nsys makes no folder; on another node the launcher's is not there
                    Path(attached.stem).parent.mkdir(parents=True, exist_ok=True)

    @property
    def stem(self) -> str:
        """Path of the reports without number and suffix; empty where there is no nsys."""
        return self.attached.stem if self.attached is not None else ""

    # Windows.

    def begin(self, window: Window, context: Context, nvtx: Any) -> str:
        """Open the capture range of a window. Returns why nsys captures nothing of it, or an empty text."""
        with self._lock:
            if self._claimed:  # a range of ours would be counted as one of that process
                return self._claimed
            problem = self._why_not(nvtx)
            self._switch = CaptureSwitch(nvtx)
            # Opened in any case: another tool may follow them, or an nsys that captures all.
            cuda_problem = self._switch.on()
            if self.attached is None:
                return "this process does not run under nsys"
            if not problem and self.attached.capture == "cudaProfilerApi" and cuda_problem:
                problem = f"{cuda_problem}; `capture: nvtx` needs no CUDA"
            if problem:
                return problem
            self.ranges.append(
                CaptureRange(
                    number=len(self.ranges) + 1,
                    window=window.id,
                    role=window.role,
                    rank=context.rank,
                    step=window.step,
                    steps=window.steps,
                    scope=window.scope,
                    reason=window.reason,
                    start_ns=context.clock(),
                )
            )
            self._write_index(context)
            return ""

    def end(self, window: Window, context: Context) -> None:
        """Close the capture range of a window; nsys collects its data meanwhile, which takes it about a second."""
        with self._lock:
            switch, self._switch = self._switch, None
            if switch is not None:
                problem = switch.off()
                if problem:
                    context.logger.warning("the capture was not ended", step=window.step, reason=problem)
            found = self.find(window.id)
            if found is not None:
                found.scope, found.end_ns = window.scope, context.clock()
                self._write_index(context)

    def find(self, window: int) -> CaptureRange | None:
        """The capture range of a window."""
        return next((entry for entry in self.ranges if entry.window == window), None)

    def _why_not(self, nvtx: Any) -> str:
        """Why a range that begins now is not captured, as far as it can be known beforehand."""
        attached = self.attached
        if attached is None:
            return ""
        if not attached.pid:
            return "nsys traces this process, but its command line is not visible, so its reports cannot be found"
        if attached.capture == "none" or (attached.drives and not attached.end.ends):
            return (
                "nsys captures this process as a whole; the step is a range in the one report, which nsys writes when "
                f"the process has ended{': ' + attached.stem if attached.stem else ''}"
            )
        if not attached.drives:
            return (
                f"nsys waits for another start of its capture ({attached.capture}); it must be told "
                f"--capture-range=nvtx --nvtx-capture={RANGE}@{DOMAIN}, as rankscope launch does"
            )
        if self._asked:
            return "nsys had ended its capture by then, so that its reports could be written"
        if attached.end.limit is not None and len(self.ranges) >= attached.end.limit:
            return (
                f"nsys was told to capture {attached.end.limit} ranges (--capture-range-end={attached.end.text}), and "
                "has them; with stages_per_step: null it captures any number"
            )
        return range_problem(nvtx) if attached.capture == "nvtx" else ""

    def _claim(self, context: Context) -> str:
        """The ranges of two processes under one nsys would be counted as one: the first to open one has it."""
        attached = self.attached
        if attached is None or not attached.pid:
            return ""
        path = context.save_path / FOLDER / context.host / f"session{attached.session}-{attached.pid}.owner"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="ascii") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            with contextlib.suppress(OSError, ValueError):
                owner = int(path.read_text(encoding="ascii"))
                if owner != os.getpid():
                    return (
                        f"process {owner}, which the same nsys traces, opens its capture ranges; nsys has to be "
                        "started for each process of its own"
                    )
        except OSError:
            return ""
        return ""

    def _write_index(self, context: Context) -> None:
        try:
            self._index.write(self.index_path)
        except OSError as error:
            if not self._index_failed:
                self._index_failed = True
                context.logger.warning("the index of the reports cannot be written", reason=str(error))

    # Reports.

    def report(self, entry: CaptureRange) -> Path | None:
        """The whole report of a range that nobody has taken yet, or None."""
        if self.attached is None or entry.number in self._taken:
            return None
        return self.reports.find(self.attached.stem, entry.number)

    def named(self, entry: CaptureRange, path: Path) -> None:
        """Core was told of a report, and moves it now."""
        self._named[str(path)] = entry

    def note_names(self, artifacts: Iterable[Artifact], context: Context) -> None:
        """What the reports are called that core moved."""
        for artifact in artifacts:
            entry = self._named.get(str(artifact.facts.get("moved_from")))
            if entry is not None and entry.report != artifact.path.name:
                self.taken(entry, artifact.path.name, context)

    def taken(self, entry: CaptureRange, name: str, context: Context) -> None:
        """The report of a range lies where it belongs, under this name."""
        with self._lock:
            self._taken.add(entry.number)
            entry.report = name
            self._write_index(context)

    def is_taken(self, entry: CaptureRange) -> bool:
        """Whether that was said of it."""
        return entry.number in self._taken

    def settle(self, user: User, context: Context, seconds: float) -> str:
        """At the end of a backend: have all reports written, and wait for them.

        Returns:
            Why they may come later than this, or an empty text.
        """
        attached = self.attached
        deadline = time.monotonic() + seconds
        with self._lock:
            self._taken.update(entry.number for path, entry in self._named.items() if not Path(path).exists())
            wanted = [entry for entry in self.ranges if entry.end_ns and entry.number not in self._taken]
            if attached is None or not wanted:
                return ""
            ask = not attached.end.written_by(len(self.ranges)) and not self._asked
            others = self._others_go_on(user, context) if ask else ""
            self._asked = self._asked or (ask and not others)
        if others:
            return others
        if ask:
            problem = self._write_now(attached, seconds)
            if problem:
                self._late = f"nsys writes its reports when the process has ended ({problem})"
        if self._late:
            return self._late
        left = max(0.0, deadline - time.monotonic())
        if self.reports.wait([(attached.stem, entry.number) for entry in wanted], left):
            return ""
        return f"nsys had not written all reports after {seconds:g} seconds (report_wait)"

    def bring_in_for_others(self, user: User) -> None:
        """Roles that were done earlier could not have their reports yet; now they are written."""
        for other in list(_users):
            if other is not user and other.pid == os.getpid() and other.finished:
                with contextlib.suppress(Exception):  # it is told where it happens, and is not this user's fault
                    other.bring_in()

    def _others_go_on(self, user: User, context: Context) -> str:
        """Asking for the reports ends the capture for all roles of the process: not before the last one is done."""
        pid = os.getpid()
        others = [other for other in list(_users) if other is not user and other.pid == pid and not other.finished]
        if self.leaving or not others:
            return ""
        reached = max((entry.steps[-1] if entry.steps else entry.step or 0 for entry in self.ranges), default=0)
        busy = any(other.opened for other in others)
        if busy or not context.steps or reached < context.steps[-1]:
            return "nsys writes the reports when the other roles of this process are done"
        return ""


_users: weakref.WeakSet[Any] = weakref.WeakSet()
_current: tuple[int, NsysSession] | None = None


def register(user: User) -> None:
    """A backend of this process that may open windows."""
    _users.add(user)


def current_session(context: Context) -> NsysSession:
    """The session of this process; made when the first window opens. A forked child gets its own."""
    global _current
    if _current is None or _current[0] != os.getpid():
        session = NsysSession(find_attached(os.environ, os.getpid()), context)
        _current = (os.getpid(), session)
        if session.attached is not None:
            atexit.register(_at_exit, os.getpid(), session)
    return _current[1]


def forget_session() -> None:
    """For tests: as in a new process."""
    global _current
    _current = None
    _users.clear()


def _at_exit(pid: int, session: NsysSession) -> None:
    """Runs before core closes what is open: from here on nobody opens a window any more."""
    if pid != os.getpid():
        return
    session.leaving = True
    for user in list(_users):
        if user.finished and user.pid == pid:
            with contextlib.suppress(Exception):  # as above
                user.bring_in_late()
