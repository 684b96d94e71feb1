"""Captures that end early: the estimate by itself, and with real captures."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import annotate
from rankscope.artifacts.exports import exports
from rankscope.config import ConfigError
from rankscope_torch import budget as module
from rankscope_torch.budget import CHECK_EVERY, Budget, EventSize, event_size, heap_meter, resident_bytes
from rankscope_torch.options import TorchOptions

MIB = 1 << 20


class Fake:
    """A heap and a clock that move only when a test says so."""

    def __init__(self) -> None:
        self.bytes = 500 * MIB
        self.now = 100.0
        self.looks = 0

    def meter(self) -> int:
        self.looks += 1
        return self.bytes

    def clock(self) -> float:
        return self.now

    def budget(self, **options: Any) -> Budget:
        return Budget(TorchOptions(**options), meter=self.meter, clock=self.clock)

    def grow(self, amount: float) -> None:
        """Let the heap grow, and the time pass until the next look."""
        self.bytes += int(amount)
        self.now += CHECK_EVERY


@pytest.fixture
def fake() -> Fake:
    return Fake()


PLAIN = event_size(TorchOptions())


# The estimate.


@pytest.mark.parametrize(
    ("contents", "other"),
    [(("cpu",), ()), (("stack",), ()), (("shapes", "stack"), ("shapes",)), (("all",), ("memory", "shapes"))],
)
def test_sizes_depend_on_the_contents(contents: tuple[str, ...], other: tuple[str, ...]) -> None:
    size = event_size(TorchOptions(contents=contents))
    assert size.recorded > 0
    assert size.stopped > size.raw > 0
    same = contents != ("stack",)
    assert (size == event_size(TorchOptions(contents=other))) is same


@pytest.mark.parametrize(
    ("options", "bytes_at_limit"),
    [
        ({"max_events": 1000}, 1000 * PLAIN.recorded),
        ({"max_trace_mb": 2}, 2 * MIB / PLAIN.raw * PLAIN.recorded),
        ({"max_host_mb": 3}, 3 * MIB / PLAIN.stopped * PLAIN.recorded),
    ],
)
def test_the_heaps_growth_tells_when_it_is_enough(fake: Fake, options: dict[str, Any], bytes_at_limit: float) -> None:
    budget = fake.budget(**options)
    assert budget
    budget.begin()
    fake.grow(bytes_at_limit * 0.98)
    assert budget.spent() is None
    fake.grow(bytes_at_limit * 0.04)
    reason = budget.spent()
    (name,) = options
    assert reason is not None
    assert reason.startswith(f"{name}={options[name]} is reached (about ")
    # The next capture begins from where the heap is then.
    budget.begin()
    fake.grow(0)
    assert budget.spent() is None


def test_the_first_limit_that_is_reached_counts(fake: Fake) -> None:
    budget = fake.budget(max_events=10**9, max_trace_mb=1)
    budget.begin()
    fake.grow(2 * MIB / PLAIN.raw * PLAIN.recorded)
    assert str(budget.spent()).startswith("max_trace_mb=1 ")


def test_between_two_looks_nothing_is_measured(fake: Fake) -> None:
    budget = fake.budget(max_events=1)
    budget.begin()
    looks = fake.looks
    fake.bytes += MIB
    assert budget.spent() is None
    fake.now += CHECK_EVERY * 0.9
    assert budget.spent() is None
    assert fake.looks == looks
    fake.now += CHECK_EVERY * 0.2
    assert budget.spent() is not None


def test_a_heap_that_shrinks_is_no_growth(fake: Fake) -> None:
    budget = fake.budget(max_events=1)
    budget.begin()
    fake.grow(-100 * MIB)
    assert budget.spent() is None
    assert budget.grown() == 0


def test_without_limits_the_heap_is_not_looked_at(fake: Fake) -> None:
    budget = fake.budget()
    assert not budget
    budget.begin()
    fake.grow(MIB)
    assert budget.grown() == 0
    assert budget.spent() is None
    assert fake.looks == 0


def test_what_to_expect_on_the_disk(fake: Fake) -> None:
    budget = fake.budget(max_events=10**6)
    assert budget.expected_bytes(0) == 0
    assert budget.expected_bytes(1000 * int(PLAIN.recorded)) == pytest.approx(1000 * PLAIN.raw, rel=0.01)
    budget.last_raw_bytes = 5 * MIB
    assert budget.expected_bytes(1000) == 5 * MIB


def learned(budget: Budget) -> EventSize:
    return budget._size


def test_a_file_corrects_the_estimate(fake: Fake) -> None:
    budget = fake.budget(max_trace_mb=1)
    budget.learn({"events": 10_000, "heap_grown": 3_000_000, "raw_bytes": 4_000_000})
    assert learned(budget) == EventSize(300, PLAIN.stopped, 400)
    budget.begin()
    fake.grow(MIB / 400 * 300 * 1.01)
    assert budget.spent() is not None


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"events": None, "heap_grown": 1000, "raw_bytes": 1000},
        {"events": 999, "heap_grown": 10**6, "raw_bytes": 10**6},
        {"events": 5000, "heap_grown": 10**6},
    ],
)
def test_too_little_teaches_nothing(fake: Fake, facts: dict[str, Any]) -> None:
    budget = fake.budget(max_events=1)
    budget.learn(facts)
    assert learned(budget) == PLAIN


@pytest.mark.parametrize(("grown", "factor"), [(10**12, 4), (1, 0.25)])
def test_what_the_training_allocates_misleads_only_so_far(fake: Fake, grown: int, factor: float) -> None:
    budget = fake.budget(max_events=1)
    for _ in range(5):  # nor does it add up from window to window
        budget.learn({"events": 10_000, "heap_grown": grown, "raw_bytes": 10_000 * PLAIN.raw})
    assert learned(budget).recorded == pytest.approx(PLAIN.recorded * factor)


def test_a_file_without_growth_teaches_the_size_of_the_trace_only(fake: Fake) -> None:
    budget = fake.budget()
    budget.learn({"events": 10_000, "raw_bytes": 5_000_000})
    assert learned(budget) == EventSize(PLAIN.recorded, PLAIN.stopped, 500)


# The meter.


def allocated(meter: Callable[[], int], size: int) -> int:
    gc.collect()
    before = meter()
    kept = bytearray(size)
    kept[::4096] = b"x" * len(kept[::4096])
    return meter() - before


@pytest.mark.parametrize("meter", [heap_meter(), resident_bytes])
def test_a_meter_sees_an_allocation(meter: Callable[[], int]) -> None:
    assert 63 * MIB < allocated(meter, 64 * MIB) < 80 * MIB


def test_a_c_library_that_does_not_allocate_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heap_meter() is not resident_bytes  # glibc here
    monkeypatch.setattr(module, "_sees_what_is_allocated", lambda _: False)
    assert heap_meter() is resident_bytes


def test_an_allocator_in_place_of_the_c_librarys_is_noticed() -> None:
    assert module._sees_what_is_allocated(heap_meter())
    assert not module._sees_what_is_allocated(lambda: 12345)


def test_a_c_library_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: object())
    assert heap_meter() is resident_bytes


# The options.


@pytest.mark.parametrize("name", ["max_events", "max_trace_mb", "max_host_mb"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_greater_than_nothing(handle: Callable[..., Any], name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"torch\.{name}.*must be greater than 0"):
        handle(**{name: value})


def test_no_limit_no_budget(handle: Callable[..., Any]) -> None:
    assert handle().tools[0].backend.over_budget is None
    assert handle().tools[0].budget() is None


# Real captures.


@pytest.fixture
def small_ops() -> Callable[..., int]:
    """Train with small operators until the window of a step ends by itself; how many mini-batches that took."""
    torch = pytest.importorskip("torch")
    tensor = torch.ones(4)

    def train(profiler: Any, step: int, most: int = 40_000) -> int:
        profiler.start(step=step)
        done = 0
        while profiler.recording and done < most:
            with annotate(f"mini_batch{done}"):
                for _ in range(5):
                    tensor.add(1)
            done += 1
        profiler.stop()
        assert exports().drain(120)
        return done

    return train


def events_of(trace: Any) -> int:
    return int(trace.meta["events"])


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "limit"),
    [("max_events", 60_000), ("max_trace_mb", 16), ("max_host_mb", 100)],
)
def test_a_capture_ends_near_its_limit_and_learns(
    handle: Callable[..., Any], small_ops: Callable[..., int], kit: Any, tmp_path: Path, name: str, limit: int
) -> None:
    profiler = handle(**{name: limit})
    budget = profiler.tools[0].backend._budget
    before = learned(budget)
    for step in (1, 2):
        assert small_ops(profiler, step) < 40_000
        size = learned(budget)
        trace = kit.traces(tmp_path)[step - 1]
        record = kit.ledger(tmp_path, "artifact", status="published", step=step)[0]
        holds = {
            "max_events": record["events"],
            "max_trace_mb": record["raw_bytes"] / MIB,
            "max_host_mb": record["events"] * before.stopped / MIB,
        }[name]
        assert 0.7 * limit < holds < 2 * limit, f"step {step}: {holds} of {limit}; {size}"
        assert trace.meta["ended_early"].startswith(f"{name}={limit} is reached")
        assert record["ended_early"] == trace.meta["ended_early"]
        assert record["heap_grown"] > 0
        assert trace.labels[0] == "mini_batch0"
        assert (size != before) is (step == 2)  # the second window begins with what the first one taught
    first = kit.ledger(tmp_path, "artifact", status="published", step=1)[0]
    assert learned(budget).raw == pytest.approx(first["raw_bytes"] / first["events"])
    assert [row["status"] for row in kit.ledger(tmp_path, "artifact")].count("published") == 2
    assert kit.left_over(tmp_path) == []


@pytest.mark.torch
def test_only_the_stage_that_had_enough_ends(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    import torch

    tensor = torch.ones(4)
    profiler = handle(discrete=True, max_events=40_000)
    profiler.start(step=1)
    with annotate("update", scheduled=True):
        current = profiler._opened()[0]
        for number in range(40_000):
            if current.window is None:
                break
            with annotate(f"mini_batch{number}"):
                for _ in range(5):
                    tensor.add(1)
        assert current.window is None
        kit.op("cos")
    with annotate("log_prob"):
        kit.op("sin")
    profiler.stop()
    assert exports().drain(120)
    traces = {trace.meta["scope"]: trace for trace in kit.traces(tmp_path)}
    assert set(traces) == {"update", "log_prob"}
    assert "max_events=40000 is reached" in traces["update"].meta["ended_early"]
    assert "ended_early" not in traces["log_prob"].meta
    assert "cos" not in traces["update"].ops
    assert "sin" in traces["log_prob"].ops
    update = traces["update"].row("update")
    assert update.end >= max(row.end for row in traces["update"].rows) - kit.SLACK


@pytest.mark.torch
def test_a_small_capture_is_not_cut(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    profiler = handle(max_events=10**8, max_trace_mb=10**5, max_host_mb=10**6)
    profiler.start(step=1)
    with annotate("update"):
        kit.op("cos")
    profiler.stop()
    assert exports().drain(60)
    assert "ended_early" not in kit.trace(tmp_path).meta
    assert kit.ledger(tmp_path, "window", event="close")[0].get("reason") is None


@pytest.mark.torch
def test_time_is_a_limit_too(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    profiler = handle(max_seconds=1e-6)
    profiler.start(step=1)
    with annotate("a"):
        kit.op("cos")
    assert not profiler.recording
    profiler.stop()
    assert exports().drain(60)
    (record,) = [one for one in kit.ledger(tmp_path, "artifact") if one["status"] != "exporting"]
    assert record["ended_early"] == "max_seconds=1e-06 is reached"


@pytest.mark.torch
def test_too_many_exports_drop_a_capture_and_the_next_one_works(
    handle: Callable[..., Any], kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = handle(common={"max_exports": 1, "exports_full": "drop"})
    store = profiler.stores[0]
    for step, room in ((1, True), (2, False), (3, True)):
        with monkeypatch.context() as patch:
            if not room:
                patch.setattr(type(exports()), "pending", 1)
                patch.setattr(type(exports()), "drain", lambda *_, **__: False)
            profiler.start(step=step)
            with annotate("update"):
                kit.op("cos")
            profiler.stop()
        assert exports().drain(60)
    assert [artifact.step for artifact in store.artifacts] == [1, 3]
    (failed,) = kit.ledger(tmp_path, "artifact", status="failed")
    assert failed["step"] == 2
    assert "max_exports" in failed["reason"]
    assert kit.left_over(tmp_path) == []
