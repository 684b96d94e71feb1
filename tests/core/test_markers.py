from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from rankscope import log, markers
from rankscope.markers import mark_annotate, mark_end_range, mark_range, mark_start_range

Calls = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "_decided", (markers._NOTHING, ()))
    monkeypatch.setattr(markers, "_off", set())
    monkeypatch.setattr(log, "_said", {})
    for name in ("torch", "torch_npu", "nvtx"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def _torch(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, npu: int = 0) -> types.ModuleType:
    torch = types.ModuleType("torch")
    for kind, count in (("cuda", cuda), ("npu", npu)):
        module = types.SimpleNamespace(is_initialized=lambda: False, device_count=lambda count=count: count)
        setattr(torch, kind, module)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """An installed nvtx package, with the signatures of the real one."""
    calls: Calls = []

    def start_range(
        message: str | None = None,
        color: str | int | None = None,
        domain: str | None = None,
        category: str | int | None = None,
    ) -> tuple[int, str | None]:
        calls.append(("start", message, color, domain, category))
        return len(calls), domain

    def end_range(range_id: tuple[int, str | None]) -> None:
        calls.append(("end", *range_id))

    module = types.ModuleType("nvtx")
    module.start_range = start_range  # type: ignore[attr-defined]
    module.end_range = end_range  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return calls


@pytest.fixture
def mstx(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """An installed torch_npu, with the signatures of the real mstx."""
    calls: Calls = []

    class Mstx:
        @staticmethod
        def range_start(message: str, stream: object = None, domain: str = "default") -> int:
            assert stream is None
            calls.append(("start", message, domain))
            return len(calls)

        @staticmethod
        def range_end(range_id: int, domain: str = "default") -> None:
            calls.append(("end", range_id, domain))

    module = types.ModuleType("torch_npu")
    module.npu = types.SimpleNamespace(mstx=Mstx)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return calls


def test_without_a_device_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    assert mark_start_range("a", color="red", domain="d", category="c") is None
    mark_end_range(None)
    mark_end_range(7)
    mark_end_range("unknown")
    with mark_range("a", "red", "d", "c"):
        pass
    assert mark_annotate(color="red")(lambda: 5)() == 5
    assert capsys.readouterr() == ("", "")


def test_an_installed_package_without_its_device_is_not_used(
    nvtx: Calls, mstx: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch(monkeypatch, npu=1)
    mark_end_range(mark_start_range("a"))
    assert nvtx == []
    assert len(mstx) == 2


def test_nvtx_gets_everything_and_its_own_handle_back(nvtx: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, cuda=1)
    outer = mark_start_range("outer", color="red", domain="d", category="c")
    inner = mark_start_range("inner")
    mark_end_range(outer)
    mark_end_range(inner)
    mark_end_range(inner)
    assert nvtx == [
        ("start", "outer", "red", "d", "c"),
        ("start", "inner", None, None, None),
        ("end", 1, "d"),
        ("end", 2, None),
    ]


def test_mstx_closes_in_the_domain_it_opened_and_names_ignored_options_once(
    mstx: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _torch(monkeypatch, npu=1)
    mark_end_range(mark_start_range("a", domain="d"))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        mark_end_range(mark_start_range("b", color="red", category="c"))
    assert mstx[:4] == [("start", "a", "d"), ("end", 1, "d"), ("start", "b", "default"), ("end", 3, "default")]
    assert len(mstx) == 6
    assert capsys.readouterr().err.count("ignored on this device") == 1


def test_both_at_once(nvtx: Calls, mstx: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, cuda=1, npu=1)
    mark_end_range(mark_start_range("a"))
    assert [call[0] for call in nvtx] == [call[0] for call in mstx] == ["start", "end"]


def test_a_device_that_appears_later_is_found(nvtx: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    @mark_annotate("late")
    def work() -> None:
        pass

    work()
    half_imported = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", half_imported)
    work()
    assert nvtx == []
    half_imported.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: True, device_count=lambda: 1
    )
    work()
    assert [call[:2] for call in nvtx] == [("start", "late"), ("end", 1)]


def test_the_decision_is_made_once(nvtx: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    torch = _torch(monkeypatch)
    torch.cuda.device_count = lambda: asked.append(None) or 0
    for _ in range(3):
        mark_start_range("a")
    assert len(asked) == 1
    assert nvtx == []


def test_a_missing_package_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, cuda=1)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert mark_start_range("a") is None


@pytest.mark.parametrize("broken", ["start_range", "end_range"])
def test_a_marker_that_raises_is_switched_off_with_one_warning(
    broken: str, nvtx: Calls, mstx: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError("tool is gone")

    _torch(monkeypatch, cuda=1, npu=1)
    monkeypatch.setattr(sys.modules["nvtx"], broken, fail)
    for _ in range(3):
        with mark_range("a"):
            pass
    assert [call[0] for call in mstx] == ["start", "end"] * 3
    assert len(nvtx) <= 1
    assert [marker.name for marker in markers.active_markers()] == ["mstx"]
    err = capsys.readouterr().err
    assert err.count("nvtx ranges are off") == 1
    assert "OSError: tool is gone" in err


def test_the_bodys_exception_passes_and_the_range_closes(nvtx: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, cuda=1)
    error = KeyError("mine")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as first, mark_range("with"):
        raise error
    with pytest.raises(KeyError) as second:
        mark_annotate("call")(fail)()
    assert first.value is second.value is error
    assert [call[0] for call in nvtx] == ["start", "end", "start", "end"]


def test_a_range_may_end_in_another_thread(nvtx: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, cuda=1)
    handle = mark_start_range("a")
    thread = threading.Thread(target=mark_end_range, args=(handle,))
    thread.start()
    thread.join()
    assert nvtx[-1] == ("end", 1, None)


@pytest.mark.parametrize("decorate", [mark_annotate, mark_annotate(), mark_annotate(message=None)])
def test_the_function_name_is_the_message(
    decorate: Callable[[Any], Any], nvtx: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch(monkeypatch, cuda=1)

    @decorate
    def update_actor(value: int, *, more: int = 0) -> int:
        """Doc."""
        return value + more

    assert update_actor(1, more=2) == 3
    assert (update_actor.__name__, update_actor.__doc__) == ("update_actor", "Doc.")
    assert nvtx[0] == ("start", "update_actor", None, None, None)


def test_coroutines_and_generators_are_covered_to_their_end(nvtx: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, cuda=1)

    @mark_annotate(color="blue")
    async def generate() -> str:
        nvtx.append(("body",))
        await asyncio.sleep(0)
        return "done"

    @mark_annotate
    def batches() -> Any:
        got = yield 1
        nvtx.append(("got", got))
        return 2

    assert asyncio.run(generate()) == "done"
    assert [call[0] for call in nvtx] == ["start", "body", "end"]
    del nvtx[:]
    iterator = batches()
    assert nvtx == []
    next(iterator)
    with pytest.raises(StopIteration) as stop:
        iterator.send("sent")
    assert stop.value.value == 2
    assert [call[0] for call in nvtx] == ["start", "got", "end"]


def test_an_async_generator_is_left_as_it_is_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    async def stream() -> Any:
        yield 1

    assert mark_annotate(stream) is stream
    assert "use rankscope.annotate function=stream" in capsys.readouterr().err
