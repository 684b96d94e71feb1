"""The recording backend as installed tools, and what tests of core share.

``install`` writes the metadata of a distribution; with its directory and this file's on ``sys.path`` (or PYTHONPATH)
the tools ``rec``, ``rec2`` and ``bound`` exist as if they came from pip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope import NothingRecorded
from rankscope import testing as kit
from rankscope.testing.configs import read_ledger as ledger
from rankscope.testing.configs import wait_for
from rankscope.testing.recording import RecordingOptions, finish_file, record

__all__ = ["RecordingOptions", "finish_file", "ledger", "wait_for"]

HERE = Path(__file__).parent

CALLS, THREADS, SPANS, WINDOWS, FINISHED = (
    record.calls,
    record.threads,
    record.spans,
    record.windows,
    record.finished,
)
calls = record.of
clear = record.clear


class RecordingBackend(kit.RecordingBackend):
    """Its finishing functions are those of this file."""


class SecondBackend(RecordingBackend):
    pass


class BoundBackend(RecordingBackend):
    thread_bound = True


# Finishing functions, for the helper process.


def raise_error(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    temporary.write_text("half")
    raise RuntimeError("cannot be made")


def find_nothing(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    raise NothingRecorded("there was nothing to record")


def wait_for_file(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    Path(arguments["began"]).touch()
    wait_for(Path(arguments["go"]).exists)
    return finish_file(staged, temporary, name, {"seconds": 0})


def kill_itself(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), 9)
    return {}


def list_modules(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    temporary.write_text(json.dumps(sorted(sys.modules)))
    return {}


# For tests.


def install(directory: Path) -> Path:
    """Write the metadata of a distribution that brings these tools."""
    tools = {"rec": RecordingBackend, "rec2": SecondBackend, "bound": BoundBackend}
    entries = {tool: f"recording:{backend.__name__}" for tool, backend in tools.items()}
    return kit.install_tools(directory, entries, distribution="recording-tools")


def config(save_path: Path, *, tool: str | Sequence[str] = "rec", **facts: Any) -> dict[str, Any]:
    """A config in which the roles are profiled on all ranks."""
    return kit.profile_config(save_path, tool, **facts)


def files(save_path: Path) -> list[str]:
    """Contents of the published files, in the order of their names."""
    return [path.read_text() for path in sorted(save_path.iterdir()) if path.is_file()] if save_path.exists() else []


def environment(site: Path, **more: str) -> dict[str, str]:
    """The environment of a subprocess in which the tools are installed; faults are contained there."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    return {**environ, "PYTHONPATH": os.pathsep.join([str(site), str(HERE)]), "PYTHONUNBUFFERED": "1", **more}


def run_python(site: Path, program: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program text in another process."""
    return subprocess.run(
        [sys.executable, "-c", program, *(str(argument) for argument in arguments)],
        env=environment(site, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
