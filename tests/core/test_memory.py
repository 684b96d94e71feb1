from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import subprocess
import sys
import types
from typing import Any

import pytest

from rankscope import memory
from rankscope.memory import (
    GPUMemoryLogger,
    MemoryInfo,
    MemoryLogger,
    log_gpu_memory_usage,
    log_memory_usage,
    memory_info,
)

GB = 1024**3


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "torch_npu", "torch.distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)


class Device:
    """Stands in for torch.cuda of a device in use: 16 GB, 4 of them free."""

    def __init__(self) -> None:
        self.initialised = True
        self.reserved = [6 * GB]
        self.calls: list[tuple[Any, ...]] = []

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return 1

    def memory_allocated(self) -> int:
        return 5 * GB

    def memory_reserved(self) -> int:
        return self.reserved[0]

    def max_memory_allocated(self) -> int:
        return 5 * GB + GB // 3

    def mem_get_info(self) -> tuple[int, int]:
        assert self.initialised, "this would create a context on the device"
        return 4 * GB, 16 * GB

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))
        if len(self.reserved) > 1:
            self.reserved.pop(0)

    def reset_peak_memory_stats(self) -> None:
        self.calls.append(("reset",))

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.calls.append(("fraction", fraction))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    torch = types.ModuleType("torch")
    torch.cuda = Device()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch.cuda


def _in_group(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    module = types.ModuleType("torch.distributed")
    module.__dict__.update(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank, get_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", module)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.getMessage()))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def logger(lines: Lines) -> logging.Logger:
    logger = logging.Logger("mine", level=logging.DEBUG)
    logger.addHandler(lines)
    return logger


def _without_host(info: MemoryInfo) -> tuple[float, ...]:
    return info.allocated, info.reserved, info.peak_allocated, info.used, info.total


def test_zeros_without_a_device_but_the_host_is_known() -> None:
    info = memory_info("KB", 0)
    assert _without_host(info) == (0, 0, 0, 0, 0)
    assert 1024 < info.host_rss <= info.host_peak


@pytest.mark.torch
def test_zeros_with_the_installed_torch_and_no_device() -> None:
    if importlib.util.find_spec("torch") is None:  # an import would load torch a second time in this process
        pytest.skip("torch is not installed")
    code = "import torch; from rankscope.memory import memory_info as m; print(m('KB')); assert m('KB').host_rss > 9999"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "allocated=0.0, reserved=0.0, peak_allocated=0.0, used=0.0, total=0.0, host_rss=" in done.stdout


def test_sizes_of_a_device_in_use(cuda: Device) -> None:
    assert _without_host(memory_info()) == (5, 6, 5.33, 12, 16)
    assert memory_info(precision=3).peak_allocated == 5.333
    assert memory_info("MB").total == 16 * 1024
    assert memory_info("KB").unit == "KB"


def test_a_device_that_is_not_in_use_is_not_woken(cuda: Device) -> None:
    cuda.initialised = False
    assert _without_host(memory_info()) == (0, 0, 0, 0, 0)


def test_a_failing_driver_gives_zeros(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("driver shutting down")

    for name in ("memory_allocated", "mem_get_info"):
        monkeypatch.setattr(cuda, name, fail)
    assert _without_host(memory_info()) == (0, 6, 5.33, 0, 0)


def test_no_proc_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> str:
        raise OSError("no /proc")

    monkeypatch.setattr(memory.Path, "read_text", fail)
    assert memory_info().host_rss == 0


@pytest.mark.parametrize(("unit", "hint"), [("gb", "Did you mean 'GB'"), ("TB", "GB, MB, KB"), (None, "GB, MB, KB")])
def test_an_unknown_unit_names_the_choices(unit: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        memory_info(unit)


def test_a_given_logger_gets_the_line(cuda: Device, logger: logging.Logger, lines: Lines) -> None:
    log_memory_usage("after load", logger, level=logging.DEBUG)
    ((level, text),) = lines.records
    assert level == logging.DEBUG
    assert text.startswith(
        "after load, memory allocated (GB): 5.00, memory reserved (GB): 6.00, "
        "device memory used/total (GB): 12.00/16.00, host memory resident (GB): "
    )


def test_without_a_logger_it_is_ours(cuda: Device, capsys: pytest.CaptureFixture[str]) -> None:
    log_gpu_memory_usage("after load")
    err = capsys.readouterr().err
    assert "[rankscope]" in err
    assert "after load, memory in GB allocated=5.0 reserved=6.0 peak_allocated=5.33 used=12.0 total=16.0" in err


def test_only_the_given_rank_logs(logger: logging.Logger, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    log_memory_usage("no group", logger, rank=3)
    _in_group(monkeypatch, 1)
    log_memory_usage("rank 0 only", logger)
    log_memory_usage("this rank", logger, rank=1)
    log_memory_usage("all ranks", logger, rank=None)
    assert [text.split(",")[0] for _, text in lines.records] == ["no group", "this rank", "all ranks"]


def test_an_unknown_level_is_an_error_when_it_is_written() -> None:
    with pytest.raises(ValueError, match=r"level='inf' is not one of debug, info, warning, error. Did you mean 'info'"):
        MemoryLogger("actor", level="inf")


def test_other_loggers_and_failing_ones(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    log_memory_usage("a", types.SimpleNamespace(warning=said.append), level=35)
    assert said[0].startswith("a, memory allocated")
    log_memory_usage("b", types.SimpleNamespace())


def test_decorator_says_before_and_after_also_when_it_raises(logger: logging.Logger, lines: Lines) -> None:
    @GPUMemoryLogger(role="actor", logger=logger, level="warning")
    def update(value: int) -> int:
        """Doc."""
        if value < 0:
            raise ValueError("negative")
        return value

    assert (update.__name__, update.__doc__) == ("update", "Doc.")
    assert update(3) == 3
    with pytest.raises(ValueError, match="negative"):
        update(-1)
    assert [text.split(",")[0] for _, text in lines.records] == ["[actor] before update", "[actor] after update"] * 2
    assert {level for level, _ in lines.records} == {logging.WARNING}


def test_decorator_on_coroutines(logger: logging.Logger, lines: Lines) -> None:
    @MemoryLogger("rollout", logger)
    async def generate() -> str:
        await asyncio.sleep(0)
        lines.records.append((0, "body"))
        return "done"

    assert asyncio.run(generate()) == "done"
    assert [text.split(",")[0] for _, text in lines.records] == [
        "[rollout] before generate",
        "body",
        "[rollout] after generate",
    ]


def test_decorator_asks_for_the_rank_at_each_call(
    logger: logging.Logger, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = MemoryLogger("actor", logger)(lambda: None)
    all_ranks = MemoryLogger("actor", logger, log_only_rank_0=False)(lambda: None)
    _in_group(monkeypatch, 1)
    quiet()
    assert lines.records == []
    all_ranks()
    assert len(lines.records) == 2


def test_memory_is_given_back_in_rounds_until_a_round_is_poor(cuda: Device) -> None:
    cuda.reserved = [9 * GB, 6 * GB, 6 * GB - 1, 1 * GB]
    assert memory.free_device_memory() == 3 * GB + 1
    assert len(cuda.calls) == 2
    cuda.reserved = [9 * GB, 6 * GB, 3 * GB, 1 * GB]
    assert memory.free_device_memory(rounds=1) == 3 * GB
    assert memory.reset_peak_memory()
    assert memory.limit_device_memory("training")
    assert memory.limit_device_memory(0.5)
    assert cuda.calls[-3:] == [("reset",), ("fraction", 0.9), ("fraction", 0.5)]


def test_helpers_do_nothing_without_a_device() -> None:
    assert memory.free_device_memory() == 0
    assert memory.reset_peak_memory() is False
    assert memory.limit_device_memory("inference") is False
    for share in ("full", 0, 1.5):
        with pytest.raises(ValueError, match="inference, training"):
            memory.limit_device_memory(share)  # type: ignore[arg-type]
