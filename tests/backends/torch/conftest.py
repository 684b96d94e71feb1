"""Fixtures of the torch backend's tests: captures in this process, and scenarios in processes of their own."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load_kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rankscope_torch_test_kit", HERE / "kit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_KIT = _load_kit()


@pytest.fixture(scope="session")
def kit() -> Any:
    """The helpers in kit.py."""
    return _KIT


@dataclasses.dataclass
class Ended:
    """A scenario that is over."""

    code: int
    out: str
    err: str
    path: Path

    def said(self, words: str, level: str | None = None) -> list[dict[str, Any]]:
        """rankscope's messages with these words in event or reason."""
        found = _KIT.messages(self.err, level)
        return [message for message in found if words in f"{message['event']} {message.get('reason', '')}"]


@dataclasses.dataclass
class Running:
    """A scenario under way, which said that it is ready."""

    process: subprocess.Popen[str]
    path: Path

    def end(self, number: int | None = None) -> Ended:
        """Send a signal, if one is given, and wait for the end."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return Ended(self.process.returncode, out, err, self.path)


class Scenarios:
    """Runs functions of scenarios.py in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def begin(self, name: str, *arguments: str, strict: bool = False, **env: str) -> Running:
        """Start a scenario and wait until it prints ``ready``."""
        running = self._popen(name, arguments, strict, env)
        assert running.process.stdout is not None
        timer = threading.Timer(120, running.process.kill)
        timer.start()
        try:
            first = running.process.stdout.readline()
        finally:
            timer.cancel()
        if first != "ready\n":
            ended = running.end(signal.SIGKILL)
            raise AssertionError(f"{name} did not become ready: {first}{ended.out}{ended.err}")
        return running

    def run(self, name: str, *arguments: str, strict: bool = True, **env: str) -> Ended:
        """Run a scenario to its end."""
        return self._popen(name, arguments, strict, env).end()

    def _popen(self, name: str, arguments: tuple[str, ...], strict: bool, env: dict[str, str]) -> Running:
        path = self._folder / name
        environ = {**os.environ, "RANKSCOPE_LOG_FORMAT": "json", "RANKSCOPE_STRICT": str(int(strict)), **env}
        process = subprocess.Popen(
            [sys.executable, str(HERE / "scenarios.py"), name, str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self._started.append(process)
        return Running(process, path)

    def close(self) -> None:
        """End what is still running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    """Scenarios of one test module; each has a folder of its name."""
    started = Scenarios(tmp_path_factory.mktemp("scenarios"))
    yield started
    started.close()


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any) -> Iterator[Callable[..., Any]]:
    """Makes a DistProfiler of this process that records into tmp_path, and closes it in the end."""
    from rankscope import DistProfiler

    monkeypatch.setenv("RANKSCOPE_LOG_FORMAT", "json")
    made: list[Any] = []

    def make(*, role: str = "actor", rank: int = 0, common: dict[str, Any] | None = None, **options: Any) -> Any:
        profiler = DistProfiler(kit.config(tmp_path, role, common=common, **options), role=role, rank=rank)
        made.append(profiler)
        return profiler

    yield make
    for profiler in made:
        profiler.close()
