"""The process's open windows.

Profilers such as torch's are process-global, so the process is the unit: a tool is open here at most once, whatever
roles live in the process. A second handle that starts the same tool joins; spans and steps reach every open tool, from
any handle or none.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rankscope.annotate import ExcInfo, current_stage, forget_running, is_batch, set_sinks
from rankscope.dispatch import Tool
from rankscope.types import Logger, Span, Window

_ids = itertools.count(1)
_lock = threading.RLock()
_open: dict[str, OpenTool] = {}
_transitions = 0
_after_transition: list[Callable[[], None]] = []


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


def new_window(role: str, **facts: Any) -> Window:
    """A window with the next id of this process."""
    return Window(id=next(_ids), role=role, started_ns=time.time_ns(), **facts)


@dataclasses.dataclass(eq=False)
class _Shown:
    """What one tool holds of a running span."""

    context: Any
    opened: bool


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

    # Spans: the methods of a SpanSink.

    def enter(self, span: Span) -> object:
        """Show a span; in discrete mode a stage opens a window first, unless it runs inside one."""
        if self._wanted is not None and self._settle():
            return None
        opened = False
        if self.window is None:
            if is_batch(span.stage) or not self._open_stage(span):
                return None
            opened = True
        show = self.tool.annotate
        if show is None or not self.tool.on:
            return _Shown(None, opened) if opened else None
        try:
            context = show(span)
            if context is not None:
                context.__enter__()
        except Exception as error:  # noqa: BLE001 - a backend's fault must not reach the stage
            self.fault("annotate", error)
            return None
        return _Shown(context, opened) if opened or context is not None else None

    def leave(self, span: Span, token: object, error: ExcInfo) -> Exception | None:  # noqa: ARG002
        """End a span; what a backend's ``__exit__`` returns cannot swallow the body's exception."""
        if self._forgotten:
            return None
        if isinstance(token, _Shown):
            if token.context is not None:
                try:
                    token.context.__exit__(*error)
                except Exception as fault:  # noqa: BLE001 - as in enter
                    self.fault("annotate", fault)
            if token.opened:
                self._close_stage()
        if self._wanted is not None:
            self._settle()
        return self.tool.faults.take()

    def mini_batch(self, span: Span | None) -> None:
        """One update mini-batch is done."""
        if self._wanted is not None and self._settle():
            return
        if self.window is not None:
            returned, _ = self.tool.call("step", self.window, span, step=self.step)
            if not returned:
                self._give_up()

    def advance(self, step: int) -> None:
        """The next training step begins inside this window."""
        if self.step == step:
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
        self.window = None
        if aborted:
            window = dataclasses.replace(window, scope=f"{window.scope}-aborted")
        try:
            self.tool.call("stop", window, step=window.step)
        finally:
            self._record_window("close", window, aborted=aborted)
            self.owner.window_closed(self.tool, window)

    def forget(self) -> None:
        """In a forked child: the window is the parent's, whatever span of it still returns here."""
        self.window, self._step_row, self._wanted, self._forgotten = None, None, None, True

    def fault(self, hook: str, error: Exception) -> None:
        """A backend raised in an open window: off, after one attempt to stop it."""
        self.tool.fault(hook, error, self.step)
        self._give_up()

    def _give_up(self) -> None:
        window, self.window = self.window, None
        with transition():
            if window is not None:
                self.tool.last_stop(window)
                self._record_window("close", window, reason="fault")
                self.owner.window_closed(self.tool, window)
            _drop(self)

    def _open_stage(self, span: Span) -> bool:
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
                return True
            _drop(self)
            return False

    def _role_of(self, span: Span) -> str:
        """A stage's file belongs to the role whose worker runs it, where that worker's handle takes part."""
        handle = getattr(span.instance, "profiler", None)
        return handle.role if handle in self.joined else self.owner.role

    def _close_stage(self) -> None:
        with transition():
            if self._must_hop():
                self._wanted = self._wanted or "stage"
                self._tell_hop()
            else:
                self.end()

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
        self._wanted, self._aborted = "tool", aborted
        self._tell_hop()
        return True

    def _settle(self) -> bool:
        """On the owner's thread: carry out a stop that another thread asked for."""
        if threading.get_ident() != self.thread:
            return False
        wanted, self._wanted = self._wanted, None
        with transition():
            if wanted == "tool":
                close(self, aborted=self._aborted)
            elif wanted == "stage":
                self.end()
        return wanted is not None


# The process.


@contextmanager
def transition() -> Iterator[None]:
    """While a window opens or closes: one thread at a time, and a signal handler that wants to close has to wait."""
    global _transitions
    with _lock:
        _transitions += 1
        try:
            yield
        finally:
            _transitions -= 1
            waiting = _after_transition[:] if _transitions == 0 else []
            if waiting:
                _after_transition.clear()
    for action in waiting:
        action()


def outside_transition(action: Callable[[], None]) -> None:
    """Run an action now, or as soon as the window that is just opening or closing has done so (for signal handlers)."""
    if _transitions:
        _after_transition.append(action)
    else:
        action()


def find(tool: str) -> OpenTool | None:
    """The open tool of that name in this process."""
    return _open.get(tool)


def opened() -> tuple[OpenTool, ...]:
    """All open tools of this process, in the order in which they were started."""
    return tuple(_open.values())


def start(tool: Tool, owner: Owner, window: Window) -> OpenTool | None:
    """Open a tool for a handle, or join the handle that has it open. None: it could not be started."""
    with transition():
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
        if tool.discrete:
            new.thread, new.thread_name = threading.get_ident(), threading.current_thread().name
        elif not new.begin(window):
            return None
        _open[tool.name] = new
        _show()
        return new


def stop(tool: str, owner: Owner, *, aborted: bool = False) -> bool:
    """A handle stops a tool: its own is closed, a joined one is left.

    Returns:
        False when the stop is carried over to the thread that owns the window.
    """
    with transition():
        current = _open.get(tool)
        if current is None:
            return True
        if current.owner is not owner:
            current.joined = [handle for handle in current.joined if handle is not owner]
            return True
        if current.ask_to_stop(aborted=aborted):
            return False
        close(current, aborted=aborted)
        return True


def close(current: OpenTool, *, aborted: bool = False) -> None:
    """Close an open tool on this thread."""
    with transition():
        if _open.get(current.tool.name) is current:
            _drop(current)
            current.end(aborted=aborted)


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
    set_sinks(tuple(current for current in _open.values() if current.tool.discrete or current.tool.annotate))


def _forget() -> None:
    """After fork the child starts clean: the windows belong to the parent."""
    global _lock, _transitions
    _lock = threading.RLock()
    _transitions = 0
    _after_transition.clear()
    for current in _open.values():
        current.forget()
    _open.clear()
    _show()
    forget_running()


os.register_at_fork(after_in_child=_forget)
