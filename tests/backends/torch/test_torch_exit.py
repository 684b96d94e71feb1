"""The process ends, dies or forks in the middle of a window; the disk fills up; the helper is killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.status import read_status

pytestmark = pytest.mark.torch


def assert_whole(path: Path, kit: Any) -> None:
    """The trace of ``leave``: everything until the end, and the stage that was still running."""
    trace = kit.trace(path)
    assert {"cos", "sin"} <= trace.ops
    assert trace.labels == ["done", "busy"]
    assert "unfinished" not in trace.row("done").args
    assert kit.left_over(path) == []


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("raise", 1)])
def test_a_process_that_ends_while_recording_leaves_a_whole_trace(
    scenarios: Any, kit: Any, how: str, code: int
) -> None:
    ended = scenarios.run("leave", how)
    path = ended.path.rename(ended.path.with_name(f"leave-{how}"))
    assert ended.code == code, ended.err
    assert ("ValueError: the training failed" in ended.err) == (how == "raise")
    assert_whole(path, kit)
    assert kit.ledger(path, "close")[0]["reason"] == "exit"


def test_a_process_that_leaves_without_cleaning_up_is_said_to_have_died(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("leave", "os_exit")
    path = ended.path.rename(ended.path.with_name("leave-os_exit"))
    assert ended.code == 4
    assert kit.traces(path) == []
    [row] = [row for row in read_status(path).rows if row.step == 1]
    assert (row.status, row.path) == ("died", "")


def _signalled(scenarios: Any, number: int, setting: str, name: str) -> Any:
    running = scenarios.begin("leave", "wait", setting)
    ended = running.end(number)
    ended.path = ended.path.rename(ended.path.with_name(name))
    return ended


def test_ctrl_c_ends_the_process_as_ever_and_saves(scenarios: Any, kit: Any) -> None:
    ended = _signalled(scenarios, signal.SIGINT, "off", "interrupted")
    assert ended.code == -signal.SIGINT
    assert "KeyboardInterrupt" in ended.err
    assert_whole(ended.path, kit)


def test_sigterm_is_nobody_s_business_unless_asked(scenarios: Any, kit: Any) -> None:
    ended = _signalled(scenarios, signal.SIGTERM, "off", "terminated")
    assert ended.code == -signal.SIGTERM
    assert kit.traces(ended.path) == []
    assert [row.status for row in read_status(ended.path).rows if row.step == 1] == ["died"]


def test_sigterm_can_save_first_and_still_ends_the_process(scenarios: Any, kit: Any) -> None:
    ended = _signalled(scenarios, signal.SIGTERM, "on", "flushed")
    assert ended.code == -signal.SIGTERM
    assert_whole(ended.path, kit)
    assert kit.trace(ended.path).row("busy").args["finished"] is False
    assert kit.ledger(ended.path, "close")[0]["reason"] == "SIGTERM"


def test_sigterm_passes_on_to_the_handler_that_was_there(scenarios: Any, kit: Any) -> None:
    ended = _signalled(scenarios, signal.SIGTERM, "previous", "passed_on")
    assert ended.code == 7, ended.err
    assert_whole(ended.path, kit)


def test_a_kill_in_a_window_leaves_nothing_half_written(scenarios: Any, kit: Any) -> None:
    ended = _signalled(scenarios, signal.SIGKILL, "off", "killed")
    assert ended.code == -signal.SIGKILL
    assert kit.traces(ended.path) == []
    [row] = [row for row in read_status(ended.path).rows if row.step == 1]
    assert row.status == "died"
    assert "went away while the window was open" in row.reason


def test_a_kill_after_the_window_loses_nothing(scenarios: Any, kit: Any) -> None:
    ended = scenarios.begin("killed_after_stop").end(signal.SIGKILL)
    assert ended.code == -signal.SIGKILL
    kit.until(lambda: kit.outcomes(ended.path)["published"] == 1)
    assert "cos" in kit.trace(ended.path).ops
    kit.until(lambda: kit.left_over(ended.path) == [])


def test_children_write_nothing_and_take_nothing(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("children")
    assert ended.code == 0, ended.err
    trace = kit.trace(ended.path)
    assert trace.labels == ["in_parent"]
    assert trace.ops & {"cos", "sin", "tan"} == {"cos", "sin"}
    ledgers = [path.name for path in (ended.path / ".rankscope").glob("*.jsonl")]
    assert len(ledgers) == 1
    assert ledgers[0].endswith(f"-{trace.meta['pid']}.jsonl")


def test_a_forked_child_that_exits_normally_does_not_hang(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("forked_exit")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["child 5"]
    assert kit.trace(ended.path).ops & {"cos", "sin"} == {"cos", "sin"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small file system is needed, and mounting one was refused: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_avoided_where_there_is_another(
    scenarios: Any, kit: Any, small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    ended = scenarios.run("full_disk", str(small_disk), TMPDIR=str(tmp_path / "tmp"))
    assert ended.code == 0, ended.err
    place = small_disk / "profile"
    # The raw trace of the first window is too big for the disk, the finished one is not.
    assert [trace.name.step for trace in kit.traces(place)] == [1, 3]
    # There was no room at all for the second, which found another place.
    [said] = ended.said("go to a fallback directory", "warning")
    trace = kit.trace(Path(said["fallback"]))
    assert (trace.name.step, "sin" in trace.ops) == (2, True)
    assert kit.left_over(place) == []


def test_a_full_disk_fails_by_name_and_the_next_window_works(scenarios: Any, kit: Any, small_disk: Path) -> None:
    (small_disk / "tmp").mkdir()
    ended = scenarios.run("full_disk", str(small_disk), TMPDIR=str(small_disk / "tmp"))
    assert ended.code == 0, ended.err
    place = small_disk / "profile"
    told = {row.step: row for row in read_status(place).rows}
    assert told[1].status == "failed"
    assert "disk full" in told[1].reason
    failed = {message["step"]: message["reason"] for message in ended.said("profile failed", "warning")}
    assert sorted(failed) == [1, 2]
    assert "No space left on device" in failed[2]
    # Half a raw trace does not keep the disk full: there was room again for the third.
    trace = kit.trace(place)
    assert (trace.name.step, told[3].status, "tan" in trace.ops) == (3, "published", True)
    assert kit.left_over(place) == []


def test_a_killed_helper_is_replaced_and_files_are_whole(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run("helper_killed")
    assert ended.code == 0, ended.err
    traces = kit.traces(ended.path)
    assert [trace.ops & {"cos", "sin", "tan"} for trace in traces] == [{"cos"}, {"sin"}, {"tan"}]
    assert kit.outcomes(ended.path)["published"] == 3
    assert kit.left_over(ended.path) == []
