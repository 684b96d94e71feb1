from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts import status as module
from rankscope.artifacts.ledger import Ledger
from rankscope.artifacts.status import Row, Status, read_status
from rankscope.topology import host_name


class Process:
    """Writes the ledger lines of one process: this one, a dead one, or one on another host."""

    def __init__(self, directory: Path, *, dead: bool = False, host: str | None = None, run_id: str = "r1") -> None:
        self.ledger = Ledger(directory, host=host or host_name(), run_id=run_id)
        self.pid = _a_dead_pid() if dead else os.getpid()

    def write(self, kind: str, **facts: Any) -> None:
        self.ledger.write(kind, **{"pid": self.pid, "role": "actor", "rank": 0, "tool": "fake", **facts})

    def plan(self, **facts: Any) -> None:
        base = {"world_size": 1, "profiled": True, "reason": "", "steps": [1], "continuous": False, "discrete": False}
        self.write("plan", **{**base, **facts})

    def open(self, window: int, step: int | None, **facts: Any) -> None:
        steps = [] if step is None else [step]
        self.write(
            "window", **{"event": "open", "window": window, "step": step, "steps": steps, "scope": "train", **facts}
        )

    def close(self, window: int, step: int | None, **facts: Any) -> None:
        self.open(window, step, **{"event": "close", "aborted": False, **facts})

    def artifact(self, window: int | None, step: int | None, status: str = "published", **facts: Any) -> None:
        path = f"/out/{window}" if status == "published" else None
        base = {"window": window, "step": step, "scope": "train", "status": status, "path": path, "bytes": 10}
        self.write("artifact", **{**base, **facts})

    def whole(self, window: int, step: int, **facts: Any) -> None:
        self.open(window, step, **facts)
        self.artifact(window, step, path=f"/out/{facts.get('role', 'actor')}-{window}", **facts)
        self.close(window, step, **facts)

    def end(self, last_step: int | None, **facts: Any) -> None:
        self.write("close", **{"last_step": last_step, "reason": "", **facts})


def _a_dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def short(status: Status) -> list[tuple[str, int | None, str]]:
    return [(row.role, row.step, row.status) for row in status.rows]


def only(status: Status) -> Row:
    [row] = status.rows
    return row


def test_a_file_of_a_window_in_which_the_process_died_counts_once(tmp_path: Path) -> None:
    process = Process(tmp_path, dead=True)
    process.plan()
    process.open(1, 1)
    facts = {"window": 1, "step": 1, "scope": "train-aborted", "status": "published", "moved_from": "elsewhere"}
    process.write("artifact", path=str(tmp_path / "report"), bytes=3, **facts)
    status = read_status(tmp_path)
    assert [(row.status, row.reason) for row in status.rows] == [
        ("aborted", "the process went away while the window was open")
    ]
    assert status.complete


def test_a_run_in_which_no_profiled_role_took_part_says_so(tmp_path: Path) -> None:
    Process(tmp_path, run_id="r0").plan(profiled=False, reason="no rank is selected")
    assert (read_status(tmp_path).complete, read_status(tmp_path).error) == (
        True,
        "nothing was expected: no rank is selected",
    )
    Process(tmp_path, run_id="r1").write("controller", steps=[1], first_step=1, total_steps=3)
    status = read_status(tmp_path)
    assert not status.complete
    assert "no role that its config profiles took part" in status.error
    assert "--all-runs" in status.error


def test_what_was_given_up_and_then_found_is_there(tmp_path: Path) -> None:
    """A report that came after its process had ended, moved in by whoever started the process."""
    from rankscope import Store, Window

    window = Window(id=3, role="actor", step=2, steps=(2,), scope="train", reason="step")
    facts = {"tool": "nsys", "role": "actor", "rank": 0, "world_size": 1, "topology": {}, "host": "node1"}
    ledger = Ledger(tmp_path, host="node1", run_id="r", pid=77)
    Store(tmp_path, ledger=ledger, clock=time.time_ns, **facts).missing(window, "no report came")
    [row] = read_status(tmp_path).rows
    assert row.status == "failed"
    launcher = Store(tmp_path, ledger=Ledger(tmp_path, host="node1", run_id="other"), clock=time.time_ns, **facts)
    (tmp_path / "late").write_text("report")
    launcher.on_behalf_of(77, "r").adopt(tmp_path / "late", window)
    [row] = read_status(tmp_path).rows
    assert (row.status, row.step, Path(row.path).read_text()) == ("published", 2, "report")


def test_everything_came(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1, 3])
    process.plan(rank=1, profiled=False, reason="rank 1 is not in ranks")
    process.whole(1, 1)
    process.whole(2, 3)
    process.end(5)
    status = read_status(tmp_path)
    assert status.complete
    assert short(status) == [("actor", 1, "published"), ("actor", 3, "published")]
    row = status.rows[0]
    assert (row.path, row.bytes, row.scope, row.tool, row.rank) == ("/out/actor-1", 10, "train", "fake", 0)
    assert status.run_ids == ("r1",)
    assert status.error == ""


def test_an_empty_directory_is_not_complete(tmp_path: Path) -> None:
    status = read_status(tmp_path)
    assert not status.complete
    assert "no ledger" in status.error
    assert str(tmp_path) in status.error
    assert not read_status(tmp_path / "nothing").complete


def test_nothing_expected_is_said(tmp_path: Path) -> None:
    Process(tmp_path).plan(profiled=False, reason="rank 0 is not in ranks")
    status = read_status(tmp_path)
    assert status.complete
    assert status.rows == ()
    assert status.error == "nothing was expected: rank 0 is not in ranks"


@pytest.mark.parametrize("outcome", ["failed", "empty"])
def test_what_the_tool_or_the_disk_refused(tmp_path: Path, outcome: str) -> None:
    process = Process(tmp_path)
    process.plan()
    process.open(1, 1)
    process.artifact(1, 1, outcome, reason="disk full")
    process.close(1, 1)
    process.end(1)
    status = read_status(tmp_path)
    assert not status.complete
    row = only(status)
    assert (row.status, row.reason, row.path) == (outcome, "disk full", "")


def test_recording_and_exporting_while_the_process_lives(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1, 2])
    process.open(1, 1)
    process.artifact(1, 1, "exporting", reserved="a", path="/out/a")
    process.close(1, 1)
    process.open(2, 2)
    status = read_status(tmp_path)
    assert not status.complete
    assert short(status) == [("actor", 1, "exporting"), ("actor", 2, "recording")]


def test_an_export_that_was_published_is_one_row(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan()
    process.open(1, 1)
    process.artifact(1, 1, "exporting", reserved="a", path="/out/a")
    process.close(1, 1)
    process.artifact(1, 1, reserved="a", path="/out/a-1")
    status = read_status(tmp_path)
    assert status.complete
    assert only(status).path == "/out/a-1"


def test_a_process_that_died(tmp_path: Path) -> None:
    process = Process(tmp_path, dead=True)
    process.plan(steps=[1, 2, 3])
    process.open(1, 1)
    process.artifact(1, 1, "exporting", reserved="a", path="/out/a")
    process.close(1, 1)
    process.open(2, 2)
    status = read_status(tmp_path)
    assert not status.complete
    assert short(status) == [("actor", 1, "died"), ("actor", 2, "died"), ("actor", 3, "not reached")]
    assert "went away" in status.rows[2].reason


def test_a_process_elsewhere_is_not_declared_dead(tmp_path: Path) -> None:
    process = Process(tmp_path, dead=True, host="far-away")
    process.plan()
    process.open(1, 1)
    row = only(read_status(tmp_path))
    assert row.status == "recording"
    assert "far-away" in row.reason


def test_a_process_elsewhere_that_said_goodbye_with_an_open_window(tmp_path: Path) -> None:
    process = Process(tmp_path, host="far-away")
    process.plan()
    process.open(1, 1)
    process.end(1)
    assert only(read_status(tmp_path)).status == "died"


def test_a_pid_that_was_given_to_another_process(tmp_path: Path) -> None:
    """An old ledger of a pid that lives again: the process that wrote it is dead all the same."""
    process = Process(tmp_path)
    process.plan()
    process.open(1, 1)
    assert only(read_status(tmp_path)).status == "recording"
    text = process.ledger.path.read_text()
    year = time.strftime("%Y", time.gmtime())
    process.ledger.path.write_text(text.replace(f'"time":"{year}-', f'"time":"{int(year) - 1}-'))
    assert only(read_status(tmp_path)).status == "died"


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert module._alive(host_name(), child.pid, "2999-01-01T00:00:00.000000Z") is False
    finally:
        child.wait()


def test_a_run_that_ended_before_the_step(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1, 50])
    process.whole(1, 1)
    process.end(10, reason="exit")
    status = read_status(tmp_path)
    assert not status.complete
    assert short(status) == [("actor", 1, "published"), ("actor", 50, "not reached")]
    assert status.rows[1].reason == "the run ended at step 10 (exit)"


def test_steps_that_the_run_does_not_have_are_not_expected(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.write("controller", first_step=3, total_steps=9)
    process.plan(steps=[1, 2, 5, 50])
    process.plan(role="ref", steps=[1, 2])
    process.whole(1, 5)
    process.end(9)
    process.end(9, role="ref")
    status = read_status(tmp_path)
    assert status.complete
    assert short(status) == [("actor", 5, "published")]


def test_a_step_still_ahead(tmp_path: Path) -> None:
    Process(tmp_path).plan(steps=[4])
    row = only(read_status(tmp_path))
    assert (row.status, row.reason) == ("not reached", "the run has not come to this step yet")


def test_a_window_without_a_file_and_no_window_at_all(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1, 2])
    process.open(1, 1)
    process.close(1, 1)
    process.end(3)
    status = read_status(tmp_path)
    assert not status.complete
    assert short(status) == [("actor", 1, "missing"), ("actor", 2, "missing")]
    assert "left no file" in status.rows[0].reason
    assert "no window was opened" in status.rows[1].reason


def test_aborted_windows(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1])
    process.open(1, 1)
    process.artifact(1, 1, scope="train-aborted")
    process.close(1, 1, aborted=True)
    process.end(1)
    status = read_status(tmp_path)
    assert status.complete
    assert (only(status).status, only(status).path) == ("aborted", "/out/1")


def test_an_aborted_window_without_a_file_is_missing(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1])
    process.open(1, 1)
    process.close(1, 1, aborted=True)
    row = only(read_status(tmp_path))
    assert row.status == "missing"
    assert "raised" in row.reason


def test_a_fault_explains_its_step_and_those_after_it(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1, 2, 4])
    process.whole(1, 1)
    process.open(2, 2)
    process.write("fault", hook="start", step=2, error="RuntimeError: no device", traceback="")
    process.close(2, 2, reason="start failed")
    process.end(9)
    status = read_status(tmp_path)
    assert short(status) == [("actor", 1, "published"), ("actor", 2, "failed"), ("actor", 4, "failed")]
    assert status.rows[1].reason == "start failed: RuntimeError: no device"
    assert status.rows[2].reason == "start failed in step 2; the tool is off since: RuntimeError: no device"


def test_a_role_that_joined(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan()
    process.plan(role="ref")
    process.open(1, 1)
    process.write("join", role="ref", step=1, owner_role="actor", window=1)
    process.artifact(1, 1)
    process.close(1, 1)
    status = read_status(tmp_path)
    assert status.complete
    assert short(status) == [("actor", 1, "published"), ("ref", 1, "joined")]
    assert status.rows[1].path == "/out/1"
    assert "actor" in status.rows[1].reason


def test_a_role_that_joined_in_the_middle_of_a_stretch(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1, 2], continuous=True)
    process.plan(role="ref", steps=[1, 2], continuous=True)
    process.whole(1, 1, steps=[1, 2])
    process.write("join", role="ref", step=2, owner_role="actor", window=1)
    status = read_status(tmp_path)
    assert short(status) == [("actor", 1, "published"), ("ref", 2, "joined")]


def test_a_role_that_joined_a_window_that_failed(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan()
    process.plan(role="ref")
    process.open(1, 1)
    process.write("join", role="ref", step=1, owner_role="actor", window=1)
    process.artifact(1, 1, "failed", reason="disk full")
    process.close(1, 1)
    status = read_status(tmp_path)
    assert not status.complete
    assert short(status) == [("actor", 1, "failed"), ("ref", 1, "failed")]
    assert status.rows[1].reason.endswith("disk full")


def test_a_stretch_of_steps_is_one_expectation(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps=[1, 2, 3, 7], continuous=True)
    process.whole(1, 2, steps=[2, 3])  # resumed in the middle
    process.end(5)
    assert short(read_status(tmp_path)) == [("actor", 2, "published"), ("actor", 7, "not reached")]


def test_stages_and_manual_windows_have_a_row_each(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(discrete=True)
    process.whole(1, 1, scope="actor-update")
    process.whole(2, 1, scope="compute-log-prob")
    process.whole(3, None, scope="manual")  # type: ignore[arg-type]
    process.artifact(None, 1, path="/out/adopted")
    status = read_status(tmp_path)
    assert status.complete
    assert [(row.step, row.scope) for row in status.rows] == [
        (None, "manual"),
        (1, "actor-update"),
        (1, "compute-log-prob"),
        (1, "train"),
    ]


def test_ranks_tools_and_processes_are_kept_apart(tmp_path: Path) -> None:
    one = Process(tmp_path, host="a")
    two = Process(tmp_path, host="b")
    for process, rank in ((one, 0), (two, 1)):
        process.plan(rank=rank)
        process.plan(rank=rank, tool="other")
    one.whole(1, 1)
    one.whole(2, 1, tool="other")
    two.whole(1, 1, rank=1)
    for process, rank in ((one, 0), (two, 1)):
        process.end(1, rank=rank)
    status = read_status(tmp_path)
    assert [(row.rank, row.tool, row.status) for row in status.rows] == [
        (0, "fake", "published"),
        (0, "other", "published"),
        (1, "fake", "published"),
        (1, "other", "missing"),
    ]


def test_only_the_newest_run_counts_unless_asked(tmp_path: Path) -> None:
    old = Process(tmp_path, run_id="old", dead=True)
    old.plan()
    new = Process(tmp_path, run_id="new")
    new.plan()
    new.whole(1, 1)
    status = read_status(tmp_path)
    assert status.complete
    assert status.run_ids == ("old", "new")
    assert only(status).run_id == "new"
    both = read_status(tmp_path, all_runs=True)
    assert not both.complete
    assert [(row.run_id, row.status) for row in both.rows] == [("new", "published"), ("old", "not reached")]


def test_processes_without_a_common_run_id_are_one_run_when_they_overlap(tmp_path: Path) -> None:
    one = Process(tmp_path, host="a", run_id="a1")
    two = Process(tmp_path, host="b", run_id="b1")
    one.plan()
    two.plan(rank=1)
    one.whole(1, 1)
    two.whole(1, 1, rank=1)
    assert [row.rank for row in read_status(tmp_path).rows] == [0, 1]


def test_odd_records_do_not_break_the_report(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.plan(steps="1-3", rank="zero")
    process.plan(steps=[None, "x", 1])
    process.write("window", window=[1])
    process.write("artifact", status=3)
    process.write("join")
    process.write("something new", a=1)
    status = read_status(tmp_path)
    assert not status.complete


def test_a_killed_process_leaves_a_readable_status(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from rankscope.artifacts.ledger import Ledger
from rankscope.topology import host_name
ledger = Ledger(sys.argv[1], host=host_name(), run_id="r")
facts = {"role": "actor", "rank": 0, "tool": "fake"}
ledger.write("plan", **facts, profiled=True, steps=[1], continuous=False)
ledger.write("window", **facts, event="open", window=1, step=1, steps=[1], scope="train")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert only(read_status(tmp_path)).status == "died"


def test_rows_are_json(tmp_path: Path) -> None:
    import dataclasses

    process = Process(tmp_path)
    process.plan()
    process.whole(1, 1)
    assert json.loads(json.dumps(dataclasses.asdict(read_status(tmp_path))))["complete"] is True
    shutil.rmtree(tmp_path / ".rankscope")
    assert not read_status(tmp_path).complete
