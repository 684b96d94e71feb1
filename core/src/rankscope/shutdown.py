"""The end of a handle: finish once, wait for exports with a deadline, at exit and (opt-in) on SIGTERM."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections import Counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from rankscope import windows
from rankscope.artifacts.exports import exports
from rankscope.finish import FinishCommand, claim_once
from rankscope.log import get_logger
from rankscope.topology import host_name, run_id

if TYPE_CHECKING:
    from rankscope.profiler import DistProfiler

_handles: dict[int, DistProfiler] = {}
_commands: list[FinishCommand] = []
_waiting_to_finish: list[DistProfiler] = []
_pid = 0
_previous: Any = None
_handler_installed = False


def watch(handle: DistProfiler, *, flush_on_sigterm: bool) -> None:
    """From now on the handle is closed at exit, whatever becomes of the program."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        _handles.clear()
        _commands.clear()
        _waiting_to_finish.clear()
        atexit.register(_at_exit, _pid)
    _handles[id(handle)] = handle
    if flush_on_sigterm:
        _install_handler()


def window_closed() -> None:
    """A window of this process was closed: whoever waits for the last one to finish can do so now."""
    if _waiting_to_finish and not windows.opened():
        waiting = _waiting_to_finish[:]
        _waiting_to_finish.clear()
        for handle in waiting:
            handle.finish()


def finish(handle: DistProfiler) -> None:
    """Finish a handle's backends, then run the finish command, once per process and save path."""
    if any(str(other.owner.save_path) == str(handle.save_path) for other in windows.opened()):
        if handle not in _waiting_to_finish:
            _waiting_to_finish.append(handle)
        return
    handle.relocate()
    deadline = time.monotonic() + handle.config.global_profiler.finish_hook_wait
    command = _command_due(handle)
    if command or any(tool.captured and tool.has("finish") for tool in handle.tools):
        exports().drain(max(0.0, deadline - time.monotonic()))
    handle.finish_backends()
    if not command or not claim_once(handle.save_path):
        return
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
        artifacts=[
            artifact
            for other in _handles.values()
            if other.save_path == handle.save_path
            for artifact in other.artifacts
        ],
        timeout=handle.config.global_profiler.finish_hook_timeout,
        ledger=handle.ledger,
    )
    _commands.append(running)
    running.start()
    running.wait(max(0.0, deadline - time.monotonic()))


def _command_due(handle: DistProfiler) -> Any:
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
    return any(
        tool.captured for other in _handles.values() if other.save_path == handle.save_path for tool in other.tools
    )


def close(handle: DistProfiler, timeout: float | None = None, *, reason: str = "closed") -> None:
    """End a handle: save what is open, finish what is due, wait for the helper, say what came of it."""
    with handle.raised_at_end():
        limit = handle.config.global_profiler.close_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        handle.stop_open(reason)
        if captured(handle):
            handle.finish()
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
        for command in _commands:
            if command.wait(0.0) is None:
                logger.info("waiting for the finish command")
                command.wait()
        handle.record("close", last_step=handle.last_step, reason=reason)
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
    # In the middle of opening or closing a window, torch for one is not in a state to be stopped: wait for its end.
    windows.outside_transition(lambda: _flush_and_pass_on(number, frame))


def _flush_and_pass_on(number: int, frame: FrameType | None) -> None:
    global _handler_installed
    _close_all("SIGTERM")
    _handler_installed = False
    if callable(_previous):
        signal.signal(number, _previous)
        _previous(number, frame)
    elif _previous is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
