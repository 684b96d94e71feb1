"""What annotate() leaves in a real trace: every kind of function, and every kind of label."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankscope import annotate

pytestmark = pytest.mark.torch

LABELS = [
    'update "fast"',
    "back\\slash",
    'all \\"of\\" it\\',
    "two\nlines",
    "tab\tand\rreturn",
    "\x00\x01\x1f\x7f",
    "größer ≥ 模型 🙂",
    "lone \ud83d surrogate",
    "x" * 10_000,
    '"' * 3_000,
    "</script><b>&amp;",
    "'single' {curly} [square], 100%",
    "NaN",
    "  },",
    '"traceEvents": [',
]


@pytest.fixture
def window(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> Callable[..., Any]:
    """A window in a ``with``; afterwards its trace is under the key ``trace``."""

    @contextmanager
    def record(**options: Any) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {}
        profiler = handle(**options)
        profiler.start(step=1)
        try:
            yield found
        finally:
            profiler.stop()
            profiler.close()
            found["trace"] = kit.trace(tmp_path)

    return record


def test_a_coroutine_s_range_covers_its_waiting(window: Callable[..., Any]) -> None:
    @annotate("waiting")
    async def waiting() -> int:
        await asyncio.sleep(0.05)
        return 7

    assert inspect.iscoroutinefunction(waiting)
    with window() as found:
        assert asyncio.run(waiting()) == 7
    row = found["trace"].row("waiting")
    assert row.end - row.start >= 50_000


def test_concurrent_coroutines_are_all_there_and_overlap_nobody(window: Callable[..., Any]) -> None:
    @annotate("task")
    async def task(first: float, second: float) -> None:
        await asyncio.sleep(first)
        with annotate("part"):
            await asyncio.sleep(second)

    async def all_of_them() -> None:
        with annotate("around"):
            await asyncio.gather(task(0.01, 0.03), task(0.02, 0.04), task(0.03, 0.01))

    with window() as found:
        asyncio.run(all_of_them())
    trace = found["trace"]  # reading it looked for partial overlaps
    assert sorted(trace.labels) == ["around", "part", "part", "part", "task", "task", "task"]
    tasks = [row for row in trace.rows if row.name == "task"]
    assert max(row.start for row in tasks) < min(row.end for row in tasks), "they ran at the same time"
    assert {row.phase for row in tasks} == {"X", "b"}, "what does not nest is shown as an asynchronous range"
    assert all(row.end - row.start >= 40_000 for row in tasks)


def test_a_generator_s_range_covers_its_iteration(window: Callable[..., Any], kit: Any) -> None:
    @annotate("counting")
    def counting() -> Generator[int, None, str]:
        yield 1
        kit.op("cos")
        yield 2
        return "done"

    def collect() -> Generator[None, None, None]:
        assert (yield from counting()) == "done"

    assert inspect.isgeneratorfunction(counting)
    with window() as found:
        assert list(collect()) == [1, 2]
    trace = found["trace"]
    row = trace.row("counting")
    [cos] = [event for event in trace.events if event["name"] == "aten::cos"]
    assert row.start <= cos["ts"] <= cos["ts"] + cos["dur"] <= row.end


def test_generators_that_are_closed_or_fail_end_their_range(window: Callable[..., Any]) -> None:
    @annotate("closed")
    def closed() -> Generator[int, None, None]:
        yield 1
        yield 2

    @annotate("failed")
    def failed() -> Generator[int, None, None]:
        yield 1
        raise KeyError("inside")

    with window() as found:
        generator = closed()
        next(generator)
        generator.close()
        with pytest.raises(KeyError, match="inside"):
            list(failed())
    rows = found["trace"].rows
    assert [row.name for row in rows] == ["closed", "failed"]
    assert not [row for row in rows if "unfinished" in row.args]


def test_async_generators_that_end_are_closed_or_fail(window: Callable[..., Any]) -> None:
    def make(label: str) -> Callable[[bool], AsyncGenerator[int, None]]:
        @annotate(label)
        async def generator(fail: bool) -> AsyncGenerator[int, None]:
            yield 1
            await asyncio.sleep(0.01)
            if fail:
                raise KeyError("inside")
            yield 2

        return generator

    async def run() -> None:
        whole, closed, failed = make("whole"), make("closed"), make("failed")
        assert inspect.isasyncgenfunction(whole)
        assert [value async for value in whole(False)] == [1, 2]
        generator = closed(False)
        assert await anext(generator) == 1
        await generator.aclose()
        with pytest.raises(KeyError, match="inside"):
            assert [value async for value in failed(True)]

    with window() as found:
        asyncio.run(run())
    rows = {row.name: row for row in found["trace"].rows}
    assert set(rows) == {"whole", "closed", "failed"}
    assert rows["whole"].end - rows["whole"].start >= 10_000
    assert not [row for row in rows.values() if "unfinished" in row.args]


def test_a_stage_that_raises_runs_once_and_keeps_its_exception(window: Callable[..., Any]) -> None:
    calls: list[int] = []
    error = ValueError("the stage's own")

    @annotate("raising")
    def raising() -> None:
        calls.append(1)
        raise error

    with window() as found:
        with pytest.raises(ValueError) as caught:
            raising()
        with pytest.raises(ValueError) as in_with, annotate("with"):
            raise error
    assert caught.value is in_with.value is error
    assert calls == [1]
    assert found["trace"].labels == ["raising", "with"]


def test_methods_of_objects_without_a_profiler_are_shown_too(window: Callable[..., Any]) -> None:
    class Library:
        @annotate("bare")
        def bare(self, value: int) -> int:
            return value

        @annotate
        def unnamed(self) -> None:
            pass

        @staticmethod
        @annotate("static")
        def static() -> None:
            pass

    class WithNone(Library):
        profiler = None

    with window() as found:
        assert Library().bare(3) == 3
        WithNone().bare(4)
        Library().unnamed()
        Library.static()
    assert found["trace"].labels == ["bare", "bare", "unnamed", "static"]


@pytest.mark.parametrize("kind", ["torch", "own"])
def test_any_label_is_in_the_file_exactly_and_the_file_is_valid(
    window: Callable[..., Any], kit: Any, kind: str
) -> None:
    async def wait(label: str) -> None:
        async def body() -> None:
            await asyncio.sleep(0)

        await annotate(label)(body)()

    with window() as found:
        for label in LABELS:
            if kind == "torch":
                with annotate(label):
                    kit.op("cos")
            else:
                asyncio.run(wait(label))
    trace = found["trace"]
    shown = [label.encode("utf-8", "replace").decode() for label in LABELS]
    assert trace.labels == shown
    assert json.loads(trace.text)["rankscope"]["rank"] == 0


def test_labels_that_look_alike_after_cleaning_stay_apart(window: Callable[..., Any]) -> None:
    with window() as found:
        for label in ('a"b', "a\\b", "a_b", "a\nb"):
            with annotate(label):
                pass
    assert found["trace"].labels == ['a"b', "a\\b", "a_b", "a\nb"]


def test_a_with_in_plain_code_is_a_range_of_torch_and_in_a_coroutine_ours(window: Callable[..., Any]) -> None:
    @annotate("plain")
    def plain() -> None:
        with annotate("in_plain"):
            pass

    async def run() -> None:
        with annotate("in_task"):
            await asyncio.sleep(0)
            plain()

    with window() as found:
        with annotate("outside"):
            pass
        asyncio.run(run())
    ours = {row.name for row in found["trace"].rows if "rankscope" in row.args}
    assert found["trace"].labels == ["outside", "in_task", "plain", "in_plain"]
    assert ours == {"in_task"}, "only ranges of torch have a twin on the device"


@pytest.mark.parametrize("contents", [["cpu"], ["stack"]])
def test_rows_nest_with_everything_on_their_thread(window: Callable[..., Any], kit: Any, contents: list[str]) -> None:
    @annotate("decorated")
    def decorated() -> None:
        with annotate("inner"):
            kit.op("cos")

    with window(contents=contents) as found, annotate("outer"):
        decorated()
        kit.op("sin")
    trace = found["trace"]
    assert trace.labels == ["outer", "decorated", "inner"]
    frames = [event["name"] for event in trace.events if event.get("cat") == "python_function"]
    assert bool(frames) == (contents == ["stack"])
    assert not [name for name in frames if "_record_function_with_args" in name or "ranges.py" in name]
