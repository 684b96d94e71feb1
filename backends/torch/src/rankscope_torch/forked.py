"""Forked children of a process in which torch's profiler has run.

Libkineto keeps a thread for the rest of the process's life. A forked child does not have that thread, yet inherits the
static object that waits for it: at the child's ordinary end the C++ teardown aborts or hangs (torch 2.13.0, also with
torch's profiler alone and long after it was stopped). Children that end by ``os._exit``, such as those of
multiprocessing, never get there; with this guard the others do not either.
"""

from __future__ import annotations

import ctypes
import functools
import os


@functools.cache
def guard_children() -> None:
    """From now on a forked child skips the C++ teardown at its end; Python's own end, output and exit status stay."""
    os.register_at_fork(after_in_child=_skip_static_teardown)


def _skip_static_teardown() -> None:
    """Ask the C library to flush its streams and leave, after Python has ended and before static objects are torn down.

    Exit functions run last in, first out, and glibc's ``on_exit`` passes the exit status on, so ``_exit`` itself can be
    the function. A C library without it is left as it is.
    """
    try:
        libc = ctypes.CDLL(None)
        on_exit, at_exit = libc.on_exit, libc.__cxa_atexit  # noqa: SLF001
        leave = ctypes.cast(libc._exit, ctypes.c_void_p)  # noqa: SLF001
        flush = ctypes.cast(libc.fflush, ctypes.c_void_p)
    except (OSError, AttributeError):
        return
    on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    at_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    on_exit(leave, None)
    at_exit(flush, None, None)
