"""Who has CUPTI: what is set before a process starts, and what is said when no device event came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankscope import ConfigError, DistProfiler, load_config, plan_launch
from rankscope.artifacts.status import read_status
from rankscope_torch import TorchBackend, TorchOptions
from rankscope_torch.injection import BLOCKED, before_start, suspects

pytestmark = pytest.mark.torch

NAME = "NVTX_INJECTION64_PATH"


def config(tmp_path: Path, contents: list[str], **common: Any) -> dict[str, Any]:
    common = {"steps": [1], "tool": "torch", "save_path": str(tmp_path / "out"), **common}
    options = {"tool_config": {"torch": {"contents": contents}}}
    return {"global_profiler": common, "actor": {"profiler": {"enable": True, "ranks": [0], **options}}}


@pytest.mark.parametrize(("environ", "env", "said"), [
    ({}, {NAME: BLOCKED}, ""),
    ({NAME: BLOCKED}, {NAME: BLOCKED}, ""),
    ({NAME: "/x/libcupti.so"}, {NAME: BLOCKED}, f"{NAME}=/x/libcupti.so was set and is replaced"),
    ({NAME: "/x/libcupti.so", "RANKSCOPE_KEEP_NVTX_INJECTION": "1"}, {}, ""),
    ({NAME: "/x/libcupti.so", "VERL_KEEP_NVTX_INJECTION": "1"}, {}, ""),
    ({NAME: "/x/nsys.so", "NSYS_PROFILING_SESSION_ID": "7"}, {}, "runs under nsys, which holds CUPTI"),
])  # fmt: skip
def test_what_is_set_before_a_process_starts(environ: dict[str, str], env: dict[str, str], said: str) -> None:
    found, warning = before_start(environ)
    assert found == env
    assert said in warning
    assert bool(said) is bool(warning)
    if env:
        assert not Path(env[NAME]).exists()


def test_it_is_decided_from_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    role_level = config(tmp_path, [], tool=None)
    role_level["actor"]["profiler"]["tool"] = "torch"
    assert plan_launch(role_level).env == {NAME: BLOCKED}
    assert plan_launch(role_level, rank=1, world_size=2).env == {}
    assert plan_launch(config(tmp_path, ["cpu"])).env == {}
    assert plan_launch(config(tmp_path, ["cuda"], steps=None)).env == {}


def test_only_a_capture_of_the_device_needs_cupti(tmp_path: Path) -> None:
    assert TorchBackend.owns(TorchOptions(contents=("cpu", "shapes"))) == {"kineto"}
    assert TorchBackend.owns(TorchOptions()) == {"kineto", "cupti"}
    with pytest.raises(ConfigError, match="'torch' and 'nsys' of actor both need 'cupti'"):
        load_config(config(tmp_path, [], tool=["torch", "nsys"]))
    load_config(config(tmp_path, ["cpu"], tool=["torch", "nsys"]))


def test_what_may_have_taken_it_is_found(tmp_path: Path) -> None:
    library = tmp_path / "libinjection.so"
    library.touch()
    assert suspects({NAME: str(library)}) == [f"{NAME}={library}"]
    assert suspects({NAME: BLOCKED, "NSYS_PROFILING_SESSION_ID": "7"}) == ["the process runs under nsys"]
    assert suspects({}) == []


@pytest.mark.filterwarnings("ignore:XPU is not available")
def test_a_device_capture_without_device_events_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    library = tmp_path / "libinjection.so"
    library.touch()
    monkeypatch.setenv(NAME, str(library))
    # A device that torch reports and of which it then records nothing, as with a CUPTI that somebody else holds.
    device = (torch.profiler.ProfilerActivity.XPU, "cuda")
    monkeypatch.setattr("rankscope_torch.backend._device_activity", lambda _: device)
    with DistProfiler(config(tmp_path, []), role="actor", rank=0, world_size=1) as profiler:
        for step in (1, 2):
            profiler.start(step=step)
            torch.ones(4).sum()
            profiler.stop()
    said = capsys.readouterr().err
    assert said.count("device events may be missing") == 1
    assert said.count("no cuda event was recorded although the device was asked for") == 1
    rows = read_status(tmp_path / "out").rows
    assert [row.status for row in rows] == ["published", "published"]
    assert all(f"(found: {NAME}={library})" in row.reason for row in rows)


def test_a_capture_of_the_cpu_alone_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    with DistProfiler(config(tmp_path, ["cpu"]), role="actor", rank=0, world_size=1) as profiler:
        profiler.start(step=1)
        torch.ones(4).sum()
        profiler.stop()
    [row] = read_status(tmp_path / "out").rows
    assert (row.status, row.reason) == ("published", "")
    assert "device" not in capsys.readouterr().err
