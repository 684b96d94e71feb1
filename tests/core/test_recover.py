"""What a kill left staged is finished later: by hand, or by the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import wait_for

from rankscope import DistProfiler, Window
from rankscope.artifacts import recover as module
from rankscope.artifacts.exports import exports
from rankscope.artifacts.recover import Recovered, complete, folders, left_over, recover
from rankscope.artifacts.status import read_status
from rankscope.artifacts.store import partial_files
from rankscope.host import born, host_name

Make = Callable[..., DistProfiler]

PARENT = """
import json, sys, time
from pathlib import Path
from rankscope import DistProfiler, annotate
from rankscope.artifacts.exports import exports
from rankscope.types import Window
config, job, arguments, after = (json.loads(text) for text in sys.argv[1:])
handle = DistProfiler(config, role="actor", rank=0, world_size=1)
store = handle.stores[0]
for step in (1, 2):
    window = Window(id=step, role="actor", step=step, steps=(step,), scope="train", reason="step")
    with store.reserve(window, suffix=".txt") as file:
        file.staged.write_text(f"step {step}")
        file.finish_later(job, arguments, note=f"mine {step}")
window = Window(id=3, role="actor", step=3, steps=(3,), scope="train", reason="step")
if after:
    file = store.reserve(window, suffix=".txt")
    file.staged.write_text("ha")
print(exports()._process.pid, flush=True)
time.sleep(120)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's temporary directory, for this test alone."""
    (tmp_path / "node-tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node-tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node-tmp"))


class Killed:
    """A training process that handed two files over; both it and its helper can be killed."""

    def __init__(
        self, site: Path, save_path: Path, *, job: str = "recording:wait_for_file", raw: bool = False, **common: Any
    ) -> None:
        self.save_path = save_path
        self.began, self.go = site.parent / "began", site.parent / "go"
        arguments = {"began": str(self.began), "go": str(self.go), "seconds": 0}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                PARENT,
                json.dumps(recording.config(save_path, **common)),
                *(json.dumps(value) for value in (job, arguments, raw)),
            ],
            env=recording.environment(site),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        try:
            self.helper = int(self.process.stdout.readline())
        except ValueError:
            self.process.kill()
            raise AssertionError(self.process.communicate()[1]) from None
        self.pid = self.process.pid

    def kill(self) -> None:
        """kill -9, the training first: it would start another helper."""
        self.process.kill()
        self.process.communicate(timeout=30)
        if born(self.helper) is not None:
            os.kill(self.helper, signal.SIGKILL)
        wait_for(lambda: born(self.helper) is None)

    def records(self, status: str) -> list[dict[str, Any]]:
        return [one for one in recording.ledger(self.save_path, "artifact") if one["status"] == status]


@pytest.fixture
def start(site: Path, save_path: Path) -> Iterator[Callable[..., Killed]]:
    made: list[Killed] = []

    def make(**facts: Any) -> Killed:
        made.append(Killed(site, save_path, **facts))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture
def killed(start: Callable[..., Killed]) -> Killed:
    """Killed while its helper was at the first file; what the helper waited for is there now."""
    one = start()
    wait_for(one.began.exists)
    one.kill()
    one.go.touch()
    return one


def staged_files(save_path: Path) -> list[str]:
    folder = save_path / ".rankscope" / "staged"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def states(outcomes: list[Recovered]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def only_job(save_path: Path) -> Path:
    """Leave one of the two jobs; where its job file lies."""
    first, second = sorted((save_path / ".rankscope" / "staged").glob("*.job"))
    second.unlink()
    second.with_name(second.name.removesuffix(".job")).unlink()
    return first


def change(job: Path, **facts: Any) -> None:
    """Change whose job it is."""
    content = json.loads(job.read_bytes())
    content["ledger"].update(facts)
    job.write_text(json.dumps(content))


# A dead process.


def test_what_was_left_is_finished_as_it_would_have_been(killed: Killed) -> None:
    assert recording.files(killed.save_path) == []
    assert killed.records("published") == []
    assert {row.status for row in read_status(killed.save_path).rows if row.step in {1, 2}} == {"died"}
    told: list[Recovered] = []
    outcomes = recover(killed.save_path, progress=told.append)
    assert told == outcomes
    assert states(outcomes) == ["published", "published"]
    assert complete(outcomes)
    assert recording.files(killed.save_path) == ["step 1 finished", "step 2 finished"]
    published = killed.records("published")
    assert {(one["pid"], one["step"], one["events"], one["note"]) for one in published} == {
        (killed.pid, 1, 7, "mine 1"),
        (killed.pid, 2, 7, "mine 2"),
    }
    assert {one["path"] for one in published} == {outcome.path for outcome in outcomes}
    rows = {row.step: row for row in read_status(killed.save_path).rows}
    assert [(rows[step].status, rows[step].pid) for step in (1, 2)] == [("published", killed.pid)] * 2
    assert staged_files(killed.save_path) == []
    assert partial_files(killed.save_path) == []
    assert recover(killed.save_path) == []


RECOVER = """
import json, sys
from pathlib import Path
from rankscope.artifacts.recover import recover
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([[found.status, found.reason] for found in recover(Path(sys.argv[1]))]))
"""


def test_two_at_once_publish_nothing_twice(start: Callable[..., Killed], site: Path) -> None:
    killed = start()
    wait_for(killed.began.exists)
    killed.kill()
    killed.began.unlink()
    both: list[subprocess.Popen[str]] = [
        subprocess.Popen(
            [sys.executable, "-c", RECOVER, str(killed.save_path)],
            env=recording.environment(site),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert both[0].stdin is not None
        both[0].stdin.write("\n")
        both[0].stdin.flush()
        wait_for(killed.began.exists)  # the first is in the middle of a file and holds it
        assert recover_one_held(killed.save_path) == ("busy", "another process is finishing it right now")
        killed.go.touch()
        told = [process.communicate("\n", timeout=60)[0].splitlines() for process in both]
    finally:
        for process in both:
            if process.poll() is None:
                process.kill()
                process.communicate()
    everything = [status for lines in told for status, _ in json.loads(lines[-1])]
    assert everything.count("published") == 2
    assert set(everything) <= {"published", "busy"}
    assert recording.files(killed.save_path) == ["step 1 finished", "step 2 finished"]
    assert len(killed.records("published")) == 2


def recover_one_held(save_path: Path) -> tuple[str, str]:
    """What recovery says of the file that another process has in hand; the other file is not touched."""
    (first, *_) = sorted((save_path / ".rankscope" / "staged").glob("*.job"))
    outcome = next(module._recover_folder(first.parent))
    assert outcome.staged.name + ".job" == first.name
    return outcome.status, outcome.reason


def test_raw_data_without_a_job_is_named_and_kept(start: Callable[..., Killed]) -> None:
    killed = start(raw=True)
    (lonely,) = (path for path in map(Path, staged_files(killed.save_path)) if "_step3_" in path.name)
    assert "no job" not in states(recover(killed.save_path))  # its writer lives
    killed.kill()
    killed.go.touch()
    for again in (False, True):
        outcomes = recover(killed.save_path)
        assert states(outcomes) == (["no job"] if again else ["published", "published", "no job"])
        assert outcomes[-1].staged.name == lonely.name
        assert "its process died while it was written" in outcomes[-1].reason
        assert not complete(outcomes)
        assert outcomes[-1].staged.read_text() == "ha"


# Whose it is.


def test_a_living_process_keeps_its_jobs(start: Callable[..., Killed]) -> None:
    living = start()
    wait_for(living.began.exists)
    outcomes = recover(living.save_path)
    assert states(outcomes) == ["busy", "busy"]
    assert {outcome.reason for outcome in outcomes} == {"the process that it belongs to still runs and will finish it"}
    assert complete(outcomes)
    assert left_over(living.save_path / ".rankscope" / "staged") == []
    living.go.touch()
    wait_for(lambda: len(living.records("published")) == 2)


def test_a_later_process_with_the_same_pid_is_another_one(killed: Killed) -> None:
    job = only_job(killed.save_path)
    own = born(os.getpid())
    assert own is not None
    change(job, pid=os.getpid(), born=own)
    assert states(recover(killed.save_path)) == ["busy"]
    change(job, born=own - 1)
    assert left_over(job.parent) == [job]
    assert states(recover(killed.save_path)) == ["published"]


def test_another_hosts_jobs_are_left_to_it(killed: Killed) -> None:
    job = only_job(killed.save_path)
    change(job, host="node-b")
    outcomes = recover(killed.save_path)
    assert states(outcomes) == ["busy"]
    assert "'node-b'" in outcomes[0].reason
    assert left_over(job.parent) == []
    assert job.exists()
    assert outcomes[0].staged.exists()
    assert recording.files(killed.save_path) == []
    assert states(recover(killed.save_path, any_host=True)) == ["published"]


@pytest.mark.parametrize(
    "content", [b"", b'{"function": "recor', b"[]", b"\xff\xfe", b'{"ledger": {"host": 3}}', b"{}"]
)
def test_a_damaged_job_is_named_and_its_raw_data_kept(killed: Killed, content: bytes) -> None:
    job = sorted((killed.save_path / ".rankscope" / "staged").glob("*.job"))[0]
    job.write_bytes(content)
    assert len(left_over(job.parent)) == 1
    outcomes = recover(killed.save_path)
    assert sorted(states(outcomes)) == ["no job", "published"]
    damaged = next(outcome for outcome in outcomes if outcome.status == "no job")
    assert str(job) in damaged.reason
    assert "damaged" in damaged.reason
    assert damaged.staged.exists()
    assert not complete(outcomes)


@pytest.mark.parametrize("gone", ["function", "staged", "temporary", "final", "facts", "ledger", "arguments"])
def test_a_job_that_lacks_something_is_damaged(killed: Killed, gone: str) -> None:
    job = only_job(killed.save_path)
    content = json.loads(job.read_bytes())
    del content[gone]
    job.write_text(json.dumps(content))
    assert states(recover(killed.save_path)) == ["no job"]


def test_a_living_process_that_is_just_writing_a_job_is_busy(start: Callable[..., Killed]) -> None:
    living = start()
    wait_for(living.began.exists)
    job = sorted((living.save_path / ".rankscope" / "staged").glob("*.job"))[1]
    whole = job.read_bytes()
    job.write_bytes(whole[:20])
    assert [outcome.reason for outcome in recover(living.save_path)][1] == "its process is just handing it over"
    job.write_bytes(whole)
    living.go.touch()
    wait_for(lambda: len(living.records("published")) == 2)


def test_a_job_whose_raw_data_is_gone_is_not_tried_for_ever(killed: Killed) -> None:
    job = only_job(killed.save_path)
    job.with_name(job.name.removesuffix(".job")).unlink()
    (outcome,) = recover(killed.save_path)
    assert outcome.status == "failed"
    assert "FileNotFoundError" in outcome.reason
    assert recover(killed.save_path) == []


def test_a_function_that_cannot_be_imported_yet_is_tried_again(
    killed: Killed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = only_job(killed.save_path)
    content = json.loads(job.read_bytes())
    job.write_text(json.dumps({**content, "function": "finisher_of_a_tool:finish"}))
    (outcome,) = recover(killed.save_path)
    assert outcome.status == "failed"
    assert "ModuleNotFoundError: No module named 'finisher_of_a_tool'" in outcome.reason
    assert f"raw data kept in {outcome.staged}" in outcome.reason
    assert outcome.staged.read_text() == "step 1"
    row = next(row for row in read_status(killed.save_path).rows if row.step == 1)
    assert (row.status, row.reason) == ("failed", outcome.reason)
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "finisher_of_a_tool.py").write_text("from recording import finish_file as finish\n")
    monkeypatch.syspath_prepend(str(tool))
    assert states(recover(killed.save_path)) == ["published"]
    assert recording.files(killed.save_path) == ["step 1 finished"]
    row = next(row for row in read_status(killed.save_path).rows if row.step == 1)
    assert row.status == "published"


def test_an_empty_one_is_done_with(killed: Killed) -> None:
    job = only_job(killed.save_path)
    content = json.loads(job.read_bytes())
    job.write_text(json.dumps({**content, "function": "recording:find_nothing"}))
    outcomes = recover(killed.save_path)
    assert (states(outcomes), outcomes[0].reason) == (["empty"], "there was nothing to record")
    assert complete(outcomes)
    assert staged_files(killed.save_path) == []


# Where it lies.


def test_a_configured_folder_is_found_through_the_ledger(start: Callable[..., Killed], tmp_path: Path) -> None:
    killed = start(stage_dir=str(tmp_path / "nvme"))
    killed.kill()
    killed.go.touch()
    assert staged_files(killed.save_path) == []
    (folder,) = folders(killed.save_path)
    assert folder.is_relative_to(tmp_path / "nvme")
    assert states(recover(killed.save_path)) == ["published", "published"]
    assert recording.files(killed.save_path) == ["step 1 finished", "step 2 finished"]
    assert list(folder.iterdir()) == []


def test_what_somebody_else_put_there_is_not_run(
    start: Callable[..., Killed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = start(stage_dir=str(tmp_path / "nvme"))
    killed.kill()
    killed.go.touch()
    (folder,) = folders(killed.save_path)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert left_over(folder) == []
    assert recover(killed.save_path) == []
    assert recording.files(killed.save_path) == []


def test_a_folder_that_cannot_be_read_is_told(killed: Killed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    (outcome,) = list(module._recover_folder(killed.save_path / ".rankscope" / "staged"))
    assert outcome.status == "failed"
    assert "PermissionError" in outcome.reason


def test_nothing_was_left(save_path: Path) -> None:
    save_path.mkdir()
    assert recover(save_path) == []
    assert complete([])
    assert left_over(save_path / "not there") == []


# The next start.


@pytest.mark.parametrize("where", ["beside", "configured"])
def test_the_next_start_finishes_it_by_itself(
    start: Callable[..., Killed], profiler: Make, tmp_path: Path, where: str
) -> None:
    more = {"stage_dir": str(tmp_path / "nvme")} if where == "configured" else {}
    killed = start(**more)
    wait_for(killed.began.exists)
    killed.kill()
    killed.go.touch()
    handle = profiler(**more)
    wait_for(lambda: len(killed.records("published")) == 2)
    assert {one["pid"] for one in killed.records("published")} == {killed.pid}
    assert handle.artifacts == ()  # they are another process's
    # And its own files come as ever.
    window = Window(id=1, role="actor", step=1, steps=(1,), scope="train", reason="step")
    with handle.stores[0].reserve(window, suffix=".txt") as file:
        file.staged.write_text("mine")
        file.finish_later("recording:finish_file", {"seconds": 0})
    assert exports().drain(60)
    assert len(handle.artifacts) == 1
    assert recording.files(killed.save_path).count("mine finished") == 1


def test_a_start_with_nothing_to_finish_starts_no_helper(profiler: Make) -> None:
    profiler()
    assert exports()._process is None


def test_a_rank_that_is_not_profiled_finishes_nothing(killed: Killed, profiler: Make) -> None:
    profiler(section={"all_ranks": False, "ranks": [5]})
    assert exports()._process is None
    assert len(left_over(killed.save_path / ".rankscope" / "staged")) == 2


def test_one_file_that_kills_the_helper_does_not_keep_new_ones_from_being_finished(
    killed: Killed, profiler: Make
) -> None:
    job = only_job(killed.save_path)
    content = json.loads(job.read_bytes())
    job.write_text(json.dumps({**content, "function": "recording:kill_itself"}))
    handle = profiler()
    window = Window(id=1, role="actor", step=1, steps=(1,), scope="train", reason="step")
    with handle.stores[0].reserve(window, suffix=".txt") as file:
        file.staged.write_text("mine")
        file.finish_later("recording:finish_file", {"seconds": 0})
    assert exports().drain(60)
    assert recording.files(killed.save_path) == ["mine finished"]
    assert job.exists()


# The life of a process.


def test_born() -> None:
    own = born(os.getpid())
    assert own == born(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        later = born(process.pid)
        assert own is not None
        assert later is not None
        assert later >= own
        process.kill()
        wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        assert born(process.pid) is None  # a zombie will finish nothing
    assert born(process.pid) is None


@pytest.mark.parametrize("pid", [0, -1, "7", None, 2**31])
def test_what_is_no_pid_does_not_live(pid: object) -> None:
    assert not module._lives(pid)


def test_our_host_is_ours() -> None:
    assert host_name() in module._OURS
