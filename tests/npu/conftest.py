"""Fixtures of the tests that run the real torch_npu, in an environment of its own: ``make test-npu``.

Test modules here import neither torch nor torch_npu at their top: elsewhere their tests are skipped, in words.
"""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _why_not() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed in this environment; run: make test-npu"
    places = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if not any(Path(place, "libcann_stub.so").exists() for place in places if place):
        return "the stand-ins for CANN are not on LD_LIBRARY_PATH; run: make test-npu"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why_not = _why_not()
    if why_not and os.environ.get("TEST_NPU_REQUIRED"):
        raise pytest.UsageError(why_not)  # make test-npu must not pass by skipping everything
    if why_not:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why_not))


class StubLog:
    """What reached the stand-ins for CANN: profiling calls and mstx ranges, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def calls(self, *names: str) -> list[dict[str, Any]]:
        """The calls with these names, or all: ``call``, ``text``, ``domain``, ``id``, ``pid``, ``tid``, ``ns``."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [call for call in map(json.loads, lines) if not names or call["call"] in names]

    def ranges(self) -> list[tuple[str, str, bool]]:
        """Each range that was begun: text, domain (empty for the default one), whether it was ended."""
        ended = {call["id"] for call in self.calls("mstxRangeEnd", "mstxDomainRangeEnd")}
        begun = self.calls("mstxRangeStartA", "mstxDomainRangeStartA")
        return [(call["text"], call["domain"], call["id"] in ended) for call in begun]


@pytest.fixture
def stub_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubLog:
    """A log of its own for each test."""
    path = tmp_path / "cann.jsonl"
    monkeypatch.setenv("CANN_STUB_LOG", str(path))
    return StubLog(path)


class Folder:
    """An artifact of the npu tool: a directory with torch_npu's folder in it."""

    def __init__(self, path: Path) -> None:
        from rankscope.artifacts.names import parse_name

        self.path = path
        self.name = parse_name(path.name)
        self.about: dict[str, Any] = json.loads((path / "rankscope.json").read_text(encoding="utf-8"))
        found = list(path.glob("*_ascend_pt"))
        assert len(found) == 1, list(path.iterdir())
        self.vendor = found[0]

    @property
    def info(self) -> dict[str, Any]:
        """What torch_npu says of its capture."""
        found = list(self.vendor.glob("profiler_info*.json"))
        assert len(found) == 1, found
        return json.loads(found[0].read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of ``profile``, as torch_npu has them."""
        return self.info["config"]["common_config"]  # type: ignore[no-any-return]

    @property
    def experimental(self) -> dict[str, Any]:
        """Arguments of ``_ExperimentalConfig``, as torch_npu has them, without their underscores."""
        found = self.info["config"]["experimental_config"]
        return {name.removeprefix("_"): value for name, value in found.items()}

    def operators(self) -> list[str]:
        """Names of what was recorded on the CPU, by torch_npu's own analysis."""
        from rankscope_npu.analysis import analyse

        outcome = analyse(self.vendor, exports=("text",), timeout=120)
        assert outcome.done, outcome
        events = json.loads((self.vendor / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text(encoding="utf-8"))
        rows = [event for event in events if event["ph"] == "X"]
        return [event["name"] for event in sorted(rows, key=lambda event: float(event["ts"]))]


class Results:
    """What lies in a save path."""

    def __init__(self, save_path: Path) -> None:
        self.save_path = save_path

    def folders(self) -> list[Folder]:
        """All finished captures, by step and time; nothing else may lie there."""
        paths = [path for path in self.save_path.iterdir() if path.name != ".rankscope"]
        assert all(path.name.endswith(".ascend") and path.is_dir() for path in paths), paths
        return sorted(map(Folder, paths), key=lambda found: (found.name.step or 0, found.name.time, found.path.name))

    def folder(self) -> Folder:
        """The only one."""
        found = self.folders()
        assert len(found) == 1, found
        return found[0]

    def left_over(self) -> list[str]:
        """Files of ours that are not whole, or whose work was not done."""
        places = (self.save_path / ".rankscope" / name for name in ("partial", "staged"))
        return sorted(path.name for place in places if place.is_dir() for path in place.iterdir())

    def ledger(self, kind: str, **facts: Any) -> list[dict[str, Any]]:
        """Ledger records of a kind that hold these facts."""
        from rankscope.artifacts.ledger import read_ledgers

        return [
            record
            for record in read_ledgers(self.save_path)
            if record["kind"] == kind and all(record.get(key) == value for key, value in facts.items())
        ]

    def reasons(self, status: str = "failed") -> list[str]:
        """Why there is nothing, for each window that left nothing."""
        return [record["reason"] for record in self.ledger("artifact", status=status)]


@pytest.fixture
def results(save_path: Path) -> Results:
    """What lies in the save path of the test."""
    return Results(save_path)


@pytest.fixture(scope="session")
def torch_npu() -> Any:
    """The real torch_npu; what it warns of while it is imported and set up is no concern of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_npu

        torch_npu.npu.set_device(0)
    return torch_npu


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are contained, as in a user's run."""
    monkeypatch.delenv("RANKSCOPE_STRICT")


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def profiler(torch_npu: Any, save_path: Path) -> Iterator[Callable[..., Any]]:
    """Make a handle: ``profiler(options, role=..., rank=..., steps=...)``; all are closed at the end.

    ``options`` are those of the tool (``npu`` unless ``tool`` says otherwise); other keywords go to global_profiler.
    """
    from rankscope import DistProfiler, FaultError, windows

    made: list[DistProfiler] = []

    def make(
        options: dict[str, Any] | None = None,
        *,
        tool: str = "npu",
        role: str = "actor",
        rank: int = 0,
        world_size: int | None = None,
        **common: Any,
    ) -> DistProfiler:
        config = {
            "global_profiler": {
                "tool": tool,
                "steps": list(range(1, 10)),
                "save_path": str(save_path),
                "global_tool_config": {tool: options or {}},
                **common,
            },
            role: {"profiler": {"enable": True, "ranks": "all"}},
        }
        handle = DistProfiler(config, role=role, rank=rank, world_size=world_size or rank + 1)
        made.append(handle)
        return handle

    yield make
    for handle in made:
        with suppress(FaultError):
            handle.close()
    assert windows.opened() == ()
