from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import wait_for

from rankscope import DistProfiler, Window
from rankscope.artifacts import exports as module
from rankscope.artifacts.exports import exports
from rankscope.artifacts.store import Store, partial_files


@pytest.fixture
def store(profiler: Callable[..., DistProfiler]) -> Store:
    return profiler().stores[0]


def submit(store: Store, step: int, job: str = "recording:finish_file", **arguments: Any) -> Path:
    """Stage a file and hand it over; returns where the raw data lies."""
    window = Window(id=step, role="actor", step=step, steps=(step,), scope="train", reason="step")
    with store.reserve(window, suffix=".txt") as file:
        file.staged.write_text(f"step {step}")
        file.finish_later(job, {"seconds": 0, **arguments}, note="mine")
        return file.staged


def outcomes(store: Store) -> list[tuple[int, str]]:
    """What the ledger says became of each file, but for the note that it was handed over."""
    records = recording.ledger(store.save_path, "artifact")
    return sorted((record["step"], record["status"]) for record in records if record["status"] != "exporting")


def helper_pid() -> int:
    process = exports()._process
    assert process is not None
    return process.pid


def test_a_file_is_finished_elsewhere_and_told_here_and_in_the_ledger(store: Store) -> None:
    staged = submit(store, 1)
    assert [record["status"] for record in recording.ledger(store.save_path, "artifact")] == ["exporting"]
    assert exports().drain(60)
    (artifact,) = store.artifacts
    assert artifact.path.read_text() == "step 1 finished"
    assert (artifact.step, artifact.events, artifact.facts["note"]) == (1, 7, "mine")
    assert artifact.bytes == artifact.path.stat().st_size
    assert artifact.facts["seconds_background"] >= 0
    records = recording.ledger(store.save_path, "artifact")
    assert [record["status"] for record in records] == ["exporting", "published"]
    assert {record["pid"] for record in records} == {os.getpid()}
    assert not staged.exists()
    assert partial_files(store.save_path) == []
    assert exports().pending == 0


def test_answers_are_taken_when_somebody_asks(profiler: Callable[..., DistProfiler]) -> None:
    handle = profiler()
    submit(handle.stores[0], 1)
    wait_for(lambda: handle.artifacts)
    assert [artifact.step for artifact in handle.artifacts] == [1]


def test_many_files_one_helper(store: Store) -> None:
    submit(store, 1)
    pid = helper_pid()
    for step in range(2, 40):
        submit(store, step)
    assert exports().drain(60)
    assert helper_pid() == pid
    assert outcomes(store) == [(step, "published") for step in range(1, 40)]


@pytest.mark.parametrize(
    ("job", "status", "words", "kept"),
    [
        ("recording:raise_error", "failed", "RuntimeError: cannot be made (raw data kept in", True),
        ("recording:find_nothing", "empty", "there was nothing to record", False),
        ("recording:no_such_function", "failed", "AttributeError", True),
        ("no_such_module_at_all:f", "failed", "ModuleNotFoundError", True),
    ],
)
def test_what_becomes_of_a_file_that_cannot_be_made(
    store: Store, job: str, status: str, words: str, kept: bool
) -> None:
    staged = submit(store, 1, job)
    submit(store, 2)
    assert exports().drain(60)
    assert outcomes(store) == [(1, status), (2, "published")]
    record = next(one for one in recording.ledger(store.save_path, "artifact") if one["status"] == status)
    assert words in record["reason"]
    assert record["path"] is None
    assert staged.exists() is kept
    assert [artifact.step for artifact in store.artifacts] == [2]
    assert partial_files(store.save_path) == []


def test_arguments_that_cannot_be_sent_leave_nothing_pending(store: Store) -> None:
    with pytest.raises(TypeError):
        submit(store, 1, bad=object())
    assert exports().pending == 0
    assert outcomes(store) == [(1, "failed")]


def test_a_helper_that_is_killed_costs_nothing(store: Store, tmp_path: Path) -> None:
    began, go = tmp_path / "began", tmp_path / "go"
    submit(store, 1)
    submit(store, 2, "recording:wait_for_file", began=str(began), go=str(go))
    submit(store, 3)
    wait_for(began.exists)
    os.kill(helper_pid(), signal.SIGKILL)
    go.touch()
    submit(store, 4)
    assert exports().drain(60)
    assert outcomes(store) == [(step, "published") for step in range(1, 5)]
    assert sorted(recording.files(store.save_path)) == [f"step {step} finished" for step in range(1, 5)]


def test_a_file_that_kills_its_helper_costs_only_itself(store: Store) -> None:
    submit(store, 1)
    staged = submit(store, 2, "recording:kill_itself")
    for step in range(3, 6):
        submit(store, step)
    assert exports().drain(60)
    assert outcomes(store) == [(1, "published"), (2, "failed"), *((step, "published") for step in range(3, 6))]
    record = next(one for one in recording.ledger(store.save_path, "artifact") if one["status"] == "failed")
    assert "the helper process died" in record["reason"]
    assert str(staged) in record["reason"]
    assert staged.exists()


def test_helpers_that_die_of_everything_are_not_started_for_ever(store: Store) -> None:
    for step in range(1, 9):
        submit(store, step, "recording:kill_itself")
    assert exports().drain(60)
    assert outcomes(store) == [(step, "failed") for step in range(1, 9)]
    submit(store, 9)
    assert exports().drain(60)
    assert outcomes(store)[-1] == (9, "published")


def test_the_helper_is_deaf_to_signals_that_are_meant_for_the_training(store: Store, tmp_path: Path) -> None:
    began, go = tmp_path / "began", tmp_path / "go"
    submit(store, 1, "recording:wait_for_file", began=str(began), go=str(go))
    wait_for(began.exists)
    pid = helper_pid()
    assert os.getsid(pid) != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    go.touch()
    assert exports().drain(60)
    assert helper_pid() == pid
    assert outcomes(store) == [(1, "published")]


def test_drain_has_a_deadline_and_says_that_it_waits(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRESS_EVERY", 0.05)
    told: list[tuple[int, float]] = []
    go = tmp_path / "go"
    submit(store, 1, "recording:wait_for_file", began=str(tmp_path / "began"), go=str(go))
    submit(store, 2)
    assert exports().drain(0) is False
    assert exports().drain(0.5, lambda files, seconds: told.append((files, seconds))) is False
    assert told
    assert {files for files, _ in told} == {2}
    assert [seconds for _, seconds in told] == sorted(seconds for _, seconds in told)
    go.touch()
    assert exports().drain(60) is True


@pytest.mark.parametrize("how", ["no interpreter", "no process"])
def test_without_a_helper_the_file_is_finished_here(store: Store, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "no interpreter":
        monkeypatch.setattr(sys, "executable", "")
    else:

        def refuse(*_: Any, **__: Any) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(subprocess, "Popen", refuse)
    submit(store, 1)
    submit(store, 2, "recording:raise_error")
    assert exports().pending == 0
    assert outcomes(store) == [(1, "published"), (2, "failed")]
    assert recording.files(store.save_path) == ["step 1 finished"]


def test_the_helper_is_light(store: Store) -> None:
    submit(store, 1, "recording_light:list_modules")
    light = store.save_path.parent / "site" / "recording_light.py"
    light.write_text(
        "import json, sys\n"
        "def list_modules(staged, temporary, name, arguments):\n"
        "    temporary.write_text(json.dumps(sorted(sys.modules)))\n"
        "    return {}\n"
    )
    assert exports().drain(60)
    (text,) = recording.files(store.save_path)
    modules = set(json.loads(text))
    assert "rankscope.artifacts.helper" in modules
    heavy = {"structlog", "omegaconf", "pluggy", "torch", "numpy", "yaml", "asyncio", "rankscope.profiler"}
    assert modules & heavy == set()


PARENT = """
import json, sys, time
from rankscope import DistProfiler, Window
handle = DistProfiler(json.loads(sys.argv[1]), role="actor", rank=0, world_size=1)
store = handle.stores[0]
for step in (1, 2, 3):
    window = Window(id=step, role="actor", step=step, steps=(step,), scope="train", reason="step")
    with store.reserve(window, suffix=".txt") as file:
        file.staged.write_text(f"step {step}")
        file.finish_later("recording:finish_file", {"seconds": 0.3})
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_parent_loses_nothing_that_it_handed_over(site: Path, save_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(recording.config(save_path))],
        env=recording.environment(site),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.wait(30)

    def published() -> list[int]:
        records = recording.ledger(save_path, "artifact")
        return [record["step"] for record in records if record["status"] == "published"]

    wait_for(lambda: len(published()) == 3)
    assert published() == [1, 2, 3]
    assert recording.files(save_path) == [f"step {step} finished" for step in (1, 2, 3)]
    assert {record["pid"] for record in recording.ledger(save_path)} == {process.pid}


def test_the_helper_ends_when_nothing_is_left(store: Store) -> None:
    submit(store, 1)
    process = exports()._process
    assert process is not None
    assert exports().drain(60)
    exports().end()
    assert process.wait(30) == 0
    submit(store, 2)  # a handle that is made later has a helper again
    assert exports().drain(60)
    assert outcomes(store) == [(1, "published"), (2, "published")]


def test_a_helper_that_was_sent_away_still_works_off_what_it_has(store: Store, tmp_path: Path) -> None:
    go = tmp_path / "go"
    submit(store, 1, "recording:wait_for_file", began=str(tmp_path / "began"), go=str(go))
    process = exports()._process
    assert process is not None
    exports().end()
    submit(store, 2)
    assert exports().drain(60)
    go.touch()
    assert process.wait(60) == 0
    assert outcomes(store) == [(1, "published"), (2, "published")]
