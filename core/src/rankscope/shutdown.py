"""The end of a handle: finish once, wait for exports with a deadline, at exit and (opt-in) on SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rankscope import windows
from rankscope.artifacts.exports import exports
from rankscope.finish import FinishCommand, claim_once
from rankscope.host import host_name
from rankscope.log import get_logger, import_nothing_more
from rankscope.topology import run_id
from rankscope.transitions import outside_transition

if TYPE_CHECKING:
    from rankscope.artifacts.store import Store
    from rankscope.profiler import DistProfiler
    from rankscope.types import Artifact

SIGTERM_PATIENCE = 30.0
"""Seconds that SIGTERM waits for a window that another thread is just opening or closing."""

_handles: dict[int, DistProfiler] = {}
_stores_of_closed: dict[str, list[Store]] = {}
_captured_by_closed: set[str] = set()
_commands: list[FinishCommand] = []
_late: list[threading.Thread] = []
_finishing = threading.RLock()
_waiting_to_finish: list[DistProfiler] = []
_pid = 0
_previous: Any = None
_handler_installed = False
_waited_for: _Patience | None = None


def watch(handle: DistProfiler, *, flush_on_sigterm: bool) -> None:
    """From now on the handle is closed at exit, whatever becomes of the program."""
    global _pid, _finishing
    if _pid != os.getpid():
        _pid = os.getpid()
        _finishing = threading.RLock()
        for kept in (_handles, _stores_of_closed, _captured_by_closed, _commands, _late, _waiting_to_finish):
            kept.clear()
        atexit.register(_at_exit, _pid)
        forked = sys.modules.get("multiprocessing.util")
        if forked is not None:  # its children end without atexit, but run these
            forked.Finalize(None, _at_exit, args=(_pid,), exitpriority=0)
    _handles[id(handle)] = handle
    if flush_on_sigterm:
        _install_handler()


def handles() -> tuple[DistProfiler, ...]:
    """The handles of this process that profile something and are not closed."""
    return tuple(_handles.values()) if _pid == os.getpid() else ()


def window_closed() -> None:
    """A window of this process was closed: whoever waits for the last one to finish can do so now."""
    if _waiting_to_finish and _pid == os.getpid():
        outside_transition(_finish_waiting)


def _finish_waiting() -> None:
    waiting = _waiting_to_finish[:]
    _waiting_to_finish.clear()
    for handle in waiting:  # in strict mode, what they raise comes out of their handles' next call
        finish(handle)


def finish(handle: DistProfiler, *, patient: bool = True) -> None:
    """Finish a handle's backends, then run the finish command, once per process and save path.

    Both see complete captures: files that are still being exported after ``finish_hook_wait`` seconds are awaited in
    the background, and what follows is done there; unless not ``patient``: then it was waited long enough.
    """
    if any(str(other.owner.save_path) == str(handle.save_path) for other in windows.opened()):
        if handle not in _waiting_to_finish:
            _waiting_to_finish.append(handle)
        return
    handle.relocate_files(last=True)
    deadline = time.monotonic() + handle.config.global_profiler.finish_hook_wait
    if not command_due(handle) and not any(tool.captured and tool.has("finish") for tool in handle.tools):
        return
    if patient and not exports().drain(max(0.0, deadline - time.monotonic())) and _finish_later(handle):
        return
    _finish_now(handle, deadline)


def _finish_later(handle: DistProfiler) -> bool:
    """Wait for exports in the background. False: no thread can be started any more."""

    def wait_and_finish() -> None:
        exports().drain(handle.config.global_profiler.finish_hook_timeout)
        _finish_now(handle, 0.0)

    thread = threading.Thread(target=wait_and_finish, name="rankscope-exports", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is on its way out, so there is no training that would wait
        exports().drain(handle.config.global_profiler.close_timeout)
        return False
    _late.append(thread)
    return True


def _finish_now(handle: DistProfiler, deadline: float) -> None:
    with _finishing:
        handle.finish_backends()
        running = run_command(handle)
    if running is not None:
        running.wait(max(0.0, deadline - time.monotonic()))


def run_command(handle: DistProfiler, others: Sequence[Artifact] = ()) -> FinishCommand | None:
    """Run a handle's finish command in the background; None where it has none, or where it has run.

    Args:
        handle: gives the command and what it is told.
        others: files of other processes that this one speaks for.
    """
    command = command_due(handle)
    if not command or not claim_once(handle.save_path):
        return None
    running = FinishCommand(
        command,
        save_path=handle.save_path,
        tool=",".join(handle.section.tools),
        role=handle.role,
        rank=handle.rank,
        step=handle.last_step,
        steps=handle.config.global_profiler.steps,
        world_size=handle.world_size,
        host=host_name(),
        run_id=run_id(),
        artifacts=[*_artifacts(handle.save_path), *others],
        timeout=handle.config.global_profiler.finish_hook_timeout,
        ledger=handle.ledger,
    )
    _commands.append(running)
    running.start()
    return running


def _artifacts(save_path: Path) -> list[Artifact]:
    """All files of this process below a save path, also those of handles that are closed."""
    exports().poll()
    closed = [artifact for store in _stores_of_closed.get(str(save_path), ()) for artifact in store.artifacts]
    handles = [handle for handle in list(_handles.values()) if handle.save_path == save_path]
    return closed + [artifact for handle in handles for artifact in handle.artifacts]


def command_due(handle: DistProfiler) -> Any:
    """The finish command, if this rank is to run it: it captured something, or was asked for by name."""
    command = handle.section.finish_hook_cmd
    if not command:
        return None
    selection = handle.section.finish_ranks.selects(
        handle.rank,
        world_size=handle.world_size,
        topology=handle.place.dimensions,
        topology_sizes=handle.place.sizes,
        local_rank=handle.place.local_rank,
    )
    named = handle.section.finish_hook_all_ranks or handle.section.finish_hook_ranks
    return command if selection.selected and (named or captured(handle)) else None


def captured(handle: DistProfiler) -> bool:
    """Whether any role of this process captured something into the handle's save path."""
    return str(handle.save_path) in _captured_by_closed or any(
        tool.captured
        for other in list(_handles.values())
        if other.save_path == handle.save_path
        for tool in other.tools
    )


def close(handle: DistProfiler, timeout: float | None = None, *, reason: str = "closed") -> None:
    """End a handle: save what is open, finish what is due, wait for the helper, say what came of it."""
    with handle.raised_at_end():
        limit = handle.config.global_profiler.close_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        handle.stop_open(reason)
        logger = handle.logger
        done = exports().drain(
            max(0.0, deadline - time.monotonic()),
            lambda files, seconds: logger.info("waiting for exports", files=files, seconds=round(seconds)),
        )
        if not done:
            logger.warning(
                "exports are not finished yet; the helper process goes on after this process has ended",
                files=exports().pending,
                waited_seconds=limit,
            )
        if captured(handle):
            finish(handle, patient=done)
        for thread in _late[:]:
            thread.join(0.0 if not done else None)
        for command in _commands[:]:
            if command.wait(0.0) is None:
                logger.info("waiting for the finish command")
                command.wait()
        handle.record("close", last_step=handle.last_step, reason=reason)
        if captured(handle):
            _captured_by_closed.add(str(handle.save_path))
        _stores_of_closed.setdefault(str(handle.save_path), []).extend(handle.stores)
        _handles.pop(id(handle), None)
        handle.closed = True
        _summarise(handle)
        if not _handles:
            exports().end()


def _summarise(handle: DistProfiler) -> None:
    """One line for what came out, and a warning where something was asked for and nothing did."""
    if not handle.selected:
        return
    files = handle.artifacts
    faults = Counter(fault.tool for fault in handle.faults)
    for tool, count in faults.items():
        handle.logger.warning("this tool had faults and was switched off", tool=tool, faults=count)
    if files:
        handle.logger.info(
            "captured", files=len(files), bytes=sum(file.bytes for file in files), save_path=handle.save_path
        )
    elif not handle.joined:
        handle.logger.warning(
            "profiling was on for this rank and left no file",
            reason=handle.why_nothing(),
            steps=list(handle.config.global_profiler.steps),
            save_path=str(handle.save_path),
        )


def _at_exit(pid: int) -> None:
    if pid != os.getpid():
        return
    import_nothing_more()
    _close_all("exit")
    exports().end()


def _close_all(reason: str) -> None:
    for handle in list(_handles.values()):
        try:
            close(handle, reason=reason)
        except Exception as error:  # noqa: BLE001, PERF203 - one handle must not keep the others from being saved
            get_logger().error("a handle could not be closed", role=handle.role, why=reason, exc_info=error)


# SIGTERM, for those who ask for it.


def _install_handler() -> None:
    global _previous, _handler_installed
    if _handler_installed:
        return
    if threading.current_thread() is not threading.main_thread():
        get_logger().warning("flush_on_sigterm has no effect: the handle was made outside the main thread")
        return
    _previous = signal.signal(signal.SIGTERM, _on_sigterm)
    _handler_installed = True


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _waited_for
    if _waited_for is not None and _waited_for.expired:  # a thread hangs in a tool: it is not waited for again
        _flush_and_pass_on(number, frame)
        return
    # In the middle of opening or closing a window, torch for one is not in a state to be stopped: wait for its end.
    patience = _Patience()
    _waited_for = patience

    def now() -> None:
        patience.cancel()
        _flush_and_pass_on(number, frame)

    if not outside_transition(now):
        with contextlib.suppress(RuntimeError):  # at the end of the interpreter no thread can be started any more
            patience.start()


class _Patience(threading.Thread):
    """Raises SIGTERM again when what has to be waited for takes too long: a tool may hang, and the process must end.

    Attributes:
        expired: whether it did.
    """

    def __init__(self) -> None:
        super().__init__(name="rankscope-sigterm", daemon=True)
        self.expired = False
        self._done = threading.Event()

    def cancel(self) -> None:
        """It happened in time."""
        self._done.set()

    def run(self) -> None:
        """Wait."""
        if not self._done.wait(SIGTERM_PATIENCE):
            self.expired = True
            os.kill(os.getpid(), signal.SIGTERM)


def _flush_and_pass_on(number: int, frame: FrameType | None) -> None:
    global _handler_installed
    if threading.current_thread() is not threading.main_thread():  # the transition that it waited for was a thread's
        os.kill(os.getpid(), number)
        return
    if _pid == os.getpid():
        _close_all("SIGTERM")
    _handler_installed = False
    if callable(_previous):
        signal.signal(number, _previous)
        _previous(number, frame)
    elif _previous is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
