"""With the real nsys and the real nvtx package: processes started by ``rankscope launch``, reports read by nsys."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("real_nsys")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nsys")


def ended_well(ended: Any) -> Any:
    assert ended.code == 0, ended.out + ended.err
    return ended


@pytest.fixture(scope="module")
def spans(real_nsys: str, folder: Path, kit: Any) -> tuple[Path, Any]:
    path = folder / "spans"
    return path, ended_well(kit.run(kit.launched(path, kit.config(path), kit.scenario("spans", path))))


def test_each_window_has_one_report_which_is_there_when_training_ends(spans: tuple[Path, Any], kit: Any) -> None:
    path, ended = spans
    assert "raised of the training\n" in ended.out
    assert "finished 2\n" in ended.out
    names = [report.name for report in kit.reports(path)]
    assert [re.sub(r"pid\d+-[0-9a-f]{8}", "PID", name) for name in names] == [
        f"actor_train_step1_rank0_{os.uname().nodename.partition('.')[0]}_PID.1.nsys-rep",
        f"actor_train_step2_rank0_{os.uname().nodename.partition('.')[0]}_PID.2.nsys-rep",
    ]
    assert kit.status(path) == [("actor", 1, "train", "published"), ("actor", 2, "train", "published")]
    assert kit.left_over(path) == []


def test_labels_are_in_the_report_of_their_window_only(spans: tuple[Path, Any], kit: Any) -> None:
    first, second = (kit.labels(report) for report in kit.reports(spans[0]))
    assert sorted(first) == sorted([
        "step1", "actor_update", "mini_batch0", "mini_batch1", "slow", "quick", "items", "broken", "inner",
        "after ü \u4e2d", "actor_update", "mini_batch0",
    ])  # fmt: skip
    assert second == ["step2", "second"]


def test_colour_domain_and_category_are_those_of_the_span(spans: tuple[Path, Any], kit: Any) -> None:
    rows = {row.text: row for row in kit.ranges(kit.reports(spans[0])[0])}
    update, batch, slow, quick, broken = (
        rows[text] for text in ("actor_update", "mini_batch0", "slow", "quick", "broken")
    )
    assert (update.domain, update.category, update.color) == ("rankscope", "training", 0xFF0000)
    assert (batch.domain, batch.category, batch.color) == ("rankscope", "", 0x00FF80)
    assert (slow.domain, slow.color) == ("rollout", 0x808000)
    assert (quick.domain, quick.color) == ("rollout", 0x0000FF)
    assert broken.color == 0x0000FF
    assert spans[1].said("no such colour", "warning")


def test_ranges_end_also_where_the_body_raised_where_coroutines_interleave_and_in_threads(
    spans: tuple[Path, Any], kit: Any
) -> None:
    rows = [row for row in kit.ranges(kit.reports(spans[0])[0]) if row.text != "rankscope.window"]
    assert all(row.kind == 60 and row.end is not None and row.end >= row.start for row in rows)
    by_text = {row.text: row for row in rows}
    slow, quick = by_text["slow"], by_text["quick"]
    assert slow.start < quick.start < quick.end < slow.end
    assert by_text["broken"].start <= by_text["inner"].start <= by_text["inner"].end <= by_text["broken"].end
    assert by_text["broken"].end < by_text["after ü \u4e2d"].start
    updates = [row for row in rows if row.text == "actor_update"]
    assert len({row.thread for row in updates}) == 2


def test_the_index_says_which_range_is_which_step(spans: tuple[Path, Any], kit: Any) -> None:
    found = kit.index(spans[0])
    entries = [(entry["number"], entry["step"], entry["scope"], entry["role"]) for entry in found["ranges"]]
    assert entries == [(1, 1, "train", "actor"), (2, 2, "train", "actor")]
    assert [entry["report"] for entry in found["ranges"]] == [report.name for report in kit.reports(spans[0])]
    assert all(0 < entry["start_ns"] < entry["end_ns"] for entry in found["ranges"])


def test_nsys_stats_reads_the_report(spans: tuple[Path, Any], kit: Any) -> None:
    report = kit.reports(spans[0])[0]
    command = ["nsys", "stats", "-q", "--force-export=true", "--report", "nvtx_startend_sum", "--format", "csv"]
    ended = ended_well(kit.run([*command, str(report)]))
    assert "rankscope:actor_update" in ended.out


def test_discrete_makes_a_report_of_each_stage_and_closes_it_where_the_stage_raised(folder: Path, kit: Any) -> None:
    path = folder / "stages"
    source = kit.config(path, discrete=True, stages_per_step=2, common={"steps": [1]})
    ended_well(kit.run(kit.launched(path, source, kit.scenario("stages", path))))
    assert kit.index(path)["capture_range_end"] == "repeat:2"
    assert {report.name.partition("_step1")[0]: sorted(kit.labels(report)) for report in kit.reports(path)} == {
        "actor_actor-update": sorted(["actor_update", "mini_batch0", "mini_batch1", "step1"]),
        "actor_compute-log-prob": sorted(["compute_log_prob", "nested", "step1"]),
    }
    assert [row[2:] for row in kit.status(path)] == [
        ("actor_update", "published"),
        ("compute_log_prob", "published"),
    ]


def test_two_roles_take_turns_and_reports_come_when_both_are_done(folder: Path, kit: Any) -> None:
    path = folder / "roles"
    source = kit.config(path, "actor", "critic", discrete=True)
    ended = ended_well(kit.run(kit.launched(path, source, kit.scenario("roles", path))))
    assert kit.index(path)["capture_range_end"] == "repeat"
    assert "after the first role 0" in ended.out
    assert "after the second role 4" in ended.out
    labels = {(report.name.split("_step")[0], kit.labels(report)[-1]) for report in kit.reports(path)}
    assert labels == {("critic_critic-update", "critic_update"), ("actor_actor-update", "actor_update")}
    assert {row[3] for row in kit.status(path)} == {"published"}


def test_an_aborted_step_is_saved_as_such_though_more_were_planned(folder: Path, kit: Any) -> None:
    path = folder / "aborted"
    ended = kit.run(kit.launched(path, kit.config(path), kit.scenario("aborted", path)))
    assert ended.code == 1
    assert "RuntimeError: out of memory" in ended.err
    (report,) = kit.reports(path)
    assert report.name.startswith("actor_train-aborted_step1_")
    assert "actor_update" in kit.labels(report)


def test_what_a_killed_process_left_is_collected_by_the_launcher(folder: Path, kit: Any) -> None:
    path = folder / "killed"
    ended = kit.run(kit.launched(path, kit.config(path), kit.scenario("killed", path)))
    assert ended.code in {-9, 137}, ended.err
    first, second = sorted(kit.reports(path), key=lambda report: report.name.rpartition("_step")[2])
    assert first.name.startswith("actor_train_step1_")
    assert second.name.startswith("actor_train-aborted_step2_")
    assert "actor_update" in kit.labels(first)
    assert kit.ranges(second)  # not the last ones: nsys loses what the process had not handed over yet
    assert {row[:2] + row[3:] for row in kit.status(path)} >= {("actor", 1, "published"), ("actor", 2, "aborted")}
    assert kit.left_over(path) == []


def test_an_nsys_that_is_killed_takes_neither_the_training_nor_the_reports_along(folder: Path, kit: Any) -> None:
    path = folder / "orphaned"
    kit.run(kit.launched(path, kit.config(path), kit.scenario("orphaned", path)))
    rows = kit.until(lambda: [row for row in kit.status(path) if row[3] == "published"] if kit.closed(path) else None)
    assert [row[1] for row in rows] == [1, 2]
    assert kit.left_over(path) == []


def test_a_terminated_launcher_ends_its_process(folder: Path, kit: Any) -> None:
    path = folder / "terminated"
    waiting = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    process = subprocess.Popen(
        kit.launched(path, kit.config(path, report_wait=5), waiting),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kit.environment(),
    )
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    kit.until(lambda: not Path(f"/proc/{child}").exists())


def test_own_output_and_relocation(folder: Path, kit: Any) -> None:
    path, own = folder / "own", folder / "elsewhere" / "mine_%q{RUN_NAME}_%h_%p"
    options = {"trace": "nvtx", "o": str(own), "capture-range": "cudaProfilerApi", "capture-range-end": None}
    source = kit.config(path, worker_nsight_options=options, common={"relocate_results": True})
    ended = ended_well(kit.run(kit.launched(path, source, kit.scenario("windows", path)), RUN_NAME="first"))
    assert ended.said("there is no CUDA device: nsys captures by an NVTX range")
    names = [report.name for report in kit.reports(path)]
    assert [name.split("_mine_first_")[0].rpartition("_rank0")[0] for name in names] == [
        "actor_train_step1",
        "actor_train_step2",
    ]
    assert list((folder / "elsewhere").iterdir()) == []
    # Without relocation they stay, and the ledger knows where.
    path = folder / "left"
    source = kit.config(path, worker_nsight_options=options)
    ended_well(kit.run(kit.launched(path, source, kit.scenario("windows", path)), RUN_NAME="second"))
    assert kit.reports(path) == []
    assert len(list((folder / "elsewhere").glob("mine_second_*.nsys-rep"))) == 2
    assert [row[3] for row in kit.status(path)] == ["published", "published"]


def test_a_process_in_which_no_window_opened_is_told(folder: Path, kit: Any) -> None:
    path = folder / "nothing"
    ended = ended_well(kit.run(kit.launched(path, kit.config(path), kit.scenario("nothing", path))))
    assert ended.said("nsys was attached and captured nothing: no capture range opened in the process", "warning")
    assert kit.reports(path) == []


def test_the_controller_is_captured_as_a_whole(folder: Path, kit: Any) -> None:
    path = folder / "controller"
    source = kit.config(path, "controller", controller_nsight_options={"trace": "nvtx"})
    ended_well(kit.run(kit.launched(path, source, kit.scenario("controller", path), "--role", "controller")))
    (report,) = kit.reports(path)
    assert report.name.startswith("controller_process_rank0_")
    assert kit.labels(report) == ["dispatch"]


@pytest.mark.parametrize(
    ("words", "step", "reason"),
    [
        ((), 1, "nsys captures this process as a whole"),
        (("-c", "nvtx", "-p", "theirs"), 1, "nsys waits for another start of its capture (nvtx)"),
        (("-c", "nvtx", "-p", "rankscope.window@rankscope", "--capture-range-end=repeat:1"), 2, "to capture 1 ranges"),
    ],
)  # fmt: skip
def test_an_nsys_that_was_started_by_hand(
    folder: Path, kit: Any, words: tuple[str, ...], step: int, reason: str
) -> None:
    path = folder / f"hand{len(words)}{step}"
    kit.write_config(path, kit.config(path, report_wait=5))
    by_hand = ["nsys", "profile", "-t", "nvtx", "-s", "none", "--cpuctxsw=none", "-o", f"{path}-report", *words]
    ended = ended_well(kit.run([*by_hand, *kit.scenario("windows", path)]))
    said = [message for message in ended.said(reason, "warning") if "step" in message]  # at the end it is said again
    assert [message["step"] for message in said] == list(range(step, 3))
    assert [row[3] for row in kit.status(path)] == ["published"] * (step - 1) + ["failed"] * (3 - step)


def test_two_processes_below_one_nsys_do_not_mix_their_reports(folder: Path, kit: Any) -> None:
    path = folder / "pair"
    ended = ended_well(kit.run(kit.launched(path, kit.config(path), kit.scenario("pair", path))))
    (report,) = kit.reports(path)
    assert report.name.startswith("actor_train_step1_")
    assert ended.said("nsys has to be started for each process of its own", "warning")
    assert sorted(row[3] for row in kit.status(path) if row[1] == 1) == ["failed", "published"]


def test_without_nsys_the_training_goes_on_and_hears_how_to_start(folder: Path, kit: Any) -> None:
    path = folder / "plain"
    kit.write_config(path, kit.config(path))
    ended = ended_well(kit.run(kit.scenario("windows", path)))
    (message,) = ended.said("nothing is captured: this process does not run under nsys")
    assert "rankscope launch --config <your config> --role actor -- python" in message["help"]
    assert [row[3] for row in kit.status(path)] == ["failed", "failed"]


@pytest.mark.torchrun
def test_torchrun_starts_nsys_on_the_selected_rank_only(folder: Path, kit: Any) -> None:
    path = folder / "torchrun"
    source = kit.config(path, section={"ranks": [1]}, common={"steps": [1]})
    command = kit.launched(path, source, kit.scenario("windows", path, "1"), "--role", "actor")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    ended_well(kit.run([*torchrun, *command]))
    (report,) = kit.reports(path)
    assert report.name.startswith("actor_train_step1_rank1_")
    assert "actor_update" in kit.labels(report)
