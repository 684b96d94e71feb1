"""Fixtures of the torch_memory backend's tests: a simulated device, and handles that profile it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"rankscope_torch_memory_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_STAND_IN = _load("stand_in")


@pytest.fixture(scope="session")
def stand_in() -> Any:
    """The helpers in stand_in.py."""
    return _STAND_IN


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was recorded, saved or said in this process so far."""
    from rankscope import log
    from rankscope_torch_memory import oom, recording

    monkeypatch.setattr(recording, "_recording", recording.Recording())
    monkeypatch.setattr(oom, "_guard", oom.Guard())
    monkeypatch.setattr(log, "_said", {})


@pytest.fixture
def use(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Make a simulated device the one that ``import torch`` has: ``use(generation, kind=..., without=...)``."""
    before = set(sys.modules)

    def install(generation: str = "cuda 2.13", *, kind: str = "cuda", limit: int = 1 << 40, **how: Any) -> Any:
        device = _STAND_IN.Device(kind, limit)
        monkeypatch.setitem(sys.modules, "torch", _STAND_IN.torch_with(device, generation, **how))
        if kind == "npu":
            monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
        return device

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("torch.") and name.endswith(".memory"):
            del sys.modules[name]


@pytest.fixture
def device(use: Callable[..., Any]) -> Any:
    """A device as torch 2.13 shows a CUDA one, in use already."""
    made = use()
    made.initialise()
    return made


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are contained, as in a user's run."""
    monkeypatch.delenv("RANKSCOPE_STRICT")


@pytest.fixture
def profiler(fresh: None, save_path: Path) -> Iterator[Callable[..., Any]]:
    """Make a handle: ``profiler(role=..., steps=..., **options of the tool)``; all are closed at the end."""
    from rankscope import DistProfiler, FaultError, windows

    made: list[DistProfiler] = []

    def make(
        *,
        role: str = "actor",
        rank: int = 0,
        steps: Any = (2, 3, 5),
        total_steps: int | None = 6,
        tool: Any = "torch_memory",
        common: dict[str, Any] | None = None,
        **options: Any,
    ) -> DistProfiler:
        config = {
            "global_profiler": {
                "tool": tool,
                "steps": list(steps),
                "save_path": str(save_path),
                "global_tool_config": {"torch_memory": options},
                **(common or {}),
            },
            **{name: {"profiler": {"enable": True}} for name in ("actor", "critic")},
        }
        handle = DistProfiler(config, role=role, rank=rank, world_size=2, total_steps=total_steps)
        made.append(handle)
        return handle

    yield make
    for handle in made:
        with suppress(FaultError):
            handle.close()
    assert windows.opened() == ()


@pytest.fixture
def files(save_path: Path) -> Callable[..., list[Path]]:
    """The published files with these words in their names, once the helper process is done."""

    def find(*words: str, suffix: str = ".pickle") -> list[Path]:
        from rankscope.artifacts.exports import exports

        assert exports().drain(60)
        found = sorted(save_path.iterdir()) if save_path.exists() else []
        return [path for path in found if path.suffix == suffix and all(word in path.name for word in words)]

    return find


@pytest.fixture
def snapshots(files: Callable[..., list[Path]]) -> Callable[..., list[dict[str, Any]]]:
    """Their contents."""

    def find(*words: str) -> list[dict[str, Any]]:
        from rankscope_torch_memory.reading import load

        return [load(path) for path in files(*words)]

    return find
