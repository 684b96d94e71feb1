"""What the tests with the real verl share. Without verl they are skipped, see `make test-verl`."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)

missing = [name for name in ("verl", "rankscope_verl") if importlib.util.find_spec(name) is None]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Test files need verl when they are imported; one file says why the others are not there."""
    return True if missing and collection_path.name not in {"verl", "test_verl_here.py"} else None


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A distribution of somebody else with one tool, as if it came from pip."""
    import verl_tool

    folder = verl_tool.install(tmp_path_factory.mktemp("tools"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model's config."""
    from verl_workers import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Strict, like all our tests; a single rank; and afterwards nothing is open any more."""
    if missing:
        yield
        return
    monkeypatch.setenv("RANKSCOPE_STRICT", "1")
    for name, value in _environment().items():
        monkeypatch.setenv(name, value)
    yield
    from rankscope import FaultError, shutdown, windows
    from rankscope_verl import drive

    for handle in list(shutdown._handles.values()):
        with suppress(FaultError):
            handle.close()
    drive.forget_workers()
    drive._handles.clear()
    assert windows.opened() == ()


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are contained, as in a user's run."""
    monkeypatch.delenv("RANKSCOPE_STRICT", raising=False)


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def compose(model: str, save_path: Path) -> Callable[..., Any]:
    """verl's own config with some overrides: ``compose("global_profiler.tool=torch", …)``."""
    from verl_workers import job_config

    return lambda *overrides: job_config(model, str(save_path), *overrides)


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was logged since the last call."""
    return lambda: capfd.readouterr().err


_PORT: list[int] = []


def _environment() -> dict[str, str]:
    if not _PORT:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            _PORT.append(free.getsockname()[1])
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(_PORT[0])),
        "VERL_ENGINE_DEVICE": "cpu",
        "DISABLE_WORKER_INIT": "1",
    }
