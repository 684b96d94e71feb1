"""Fixtures of the precision_debugger backend's tests.

msprobe changes torch for the whole process, so it only runs in processes of their own: none of them is this one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load_kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rankscope_precision_debugger_test_kit", HERE / "debugger_kit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_KIT = _load_kit()


@pytest.fixture(autouse=True)
def _installed() -> None:
    if importlib.util.find_spec("msprobe") is None:
        pytest.skip("msprobe is not installed (pip install mindstudio-probe)")


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process is told once, each test is told once."""
    from rankscope_precision_debugger import backend

    monkeypatch.setattr(backend, "_said", set())


@pytest.fixture(scope="session")
def kit() -> Any:
    """The helpers in debugger_kit.py."""
    return _KIT


@dataclasses.dataclass
class Ended:
    """A scenario that is over; ``facts`` is what it printed at last, as JSON."""

    code: int
    out: str
    err: str
    path: Path

    @property
    def facts(self) -> Any:
        """What it found out."""
        return json.loads(self.out.splitlines()[-1])

    def said(self, words: str, level: str | None = None) -> list[dict[str, Any]]:
        """rankscope's messages with these words in event or reason."""
        found = _KIT.messages(self.err, level)
        return [message for message in found if words in f"{message['event']} {message.get('reason', '')}"]


class Scenarios:
    """Runs functions of debugger_scenarios.py in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, name: str, *arguments: str, strict: bool = True, **env: str) -> Ended:
        """Run a scenario to its end; ``strict``: rankscope raises what a backend raises."""
        return self._run("debugger_scenarios.py", [name], "-".join([name, *arguments]), arguments, strict, env)

    def run_faulty(self, fault: str, mode: str, *, strict: bool = True) -> Ended:
        """Run two stages in two steps with a stand-in for msprobe.

        Args:
            fault: what goes wrong in it; see standin/.
            mode: ``strict`` or ``lenient``: the tool's own option.
            strict: rankscope raises what a backend raises.
        """
        env = {
            "PYTHONPATH": os.pathsep.join([str(HERE / "standin"), os.environ.get("PYTHONPATH", "")]),
            "STANDIN": fault,
        }
        return self._run("debugger_faulty.py", [], f"{fault}-{mode}-{strict}", (mode,), strict, env)

    def _run(
        self, program: str, before: list[str], label: str, after: tuple[str, ...], strict: bool, env: dict[str, str]
    ) -> Ended:
        path = self._folder / re.sub(r"[^A-Za-z0-9_-]", "_", label)  # msprobe accepts no other paths
        environ = {**os.environ, "RANKSCOPE_LOG_FORMAT": "json", "RANKSCOPE_STRICT": str(int(strict)), **env}
        environ.pop("MSPROBE_LOG_LEVEL", None)
        ended = subprocess.run(
            [sys.executable, str(HERE / program), *before, str(path), *after],
            check=False,
            capture_output=True,
            text=True,
            timeout=280,
            stdin=subprocess.DEVNULL,
            env=environ,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr, path)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    """Scenarios of one test module; each has a folder of its name."""
    return Scenarios(tmp_path_factory.mktemp("scenarios"))
