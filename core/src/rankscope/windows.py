"""The process's open windows.

Profilers such as torch's are process-global, so the process is the unit: a tool is open here at most once, whatever
roles live in the process. A second handle that starts the same tool joins; spans and steps reach every open tool, from
any handle or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rankscope.annotate import ExcInfo, current_stage, forget_running, set_sinks
from rankscope.dispatch import Tool
from rankscope.errors import FaultError
from rankscope.transitions import BusyError, transition
from rankscope.types import Logger, Span, Window

_ids = itertools.count(1)
_open: dict[str, OpenTool] = {}


class Owner(Protocol):
    """The handle that opened a tool: what this module needs of it."""

    role: str
    rank: int
    save_path: Path
    logger: Logger

    def record(self, kind: str, **facts: Any) -> None:
        """Write a ledger line with the handle's role and rank."""

    def window_closed(self, tool: Tool, window: Window) -> None:
        """A window of the tool was stopped."""

    def window_missed(self, tool: Tool, window: Window, reason: str) -> None:
        """A window of the tool could not be opened."""


def new_window(role: str, **facts: Any) -> Window:
    """A window with the next id of this process."""
    return Window(id=next(_ids), role=role, started_ns=time.time_ns(), **facts)


@dataclasses.dataclass(eq=False)
class _Opened:
    """What a tool holds of a span for which it opened a window; of any other it holds the context itself."""

    context: Any


class OpenTool:
    """A tool that a handle has started in this process.

    Attributes:
        tool: the backend and its policy.
        owner: the handle that started it; only its stop closes it.
        train: the window of the whole step; in discrete mode only its facts are used.
        window: what is being captured now; None while a discrete tool waits for a stage.
        thread: ident of the thread that started the window.
        joined: other handles of this process that started the same tool meanwhile.
    """

    def __init__(self, tool: Tool, owner: Owner, train: Window) -> None:
        self.tool = tool
        self.owner = owner
        self.train = train
        self.window: Window | None = None
        self.thread = 0
        self.thread_name = ""
        self.joined: list[Owner] = []
        self.step = train.step
        self._step_row: Any = None
        self._wanted: str | None = None
        self._aborted = False
        self._forgotten = False
        self._told_busy = False
        self._check: Callable[[], str | None] | None = None
        self._early = ""
        self._inside = False  # a stage that opened a window still runs, even if its window has ended already

    # Spans: the methods of a SpanSink.

    def enter(self, span: Span) -> object:
        """Show a span; in discrete mode a stage opens a window first, unless it runs inside one."""
        if self._wanted is not None and self._settle():
            return None
        if self._check is not None and self._look():
            return None
        opened = False
        if self.window is None:
            if span.is_batch or self._inside:
                return None
            opened = self._open_stage(span)
            if self.window is None:  # else another thread was faster: a range in its window
                return None
        tool = self.tool
        show = tool.annotate
        if show is None or not tool.on:
            return _Opened(None) if opened else None
        try:
            context = show(span)
            if context is not None:
                context.__enter__()
        except Exception as error:  # noqa: BLE001 - a backend's fault must not reach the stage
            self.fault("annotate", error)
            return None
        return _Opened(context) if opened else context

    def leave(self, span: Span, token: Any, error: ExcInfo) -> FaultError | None:  # noqa: ARG002
        """End a span; what a backend's ``__exit__`` returns cannot swallow the body's exception."""
        if self._forgotten:
            return None
        if token is not None:
            opened = token.__class__ is _Opened
            context = token.context if opened else token
            if context is not None:
                try:
                    context.__exit__(*error)
                except Exception as fault:  # noqa: BLE001 - as in enter
                    if self.tool.on:  # else it is the echo of a fault that was told; it is left all the same
                        self.fault("annotate", fault)
            if opened:
                self._inside = False
                self._close_stage()
        if self._wanted is not None:
            self._settle()
        elif self._check is not None:
            self._look()
        faults = self.tool.faults
        return faults.take() if faults.faults else None

    def mini_batch(self, span: Span | None) -> None:
        """One update mini-batch is done."""
        if self._wanted is not None and self._settle():
            return
        window = self.window
        if window is None:
            return
        # A tool may save a file in this: a signal handler that wants to close has to wait for it, too.
        with contextlib.suppress(BusyError), transition():
            if self.window is not window:
                return
            returned, _ = self.tool.call("step", window, span, step=self.step)
            if not returned:
                self._give_up()
            elif self._check is not None:
                self._look()

    def advance(self, step: int) -> None:
        """The next training step begins inside this window."""
        if self.step == step:
            return
        if self._check is not None and self._look() and not self.tool.discrete:
            return
        self._end_step_row()
        self.step = step
        self.train = dataclasses.replace(self.train, step=step) if self.tool.discrete else self.train
        self._begin_step_row()

    # Windows.

    def begin(self, window: Window) -> bool:
        """Start the backend on a window. False: it failed and is off."""
        self.thread, self.thread_name = threading.get_ident(), threading.current_thread().name
        self._record_window("open", window)
        returned, _ = self.tool.call("start", window, step=window.step)
        if not returned:
            self._record_window("close", window, reason="start failed")
            return False
        self.tool.captured = True
        self.window = window
        self._check = self.tool.budget()
        self._begin_step_row()
        return self.window is not None

    def end(self, *, aborted: bool = False) -> None:
        """Stop the backend on its window."""
        window = self.window
        if window is None:
            return
        self._end_step_row()
        if self.window is None:  # the row's end was a fault, and the window ended with it
            return
        self.window, self._check = None, None
        early, self._early = self._early, ""
        if early:
            window = dataclasses.replace(window, ended=early)
            self.owner.logger.warning(
                "a window was ended early and saved", tool=self.tool.name, step=window.step, reason=early
            )
        if aborted:
            window = dataclasses.replace(window, scope=f"{window.scope}-aborted")
        try:
            if self.tool.on:
                self.tool.call("stop", window, step=window.step)
            else:  # a fault outside the window switched it off, and yet it is started
                self.tool.last_stop(window)
        finally:
            self._record_window("close", window, aborted=aborted, **({"reason": early} if early else {}))
            self.owner.window_closed(self.tool, window)

    def forget(self) -> None:
        """In a forked child: the window is the parent's, whatever span of it still returns here."""
        self.window, self._step_row, self._wanted, self._forgotten = None, None, None, True

    def fault(self, hook: str, error: Exception) -> None:
        """A backend raised in an open window: off, after one attempt to stop it."""
        self.tool.fault(hook, error, self.step)
        # A span may end after its window: by then the tool can be open anew, and that is what has to be stopped.
        current = _open.get(self.tool.name)
        holder = current if current is not None and current.tool is self.tool else self
        holder._give_up()  # noqa: SLF001

    def _give_up(self) -> None:
        window, self.window = self.window, None
        row, self._step_row = self._step_row, None
        with contextlib.suppress(BusyError), transition():
            if row is not None:
                with contextlib.suppress(Exception):
                    row.__exit__(None, None, None)
            if window is not None:
                self.tool.last_stop(window)
                self._record_window("close", window, reason="fault")
                self.owner.window_closed(self.tool, window)
            _drop(self)

    def _open_stage(self, span: Span) -> bool:
        try:
            return self._open_stage_now(span)
        except BusyError as busy:
            if not self._told_busy:
                self._told_busy = True
                self.owner.logger.warning(
                    "a stage is not captured", tool=self.tool.name, step=self.step, stage=span.stage, reason=str(busy)
                )
            return False

    def _open_stage_now(self, span: Span) -> bool:
        with transition():
            if self.window is not None or _open.get(self.tool.name) is not self:
                return False
            window = new_window(
                self._role_of(span),
                step=self.train.step,
                steps=(self.train.step,) if self.train.step is not None else (),
                scope=span.stage,
                reason="stage",
                scheduled=span.scheduled,
            )
            if self.begin(window):
                self._inside = True
                return True
            _drop(self)
            return False

    def _look(self) -> bool:
        """Whether the window has had enough; then it is ended and saved, by the thread that may do so."""
        window, check = self.window, self._check
        if window is None or check is None or self._wanted is not None:
            return False
        try:
            reason = check()
        except Exception as error:  # noqa: BLE001 - as in enter
            self.fault("over_budget", error)
            return True
        if not reason:
            return False
        with contextlib.suppress(BusyError), transition():
            if self.window is not window:
                return False
            self._early = str(reason)
            if self._must_hop():
                self._wanted = "stage" if self.tool.discrete else "tool"
                return False
            if self.tool.discrete:
                self.end()
            else:
                close(self)
            return True
        return False

    def _role_of(self, span: Span) -> str:
        """A stage's file belongs to the role whose worker runs it, where that worker's handle takes part."""
        try:
            handle = getattr(span.instance, "profiler", None)
        except Exception:  # noqa: BLE001 - a property of the user's object
            handle = None
        return next((joined.role for joined in self.joined if joined is handle), self.owner.role)

    def _close_stage(self) -> None:
        try:
            with transition():
                if self._must_hop():
                    self._wanted = self._wanted or "stage"
                    self._tell_hop()
                else:
                    self.end()
        except BusyError:
            self._wanted = self._wanted or "stage"  # this thread tries again when it comes by

    def _begin_step_row(self) -> None:
        show = self.tool.annotate
        if show is None or self.step is None or self.window is None or not self.tool.on:
            return
        try:
            row = show(Span(stage=f"step{self.step}", step=self.step))
            if row is not None:
                row.__enter__()
            self._step_row = row
        except Exception as error:  # noqa: BLE001 - as in enter
            self.fault("annotate", error)

    def _end_step_row(self) -> None:
        row, self._step_row = self._step_row, None
        if row is None:
            return
        try:
            row.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - as in enter
            self.fault("annotate", error)

    def _record_window(self, event: str, window: Window, **facts: Any) -> None:
        roles = [self.owner.role, *(handle.role for handle in self.joined)]
        self.owner.record(
            "window",
            event=event,
            window=window.id,
            tool=self.tool.name,
            step=window.step,
            steps=window.steps,
            scope=window.scope,
            why=window.reason,
            roles=roles,
            **facts,
        )

    # Threads.

    def _must_hop(self) -> bool:
        """Whether a stop here would tear a profiler that only its own thread can stop."""
        return (
            self.window is not None
            and self.tool.thread_bound
            and self.thread != threading.get_ident()
            and any(thread.ident == self.thread for thread in threading.enumerate())
        )

    def _tell_hop(self) -> None:
        self.owner.logger.info(
            f"{self.tool.name} was started on thread {self.thread_name!r} and asked to stop on "
            f"{threading.current_thread().name!r}; the stop is carried out on {self.thread_name!r} at its next "
            "annotated call, step or stop",
            step=self.step,
        )

    def ask_to_stop(self, *, aborted: bool) -> bool:
        """From a foreign thread: leave the stop to the owner's next boundary. False: this thread may stop it."""
        if not self._must_hop():
            return False
        if self._wanted != "tool":
            self._wanted, self._aborted = "tool", aborted
            self._tell_hop()
            _show()  # its own thread has to come by, also at the spans of a tool that shows none
        return True

    @property
    def limited(self) -> bool:
        """Whether something may end the window early: then it looks at spans also for a tool that shows none."""
        return self._check is not None

    @property
    def stopping(self) -> bool:
        """Whether it only waits for the thread that has to stop it."""
        return self._wanted == "tool"

    def settle_now(self) -> bool:
        """Before another window: carry out a stop that still waits. False: only a thread that is busy can do that."""
        if self._wanted != "tool" or self._settle():
            return True
        if self._must_hop():
            return False
        try:
            close(self, aborted=self._aborted)
        except BusyError:
            return False
        return True

    def _settle(self) -> bool:
        """On the owner's thread: carry out a stop that another thread asked for."""
        if threading.get_ident() != self.thread:
            return False
        wanted = self._wanted
        with contextlib.suppress(BusyError), transition():
            self._wanted = None
            if wanted == "tool":
                close(self, aborted=self._aborted)
            elif wanted == "stage":
                self.end()
            return wanted == "tool"
        return False


# The process.


def find(tool: str) -> OpenTool | None:
    """The open tool of that name in this process."""
    return _open.get(tool)


def opened() -> tuple[OpenTool, ...]:
    """All open tools of this process, in the order in which they were started."""
    return tuple(_open.values())


def start(tool: Tool, owner: Owner, window: Window) -> OpenTool | None:
    """Open a tool for a handle, or join the handle that has it open. None: it could not be started."""
    try:
        return _start(tool, owner, window)
    except BusyError as busy:
        owner.window_missed(tool, window, str(busy))
        return None


def _start(tool: Tool, owner: Owner, window: Window) -> OpenTool | None:
    with transition():
        other = _open.get(tool.name)
        if other is not None and not other.settle_now():
            reason = f"the window before it is still open: thread {other.thread_name!r}, which has to stop it, is busy"
            owner.window_missed(tool, window, reason)
            return None
        other = _open.get(tool.name)
        if other is not None:
            if owner is not other.owner and owner not in other.joined:
                other.joined.append(owner)
                owner.record(
                    "join", tool=tool.name, step=window.step, owner_role=other.owner.role, window=other.train.id
                )
            return other
        if not tool.on:
            return None
        new = OpenTool(tool, owner, window)
        _open[tool.name] = new
        try:
            if tool.discrete:
                new.thread, new.thread_name = threading.get_ident(), threading.current_thread().name
            elif not new.begin(window):
                _drop(new)
                return None
        except BaseException:  # a KeyboardInterrupt: what is started by now has to be stopped at the end
            if new.window is None:
                _drop(new)
            raise
        _show()
        return new


def stop(tool: str, owner: Owner, *, aborted: bool = False) -> bool:
    """A handle stops a tool: its own is closed, a joined one is left.

    Returns:
        False when the stop is carried over to the thread that owns the window, or cannot be carried out.
    """
    try:
        return _stop(tool, owner, aborted=aborted)
    except BusyError as busy:
        # What the other thread hangs in is a tool that it has taken out already. The rest is ours to save: a torch
        # profiler that is never stopped crashes the process when that ends.
        current = _open.get(tool)
        if current is None or current.owner is not owner:
            return True
        if current._must_hop():  # noqa: SLF001
            owner.logger.warning("a window could not be stopped", tool=tool, reason=str(busy))
            return False
        if _open.pop(tool, None) is current:
            _show()
            current.end(aborted=aborted)
        return True


def _stop(tool: str, owner: Owner, *, aborted: bool) -> bool:
    with transition():
        current = _open.get(tool)
        if current is None:
            return True
        if current.owner is not owner:
            current.joined = [handle for handle in current.joined if handle is not owner]
            return True
        if current.ask_to_stop(aborted=aborted):
            return False
        close(current, aborted=current._aborted if current.stopping else aborted)  # noqa: SLF001
        return True


def close(current: OpenTool, *, aborted: bool = False) -> None:
    """Close an open tool on this thread.

    Raises:
        BusyError: as of ``transition``.
    """
    with transition():
        if _open.get(current.tool.name) is current:
            _drop(current)
            current.end(aborted=aborted)


def close_all_of(owner: Owner, timeout: float) -> tuple[OpenTool, ...]:
    """At the end of a handle: what it still has open is a stop that waits for another thread, which gets a moment.

    Returns:
        What is open even then: only a thread that is busy could stop it.
    """
    deadline = time.monotonic() + timeout
    while True:
        rest = tuple(current for current in opened() if current.owner is owner and not current.settle_now())
        if not rest or time.monotonic() >= deadline:
            return rest
        time.sleep(0.01)


def step() -> None:
    """One update mini-batch is done, in every open window of the process."""
    span = current_stage()
    for current in opened():
        current.mini_batch(span)


def _drop(current: OpenTool) -> None:
    if _open.get(current.tool.name) is current:
        del _open[current.tool.name]
        _show()


def _show() -> None:
    set_sinks(
        tuple(
            current
            for current in _open.values()
            if current.tool.discrete or current.tool.annotate or current.stopping or current.limited
        )
    )


def _forget() -> None:
    """After fork the child starts clean: the windows belong to the parent."""
    for current in _open.values():
        current.forget()
    _open.clear()
    _show()
    forget_running()


os.register_at_fork(after_in_child=_forget)
