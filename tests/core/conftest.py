"""The recording backends, installed, for the tests that ask for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the metadata of the recording tools, on sys.path; afterwards nothing is open any more."""
    import recording

    from rankscope.testing import close_everything

    directory = recording.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(directory))
    recording.clear()
    yield directory
    close_everything()
    recording.clear()


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are contained, as in a user's run."""
    monkeypatch.delenv("RANKSCOPE_STRICT")


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def profiler(site: Path, save_path: Path) -> Callable[..., Any]:
    """Make a handle: ``profiler(role, tool=..., options=...)``."""
    import recording

    from rankscope import DistProfiler

    def make(role: str = "actor", *, rank: int = 0, world_size: int = 1, **facts: Any) -> DistProfiler:
        roles = facts.pop("roles", ("actor", "critic", "ref"))
        more = {key: facts.pop(key) for key in ("total_steps", "first_step") if key in facts}
        return DistProfiler(
            recording.config(facts.pop("save_path", save_path), roles=roles, **facts),
            role=role,
            rank=rank,
            world_size=world_size,
            **more,
        )

    return make
