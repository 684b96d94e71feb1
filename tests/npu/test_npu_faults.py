"""What torch_npu does wrong without a word, and what others do with its one profiler: told, and nobody suffers."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Any]


def work() -> None:
    import torch

    torch.ones(8) + 1


def step(handle: Any, number: int = 1) -> None:
    handle.start(step=number)
    work()
    handle.stop()


@contextlib.contextmanager
def theirs(torch_npu: Any, folder: Path | None) -> Iterator[Any]:
    """A profiler that the user runs by hand, with whatever it prints."""
    npu = torch_npu.profiler
    handler = npu.tensorboard_trace_handler(str(folder), analyse_flag=False) if folder is not None else None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(AttributeError):
        yield npu.profile(activities=[npu.ProfilerActivity.CPU], on_trace_ready=handler)


def holds_operators(folder: Path) -> bool:
    return any(file.stat().st_size for file in folder.glob("*_ascend_pt/FRAMEWORK/*"))


def test_a_start_that_torch_npu_swallows_is_told_and_hurts_nobody(
    profiler: Make, results: Any, save_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It warns of a plus in a path; where warnings are errors, as in these tests, its handler is not made at all."""
    with_plus = profiler(save_path=str(save_path / "a+b"))
    step(with_plus, 1)
    step(with_plus, 2)
    with_plus.close()
    results.save_path = save_path / "a+b"
    assert results.folders() == []
    reasons = results.reasons()
    assert len(reasons) == 2
    assert all("did not start" in reason and "Invalid input path" in reason for reason in reasons)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("profile failed") == 2
    assert with_plus.faults == ()
    # Nothing of it is left: another capture of the same process is whole.
    other = profiler()
    step(other, 3)
    other.close()
    results.save_path = save_path
    assert holds_operators(next(save_path.glob("*.ascend")))
    assert results.left_over() == []


def test_a_stop_that_torch_npu_swallows_costs_no_data(
    profiler: Make, results: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits for the device first; where that fails, it ends nothing."""
    handle = profiler()
    handle.start(step=1)
    work()
    monkeypatch.setenv("CANN_STUB_FAIL", "aclrtSynchronizeDevice")
    handle.stop()
    monkeypatch.delenv("CANN_STUB_FAIL")
    assert capfd.readouterr().out == ""
    step(handle, 2)
    handle.close()
    first, second = results.folders()
    assert holds_operators(first.path)
    assert holds_operators(second.path)
    assert "AclrtSynchronizeDevice" in first.about["warnings"][-1]
    assert len(second.about["warnings"]) == 1


@pytest.mark.parametrize("failing", ["aclprofInit", "aclprofStart", "aclprofStop", "aclprofFinalize"])
def test_what_the_device_refuses_in_silence_shows_as_missing_data(
    profiler: Make, results: Any, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setenv("CANN_STUB_FAIL", failing)
    handle = profiler()
    step(handle)
    handle.close()
    assert results.folder().about["warnings"] == [
        "nothing of the device was recorded: torch_npu's folder has no PROF_* folder"
    ]


def test_data_of_the_device_is_no_reason_to_warn(profiler: Make, results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANN_STUB_PROF", "1")
    handle = profiler()
    step(handle)
    handle.close()
    found = results.folder()
    assert "warnings" not in found.about
    assert len(list(found.vendor.glob("PROF_*"))) == 1


def test_a_running_profiler_of_the_user_is_left_alone(
    profiler: Make, results: Any, torch_npu: Any, tmp_path: Path
) -> None:
    handle = profiler()
    mine = tmp_path / "mine"
    with theirs(torch_npu, mine) as own:
        own.start()
        step(handle, 1)
        own.stop()
    [reason] = results.reasons()
    assert "already running" in reason
    assert str(mine) in reason
    assert holds_operators(mine)
    step(handle, 2)
    handle.close()
    assert results.folder().name.step == 2


def test_a_handler_that_the_user_made_keeps_its_place(
    profiler: Make, results: Any, torch_npu: Any, tmp_path: Path
) -> None:
    """A handler sets the folder of the whole process when it is made, long before its profiler starts."""
    handle = profiler()
    before, within = tmp_path / "before", tmp_path / "within"
    with theirs(torch_npu, before) as own:
        step(handle, 1)
        own.start()
        work()
        own.stop()
    assert holds_operators(before)
    handle.start(step=2)
    work()
    with theirs(torch_npu, within) as own:
        work()
        handle.stop()
        own.start()
        work()
        own.stop()
    handle.close()
    assert holds_operators(within)
    assert [found.name.step for found in results.folders()] == [1, 2]


def test_a_profiler_for_export_only_does_not_take_our_data_with_it(
    profiler: Make, results: Any, torch_npu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a handler torch_npu removes the folder that was begun last when such a profiler goes away."""
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        own = torch_npu.profiler._KinetoProfile(activities=[torch_npu.profiler.ProfilerActivity.CPU])
        own.start()
        work()
        own.stop()
        handle = profiler()
        step(handle)
        del own
    handle.close()
    assert holds_operators(results.folder().path)


@pytest.mark.parametrize("stopped", [True, False])
def test_another_profiler_inside_of_a_window_is_told(
    profiler: Make, results: Any, torch_npu: Any, tmp_path: Path, stopped: bool
) -> None:
    handle = profiler()
    handle.start(step=1)
    work()
    with theirs(torch_npu, tmp_path / "mine") as own:
        own.start()
        if stopped:
            own.stop()
        handle.stop()
        own.stop()
    [reason] = results.reasons()
    assert "inside this window" in reason
    assert ("still runs" in reason) == (not stopped)
    step(handle, 2)
    handle.close()
    assert [found.name.step for found in results.folders()] == [2]


def test_a_stop_on_another_thread_is_carried_over(profiler: Make, results: Any, stub_log: Any) -> None:
    from rankscope import annotate

    handle = profiler({"discrete": False})
    handle.start(step=1)
    work()
    thread = threading.Thread(target=handle.stop)
    thread.start()
    thread.join()
    with annotate("next"):
        pass
    handle.close()
    assert holds_operators(results.folder().path)
    [stop] = stub_log.calls("aclprofStop")
    assert stop["tid"] == threading.get_native_id()


def test_a_thread_that_ended_takes_its_operators_with_it(profiler: Make, results: Any) -> None:
    handle = profiler({"contents": ["cpu"]})
    thread = threading.Thread(target=handle.start, kwargs={"step": 1})
    thread.start()
    thread.join()
    handle.stop()
    assert results.folders() == []
    step(handle, 2)
    handle.close()
    [record] = [
        record for record in results.ledger("artifact") if record["step"] == 1 and record["status"] != "exporting"
    ]
    assert record["status"] in {"failed", "empty"}
    assert "thread" in record["reason"]
    assert holds_operators(results.folder().path)


def test_ranges_of_other_threads(
    profiler: Make, stub_log: Any, results: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from rankscope import annotate

    def elsewhere() -> None:
        with annotate("loader"):
            pass

    for contents in (["npu"], ["cpu"]):
        handle = profiler({"contents": contents})
        handle.start(step=1)
        work()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        handle.stop()
        handle.close()
    assert stub_log.ranges() == [("loader", "", True)]
    assert capfd.readouterr().err.count("ranges ran on threads") == 1


@pytest.mark.parametrize("name", ["PROFILING_MODE", "PROFILER_SAMPLECONFIG"])
def test_the_msprof_command_has_the_profiler(
    profiler: Make, results: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "dynamic")
    handle = profiler()
    step(handle)
    handle.close()
    [reason] = results.reasons()
    assert name in reason
    assert "msprof" in reason


def test_a_capture_that_torch_npu_cannot_end_is_told(save_path: Path, results: Any, torch_npu: Any) -> None:
    """Arguments of operators need libascend_dump.so, which the stand-ins do not have: from then on no stop works."""
    ended = run(save_path, '{"record_op_args": true}')
    assert results.folders() == []
    [reason] = results.reasons()
    assert "libascend_dump.so" in reason
    assert ended.stdout == ""
    assert results.ledger("fault") == []


PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, torch_npu
from rankscope import DistProfiler, annotate
config = {
    "global_profiler": {"tool": "npu", "steps": [1], "save_path": sys.argv[1]},
    "actor": {"profiler": {"enable": True, "tool_config": {"npu": json.loads(sys.argv[2])}}},
}
with DistProfiler(config, role="actor", rank=0, world_size=1) as handle:
    handle.start(step=1)
    with annotate("plain"), annotate("ours", domain="rl"), annotate("theirs", domain="other"):
        torch.ones(8) + 1
    handle.stop()
"""


def run(save_path: Path, options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(save_path), options],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_domains_are_filtered_by_torch_npu(torch_npu: Any, save_path: Path, results: Any, stub_log: Any) -> None:
    """In a process of its own: torch_npu asks the filter once for each domain, and keeps the answer."""
    ended = run(save_path, '{"mstx_domain_include": ["rl"]}')
    assert [(text, domain) for text, domain, _ in stub_log.ranges()] == [("ours", "rl")]
    assert "'default' is not in mstx_domain_include" in ended.stderr
    assert "were not taken by mstx" in ended.stderr
    assert results.folder().experimental["mstx_domain_exclude"] == []


def test_without_a_device_nothing_is_recorded_and_that_is_said(save_path: Path, results: Any, torch_npu: Any) -> None:
    ended = run(save_path, "{}", CANN_STUB_DEVICES="0")
    assert results.folders() == []
    [reason] = results.reasons()
    assert "no NPU" in reason
    assert "no NPU" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_capture_that_a_full_disk_keeps_from_ending_costs_only_itself(profiler: Make, results: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    handle = profiler()
    handle.start(step=1)
    work()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with contextlib.suppress(OSError):
            handle.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    step(handle, 2)
    handle.close()
    [published] = results.ledger("artifact", status="published")
    assert published["step"] == 2


def test_without_the_libraries_of_cann_it_is_a_fault_that_says_what_helps(
    save_path: Path, results: Any, tmp_path: Path, torch_npu: Any
) -> None:
    program = PROGRAM.replace("import torch, torch_npu", "import torch")
    ended = subprocess.run(
        [sys.executable, "-c", program, str(save_path), "{}"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "RANKSCOPE_STRICT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "source the set_env.sh" in ended.stderr
    [fault] = results.ledger("fault")
    assert "libhccl.so" in fault["error"]
