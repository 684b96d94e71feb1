"""Fixtures of the nsys backend's tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_KIT = _load("nsys_kit")


@pytest.fixture(scope="session")
def kit() -> Any:
    """The helpers in nsys_kit.py."""
    return _KIT


@pytest.fixture(scope="session")
def real_nsys(kit: Any) -> str:
    """The real nsys; tests that ask for it are skipped where there is none."""
    reason = kit.why_no_nsys()
    if reason:
        pytest.skip(reason)
    return "nsys"


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No nsys around the test process, no session from the test before."""
    from rankscope_nsys.session import forget_session

    for name in list(os.environ):
        if name.startswith(("NSYS_", "QUADD_", "RANKSCOPE_NSYS")) or name.endswith("_INJECTION64_PATH"):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANKSCOPE_LOG_FORMAT", "json")
    forget_session()
    yield
    forget_session()


@pytest.fixture
def fake_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program ``nsys`` on PATH that knows the options of 2023.4, says its version, and runs what it is given."""
    from rankscope_nsys.flags import binary

    help_file = tmp_path / "nsys-help.txt"
    help_file.write_text(HELP)
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$*" = "profile --help" ]; then cat {help_file}; exit; fi\n'
        'if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version 2023.4.4.54-1v0"; exit; fi\n'
        "exit 3\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    binary.cache_clear()
    return program


def _help() -> str:
    from rankscope_nsys.flags import _OF_2023_4, SHORT

    letters = {name: letter for letter, name in SHORT.items()}
    lines = ["", "usage: nsys profile [<args>] [application] [<application args>]", ""]
    for name in _OF_2023_4.split():
        short = f"-{letters[name]}, " if name in letters else ""
        lines += [f"\t{short}--{name}=", "", "\t   What it does.", ""]
    return "\n".join(lines)


HELP = _help()
