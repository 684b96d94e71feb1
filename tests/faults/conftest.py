"""The fork server, and how a cell of the matrix is run."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TORCH_TESTS = HERE.parent / "backends" / "torch"
for folder in (HERE, TORCH_TESTS):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@dataclasses.dataclass
class Ended:
    """A cell that is over.

    Attributes:
        code: as of ``subprocess``: negative for a signal; None when it hung and was killed.
        said: what the training computed, saw and raised.
        err: its standard error.
        notes: what only the test wants to know.
        save_path: where its artifacts are.
    """

    code: int | None
    said: list[Any]
    err: str
    notes: dict[str, Any]
    save_path: Path


class Server:
    """The process that forks cells."""

    def __init__(self, site: Path) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
        environ["PYTHONPATH"] = os.pathsep.join([str(site), str(HERE), str(TORCH_TESTS)])
        environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # what forks shall have one thread only
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fault_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        assert self._answer(120) == "ready"

    def _answer(self, seconds: float) -> str | None:
        pipe = self._process.stdout
        assert pipe is not None
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        return pipe.readline().decode().strip() if poller.poll(seconds * 1000) else None

    def run(self, folder: Path, save_path: Path, *, seconds: float = 60.0, **request: Any) -> Ended:
        """Run a program in a fresh child to its end."""
        folder.mkdir(parents=True)
        short = tempfile.mkdtemp(prefix="rs-")  # names of sockets must be short
        env = {"RANKSCOPE_LOG_FORMAT": "json", "RANKSCOPE_STRICT": "0", "TMPDIR": short, **request.pop("env", {})}
        request = {**request, "folder": str(folder), "save_path": str(save_path), "env": env}
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(json.dumps(request).encode() + b"\n")
        pipe.flush()
        pid = int(self._answer(60) or 0)
        status = self._answer(seconds)
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            self._answer(60)
        shutil.rmtree(short, ignore_errors=True)
        notes = folder / "notes"
        return Ended(
            None if status is None else os.waitstatus_to_exitcode(int(status)),
            [json.loads(line) for line in (folder / "said").read_text().splitlines()],
            (folder / "err").read_text(),
            json.loads(notes.read_text()) if notes.exists() else {},
            save_path,
        )

    def close(self) -> None:
        """The server ends with its input."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        assert self._process.wait(60) == 0


@pytest.fixture(scope="session")
def fault_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    import fault_gate

    server = Server(fault_gate.install(tmp_path_factory.mktemp("fault_site")))
    yield server
    server.close()


@pytest.fixture(scope="session")
def unprofiled(fault_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, str], Ended]:
    """The same program with profiling off, run once for each scenario (and mode, where the program looks at it)."""
    kept: dict[str, Ended] = {}

    def run(scenario: Any, mode: str) -> Ended:
        mode = mode if scenario.looks_at_mode else "continuous"
        key = json.dumps([scenario.program, dict(scenario.arguments), mode])
        if key not in kept:
            folder = tmp_path_factory.mktemp("unprofiled")
            kept[key] = fault_server.run(
                folder / "run",
                folder / "out",
                program=scenario.program,
                arguments=dict(scenario.arguments),
                on=False,
                mode=mode,
                contents=["cpu"],
                seconds=scenario.seconds,
            )
        return kept[key]

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of a size."""
    place = tmp_path / "disk"
    place.mkdir()
    made: list[Path] = []

    def make(size: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"a small file system is needed, and mounting one was refused: {done.stderr.strip()}")
        made.append(place)
        return place

    yield make
    for mounted in made:
        subprocess.run(["umount", str(mounted)], check=True)
