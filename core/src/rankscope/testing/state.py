"""What a process is like: its switches, its random numbers, and what it holds. A window leaves all of it as it was."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import gc
import logging
import os
import random
import resource
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankscope.testing.rules import RuleBroken

_OWN = "rankscope"
"""Threads of core are named like this."""

_TO_SETTLE = 3.0
"""Seconds in which what a window began may still end: a thread, a child, a file that is handed over."""

_RESTORE = "note it in start() and put it back in stop(), also where stop() fails; else leave it to the training"
_DRAW = "use a generator of your own, e.g. random.Random(): the training's results must not depend on the profiler"
_LET_GO = "close, join and wait in stop() for what start() took: a long run has many windows"
_PRINT = "write to the tool's file, or log it: standard output is the training's, and programs read it"


# Switches: everything that has one value.


def switches() -> dict[str, Any]:
    """The value of each switch of this process that a tool could turn, by its name."""
    return {**_of_python(), **_of_the_system(), **_of_torch()}


def require_same_switches(before: Mapping[str, Any], moment: str) -> None:
    """They are now as they were then.

    Raises:
        RuleBroken: one differs.
    """
    now = switches()
    for name, value in before.items():
        if name in now and not _same(value, now[name]):
            raise RuleBroken(f"{name} is another one {moment}: {_short(now[name])}, not {_short(value)}", _RESTORE)


def _of_python() -> dict[str, Any]:
    found: dict[str, Any] = {
        "sys.stdin": sys.stdin,
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "sys.gettrace()": sys.gettrace(),
        "sys.getprofile()": sys.getprofile(),
        "threading.gettrace()": threading.gettrace(),
        "threading.getprofile()": threading.getprofile(),
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "sys.path": list(sys.path),
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "sys.getswitchinterval()": sys.getswitchinterval(),
        "gc.isenabled()": gc.isenabled(),
        "gc.get_threshold()": gc.get_threshold(),
        "logging.root.manager.disable": logging.root.manager.disable,
        "the level of the root logger": logging.root.level,
        "the root logger's handlers": list(logging.root.handlers),
        "warnings.filters": list(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "builtins.open": builtins.open,
        "builtins.print": builtins.print,
        "builtins.__import__": builtins.__import__,
        "time.sleep": time.sleep,
    }
    multiprocessing: Any = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        found["the start method of multiprocessing"] = multiprocessing.get_start_method(allow_none=True)
    return found


def _of_the_system() -> dict[str, Any]:
    umask = os.umask(0o77)  # there is no other way to read it
    os.umask(umask)
    found: dict[str, Any] = {
        "the umask": umask,
        "the niceness": os.nice(0),
        "os.sched_getaffinity()": os.sched_getaffinity(0),
    }
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            with contextlib.suppress(OSError, ValueError):
                found[f"the limit {name}"] = resource.getrlimit(getattr(resource, name))
    return found


def _of_torch() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    found: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):  # no torch, one that is half imported, or a stand-in
        for name in ("is_grad_enabled", "get_default_dtype", "get_num_threads", "are_deterministic_algorithms_enabled"):
            found[f"torch.{name}()"] = getattr(torch, name)()
        found["torch.nn.functional.linear"] = torch.nn.functional.linear
        found["torch.nn.Module.__call__"] = torch.nn.Module.__call__
        found["the number of torch's global module hooks"] = _global_hooks(torch.nn.modules.module)
    return found


def _global_hooks(module: Any) -> int:
    tables = (value for name, value in vars(module).items() if name.startswith("_global_") and "hooks" in name)
    return sum(len(table) for table in tables if isinstance(table, dict))


def _same(one: Any, other: Any) -> bool:
    """Values are equal, and objects (functions, streams, also those in lists) are the very same or equal."""
    if one is other:
        return True
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# Random numbers.


def draw() -> None:
    """The training draws random numbers: where a tool seeds each window alike, that is then seen."""
    random.random()  # noqa: S311
    for name, ask in (("numpy", "random"), ("torch", "rand")):
        with contextlib.suppress(AttributeError):
            found: Any = getattr(sys.modules.get(name), ask)
            found.random() if name == "numpy" else found(1)


def generators() -> dict[str, bytes]:
    """The states of the random number generators that all code of this process shares."""
    found = {"random": repr(random.getstate()).encode()}
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(AttributeError):
        kind, keys, *more = numpy.random.get_state()
        found["numpy.random"] = repr((kind, *more)).encode() + keys.tobytes()
    with contextlib.suppress(AttributeError):
        found["torch"] = bytes(torch.get_rng_state().tolist())
    with contextlib.suppress(AttributeError):
        if torch.cuda.is_initialized():
            found["torch.cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    return found


# Standard output.


@contextlib.contextmanager
def captured_output(path: Path) -> Iterator[Callable[[], str]]:
    """In the block descriptor 1 leads to this file; yields a function that gives what is in it."""
    sys.stdout.flush()
    kept = os.dup(1)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.close(file)

    def text() -> str:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()
        return path.read_text(encoding="utf-8", errors="replace")

    try:
        yield text
    finally:
        text()
        os.dup2(kept, 1)
        os.close(kept)


class Quiet:
    """Watches what hooks alone do: between ``begin`` and ``require`` no work of the training may lie.

    Args:
        output: gives what standard output got so far.
    """

    def __init__(self, output: Callable[[], str]) -> None:
        self._output = output
        self.begin()

    def begin(self) -> None:
        """Hooks come now."""
        self._printed = self._output()
        self._generators = generators()

    def require(self, moment: str) -> None:
        """No hook since then drew a number or wrote to standard output.

        Raises:
            RuleBroken: one did.
        """
        now = generators()
        for name, state in self._generators.items():
            if now[name] != state:
                raise RuleBroken(f"the random numbers of {name} go on differently {moment}", _DRAW)
        more = self._output()[len(self._printed) :].strip()
        if more:
            raise RuleBroken(f"standard output got {_short(more.splitlines()[0])} {moment}", _PRINT)


# What is held: everything that can be counted.


@dataclasses.dataclass(frozen=True)
class Held:
    """Open files, threads and children of this process, each kind by name and number."""

    kinds: dict[str, Counter[str]]

    @classmethod
    def now(cls) -> Held:
        """As they are; core's own threads do not count."""
        files: Counter[str] = Counter()
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists them
                files[str(entry.readlink()).partition(":[")[0]] += 1
        running = threading.enumerate()
        core = sum(thread.name.startswith(_OWN) for thread in running)
        threads = Counter(repr(thread.name) for thread in running if not thread.name.startswith(_OWN))
        native = 0
        children: Counter[str] = Counter()
        for task in Path("/proc/self/task").iterdir():
            native += 1
            with contextlib.suppress(OSError):
                children.update((task / "children").read_text(encoding="ascii").split())
        more = max(0, native - core - threads.total())
        return cls(
            {
                "open files": files,
                "threads": threads,
                "threads outside of Python": Counter({"native": more}),
                "child processes": children,
            }
        )

    def grown(self, now: Held) -> dict[str, str]:
        """The kinds of which there are more now, and what they are."""
        found = {}
        for kind, before in self.kinds.items():
            more = now.kinds[kind].total() - before.total()
            if more > 0:
                names = list(dict.fromkeys((now.kinds[kind] - before).elements()))
                found[kind] = f"{more} more {kind} ({', '.join(names[:5])})"
        return found

    def settled(self) -> dict[str, str]:
        """What grew since then, by kind; waits a while for it to go back."""
        limit = time.monotonic() + _TO_SETTLE
        while True:
            grown = self.grown(Held.now())
            if not grown or time.monotonic() >= limit:
                return grown
            time.sleep(0.02)


def require_no_leak(first: Mapping[str, str], second: Mapping[str, str]) -> None:
    """Nothing grew over both of two windows; what grew over one may be a pool that is now as large as it gets.

    Raises:
        RuleBroken: something did.
    """
    for kind in first:
        if kind in second:
            raise RuleBroken(f"each window leaves something behind: {second[kind]}", _LET_GO)
