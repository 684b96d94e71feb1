"""A stand-in for torch_npu, made from the signatures of the real one, for machines that cannot have that.

It takes the arguments that torch_npu takes, keeps them, and leaves the folders that torch_npu leaves.
"""

from __future__ import annotations

import enum
import importlib.machinery
import inspect
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SIGNATURES: dict[str, Any] = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))


class StandIn:
    """What the backend did with torch_npu.

    Attributes:
        made: keyword arguments of each profiler, in order.
        configs: arguments of each ``_ExperimentalConfig``.
        handlers: arguments of each trace handler.
        ranges: text, domain and whether it was ended, of each mstx range.
        devices: how many there are.
        refuse: domains whose ranges are not taken.
        swallow: calls of a profiler that fail as torch_npu's fail: with a printed line.
        broken: message with which making a profiler fails.
    """

    def __init__(self, *, without: Iterable[str] = ()) -> None:
        self.made: list[dict[str, Any]] = []
        self.profiles: list[Any] = []
        self.configs: list[dict[str, Any]] = []
        self.handlers: list[dict[str, Any]] = []
        self.ranges: list[list[Any]] = []
        self.devices = 1
        self.refuse: set[str] = set()
        self.swallow: set[str] = set()
        self.broken = ""
        self._without = set(without)
        self._numbers = itertools.count(1)
        self.folder = ""

    def arguments(self, function: str, *given: Any, **named: Any) -> dict[str, Any]:
        """Bind arguments as the real function does; TypeError for one that it does not have."""
        return dict(self.signature(function).bind(*given, **named).arguments)

    def signature(self, function: str) -> inspect.Signature:
        """The recorded signature, without what this version does not have."""
        kind = inspect.Parameter.KEYWORD_ONLY if function == "profile" else inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature(
            [
                inspect.Parameter(name, kind, default=default)
                for name, default in SIGNATURES["functions"][function].items()
                if name not in self._without
            ]
        )

    def modules(self) -> dict[str, types.ModuleType]:
        """The modules that ``import torch_npu`` is to find."""
        stand_in = self

        class Profile:
            __signature__ = stand_in.signature("profile")

            def __init__(self, **named: Any) -> None:
                if stand_in.broken:
                    raise RuntimeError(stand_in.broken)
                stand_in.made.append(stand_in.arguments("profile", **named))
                stand_in.profiles.append(self)
                self.metadata: dict[str, str] = {}
                self.calls: list[str] = []
                self.stopped = False

            def _call(self, name: str) -> bool:
                self.calls.append(name)
                if name in stand_in.swallow:
                    print(f"[2026-01-01 00:00:00] [ERROR] [1] profiler.py: Call {name} failed. Exception: out of luck")
                    return False
                return True

            def start(self) -> None:
                if self._call("start"):
                    self.path = Path(stand_in.folder) / f"host_1_{next(stand_in._numbers):017d}_ascend_pt"
                    (self.path / "FRAMEWORK").mkdir(parents=True)

            def step(self) -> None:
                self._call("step")

            def stop(self) -> None:
                if self._call("stop"):
                    (self.path / "FRAMEWORK" / "torch.op_range").write_bytes(b"data")
                    (self.path / "profiler_info.json").write_text('{"config": {}}')

            def add_metadata_json(self, key: str, value: str) -> None:
                self.metadata[key] = value

        class Config:
            __signature__ = stand_in.signature("_ExperimentalConfig")

            def __init__(self, *given: Any, **named: Any) -> None:
                stand_in.configs.append(stand_in.arguments("_ExperimentalConfig", *given, **named))

        def handler(*given: Any, **named: Any) -> Callable[[Any], None]:
            bound = stand_in.arguments("tensorboard_trace_handler", *given, **named)
            stand_in.handlers.append(bound)
            stand_in.folder = bound["dir_name"]
            return lambda _: None

        def range_start(*given: Any, **named: Any) -> int:
            bound = stand_in.arguments("mstx.range_start", *given, **named)
            if bound["domain"] in stand_in.refuse:
                return 0
            stand_in.ranges.append([bound["message"], bound["domain"], False])
            return len(stand_in.ranges)

        def range_end(*given: Any, **named: Any) -> None:
            bound = stand_in.arguments("mstx.range_end", *given, **named)
            entry = stand_in.ranges[bound["range_id"] - 1]
            assert entry[1] == bound["domain"]
            entry[2] = True

        profiler = types.ModuleType("torch_npu.profiler")
        for name, value in {
            "profile": Profile,
            "_ExperimentalConfig": Config,
            "tensorboard_trace_handler": handler,
            "ProfilerAction": enum.Enum("ProfilerAction", SIGNATURES["actions"]),
            "ProfilerActivity": enum.Enum("ProfilerActivity", SIGNATURES["activities"]),
            **{
                group: type(group, (), {name: value for name, value in members.items() if name not in self._without})
                for group, members in SIGNATURES["constants"].items()
            },
        }.items():
            setattr(profiler, name, value)
        mstx = types.SimpleNamespace(range_start=range_start, range_end=range_end)
        whole = types.ModuleType("torch_npu")
        whole.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
        whole.__path__ = []
        whole.__version__ = SIGNATURES["version"]
        whole.npu = types.SimpleNamespace(mstx=mstx, is_available=lambda: stand_in.devices > 0)
        whole.profiler = profiler
        return {"torch_npu": whole, "torch_npu.profiler": profiler}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    """Let ``import torch_npu`` find a stand-in: ``install(without={"mstx"})``."""

    def make(**facts: Any) -> StandIn:
        import importlib.metadata

        from rankscope_npu import backend

        stand_in = StandIn(**facts)
        for name, module in stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        known = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: SIGNATURES["version"] if name == "torch-npu" else known(name)
        )
        backend._version.cache_clear()
        return stand_in

    return make


@pytest.fixture
def npu(install: Callable[..., StandIn]) -> StandIn:
    """The stand-in, with everything that torch_npu 2.13 has."""
    return install()


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a DistProfiler that records into ``tmp_path / "out"``: ``handle(level=1, ...)``."""
    from rankscope import DistProfiler, FaultError, windows

    made: list[Any] = []

    def make(*, role: str = "actor", common: dict[str, Any] | None = None, **options: Any) -> Any:
        config = {
            "global_profiler": {
                "tool": "npu",
                "steps": [1, 2, 3],
                "save_path": str(tmp_path / "out"),
                "global_tool_config": {"npu": options},
                **(common or {}),
            },
            role: {"profiler": {"enable": True}},
        }
        profiler = DistProfiler(config, role=role, rank=0, world_size=1)
        made.append(profiler)
        return profiler

    yield make
    for profiler in made:
        with suppress(FaultError):
            profiler.close()
    assert windows.opened() == ()
