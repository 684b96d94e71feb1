"""What becomes of engines' files: only whole ones, under their own step, never on a wrong GPU, and nothing else."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout_kit import config, names, records, rows, servers, wait_for
from rollout_server import made_up

from rankscope.rollout import Layout, RolloutProfiler
from rankscope.rollout.whole import Watch, read_info

TP2 = Layout(tp=2)
SOON = 0.0
Names = Callable[[str, int, int], str]


def old_name(prefix: str, step: int, rank: int) -> str:
    """Of vLLM 0.13, which takes no prefix."""
    return f"3f2a1-rank-{rank}.{time.time_ns()}.pt.trace.json.gz"


def same_name(prefix: str, step: int, rank: int) -> str:
    return f"3f2a1-rank-{rank}.pt.trace.json.gz"


def new_name(prefix: str, step: int, rank: int) -> str:
    return f"{prefix}_dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{time.time_ns()}.pt.trace.json.gz"


class Engine:
    """An engine in this process: it writes when it is told to stop, or when the test says so."""

    def __init__(self, directory: Path, name: Names = new_name, *, at_stop: bool = True, gpus: int = 2) -> None:
        self.directory, self.name, self.at_stop, self.gpus = directory, name, at_stop, gpus
        self.step = 0
        self.prefix = ""

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self.prefix = profile_prefix or ""
        self.step += 1

    def stop_profile(self) -> None:
        if self.at_stop:
            self.write()

    def write(self, *, mark: str = "") -> None:
        for rank in range(self.gpus):
            self.put(self.name(self.prefix, self.step, rank), rank, mark=mark or f"window{self.step}")

    def put(self, name: str, rank: int | None = 0, *, mark: str = "x") -> Path:
        """Write one trace; without a rank it says nothing of its process group."""
        self.directory.mkdir(parents=True, exist_ok=True)
        trace = json.loads(made_up(rank or 0, self.gpus, compressed=False))
        if rank is None:
            del trace["distributedInfo"]
        trace["traceEvents"][0]["name"] = mark
        data = json.dumps(trace).encode()
        path = self.directory / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path


def mark(path: Path) -> str:
    """Which window's events a file holds."""
    data = path.read_bytes()
    return str(json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)["traceEvents"][0]["name"])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def directory(out: Path) -> Path:
    return out / "agent_loop_rollout_replica_0"


Make = Callable[..., RolloutProfiler]


@pytest.fixture
def make(out: Path) -> Any:
    made: list[RolloutProfiler] = []

    def profiler(*engines: Any, layout: Layout | None = TP2, **facts: Any) -> RolloutProfiler:
        common = {key: facts.pop(key) for key in ("section", "relocate_results", "steps") if key in facts}
        given = {"patience": SOON, "close_patience": SOON, "engine": "vllm", **facts}
        made.append(RolloutProfiler(config(out, **common), replicas=engines, layout=layout, **given))
        return made[-1]

    yield profiler
    for one in made:
        one.close_profile()


def step(rollout: RolloutProfiler, n: int) -> None:
    rollout.start_profile(step=n)
    rollout.stop_profile()
    rollout.relocate_profile()


def steps(out: Path) -> dict[str, str]:
    """Of each relocated file, the step in its name and the window whose events it holds."""
    return {name.split("_")[1]: mark(out / name) for name in names(out)}


# Steps.


@pytest.mark.parametrize("name", [new_name, old_name, same_name])
def test_each_step_has_its_files_also_when_names_are_used_again(
    make: Make, out: Path, directory: Path, name: Names
) -> None:
    rollout = make(Engine(directory, name))
    for n in (1, 2, 3):
        step(rollout, n)
    assert len(names(out)) == 6
    assert steps(out) == {f"step{n}": f"window{n}" for n in (1, 2, 3)}


@pytest.mark.parametrize("name", [new_name, old_name])
def test_a_late_file_gets_its_own_step(make: Make, out: Path, directory: Path, name: Names) -> None:
    """Nothing came after step 1; its file appears while step 2 is recorded, that of step 2 after step 3."""
    engine = Engine(directory, name, at_stop=False)
    rollout = make(engine)
    step(rollout, 1)
    assert names(out) == []
    late = engine.prefix
    rollout.start_profile(step=2)
    now, engine.prefix, engine.step = engine.prefix, late, 1
    engine.write()
    assert len(rollout.relocate_profile()) == 2
    assert steps(out) == {"step1": "window1"}
    engine.prefix, engine.step = now, 2
    rollout.stop_profile()
    step(rollout, 3)
    third, engine.prefix, engine.step = engine.prefix, now, 2
    engine.write()
    engine.prefix, engine.step = third, 3
    engine.write()
    rollout.close_profile()
    assert steps(out) == {"step1": "window1", "step2": "window2", "step3": "window3"}
    assert [row[2] for row in rows(out)] == ["published"] * 6


@pytest.mark.parametrize("wait", [3.0, 0.0])
def test_a_file_that_comes_after_the_stop_returned(tmp_path: Path, out: Path, wait: float) -> None:
    with servers(tmp_path, {"late": 1.0}, gpus=2) as engines:
        rollout = RolloutProfiler(
            config(out), engine="vllm", replicas=[engines[0].url], layout=TP2, patience=wait, close_patience=10.0
        )
        rollout.start_profile(step=1)
        rollout.stop_profile()
        began = time.monotonic()
        assert len(rollout.relocate_profile()) == (2 if wait else 0)
        assert (time.monotonic() - began < 0.5) is not bool(wait)
        began = time.monotonic()
        rollout.close_profile()
        assert time.monotonic() - began < 5
    assert len(names(out)) == 2


def test_a_file_that_never_comes_is_waited_for_once(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, at_stop=False)
    rollout = make(engine, patience=0.6)
    rollout.start_profile(step=1)
    rollout.stop_profile()
    took = []
    for _ in range(2):
        began = time.monotonic()
        rollout.relocate_profile()
        took.append(time.monotonic() - began)
    assert took[0] >= 0.6 > took[1]
    rollout.close_profile()
    assert [row for row in rows(out) if row[1] == 1] == [(0, 1, "failed"), (1, 1, "failed")]
    assert "the engine of replica 0 left no file of it" in records(out, "artifact")[0]["reason"]


# Whole files only.


def test_a_growing_file_is_not_moved_before_it_is_whole(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, at_stop=False)
    rollout = make(engine)
    step(rollout, 1)
    name = new_name(engine.prefix, 1, 0)
    data = gzip.compress(json.dumps({"traceEvents": list(range(20_000))}).encode())
    directory.mkdir(exist_ok=True)
    with (directory / name).open("wb") as file:
        for start in range(0, len(data), len(data) // 5 + 1):
            assert rollout.relocate_profile() == ()
            file.write(data[start : start + len(data) // 5 + 1])
            file.flush()
    (artifact,) = rollout.relocate_profile()
    assert artifact.path.read_bytes() == data
    assert artifact.checksum.startswith("crc32:")


def test_what_is_not_a_finished_file_of_the_engine_is_left_alone(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, at_stop=False)
    directory.mkdir(parents=True)
    old = engine.put("dp0_pp0_tp0_dcp0_ep0_rank0.1.pt.trace.json.gz")
    rollout = make(engine)
    rollout.start_profile(step=1)
    rollout.stop_profile()
    whole = engine.put(new_name(engine.prefix, 1, 0))
    left = {
        old.name: "",
        "half.pt.trace.json.gz": "its gzip data has no end",
        "x.pt.trace.json.gz.tmp": "it is a temporary file",
        ".nfs0001": "it is a temporary file",
        "empty.pt.trace.json.gz": "it is empty",
        "broken.pt.trace.json.gz": "its gzip data is damaged",
        "link.pt.trace.json.gz": "it is a link",
        "capture_traces": "it is a directory",
        "README.md": "no file of this engine is called so",
        "config.json": "and it holds no trace",
        "cut.pt.trace.json": "it may still be written",
    }
    (directory / "half.pt.trace.json.gz").write_bytes(whole.read_bytes()[:-9])
    (directory / "x.pt.trace.json.gz.tmp").write_bytes(b"x")
    (directory / ".nfs0001").write_bytes(b"x")
    (directory / "empty.pt.trace.json.gz").touch()
    (directory / "broken.pt.trace.json.gz").write_bytes(b"not gzip at all")
    (directory / "link.pt.trace.json.gz").symlink_to(whole)
    (directory / "capture_traces").mkdir()
    (directory / "capture_traces" / "inside.pt.trace.json.gz").write_bytes(b"x")
    (directory / "README.md").write_text("hello")
    (directory / "config.json").write_text('{"a": 1}')
    (directory / "cut.pt.trace.json").write_text('{"traceEvents": [')
    wait_for(lambda: rollout.relocate_profile() == () and "config.json" not in _unfinished(rollout))
    rollout.close_profile()
    assert [name.split("_")[1] for name in names(out)] == ["step1"]
    assert sorted(path.name for path in directory.iterdir()) == sorted(left)
    (said,) = [record for record in records(out, "rollout") if record["action"] == "left"]
    assert set(said["files"]) == set(left) - {old.name}
    for name, why in said["files"].items():
        assert left[name] in why, name


def _unfinished(rollout: RolloutProfiler) -> set[str]:
    (traces,) = rollout._gathering._traces.values()
    return {name for name, known in traces._known.items() if known.done is None}


def test_a_trace_from_outside_of_every_window_stays(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, old_name)
    rollout = make(engine)
    engine.write(mark="by hand")
    assert rollout.relocate_profile() == ()
    step(rollout, 1)
    assert steps(out) == {"step1": "window1"}
    assert len(names(directory)) == 2


def test_traces_that_are_not_compressed_and_other_files(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(
        directory,
        lambda prefix, step, rank: f"{prefix}_dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{time.time_ns()}.pt.trace.json",
    )
    rollout = make(engine, patience=5.0)
    rollout.start_profile(step=1)
    (directory / f"{engine.prefix}_dp0_pp0_tp0_dcp0_ep0_rank0.profiler_out.txt").write_text("a table")
    engine.put(f"{engine.prefix}_node17_4711.async_llm.{time.time_ns()}.pt.trace.json.gz", None)
    rollout.stop_profile()
    rollout.relocate_profile()
    rollout.close_profile()
    assert [".".join(part for part in name.split(".") if not part.isdigit()) for name in names(out)] == [
        "rollout-replica0-globalrank0_step1_dp0_pp0_tp0_dcp0_ep0_rank0.pt.trace.json",
        "rollout-replica0-globalrank0_step1_dp0_pp0_tp0_dcp0_ep0_rank0.profiler_out.txt",
        "rollout-replica0-globalrank1_step1_dp0_pp0_tp1_dcp0_ep0_rank1.pt.trace.json",
        "rollout-replica0_step1_node17_4711.async_llm.pt.trace.json.gz",
    ]


def test_folders_of_torch_npu_are_recorded_where_they_lie(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, at_stop=False)
    rollout = make(engine, patience=5.0)
    rollout.start_profile(step=1)
    for rank in range(2):
        folder = directory / f"{engine.prefix}_dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}_20260101120000000_ascend_pt"
        (folder / "FRAMEWORK").mkdir(parents=True)
        (folder / "profiler_info_0.json").write_text("{}")
    rollout.stop_profile()
    found = rollout.relocate_profile()
    assert [(artifact.rank, artifact.path.parent, artifact.bytes) for artifact in found] == [
        (0, directory, 2),
        (1, directory, 2),
    ]
    rollout.close_profile()
    assert [row for row in rows(out) if row[1] == 1] == [(0, 1, "published"), (1, 1, "published")]


# GPUs.


def test_a_file_of_an_unknown_gpu_is_kept_and_said(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, at_stop=False)
    rollout = make(engine, layout=None, gpus_per_replica=2, section={"ranks": [1]})
    rollout.start_profile(step=1)
    for pid in (4711, 4712):
        engine.put(f"node17_{pid}.{time.time_ns()}.pt.trace.json.gz", None)
    rollout.stop_profile()
    rollout.close_profile()
    assert [name.split(".")[0] for name in names(out)] == [
        "rollout-replica0_step1_node17_4711",
        "rollout-replica0_step1_node17_4712",
    ]
    assert (
        "nobody can tell of which GPU of replica 0 this is: the name says no rank"
        in records(out, "artifact")[0]["warnings"][0]
    )
    assert [row[:3] for row in rows(out) if row[1] == 1] == [(1, 1, "published")] * 2


def test_copies_of_a_dense_model_are_not_confused(make: Make, out: Path, directory: Path) -> None:
    """Both call themselves dp0; one of them would be taken for the other."""
    engine = Engine(
        directory, lambda prefix, step, rank: f"{prefix}_dp0_pp0_tp0_dcp0_ep0_rank0.{time.time_ns()}.pt.trace.json.gz"
    )
    rollout = make(engine, layout=Layout(dp=2))
    rollout.start_profile(step=1)
    rollout.stop_profile()
    for path in directory.iterdir():
        path.write_bytes(made_up(0, 1))
    assert [artifact.rank for artifact in rollout.relocate_profile()] == [0, 0]
    rollout.close_profile()
    assert [name.split("_")[0] for name in names(out)] == ["rollout-replica0", "rollout-replica0"]


def test_a_file_waits_for_those_that_tell_its_place(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, at_stop=False)
    rollout = make(engine, layout=None, gpus_per_replica=2)
    step(rollout, 1)
    engine.put(new_name(engine.prefix, 1, 0), None)
    assert rollout.relocate_profile() == ()
    engine.put(new_name(engine.prefix, 1, 1), None)
    assert sorted(artifact.rank for artifact in rollout.relocate_profile()) == [0, 1]
    assert [name.split("_")[0] for name in names(out)] == [
        "rollout-replica0-globalrank0",
        "rollout-replica0-globalrank1",
    ]


@pytest.mark.parametrize("name", [new_name, same_name])
def test_files_of_other_ranks_stay_in_every_step(make: Make, out: Path, directory: Path, name: Names) -> None:
    rollout = make(Engine(directory, name), section={"ranks": [1]})
    for n in (1, 2, 3):
        step(rollout, n)
    assert len(names(out)) == 3
    assert {found.split("_")[0] for found in names(out)} == {"rollout-replica0-globalrank1"}
    assert {mark(out / found) for found in names(out)} == {"window1", "window2", "window3"}
    assert all("rank0" in left or "rank-0" in left for left in names(directory))


# Places.


def test_nothing_is_overwritten(make: Make, out: Path, directory: Path) -> None:
    out.mkdir()
    taken = out / "rollout-replica0-globalrank0_step1_3f2a1-rank-0.pt.trace.json.gz"
    taken.write_bytes(b"of an earlier run")
    rollout = make(Engine(directory, same_name))
    step(rollout, 1)
    assert taken.read_bytes() == b"of an earlier run"
    assert names(out) == [
        "rollout-replica0-globalrank0_step1_3f2a1-rank-0-1.pt.trace.json.gz",
        "rollout-replica0-globalrank0_step1_3f2a1-rank-0.pt.trace.json.gz",
        "rollout-replica0-globalrank1_step1_3f2a1-rank-1.pt.trace.json.gz",
    ]


def test_a_very_long_name_is_cut(make: Make, out: Path, directory: Path) -> None:
    long = "i" * 200
    rollout = make(Engine(directory, lambda prefix, step, rank: f"{long}-rank-{rank}.7.pt.trace.json.gz"))
    step(rollout, 1)
    assert all(len(name) <= 200 and name.endswith(".pt.trace.json.gz") for name in names(out))
    assert len(names(out)) == 2


def test_without_relocation_files_are_recorded_where_they_lie(make: Make, out: Path, directory: Path) -> None:
    rollout = make(Engine(directory), relocate_results=False)
    for n in (1, 2):
        step(rollout, n)
    rollout.close_profile()
    assert names(out) == []
    assert len(names(directory)) == 4
    assert [row for row in rows(out) if row[1] != 3] == [(rank, n, "published") for rank in (0, 1) for n in (1, 2)]
    assert {Path(record["path"]).parent for record in records(out, "artifact")} == {directory}


def test_an_engine_with_a_directory_of_its_own(make: Make, out: Path, tmp_path: Path) -> None:
    from rankscope.rollout import Replica

    engine = Engine(tmp_path / "elsewhere")
    rollout = make(Replica(0, engine, directory=str(tmp_path / "elsewhere")))
    assert rollout.launch(0).arguments["profiler_config"]["torch_profiler_dir"] == str(tmp_path / "elsewhere")
    step(rollout, 1)
    assert len(names(out)) == 2


@pytest.mark.parametrize("told", [True, False])
def test_another_node_of_the_replica_brings_in_its_own_files(
    make: Make, out: Path, directory: Path, tmp_path: Path, told: bool
) -> None:
    """Its engine part is driven from elsewhere; the step is in the names, or it is told the steps."""
    engine = Engine(directory, new_name if not told else old_name)
    driver = RolloutProfiler(config(tmp_path / "first"), engine="vllm", replicas=[engine], layout=TP2)
    rollout = make(None, drive=False)
    driver.start_profile(step=2)
    assert rollout.start_profile(step=2) is False if told else True
    driver.stop_profile()
    if told:
        rollout.stop_profile()
    assert len(rollout.relocate_profile()) == 2
    assert steps(out) == {"step2": "window1"}
    rollout.close_profile()
    driver.close_profile(0)
    assert {row[1:] for row in rows(out)} == {(2, "published")}


def test_two_instances_on_one_directory_do_not_disturb_each_other(make: Make, out: Path, directory: Path) -> None:
    engine = Engine(directory, at_stop=False)
    one, other = make(engine), make(None, drive=False)
    step(one, 1)
    engine.write()
    threads = [threading.Thread(target=rollout.relocate_profile) for rollout in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(out)) == 2
    assert names(directory) == []


# One file.


def test_a_gzip_file_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    import os

    path.write_bytes(gzip.compress(os.urandom(3 << 20)) + gzip.compress(b"second member") + b"\0\0\0")
    watch = Watch(path)
    past = time.monotonic() - 1
    looks = [watch.whole(past) for _ in range(5)]
    assert looks[0] is False
    assert looks[-1] is True
    from rankscope.artifacts.publish import checksum

    assert watch.checksum == checksum(path)


def test_a_gzip_file_that_grew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"first"))
    watch = Watch(path)
    assert watch.whole(time.monotonic() + 5)
    with path.open("ab") as file:
        file.write(gzip.compress(b"second")[:-3])
    assert not watch.whole(time.monotonic() + 5)
    assert watch.why == "its gzip data has no end"


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.json", b'{"traceEvents": []}\n', True),
        ("a.json", b'{"traceEvents": [', False),
        ("a.pickle", b"\x80\x04N.", True),
        ("a.pickle", b"\x80\x04N", False),
        ("a.txt", b"anything", True),
    ],
)
def test_other_files_have_to_end_well_and_rest(tmp_path: Path, name: str, data: bytes, expected: bool) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    watch = Watch(path)
    assert watch.whole(time.monotonic() + 5) is False
    if expected:
        wait_for(lambda: watch.whole(time.monotonic() + 5))
    else:
        watch._since -= 60  # as if it had been left alone for so long
        assert watch.whole(time.monotonic() + 5) is False


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"distributedInfo": {"rank": 1, "world_size": 2}, "traceEvents": []}', (True, 1, 2)),
        (
            b'{"deviceProperties": [{"id": 0}], "distributedInfo": {"rank": 3, "world_size": 2}, "traceEvents": []}',
            (True, None, None),
        ),
        (b'{"distributedInfo": {"rank": "1", "world_size": 2}, "traceEvents": []}', (True, None, None)),
        (b'{"distributedInfo": [', (False, None, None)),
        (
            b'{"traceEvents": [{"name": "distributedInfo", "distributedInfo": {"rank": 0, "world_size": 1}}]}',
            (True, None, None),
        ),
        (b"{}", (False, None, None)),
        (b"\xff\xfe", (False, None, None)),
    ],
)
def test_what_a_trace_says_of_itself(
    tmp_path: Path, data: bytes, expected: tuple[bool, int | None, int | None]
) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(data))
    found = read_info(path)
    assert (found.is_trace, found.rank, found.world_size) == expected
    assert read_info(tmp_path / "missing.json").is_trace is False
