from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rankscope import device, timing
from rankscope.timing import (
    gather_timing,
    marked_timer,
    rank_spread,
    reduce_timing,
    simple_timer,
    topk_reduce_ratio_min_max,
)


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the timers show as ranges."""
    shown: list[tuple[Any, ...]] = []

    def start(*arguments: object) -> object:
        shown.append(("start", *arguments))
        return types.SimpleNamespace(close=lambda: shown.append(("end", arguments[0])))

    monkeypatch.setattr(timing, "mark_start_range", start)
    return shown


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)


def test_seconds_are_added(clock: Clock, ranges: list[tuple[Any, ...]]) -> None:
    seconds: dict[str, float] = {"old": 1.0}
    for _ in range(2):
        with simple_timer("gen", seconds):
            clock.now += 2
        with marked_timer("update", seconds, color="red", domain="d", category="c"):
            clock.now += 3
    assert seconds == {"old": 1.0, "gen": 4.0, "update": 6.0}
    assert ranges == [("start", "update", "red", "d", "c"), ("end", "update")] * 2


def test_seconds_and_range_survive_an_exception(clock: Clock, ranges: list[tuple[Any, ...]]) -> None:
    seconds: dict[str, float] = {}

    def fail(timer: Any) -> None:
        with timer:
            clock.now += 5
            raise KeyError("mine")

    for timer in (simple_timer("a", seconds), marked_timer("b", seconds)):
        with pytest.raises(KeyError, match="mine"):
            fail(timer)
    assert seconds == {"a": 5.0, "b": 5.0}
    assert ranges[-1] == ("end", "b")


def test_the_range_closes_even_when_the_dict_refuses(clock: Clock, ranges: list[tuple[Any, ...]]) -> None:
    with pytest.raises(TypeError), marked_timer("a", {"a": "text"}):  # type: ignore[dict-item]
        pass
    assert ranges == [("start", "a", None, None, None), ("end", "a")]


def test_nested_and_as_decorators(clock: Clock) -> None:
    seconds: dict[str, float] = {}

    @marked_timer("deep", seconds)
    def deep(depth: int) -> int:
        """Doc."""
        clock.now += 1
        return depth if depth == 0 else deep(depth - 1)

    @simple_timer("slow", seconds)
    async def slow() -> str:
        await asyncio.sleep(0)
        clock.now += 4
        return "done"

    assert deep(2) == 0
    assert asyncio.run(slow()) == "done"
    assert (deep.__name__, deep.__doc__) == ("deep", "Doc.")
    assert seconds == {"deep": 1 + 2 + 3, "slow": 4.0}


def test_sync_waits_for_the_device_before_each_look_at_the_clock(
    clock: Clock, ranges: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: dict[str, float] = {}

    def wait() -> bool:
        clock.now += 10
        return True

    monkeypatch.setattr(device, "synchronize", wait)
    with marked_timer("a", seconds, sync=True):
        clock.now += 1
    with marked_timer("b", seconds):
        clock.now += 1
    assert seconds == {"a": 11.0, "b": 1.0}


def test_synchronize_without_a_device_with_one_and_with_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def fail() -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert (device.device_type(), device.synchronize()) == ("cpu", False)
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: waited.append("cuda"))
    sys.modules["torch"].cuda = cuda  # type: ignore[attr-defined]
    assert (device.device_type(), device.synchronize(), waited) == ("cuda", True, ["cuda"])
    cuda.synchronize = fail
    assert device.synchronize() is False
    cuda.is_initialized = lambda: False
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda: waited.append("woken")
    assert (device.device_type(), device.synchronize(), waited) == ("cuda", False, ["cuda"])
    monkeypatch.delitem(sys.modules, "torch")
    assert device.device_type() is None


@pytest.mark.usefixtures("no_group")
def test_without_a_group() -> None:
    mine = {"b": 2, "a": 1.5}
    reduced = reduce_timing(mine)
    assert list(reduced.items()) == [("a", 1.5), ("b", 2.0)]
    assert mine == {"b": 2, "a": 1.5}
    assert reduce_timing({}) == {}
    assert gather_timing(mine) == {"a": [1.5], "b": [2.0]}
    assert topk_reduce_ratio_min_max(1.5) == (-1.0, -1.0, -1.0)
    assert rank_spread(1.5) == (0.0, 1.5, 1.5, 0)


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("op", ["mean", "product", None, 3])
def test_an_unknown_operation_names_the_choices(op: object) -> None:
    with pytest.raises(ValueError, match="is not one of avg, sum, max, min"):
        reduce_timing({}, op)


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(("value", "what"), [("1.5", "the text '1.5'"), (None, "NoneType"), ([1.0], "list")])
def test_a_value_that_is_no_number(value: object, what: str) -> None:
    with pytest.raises(TypeError, match=f"'a' of rank 0 is {what}"):
        gather_timing({"a": value})


class World:
    """Stands in for torch.distributed of many ranks, of which this is the first."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return len(self.values)

    def all_gather_object(self, into: list[dict[str, float]], own: dict[str, float]) -> None:
        assert own == {"timing": self.values[0]}
        into[:] = [{"timing": value} for value in self.values]


@pytest.mark.parametrize(
    ("values", "k", "expected"),
    [
        ([float(n) for n in range(1, 11)], 10, (0.1, 1.0, 10.0, 9)),
        ([float(n) for n in range(1, 12)], 10, (1 / 11, 1.0, 11.0, 10)),  # the percentile is exactly a rank's value
        ([3.0, 3.0, 3.0, 3.0], 10, (0.0, 3.0, 3.0, 0)),
        ([1.0, 9.0, 9.0, 1.0], 50, (0.5, 1.0, 9.0, 1)),
        ([5.0], 10, (0.0, 5.0, 5.0, 0)),
        ([2.0, 1.0], 0, (0.0, 1.0, 2.0, 0)),
        ([2.0, 1.0], 100, (0.5, 1.0, 2.0, 0)),
    ],
)
def test_spread_over_many_ranks(
    values: list[float], k: int, expected: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", World(values))  # type: ignore[arg-type]
    assert rank_spread(values[0], k) == pytest.approx(expected)
    assert topk_reduce_ratio_min_max(values[0], k) == pytest.approx(expected[:3])


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("k", [-1, 101, math.nan])
def test_k_is_a_percentage(k: float) -> None:
    with pytest.raises(ValueError, match="0 to 100"):
        rank_spread(1.0, k)


SCRIPT = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist

from rankscope import topology
from rankscope.timing import gather_timing, rank_spread, reduce_timing, topk_reduce_ratio_min_max

dist.init_process_group("gloo")
rank = dist.get_rank()
mine = {"z_shared": 1.0 + 2 * rank, "step": 0.1, ("only_0" if rank == 0 else "only_1"): 10.0 + rank}
before = dict(mine)
result = {"gathered": gather_timing(mine)}
for op in ("avg", "sum", "max", "min"):
    result[op] = reduce_timing(mine, op)
result["enum"] = reduce_timing(mine, dist.ReduceOp.MAX)
result["tensor"] = reduce_timing({"t": torch.tensor(2.0 + rank, dtype=torch.float64)})
result["empty"] = reduce_timing({} if rank == 0 else {"late": 3.0})
result["topk"] = topk_reduce_ratio_min_max(1.0 + rank)
result["spread"] = rank_spread(1.0 + rank)
try:
    reduce_timing({"bad": "text"} if rank == 1 else {"bad": 1.0})
except TypeError as error:
    result["error"] = str(error)
result["unchanged"] = mine == before
result["keys_sorted"] = list(result["avg"]) == sorted(result["avg"])
found = topology.detect()
result["detected"] = [found.rank, found.world_size, found.local_rank, found.group_rank, found.source]
result["run_id"] = topology.run_id()
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
"""


@pytest.mark.torchrun
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_two_real_ranks_with_different_names(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, result in enumerate(ranks):
        assert result.pop("detected") == [rank, 2, rank, rank, "process group"]
    assert ranks[0] == ranks[1]
    result = ranks[0]
    assert result["gathered"] == {
        "only_0": [10.0, None],
        "only_1": [None, 11.0],
        "step": [0.1, 0.1],
        "z_shared": [1.0, 3.0],
    }
    assert result["avg"] == {"only_0": 10.0, "only_1": 11.0, "step": 0.1, "z_shared": 2.0}
    assert result["sum"] == {"only_0": 10.0, "only_1": 11.0, "step": 0.2, "z_shared": 4.0}
    assert result["max"] == result["enum"] == {"only_0": 10.0, "only_1": 11.0, "step": 0.1, "z_shared": 3.0}
    assert result["min"] == {"only_0": 10.0, "only_1": 11.0, "step": 0.1, "z_shared": 1.0}
    assert result["tensor"] == {"t": 2.5}
    assert result["empty"] == {"late": 3.0}
    assert result["topk"] == [0.5, 1.0, 2.0]
    assert result["spread"] == [0.5, 1.0, 2.0, 1]
    assert result["error"] == "timings must be numbers, but 'bad' of rank 1 is the text 'text'"
    assert result["unchanged"]
    assert result["keys_sorted"]
    assert result["run_id"]
