"""The offline analysis of the real torch_npu, by ``rankscope analyse`` and by ``analysis: true``."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Any]


def capture(
    profiler: Make, options: dict[str, Any] | None = None, *, rank: int = 0, steps: tuple[int, ...] = (1,)
) -> None:
    import torch

    handle = profiler(options, rank=rank)
    for number in steps:
        handle.start(step=number)
        torch.ones(8) + 1
        handle.stop()
    handle.close()


def analyse(*words: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "rankscope", "analyse", *words], capture_output=True, text=True, timeout=250, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_the_command_analyses_what_is_not_analysed_yet(profiler: Make, results: Any, save_path: Path) -> None:
    capture(profiler, {"export_type": "text"}, rank=5)
    code, out, err = analyse(str(save_path))
    assert (code, err.count("1 of 1: analysed")) == (0, 1)
    first, *_ = out.splitlines()
    assert first.split() == ["role", "rank", "step", "scope", "status", "wrote", "folder", "reason"]
    assert "1 captures: 1 analysed" in out
    found = results.folder()
    output = found.vendor / "ASCEND_PROFILER_OUTPUT"
    events = json.loads((output / "trace_view.json").read_text())
    assert "aten::add" in {event["name"] for event in events}
    # Again: nothing is left to do, and what is there stays as it is.
    before = (output / "trace_view.json").stat().st_mtime_ns
    code, out, err = analyse(str(found.path), "--json")
    assert code == 0
    [row] = json.loads(out)["rows"]
    assert {"status": "already", "rank": 5, "role": "actor", "step": 1, "exports": ["text"]}.items() <= row.items()
    assert (output / "trace_view.json").stat().st_mtime_ns == before
    # Another export comes beside the first one.
    code, out, _ = analyse(str(save_path), "--export", "db", "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["exports"] == ["db", "text"]
    with sqlite3.connect(output / "ascend_pytorch_profiler_5.db") as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master")}
    assert "PYTORCH_API" in tables


def test_a_capture_that_cannot_be_analysed_is_named_and_the_others_go_on(
    profiler: Make, results: Any, save_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data of a device torch_npu needs CANN's own parser for a database, which is not here."""
    capture(profiler, steps=(1,))
    monkeypatch.setenv("CANN_STUB_PROF", "1")
    capture(profiler, steps=(2,))
    monkeypatch.delenv("CANN_STUB_PROF")
    capture(profiler, steps=(3,))
    code, out, _ = analyse(str(save_path), "--json", "--processes", "2")
    document = json.loads(out)
    assert (code, document["complete"]) == (1, False)
    rows = {row["step"]: row for row in document["rows"]}
    assert {step: row["status"] for step, row in rows.items()} == {1: "analysed", 2: "failed", 3: "analysed"}
    assert "does not support export db" in rows[2]["reason"]
    assert "did not come to its end" in rows[2]["reason"]
    raw = next(found for found in results.folders() if found.name.step == 2).vendor
    assert any(file.stat().st_size for file in (raw / "FRAMEWORK").iterdir())


def test_damaged_data_is_no_success(profiler: Make, results: Any, save_path: Path) -> None:
    """torch_npu writes its analyse.done all the same."""
    capture(profiler, {"export_type": "text"})
    for file in (results.folder().vendor / "FRAMEWORK").iterdir():
        file.write_bytes(b"\0" * 7)
    code, out, _ = analyse(str(save_path), "--json")
    [row] = json.loads(out)["rows"]
    assert (code, row["status"]) == (1, "failed")
    assert "wrote no text" in row["reason"]


def test_an_analysis_that_takes_too_long_is_given_up(
    profiler: Make, results: Any, save_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rankscope_npu import analysis

    capture(profiler)
    vendor = results.folder().vendor
    hang = tmp_path / "site"
    hang.mkdir()
    (hang / "torch_npu.py").write_text("import os, time\nos.fork()\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(hang))
    began = time.monotonic()
    outcome = analysis.analyse(vendor, timeout=3)
    assert (outcome.done, outcome.exports) == (False, ())
    assert "given up after 3 seconds" in outcome.reason
    assert time.monotonic() - began < 60
    left = [line for line in _processes() if str(vendor) in line]
    assert left == []


def test_a_crash_of_the_analysis_is_named(
    profiler: Make, results: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rankscope_npu import analysis

    capture(profiler)
    crash = tmp_path / "site"
    crash.mkdir()
    (crash / "torch_npu.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(str(crash))
    outcome = analysis.analyse(results.folder().vendor)
    assert not outcome.done
    assert "crashed: SIGABRT" in outcome.reason


def test_analysis_after_each_capture_happens_in_the_background(
    profiler: Make, results: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    import multiprocessing

    import torch

    method = multiprocessing.get_start_method(allow_none=True)
    handle = profiler({"analysis": True, "export_type": "text"})
    handle.start(step=1)
    torch.ones(8) + 1
    handle.stop()
    assert results.folders() == []  # the training goes on meanwhile
    handle.close()
    found = results.folder()
    assert (found.vendor / "ASCEND_PROFILER_OUTPUT" / "analyse.done").exists()
    assert "aten::add" in (found.vendor / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text()
    assert found.about["analysed"] == ["text"]
    assert capfd.readouterr().out == ""
    # torch_npu's own analysis would have changed this for the whole process.
    assert multiprocessing.get_start_method(allow_none=True) == method


def test_an_analysis_that_fails_after_a_capture_keeps_the_raw_data(
    profiler: Make, results: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANN_STUB_PROF", "1")
    capture(profiler, {"analysis": True})
    found = results.folder()
    [warning] = found.about["warnings"]
    assert "the analysis failed, the raw data is kept" in warning
    assert "does not support export db" in warning
    assert found.about["analysed"] == []
    assert "the analysis failed" in capfd.readouterr().err


PROGRAM = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, torch_npu
from rankscope import DistProfiler
config = {
    "global_profiler": {"tool": "npu", "steps": [1, 2], "save_path": sys.argv[1]},
    "actor": {"profiler": {"enable": True}},
}
handle = DistProfiler(config, role="actor", rank=0, world_size=1)
for step in (1, 2):
    handle.start(step=step)
    torch.ones(8) + 1
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    handle.stop()
"""


def test_a_kill_inside_of_a_window_costs_only_that_window(torch_npu: Any, save_path: Path, results: Any) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(save_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not list(save_path.glob("*.ascend")):  # the helper outlives the process
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert results.folder().name.step == 1
    from rankscope.artifacts.recover import recover

    [left] = recover(save_path)
    assert left.status == "no job"
    assert "its process died" in left.reason
    assert list(left.staged.glob("*_ascend_pt"))


def _processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return [line for line in found if f"pid={os.getpid()}" not in line]
