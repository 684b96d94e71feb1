from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import calls

from rankscope import DistProfiler, FaultError

Make = Callable[..., DistProfiler]

RUN = """
import json, sys, threading, time
from rankscope import DistProfiler, annotate
import recording
facts = json.loads(sys.argv[1])
def make(role):
    return DistProfiler(facts, role=role, rank=0, world_size=1)
"""


def closes(save_path: Path) -> list[tuple[str, str]]:
    return [(record["role"], record["reason"]) for record in recording.ledger(save_path, "close")]


# At exit.


def test_every_handle_is_closed_at_exit_and_the_command_sees_all_files(site: Path, save_path: Path) -> None:
    facts = recording.config(
        save_path,
        roles=("actor", "critic", "ref"),
        options={"rec": {"write": "later", "seconds": 0.3}, "rec2": {"write": "later"}},
        finish_hook_cmd=f"cp $RANKSCOPE_PROFILE_MANIFEST {save_path.parent}/manifest.json",
        finish_hook_wait=0,
    )
    facts["critic"]["profiler"]["tool"] = "rec2"
    program = RUN + "for role in ('actor', 'critic', 'ref'):\n    make(role).start(step=1)\n"
    result = recording.run_python(site, program, json.dumps(facts))
    assert result.returncode == 0, result.stderr
    assert closes(save_path) == [("actor", "exit"), ("critic", "exit"), ("ref", "exit")]
    assert recording.files(save_path) == ["step 1 finished"] * 2
    listed = json.loads((save_path.parent / "manifest.json").read_text())["artifacts"]
    assert sorted(one["tool"] for one in listed) == ["rec", "rec2"]
    assert len(recording.ledger(save_path, "finish")) == 1


def test_one_handle_that_cannot_be_closed_does_not_keep_the_others_from_being_saved(
    site: Path, save_path: Path
) -> None:
    facts = recording.config(save_path, roles=("actor", "critic"))
    facts["critic"]["profiler"]["tool"] = "rec2"
    program = RUN + (
        "bad, good = make('actor'), make('critic')\n"
        "bad.start(step=1); good.start(step=1)\n"
        "def broken(reason):\n    raise RuntimeError('no end')\n"
        "bad.stop_open = broken\n"
    )
    result = recording.run_python(site, program, json.dumps(facts))
    assert result.returncode == 0
    assert "a handle could not be closed" in result.stderr
    assert "no end" in result.stderr
    assert [path.name.split("_")[0] for path in save_path.glob("*.txt")] == ["critic"]


@pytest.mark.parametrize("hook", ["stop", "exit", "finish"])
def test_a_fault_at_exit_is_told_and_changes_no_exit_code(site: Path, save_path: Path, hook: str) -> None:
    facts = recording.config(save_path, options={"rec": {"fail": hook}})
    program = RUN + "make('actor').start(step=1)\nraise SystemExit(4)"
    for strict in ("0", "1"):
        result = recording.run_python(site, program, json.dumps(facts), RANKSCOPE_STRICT=strict)
        assert result.returncode == 4
        assert f"broken {hook}" in result.stderr
    assert [line["error"] for line in recording.ledger(save_path, "fault")] == [f"ValueError: broken {hook}"] * 2


def test_a_window_of_a_daemon_thread_is_not_torn_at_exit(site: Path, save_path: Path) -> None:
    program = RUN + (
        "handle = make('actor')\n"
        "started = threading.Event()\n"
        "def own():\n    handle.start(step=1)\n    started.set()\n    time.sleep(60)\n"
        "threading.Thread(target=own, name='sleeper', daemon=True).start()\n"
        "started.wait(30)\n"
    )
    result = recording.run_python(site, program, json.dumps(recording.config(save_path, tool="bound")))
    assert result.returncode == 0
    assert "thread=sleeper" in result.stderr
    assert "could not be saved" in result.stderr
    assert recording.files(save_path) == []


def test_sigterm_ends_a_process_in_which_another_thread_hangs_in_a_tool(site: Path, save_path: Path) -> None:
    facts = recording.config(save_path, roles=("actor", "critic"))
    facts["global_profiler"]["flush_on_sigterm"] = True
    program = RUN + (
        "import os, signal\n"
        "from rankscope import hookimpl, shutdown, transitions\n"
        "shutdown.SIGTERM_PATIENCE = transitions.PATIENCE = 0.3\n"
        "hangs = threading.Event()\n"
        "class Hanging(recording.SecondBackend):\n"
        "    @hookimpl\n"
        "    def start(self, window):\n        hangs.set()\n        time.sleep(600)\n"
        "recording.SecondBackend = Hanging\n"
        "saved = make('actor')\n"
        "saved.start(step=1)\n"
        "facts['critic']['profiler']['tool'] = 'rec2'\n"
        "stuck = make('critic')\n"
        "threading.Thread(target=stuck.start, kwargs={'step': 1}, daemon=True).start()\n"
        "assert hangs.wait(30)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(600)\n"
    )
    result = recording.run_python(site, program, json.dumps(facts))
    assert result.returncode == -15, result.stderr
    assert recording.files(save_path) == ["step 1"]  # what does not hang is saved first


# Waiting.


def test_close_waits_no_longer_than_it_was_told(
    profiler: Make, save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = profiler(options={"rec": {"write": "later", "seconds": 1.0}})
    handle.start(step=1)
    handle.stop()
    began = time.monotonic()
    handle.close(timeout=0.1)
    assert time.monotonic() - began < 5
    assert "exports are not finished yet" in capsys.readouterr().err
    recording.wait_for(lambda: recording.files(save_path) == ["step 1 finished"])  # the helper goes on by itself


def test_close_says_that_it_waits(
    profiler: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.artifacts.exports.PROGRESS_EVERY", 0.05)
    handle = profiler(options={"rec": {"write": "later", "seconds": 1.0}})
    handle.start(step=1)
    handle.close()
    assert "waiting for exports" in capsys.readouterr().err
    assert [artifact.events for artifact in handle.artifacts] == [7]


def test_finish_waits_for_the_window_of_another_role_not_for_another_place(profiler: Make, tmp_path: Path) -> None:
    here, there = profiler("actor"), profiler("critic", tool="rec2", save_path=tmp_path / "there")
    here.start(step=1)
    there.start(step=1)
    here.stop(last=True)
    assert calls("finish") == ["rec finish 1"]
    there.stop(last=True)
    assert calls("finish") == ["rec finish 1", "rec2 finish 1"]


def test_what_waited_is_finished_when_the_last_window_ends_by_a_fault(profiler: Make, lenient: None) -> None:
    from rankscope import annotate

    first = profiler("actor")
    second = profiler("critic", tool="rec2", options={"rec2": {"fail": "enter", "write": "never"}})
    first.start(step=1)
    second.start(step=1)  # its step row fails at once
    second_tool = profiler("ref", tool="bound", options={"bound": {"write": "never"}})
    second_tool.start(step=1)
    first.stop(last=True)
    assert calls("finish") == []
    with annotate("a"):
        second_tool.stop()
    assert calls("finish") == ["rec finish 1"]
    assert [fault.tool for fault in second.faults] == ["rec2"]


def test_a_finish_that_waited_raises_in_the_call_of_its_own_handle(profiler: Make) -> None:
    waiting = profiler("actor", options={"rec": {"fail": "finish"}})
    other = profiler("critic", tool="rec2")
    waiting.start(step=1)
    other.start(step=1)
    waiting.stop(last=True)
    other.stop()  # here the other one's finish runs, and fails
    assert calls("finish") == ["rec finish 1"]
    with pytest.raises(FaultError, match=r"rec\.finish failed"):
        waiting.close()
    assert waiting.closed


def test_a_handle_made_outside_the_main_thread_says_that_it_cannot_watch_sigterm(
    profiler: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    thread = threading.Thread(target=profiler, kwargs={"flush_on_sigterm": True})
    thread.start()
    thread.join()
    assert "flush_on_sigterm has no effect" in capsys.readouterr().err


def test_closed_handles_are_let_go(profiler: Make) -> None:
    from rankscope import shutdown

    handle = profiler()
    assert any(one is handle for one in shutdown._handles.values())
    handle.close()
    assert not any(one is handle for one in shutdown._handles.values())


def test_the_summary_names_files_and_faults(profiler: Make, lenient: None, capsys: pytest.CaptureFixture[str]) -> None:
    handle: Any = profiler(tool=["rec", "rec2"], options={"rec2": {"fail": "start"}})
    handle.start(step=1)
    handle.close()
    text = capsys.readouterr().err
    assert "this tool had faults and was switched off" in text
    assert "tool=rec2 faults=1" in text
    assert "captured" in text
    assert "files=1 bytes=6" in text
