"""Reports that come late, or never, or twice: against stand-ins of nsys' side, with the real store and ledger."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope import DistProfiler, annotate, load_config
from rankscope.launch import plan_launch
from rankscope_nsys import collecting, session
from rankscope_nsys.attached import Attached
from rankscope_nsys.control import session_name, write_reports_now
from rankscope_nsys.ends import CaptureEnd, parse_end
from rankscope_nsys.reports import Reports, why_no_report
from rankscope_nsys.session import LAUNCH

WHOLE = b"NVIDIA Tegra Profiler Report ... [END]"


def end(text: str) -> CaptureEnd:
    found = parse_end(text)
    assert found is not None
    return found


class Nsys:
    """Around the test process: what it was told, and the reports that it writes."""

    def __init__(self, folder: Path, save_path: Path) -> None:
        self.stem = str(folder / "pid7-ab")
        self.save_path = save_path
        self.asked: list[float] = []
        self.answer = ""
        self.writes: tuple[int, ...] = ()
        self.attached = Attached("42", 7, "nsys", "nvtx", True, end("repeat"), self.stem)

    def write(self, number: int | None, content: bytes = WHOLE) -> Path:
        path = Path(f"{self.stem}{'' if number is None else f'.{number}'}.nsys-rep")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def write_now(self, attached: Attached, seconds: float) -> str:
        self.asked.append(seconds)
        for number in self.writes:
            self.write(number)
        return self.answer


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nsys:
    stand_in = Nsys(tmp_path / "out" / ".rankscope" / "nsys" / "h", tmp_path / "out")
    monkeypatch.setattr(session, "find_attached", lambda *_: stand_in.attached)
    monkeypatch.setattr(session.NsysSession.__init__, "__defaults__", (stand_in.write_now,))
    monkeypatch.delenv("RANKSCOPE_STRICT")
    return stand_in


@pytest.fixture
def handle(nsys: Nsys, kit: Any) -> Iterator[Callable[..., DistProfiler]]:
    made: list[DistProfiler] = []

    def make(role: str = "actor", **facts: Any) -> DistProfiler:
        facts = {"report_wait": 0.2, **facts}
        source = kit.config(nsys.save_path, "actor", "critic", **facts)
        made.append(DistProfiler(source, role=role, rank=0, world_size=1))
        return made[-1]

    yield make
    for profiler in made:
        profiler.close()


def window(profiler: DistProfiler, step: int, *, last: bool = False) -> None:
    profiler.start(step=step)
    with annotate("stage"):
        pass
    profiler.stop(last=last)


def reasons(save_path: Path) -> list[tuple[int | None, str, str]]:
    from rankscope.artifacts.status import read_status

    return [(row.step, row.status, row.reason) for row in read_status(save_path).rows]


# When a report is whole.


def test_a_report_is_whole_when_nsys_says_so_or_nothing_changes_any_more(tmp_path: Path) -> None:
    now = [0.0]
    reports = Reports(lambda: now[0])
    path = tmp_path / "a.nsys-rep"
    assert not reports.whole(path)
    path.write_bytes(b"")
    assert not reports.whole(path)
    path.write_bytes(b"half")
    assert not reports.whole(path)
    now[0] = 0.9
    assert not reports.whole(path)
    path.write_bytes(b"half and more")
    now[0] = 1.8
    assert not reports.whole(path)
    now[0] = 2.9
    assert reports.whole(path)
    path.write_bytes(WHOLE)
    assert Reports().whole(path)


def test_raw_data_beside_it_means_that_it_is_not_made_yet(tmp_path: Path) -> None:
    path = tmp_path / "a b.1.nsys-rep"
    path.write_bytes(WHOLE)
    raw = tmp_path / "a b.1.qdstrm"
    raw.write_bytes(b"raw")
    assert not Reports().whole(path)
    path.unlink()
    assert why_no_report(str(tmp_path / "a b"), 1).endswith(f"QdstrmImporter -i '{raw}'")
    raw.unlink()
    assert why_no_report(str(tmp_path / "a b"), 1).endswith("it would be " + str(tmp_path / "a b*.nsys-rep"))


def test_waiting_has_an_end(tmp_path: Path) -> None:
    assert not Reports().wait([(str(tmp_path / "a"), 1)], 0.15)
    writer = threading.Timer(0.3, lambda: (tmp_path / "a.nsys-rep").write_bytes(WHOLE))
    writer.start()
    assert Reports().wait([(str(tmp_path / "a"), 1)], 30)
    writer.join()


def test_a_name_that_nsys_chooses_is_found(tmp_path: Path) -> None:
    (tmp_path / "report3.nsys-rep").write_bytes(WHOLE)
    assert Reports().find(str(tmp_path / "report*"), 1) == tmp_path / "report3.nsys-rep"


# Asking nsys.


def listing(*rows: str) -> str:
    return "\n".join(["               ID         TIME                       STATE LAUNCH NAME", *rows, ""])


def test_only_the_session_of_this_process_is_stopped() -> None:
    text = listing(
        "          103477        00:01                  StartRange      1 profile-1",
        "          103478        00:01                  StartRange      1 my own name",
        "          103479        00:01                  Collection      1 profile-3",
    )
    assert session_name(text, "103478") == "my own name"
    assert session_name(text, "3478") == ""
    ran: list[list[str]] = []

    def run(command: Any, seconds: float) -> subprocess.CompletedProcess[str]:
        ran.append(list(command))
        return subprocess.CompletedProcess(command, 0, stdout=text, stderr="")

    attached = Attached("103478", 7, "/opt/nsys")
    assert write_reports_now(attached, 5, run) == ""
    assert ran == [["/opt/nsys", "sessions", "list"], ["/opt/nsys", "stop", "--session=my own name"]]


def test_what_nsys_says_instead_is_passed_on() -> None:
    def run(command: Any, seconds: float) -> subprocess.CompletedProcess[str]:
        if "stop" in command:
            return subprocess.CompletedProcess(command, 1, "", "Collection stop is not allowed in this state.\n\n")
        return subprocess.CompletedProcess(command, 0, listing("  5  00:01  Launched  1 profile-9"), "")

    def hang(command: Any, seconds: float) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, seconds)

    assert write_reports_now(Attached("5"), 5, run) == "Collection stop is not allowed in this state."
    assert write_reports_now(Attached("6"), 5, run) == "nsys does not list its session 6"
    assert "was not done within 5 seconds" in write_reports_now(Attached("5"), 5, hang)
    assert write_reports_now(Attached("5", program="/nonexistent/nsys"), 5).startswith("FileNotFoundError")


# A whole run.


def test_reports_that_come_during_the_run_are_relocated_step_by_step(
    nsys: Nsys, handle: Callable[..., DistProfiler], kit: Any
) -> None:
    nsys.attached = Attached("42", 7, "nsys", "nvtx", True, end("repeat:2:async"), nsys.stem)
    profiler = handle(common={"relocate_results": True})
    window(profiler, 1)
    assert profiler.relocate() == ()
    nsys.write(1, b"NVIDIA half")
    assert profiler.relocate() == ()
    nsys.write(1)
    (first,) = profiler.relocate()
    assert first.path.name.startswith("actor_train_step1_rank0_")
    assert profiler.relocate() == ()
    nsys.write(2)
    window(profiler, 2, last=True)
    assert nsys.asked == []
    assert [row[:2] for row in reasons(nsys.save_path)] == [(1, "published"), (2, "published")]
    assert [entry["report"] for entry in kit.index(nsys.save_path)["ranges"]] == [
        artifact.path.name for artifact in profiler.artifacts
    ]


def test_put_off_reports_are_asked_for_once_at_the_end(nsys: Nsys, handle: Callable[..., DistProfiler]) -> None:
    profiler = handle()
    nsys.writes = (1, 2)
    window(profiler, 1)
    assert nsys.asked == []
    window(profiler, 2, last=True)
    assert nsys.asked == [0.2]
    assert [row[:2] for row in reasons(nsys.save_path)] == [(1, "published"), (2, "published")]
    window(profiler, 2)
    assert [row[2] for row in reasons(nsys.save_path) if "had ended its capture" in row[2]]


def test_a_report_that_never_comes_is_missing_with_the_reason(nsys: Nsys, handle: Callable[..., DistProfiler]) -> None:
    nsys.attached = Attached("42", 7, "nsys", "nvtx", True, end("repeat:2"), nsys.stem)
    profiler = handle()
    nsys.write(1)
    window(profiler, 1)
    window(profiler, 2, last=True)
    found = reasons(nsys.save_path)
    assert [row[:2] for row in found] == [(1, "published"), (2, "failed")]
    assert "nsys had not written all reports after 0.2 seconds (report_wait)" in found[1][2]
    assert found[1][2].endswith(f"it would be {nsys.stem}*.nsys-rep")


def test_raw_data_without_a_report_comes_with_the_way_to_convert_it(
    nsys: Nsys, handle: Callable[..., DistProfiler]
) -> None:
    nsys.attached = Attached("42", 7, "nsys", "nvtx", True, end("stop"), nsys.stem)
    profiler = handle(common={"steps": [1]})
    Path(nsys.stem).parent.mkdir(parents=True)
    Path(f"{nsys.stem}.qdstrm").write_bytes(b"raw")
    window(profiler, 1, last=True)
    ((_, status, reason),) = reasons(nsys.save_path)
    assert status == "failed"
    assert f"convert it with: QdstrmImporter -i {nsys.stem}.qdstrm" in reason


def test_a_report_that_only_the_launcher_can_collect_is_on_its_way_until_then(
    nsys: Nsys,
    handle: Callable[..., DistProfiler],
    kit: Any,
    monkeypatch: pytest.MonkeyPatch,
    fake_nsys: Path,
    capfd: Any,
) -> None:
    source = kit.config(nsys.save_path, "actor", "critic", report_wait=0.2)
    plan = plan_launch(source, roles=["actor"], rank=0, world_size=1)
    monkeypatch.setenv(LAUNCH, plan.env[LAUNCH])
    nsys.answer = "no such session"
    profiler = handle()
    window(profiler, 1)
    window(profiler, 2, last=True)
    assert [row[:2] for row in reasons(nsys.save_path)] == [(1, "exporting"), (2, "exporting")]
    profiler.close()
    nsys.write(1)
    plan.collect()
    assert "a process goes on without its nsys; its reports are left to it" in capfd.readouterr().err
    monkeypatch.setattr("rankscope_nsys.index.born", lambda pid: None)  # from here on it has ended
    plan.collect()
    found = reasons(nsys.save_path)
    assert [row[:2] for row in found] == [(1, "published"), (2, "failed")]
    assert found[1][2].startswith("nsys wrote no report of this capture range")
    names = [path.name for path in kit.reports(nsys.save_path)]
    assert [entry["report"] for entry in kit.index(nsys.save_path)["ranges"]] == [*names, ""]


def test_a_report_that_the_process_moved_before_it_was_killed_is_not_missed(
    nsys: Nsys, handle: Callable[..., DistProfiler], kit: Any, monkeypatch: pytest.MonkeyPatch, fake_nsys: Path
) -> None:
    nsys.attached = Attached("42", 7, "nsys", "nvtx", True, end("repeat:2:async"), nsys.stem)
    source = kit.config(nsys.save_path, "actor", "critic", common={"relocate_results": True}, report_wait=0.2)
    plan = plan_launch(source, roles=["actor"], rank=0, world_size=1)
    monkeypatch.setenv(LAUNCH, plan.env[LAUNCH])
    profiler = handle(common={"relocate_results": True})
    nsys.write(1)
    window(profiler, 1)
    assert len(profiler.relocate()) == 1
    monkeypatch.setattr("rankscope_nsys.index.born", lambda pid: None)  # as if it had been killed here
    plan.collect()
    assert reasons(nsys.save_path)[0][:2] == (1, "published")
    assert "failed" not in {row[1] for row in reasons(nsys.save_path)}


def test_roles_of_one_process_count_its_ranges_together(
    nsys: Nsys, handle: Callable[..., DistProfiler], kit: Any
) -> None:
    actor, critic = handle("actor"), handle("critic")
    for number, profiler in enumerate((actor, critic, actor, critic)):
        window(profiler, 1 + number // 2)
    nsys.writes = (1, 2, 3, 4)
    actor.finish()
    assert (nsys.asked, kit.reports(nsys.save_path)) == ([], [])
    critic.finish()
    assert len(nsys.asked) == 1
    entries = [(entry["number"], entry["role"], entry["step"]) for entry in kit.index(nsys.save_path)["ranges"]]
    assert entries == [(1, "actor", 1), (2, "critic", 1), (3, "actor", 2), (4, "critic", 2)]
    for entry in kit.index(nsys.save_path)["ranges"]:
        assert entry["report"].startswith(f"{entry['role']}_train_step{entry['step']}_rank0_")
        assert f"-ab.{entry['number']}.nsys-rep" in entry["report"]


def test_a_role_that_never_opened_a_window_holds_nobody_up(nsys: Nsys, handle: Callable[..., DistProfiler]) -> None:
    actor, _ = handle("actor"), handle("critic")
    nsys.writes = (1, 2)
    window(actor, 1)
    window(actor, 2, last=True)
    assert [row[:2] for row in reasons(nsys.save_path)][:2] == [(1, "published"), (2, "published")]


def test_a_stage_of_a_role_that_joined_brings_its_report_too(nsys: Nsys, handle: Callable[..., DistProfiler]) -> None:
    facts = {"discrete": True, "common": {"steps": [1]}}
    actor, critic = handle("actor", **facts), handle("critic", **facts)

    class Critic:
        profiler = critic

        @annotate("critic_update")
        def update(self) -> None:
            pass

    actor.start(step=1)
    critic.start(step=1)
    Critic().update()
    critic.stop()
    actor.stop()
    nsys.writes = (1,)
    for profiler in (critic, actor):
        profiler.finish()
    (artifact,) = actor.artifacts
    assert artifact.path.name.startswith("critic_critic-update_step1_rank0_")


def test_at_the_end_of_the_process_no_role_is_waited_for_any_more(
    nsys: Nsys, handle: Callable[..., DistProfiler], kit: Any
) -> None:
    actor, _ = handle("actor"), handle("critic")
    window(actor, 1, last=True)  # the run ends before step 2, and the critic was never there
    assert (nsys.asked, kit.reports(nsys.save_path)) == ([], [])
    nsys.writes = (1,)
    session._at_exit(os.getpid(), session._current[1])  # type: ignore[index]
    assert len(nsys.asked) == 1
    assert [row[:2] for row in reasons(nsys.save_path) if row[0] == 1 and row[1] == "published"]
    assert "failed" not in {row[1] for row in reasons(nsys.save_path)}


def test_under_ray_nobody_collects_so_the_place_is_told(
    nsys: Nsys, handle: Callable[..., DistProfiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCH, "abc")
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    nsys.answer = "no such session"
    profiler = handle(common={"steps": [1]})
    window(profiler, 1, last=True)
    ((_, status, reason),) = reasons(nsys.save_path)
    assert status == "failed"
    assert reason.endswith(f"it would be {nsys.stem}*.nsys-rep")


def test_windows_beyond_what_nsys_was_told_are_missing_in_words(
    nsys: Nsys, handle: Callable[..., DistProfiler]
) -> None:
    nsys.attached = Attached("42", 7, "nsys", "nvtx", True, end("repeat:1"), nsys.stem)
    profiler = handle()
    nsys.write(None)
    window(profiler, 1)
    window(profiler, 2, last=True)
    found = reasons(nsys.save_path)
    assert [row[:2] for row in found] == [(1, "published"), (2, "failed")]
    assert "nsys was told to capture 1 ranges (--capture-range-end=repeat:1), and has them" in found[1][2]


def test_the_training_and_its_error_are_untouched_when_the_save_path_cannot_be_written(
    nsys: Nsys, handle: Callable[..., DistProfiler], capfd: Any
) -> None:
    profiler = handle()
    shutil.rmtree(nsys.save_path)
    nsys.save_path.write_text("a file where the folder should be")
    profiler.start(step=1)
    with pytest.raises(KeyError, match="of the training"), annotate("stage"):
        raise KeyError("of the training")
    profiler.stop()
    assert profiler.faults == ()
    assert "the index of the reports cannot be written" in capfd.readouterr().err
    nsys.save_path.unlink()


def test_two_windows_of_one_process_share_the_claim_and_another_process_has_none(
    nsys: Nsys, handle: Callable[..., DistProfiler]
) -> None:
    profiler = handle()
    owner = nsys.save_path / ".rankscope" / "nsys" / profiler.stores[0].host / "session42-7.owner"
    owner.parent.mkdir(parents=True)
    owner.write_text("1")
    window(profiler, 1, last=True)
    found = reasons(nsys.save_path)
    assert (found[0][0], found[0][1]) == (1, "failed")
    assert "process 1, which the same nsys traces, opens its capture ranges" in found[0][2]


def test_a_forked_child_starts_without_the_ranges_of_its_parent(
    nsys: Nsys, handle: Callable[..., DistProfiler]
) -> None:
    profiler = handle()
    window(profiler, 1)
    context = profiler.tools[0].backend.context  # type: ignore[attr-defined]
    parent = session.current_session(context)
    assert len(parent.ranges) == 1
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        own = session.current_session(context)
        os.write(write, json.dumps([len(own.ranges), own is parent]).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        assert json.loads(pipe.read()) == [0, False]
    assert session.current_session(context) is parent


def test_the_launcher_says_when_nothing_was_captured(
    tmp_path: Path, kit: Any, fake_nsys: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_launch(kit.config(tmp_path / "out", report_wait=0), roles=["actor"], rank=0, world_size=1)
    plan.collect()
    assert "nsys was attached and captured nothing" in capfd.readouterr().err
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/other.so")  # then launch had given nothing
    plan.collect()
    assert capfd.readouterr().err == ""


def test_indexes_of_other_launches_and_other_files_are_left_alone(
    tmp_path: Path, kit: Any, fake_nsys: Path, nsys: Nsys, handle: Callable[..., DistProfiler]
) -> None:
    profiler = handle()
    window(profiler, 1)
    path = nsys.save_path
    (path / "broken.nsys-index.json").write_text('{"ranges": [{}]}')
    (index_path,) = path.glob("rank0*.nsys-index.json")
    before = index_path.read_text()
    nsys.write(1)
    plan_launch(kit.config(path, report_wait=0), roles=["actor"], rank=0, world_size=1).collect()
    assert index_path.read_text() == before
    assert [index.launch for _, index in collecting.read_indexes(path)] == [""]
    assert kit.reports(path) == []


def test_the_clash_with_another_cupti_client_is_a_config_error(kit: Any, tmp_path: Path) -> None:
    from rankscope import ConfigError

    def together(contents: str) -> Any:
        tools = {"tool": ["nsys", "torch"], "global_tool_config": {"torch": {"contents": contents}}}
        return kit.config(tmp_path, common=tools)

    load_config(together("cpu"))
    source = together("all")
    with pytest.raises(ConfigError, match="'nsys' and 'torch' of actor both need 'cupti'"):
        load_config(source)
