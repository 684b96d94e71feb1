"""Ranges and the capture switch, against a stand-in of nvtx and of torch.cuda that notes what is done to it."""

from __future__ import annotations

import inspect
import sys
import threading
import types
from typing import Any

import nvtx
import pytest

from rankscope import Span
from rankscope.log import get_logger
from rankscope_nsys.capture import CaptureSwitch, CudaProfiler, range_problem
from rankscope_nsys.ranges import COLORS, Ranges, color_value


class Recorder:
    """In place of the nvtx module."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_range(self, message: str, color: int, domain: str, category: str | None = None) -> int:
        self.calls.append(("start", message, color, domain, category))
        return len(self.calls)

    def end_range(self, handle: int) -> None:
        self.calls.append(("end", handle))


def test_the_stand_in_has_the_signatures_of_the_real_package() -> None:
    parameters = list(inspect.signature(nvtx.start_range).parameters)
    assert parameters[:4] == ["message", "color", "domain", "category"]
    assert list(inspect.signature(nvtx.end_range).parameters) == ["range_id"]


def test_a_range_has_all_that_the_span_says() -> None:
    recorder = Recorder()
    ranges = Ranges(recorder, get_logger())
    with ranges.row(Span("update", color="#f00", domain="d", category="c")), ranges.row(Span("plain")):
        pass
    assert recorder.calls == [
        ("start", "update", 0xFF0000, "d", "c"),
        ("start", "plain", 0x0000FF, "rankscope", None),
        ("end", 2),
        ("end", 1),
    ]


def test_ranges_that_overlap_end_by_their_own_handles() -> None:
    recorder = Recorder()
    ranges = Ranges(recorder, get_logger())
    first, second = ranges.row(Span("first")), ranges.row(Span("second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(ValueError, ValueError(), None)
    second.__exit__(None, None, None)
    assert recorder.calls[2:] == [("end", 1), ("end", 2)]


@pytest.mark.parametrize("label", ["", "ü", "a\0b", "\ud800", "x" * 100_000])
def test_any_label_goes_through_the_real_package(label: str) -> None:
    ranges = Ranges(nvtx, get_logger())
    with ranges.row(Span(label, domain=label[:50], category=label[:50])):
        pass


def test_colours(capfd: Any) -> None:
    assert (color_value("Red"), color_value("#0F0"), color_value("#0000ff")) == (0xFF0000, 0x00FF00, 0x0000FF)
    assert [color_value(name) for name in ("crimson-ish", "#12345", "#gggggg", "ff0000", "")] == [None] * 5
    ranges = Ranges(Recorder(), get_logger())
    for _ in range(3):
        ranges.row(Span("a", color="crimson-ish"))
    assert capfd.readouterr().err.count("crimson-ish") == 1


def test_our_colours_are_those_of_nvtx() -> None:
    from nvtx.colors import _NVTX_COLORS

    assert {name: value for name, value in _NVTX_COLORS.items() if name is not None}.items() <= COLORS.items()


# The CUDA profiler range.


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of torch, as far as it is asked: torch 2.13, torch/cuda/__init__.py and torch/cuda/profiler.py."""
    calls: list[str] = []
    module = types.SimpleNamespace(
        calls=calls,
        initialized=True,
        is_initialized=lambda: module.initialized,
        profiler=types.SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop")),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=module))
    return module


@pytest.mark.torch
def test_the_stand_in_of_torch_is_like_the_real_one() -> None:
    import torch

    assert not inspect.signature(torch.cuda.is_initialized).parameters
    assert not inspect.signature(torch.cuda.profiler.start).parameters
    assert not inspect.signature(torch.cuda.profiler.stop).parameters
    assert torch.cuda.is_initialized() is False


def test_the_cuda_range_is_counted(cuda: Any) -> None:
    profiler = CudaProfiler()
    assert [profiler.start(), profiler.start(), profiler.stop()] == ["", "", ""]
    assert (cuda.calls, profiler.depth) == (["start"], 1)
    assert [profiler.stop(), profiler.stop()] == ["", ""]
    assert (cuda.calls, profiler.depth) == (["start", "stop"], 0)


def test_threads_count_together(cuda: Any) -> None:
    profiler = CudaProfiler()
    barrier = threading.Barrier(8)

    def both() -> None:
        barrier.wait()
        profiler.start()
        barrier.wait()
        profiler.stop()

    threads = [threading.Thread(target=both) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cuda.calls == ["start", "stop"]


def test_no_cuda_context_is_made_for_it(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = CudaProfiler()
    cuda.initialized = False
    assert profiler.start() == "CUDA was not in use in this process when the window began"
    monkeypatch.delitem(sys.modules, "torch")
    assert profiler.start() == "torch is not imported in this process"
    assert (profiler.stop(), cuda.calls, profiler.depth) == ("", [], 0)


def test_errors_of_cuda_are_words(cuda: Any) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA driver version is insufficient")

    profiler = CudaProfiler()
    cuda.profiler.start = fail
    assert profiler.start() == "cudaProfilerStart failed: RuntimeError: CUDA driver version is insufficient"
    cuda.profiler = types.SimpleNamespace(start=lambda: None, stop=fail)
    assert profiler.start() == ""
    assert profiler.stop() == "cudaProfilerStop failed: RuntimeError: CUDA driver version is insufficient"
    assert profiler.depth == 0


def test_the_cuda_range_is_around_the_nvtx_range(cuda: Any) -> None:
    recorder = Recorder()
    cuda.profiler = types.SimpleNamespace(
        start=lambda: recorder.calls.append("cuda"), stop=lambda: recorder.calls.append("cuda end")
    )
    switch = CaptureSwitch(recorder)
    assert switch.on() == ""
    assert switch.off() == ""
    assert switch.off() == ""
    assert recorder.calls == [
        "cuda",
        ("start", "rankscope.window", 0x808080, "rankscope", None),
        ("end", 2),
        "cuda end",
    ]


def test_a_package_that_drops_all_ranges_is_noticed() -> None:
    class DummyDomain:
        pass

    silent = types.SimpleNamespace(enabled=lambda: True, get_domain=lambda name: DummyDomain())
    assert "install 'nvtx<0.2.12' or a newer nsys" in range_problem(silent)
    disabled = types.SimpleNamespace(enabled=lambda: False)
    assert "NVTX_DISABLE is set" in range_problem(disabled)
    assert range_problem(types.SimpleNamespace()) == ""
    assert range_problem(nvtx) == "" or hasattr(nvtx, "Domain")
