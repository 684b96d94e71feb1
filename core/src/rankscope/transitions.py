"""Opening and closing windows: one thread at a time, never interrupted half-way, and never waited for without end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

PATIENCE = 60.0
"""Most seconds that a thread waits for another one that is opening or closing a window: a tool may hang in that."""

_lock = threading.RLock()
_stuck = False
_transitions = 0
_after_transition: list[Callable[[], None]] = []


class BusyError(Exception):
    """Another thread has been opening or closing a window for so long that nobody waits for it any more."""

    def __init__(self) -> None:
        super().__init__("another thread has not come back from starting or stopping a tool")


@contextlib.contextmanager
def transition() -> Iterator[None]:
    """While a window opens or closes: one thread at a time, and a signal handler that wants to close has to wait.

    Raises:
        BusyError: another thread takes too long; from then on, and until it is done, this is found out at once.
    """
    global _transitions, _stuck
    lock = _lock  # after a fork in the middle, the child has another one
    waiting: list[Callable[[], None]] = []
    if not lock.acquire(timeout=0.0 if _stuck else PATIENCE):
        _stuck = True
        raise BusyError
    _stuck = False
    try:
        try:
            _transitions += 1
            try:
                yield
            finally:
                _transitions = max(0, _transitions - 1)  # after a fork in between, the child began with 0
                if _transitions == 0:
                    waiting += _after_transition
                    _after_transition.clear()
        finally:
            lock.release()
    finally:
        for action in waiting:
            action()


def outside_transition(action: Callable[[], None]) -> bool:
    """Run an action now, or as soon as the window that is just opening or closing has done so (for signal handlers).

    Returns:
        Whether it has run.
    """
    if _transitions:
        _after_transition.append(action)
        return False
    action()
    return True


def _forget() -> None:
    """After fork the child starts clean: whoever held the lock is not there."""
    global _lock, _stuck, _transitions
    _lock, _stuck, _transitions = threading.RLock(), False, 0
    _after_transition.clear()


os.register_at_fork(after_in_child=_forget)
