"""The process that plays scenarios: it imports the test class once and forks a process for each rule.

Each scenario has a process of its own, so that nothing of one reaches another one or the test run: no environment, no
signals, no threads, no crash. The forking process itself never makes a backend. It talks in JSON lines: jobs come in on
standard input, results go out on standard output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope.testing.life import EndOfProcess, Facts, Life
from rankscope.testing.rules import RULES, NotHere, RuleBroken
from rankscope.testing.surroundings import settle

_ALL_NEED = (
    "rankscope.testing.scenarios",
    "rankscope.controller",
    "rankscope.profiler",
    "omegaconf",
    "pluggy",
    "structlog",
)
RESULT = "result.json"
OUTPUT = "output.txt"
_WHERE = signal.SIGRTMAX
"""Asks a process for its tracebacks."""
_TO_SAY = 0.5
_CRASHED = "the traceback is in the process's output"


@dataclasses.dataclass
class _Playing:
    job: Mapping[str, Any]
    pid: int
    descriptor: int
    until: float


class Server:
    """Works off jobs, a few at a time.

    Args:
        setup: ``preload``: modules to import now; ``load``: test classes' modules to load now; ``width``: how many
            scenarios may run at once.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._jobs = os.dup(0)
        self._results = os.dup(1)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)  # what modules print when they are imported is no result
        self._width = int(setup["width"])
        self._waiting: list[dict[str, Any]] = []
        self._playing: list[_Playing] = []
        self._begun = b""
        for name in setup["preload"]:
            _try(importlib.import_module, name=name)  # the tool says by available() what it misses
        for module in setup["load"]:
            _try(load_module, **module)  # each job that needs it tries again, and tells
        for name in _ALL_NEED:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # what is here by now is never collected: forked processes share it, and end at once

    def serve(self) -> None:
        """Until the jobs' end; raises ``EndOfProcess`` in the processes of scenarios."""
        poller = select.poll()
        poller.register(self._jobs, select.POLLIN)
        while True:
            while self._waiting and len(self._playing) < self._width:
                playing = self._begin(self._waiting.pop(0))
                self._playing.append(playing)
                poller.register(playing.descriptor, select.POLLIN)
            now = time.monotonic()
            nearest = min((playing.until - now for playing in self._playing), default=3600.0)
            ready = {descriptor for descriptor, _ in poller.poll(max(0.0, nearest) * 1000)}
            if self._jobs in ready and not self._read():
                break
            for playing in self._playing[:]:
                if playing.descriptor in ready or time.monotonic() >= playing.until:
                    poller.unregister(playing.descriptor)
                    self._playing.remove(playing)
                    self._end(playing, in_time=playing.descriptor in ready)
        for playing in self._playing:
            _kill(playing.pid)

    def _read(self) -> bool:
        block = os.read(self._jobs, 1 << 16)
        *lines, self._begun = (self._begun + block).split(b"\n")
        self._waiting += [json.loads(line) for line in lines]
        return bool(block)

    def _begin(self, job: dict[str, Any]) -> _Playing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a preloaded library may have started threads
            pid = os.fork()
        if pid == 0:
            for descriptor in (self._jobs, self._results, *(playing.descriptor for playing in self._playing)):
                os.close(descriptor)
            play(job)
        return _Playing(job, pid, os.pidfd_open(pid), time.monotonic() + float(job["facts"]["seconds"]))

    def _end(self, playing: _Playing, *, in_time: bool) -> None:
        if not in_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(playing.pid, _WHERE)
            time.sleep(_TO_SAY)
        os.close(playing.descriptor)
        _kill(playing.pid)  # also what it left running
        status = os.waitpid(playing.pid, 0)[1]
        code = os.waitstatus_to_exitcode(status) if in_time else None
        result = {"id": playing.job["id"], "code": code, **_result_of(Path(playing.job["folder"]))}
        os.write(self._results, json.dumps(result).encode() + b"\n")


def _try(load: Callable[..., object], **facts: str) -> None:
    try:
        load(**facts)
    except Exception:  # noqa: BLE001 - whatever modules do when they are imported
        traceback.print_exc()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _result_of(folder: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {"status": "none"}
    return found


def play(job: Mapping[str, Any]) -> None:
    """In a process of its own: play one scenario, write down how it came out, and end like any process.

    Raises:
        EndOfProcess: always.
    """
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = Path(job["folder"])
    places = settle(folder)
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.register(_WHERE, all_threads=True)  # no watchdog thread: a forked child would wait for it
    with contextlib.suppress(OSError):
        (folder / RESULT).unlink()
    result = _judge(job, folder, places)
    written = folder / f"{RESULT}.part"
    written.write_text(json.dumps(result), encoding="utf-8")
    written.replace(folder / RESULT)
    raise EndOfProcess(0)


def _judge(job: Mapping[str, Any], folder: Path, places: Mapping[str, Path]) -> dict[str, str]:
    rule = RULES[job["rule"]]
    try:
        life = _life(job, folder, places)
        with life.registry():
            if not rule.light:
                life.require_available()
            rule.scenario(life)
    except RuleBroken as broken:
        return {"status": "broken", "seen": broken.seen, "mend": broken.mend}
    except NotHere as reason:
        return {"status": "skipped", "seen": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever the backend's code raises
        traceback.print_exc()
        return {"status": "broken", "seen": f"{type(error).__name__}: {error}", "mend": _CRASHED}
    return {"status": "held"}


def _life(job: Mapping[str, Any], folder: Path, places: Mapping[str, Path]) -> Life:
    subject = factory = None
    if job["subject"] is not None:
        kind: Any = load_module(**job["subject"]["module"])
        for name in job["subject"]["qualname"].split("."):
            kind = getattr(kind, name)
        subject = kind()
        subject.prepare()
        factory = given_factory(kind)
    return Life(Facts(**job["facts"]), folder, places=places, subject=subject, factory=factory)


def given_factory(kind: type) -> Any:
    """The factory that a test class names; a function there is not meant as a method."""
    found = inspect.getattr_static(kind, "factory", None)
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def load_module(name: str, path: str) -> Any:
    """The module of a test class: by its name if that leads to the same file, else from the file."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return loaded
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin == path:
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def main(setup: str) -> None:
    """The process's program."""
    try:
        Server(json.loads(setup)).serve()
    except EndOfProcess as end:
        sys.exit(end.code)
