from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts import publish as publishing
from rankscope.artifacts.ledger import Ledger, read_ledgers
from rankscope.artifacts.names import parse_name
from rankscope.artifacts.publish import checksum, claim, move_in, publish
from rankscope.artifacts.store import Store, partial_files
from rankscope.types import Window

NOON = 1_767_323_045_678_000_000


class Told:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def debug(self, event: str, **facts: Any) -> None:
        self.lines.append(("debug", event, facts))

    def info(self, event: str, **facts: Any) -> None:
        self.lines.append(("info", event, facts))

    def warning(self, event: str, **facts: Any) -> None:
        self.lines.append(("warning", event, facts))

    def error(self, event: str, **facts: Any) -> None:
        self.lines.append(("error", event, facts))


def window(**changes: Any) -> Window:
    facts = {"id": 1, "role": "actor", "step": 3, "steps": (3,), "scope": "train", "reason": "step", "started_ns": NOON}
    return Window(**{**facts, **changes})


def make(save_path: Path, **changes: Any) -> Store:
    facts: dict[str, Any] = {
        "tool": "fake",
        "role": "actor",
        "rank": 0,
        "world_size": 2,
        "topology": {"tp": 1},
        "host": "node1",
        "ledger": Ledger(save_path, host="node1", run_id="r"),
        "clock": lambda: NOON,
        "logger": Told(),
    }
    return Store(save_path, **{**facts, **changes})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make(tmp_path / "out")


@pytest.fixture
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fallback directories go in these tests."""
    root = tmp_path / "temp"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, b"size=256k") != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(os.fsencode(place), 2)


def outcomes(store: Store) -> list[dict[str, Any]]:
    return [record for record in read_ledgers(store.save_path) if record["kind"] == "artifact"]


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".rankscope")


# Reserve and publish.


def test_a_published_file_is_whole_named_and_recorded(store: Store) -> None:
    with store.reserve(window(), suffix=".json") as file:
        file.temporary.write_text("{}")
        assert visible(store.save_path) == []
        artifact = file.publish(events=7, blocked_s=0.5)
    assert (
        artifact.path == store.save_path / f"actor_train_step3_rank0-of-2_tp1_pid{os.getpid()}_20260102030405678.json"
    )
    assert artifact.path.read_text() == "{}"
    assert (artifact.bytes, artifact.events) == (2, 7)
    assert artifact.checksum == f"crc32:{zlib.crc32(b'{}'):08x}"
    assert artifact.facts["blocked_s"] == 0.5
    assert store.artifacts == [artifact]
    assert partial_files(store.save_path) == []
    [record] = outcomes(store)
    assert record["path"] == str(artifact.path)
    assert (record["status"], record["step"], record["scope"], record["window"]) == ("published", 3, "train", 1)
    assert (record["bytes"], record["events"], record["blocked_s"]) == (2, 7, 0.5)
    [(level, event, facts)] = store.logger.lines
    assert (level, event) == ("info", "profile saved")
    assert facts == {"tool": "fake", "path": str(artifact.path), "bytes": 2, "events": 7}


def test_two_hundred_names_in_one_millisecond(store: Store) -> None:
    files = [store.reserve(window(), suffix=".json") for _ in range(200)]
    names = {file.final.name for file in files}
    assert len(names) == 200
    assert len({file.temporary for file in files}) == 200
    assert all(parse_name(name) is not None for name in names)
    for file in files:
        file.fail("enough")
    assert partial_files(store.save_path) == []


def test_parts_scopes_and_aborted_windows_are_in_the_name(store: Store) -> None:
    fields = [
        parse_name(store.reserve(window(), part="mb0-3", suffix=".json.gz").final.name),
        parse_name(store.reserve(window(step=None), scope="actor_update").final.name),
        parse_name(store.reserve(window(), aborted=True).final.name),
        parse_name(store.reserve(window(scope="train-aborted"), aborted=True).final.name),
        parse_name(store.reserve(window(scope="s" * 90), aborted=True).final.name),
    ]
    assert fields[0] is not None
    assert (fields[0].part, fields[0].suffix) == ("mb0-3", ".json.gz")
    scopes = [field.scope for field in fields if field is not None]
    assert scopes[1:4] == ["actor-update", "train-aborted", "train-aborted"]
    assert scopes[4].endswith("-aborted")
    assert [field.step for field in fields if field is not None][1] is None


def test_a_block_without_publish_counts_as_failed(store: Store) -> None:
    with store.reserve(window()) as file:
        file.temporary.write_text("half")
    assert [(r["status"], r["reason"]) for r in outcomes(store)] == [("failed", "not published")]
    assert visible(store.save_path) == []
    assert partial_files(store.save_path) == []
    assert store.artifacts == []


def test_an_exception_passes_on_and_is_the_reason(store: Store) -> None:
    def write() -> None:
        with store.reserve(window()):
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        write()
    assert outcomes(store)[0]["reason"] == "KeyError: 'gone'"


def test_fail_and_empty_say_why(store: Store) -> None:
    store.reserve(window()).fail("the tool broke", code=3)
    with store.reserve(window()) as file:
        file.empty("no kernel ran")
        file.fail("too late")
    assert [(r["status"], r["reason"]) for r in outcomes(store)] == [
        ("failed", "the tool broke"),
        ("empty", "no kernel ran"),
    ]
    assert outcomes(store)[0]["code"] == 3
    assert [line[:2] for line in store.logger.lines] == [("warning", "profile failed"), ("warning", "profile empty")]


def test_a_file_that_was_never_written_is_not_published(store: Store) -> None:
    def silent() -> None:
        with store.reserve(window()) as file:
            file.publish()

    with pytest.raises(OSError, match="nothing was written"):
        silent()
    [record] = outcomes(store)
    assert record["status"] == "failed"
    assert visible(store.save_path) == []


def test_an_outcome_is_final(store: Store) -> None:
    file = store.reserve(window())
    file.temporary.write_text("x")
    file.publish()
    with pytest.raises(ValueError, match="known already"):
        file.publish()
    file.fail("no effect")
    assert len(outcomes(store)) == 1


def test_facts_cannot_change_what_is_fixed(store: Store) -> None:
    file = store.reserve(window())
    file.temporary.write_text("x")
    file.publish(rank=99, status="lost")
    [record] = outcomes(store)
    assert (record["rank"], record["status"]) == (0, "published")


# Hand over to the helper.


def test_a_file_that_was_handed_over_is_kept_and_recorded_later(store: Store) -> None:
    with store.reserve(window(), suffix=".gz") as file:
        file.temporary.write_text("raw")
        file.hand_over(events=3)
    assert file.temporary.read_text() == "raw"
    assert [r["status"] for r in outcomes(store)] == ["exporting"]
    path = publish(file.temporary, file.final)
    artifact = store.record({**file.facts, "path": path, "bytes": 3, "checksum": "crc32:0", "events": 5, "took_s": 1})
    assert artifact is not None
    assert (artifact.step, artifact.scope, artifact.events, artifact.facts["took_s"]) == (3, "train", 5, 1)
    assert store.artifacts == [artifact]
    assert [(r["status"], r["reserved"]) for r in outcomes(store)] == [
        ("exporting", file.final.name),
        ("published", file.final.name),
    ]


def test_the_helper_may_report_a_failure_or_write_the_line_itself(store: Store) -> None:
    file = store.reserve(window())
    assert store.record({**file.facts, "status": "failed", "reason": "killed"}) is None
    assert [(r["status"], r["reason"]) for r in outcomes(store)] == [("failed", "killed")]
    artifact = store.record({"path": "/x", "bytes": 1}, ledger=False)
    assert artifact is not None
    assert len(outcomes(store)) == 1


def test_an_exception_after_the_hand_over_counts(store: Store) -> None:
    def submit() -> None:
        with store.reserve(window()) as file:
            file.hand_over()
            raise RuntimeError("the helper is gone")

    with pytest.raises(RuntimeError):
        submit()
    assert [r["status"] for r in outcomes(store)] == ["exporting", "failed"]


# Places that go wrong.


def test_a_save_path_that_vanishes_is_made_again(store: Store) -> None:
    import shutil

    first = store.reserve(window())
    first.temporary.write_text("x")
    first.publish()
    shutil.rmtree(store.save_path)
    second = store.reserve(window())
    shutil.rmtree(store.save_path)
    second.temporary.write_text("y")  # asking for the file makes its directory
    assert second.publish().path.read_text() == "y"


def test_a_path_that_cannot_be_written_has_one_fallback(tmp_path: Path, temp_root: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = make(tmp_path / "file" / "out", ledger=Ledger(tmp_path))
    for _ in range(2):
        with store.reserve(window()) as file:
            file.temporary.write_text("x")
            artifact = file.publish()
        assert artifact.path.is_relative_to(temp_root / f"rankscope-{os.getuid()}")
        assert artifact.facts["fallback_from"] == str(store.save_path)
    records = [record for record in read_ledgers(tmp_path) if record["kind"] == "artifact"]
    assert [(r["status"], r["fallback_from"]) for r in records] == [("published", str(store.save_path))] * 2
    warnings = [facts for level, _, facts in store.logger.lines if level == "warning"]
    assert len(warnings) == 1
    assert warnings[0]["save_path"] == str(store.save_path)
    assert warnings[0]["fallback"] == str(artifact.path.parent)


def test_without_any_place_the_reservation_fails_and_is_recorded(tmp_path: Path, temp_root: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (temp_root / f"rankscope-{os.getuid()}").write_text("here too")
    store = make(tmp_path / "file" / "out", ledger=Ledger(tmp_path))
    with pytest.raises(OSError, match="rankscope-"):
        store.reserve(window())
    assert [r["status"] for r in read_ledgers(tmp_path)] == ["failed"]


def test_a_full_disk_is_found_before_the_capture(small_disk: Path, temp_root: Path, tmp_path: Path) -> None:
    store = make(small_disk, ledger=Ledger(tmp_path / "elsewhere"))
    (small_disk / "hog").write_bytes(bytes(200 * 1024))
    with store.reserve(window()) as file:
        file.temporary.write_text("x")
        artifact = file.publish()
    assert artifact.path.is_relative_to(temp_root)
    [(_, _, facts)] = [line for line in store.logger.lines if line[0] == "warning"]
    assert "MiB free" in facts["reason"]
    assert partial_files(small_disk) == []


def test_a_disk_that_fills_up_leaves_no_half_file(small_disk: Path, tmp_path: Path) -> None:
    store = make(small_disk, ledger=Ledger(tmp_path / "elsewhere"))

    def write() -> None:
        with store.reserve(window()) as file:
            file.temporary.write_bytes(bytes(400 * 1024))
            file.publish()

    with pytest.raises(OSError) as caught:
        write()
    assert caught.value.errno == errno.ENOSPC
    [record] = read_ledgers(tmp_path / "elsewhere")
    assert record["status"] == "failed"
    assert "MiB free" in record["reason"]
    assert visible(small_disk) == []
    assert partial_files(small_disk) == []


def test_a_file_size_limit_leaves_no_half_file(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import make, window
store = make(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    with store.reserve(window()) as file:
        file.temporary.write_bytes(bytes(200_000))
        file.publish()
except OSError as error:
    print(error.errno)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out"), str(Path(__file__).parent)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) == errno.EFBIG
    assert [(r["status"]) for r in read_ledgers(tmp_path / "out")] == ["failed"]
    assert visible(tmp_path / "out") == []


# Files from elsewhere.


def test_a_foreign_file_is_moved_in_under_a_name_of_its_origin(store: Store, tmp_path: Path) -> None:
    report = tmp_path / "report1.nsys-rep"
    report.write_text("report")
    artifact = store.adopt(report, window())
    assert artifact.path == store.save_path / "actor_train_step3_rank0_node1_report1.nsys-rep"
    assert artifact.path.read_text() == "report"
    assert not report.exists()
    [record] = outcomes(store)
    assert (record["status"], record["bytes"], record["moved_from"]) == ("published", 6, str(report))


def test_foreign_files_of_one_name_do_not_overwrite_each_other(store: Store, tmp_path: Path) -> None:
    for text in "ab":
        (tmp_path / "r.rep").write_text(text)
        store.adopt(tmp_path / "r.rep", window())
    assert visible(store.save_path) == ["actor_train_step3_rank0_node1_r-1.rep", "actor_train_step3_rank0_node1_r.rep"]
    assert [artifact.path.read_text() for artifact in store.artifacts] == ["a", "b"]


def test_a_missing_foreign_file_is_recorded(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.adopt(tmp_path / "nothing", window())
    assert [r["status"] for r in outcomes(store)] == ["failed"]


def test_a_foreign_directory_is_moved_in(store: Store, tmp_path: Path) -> None:
    (tmp_path / "dump" / "rank0").mkdir(parents=True)
    (tmp_path / "dump" / "rank0" / "data").write_text("12345")
    artifact = store.adopt(tmp_path / "dump", window())
    assert (artifact.path / "rank0" / "data").read_text() == "12345"
    assert artifact.bytes == 5


# Files that a tool wrote at their place.


def test_what_lies_in_the_save_path_already_is_kept_there(store: Store) -> None:
    dump = store.save_path / "step_3" / "actor_update"
    dump.mkdir(parents=True)
    (dump / "dump.json").write_text("{}")
    artifact = store.keep(dump, window(), events=2, task="tensor", warnings=["half of it"])
    assert (artifact.path, artifact.bytes, artifact.events) == (dump, 2, 2)
    [record] = outcomes(store)
    assert (record["status"], record["task"], record["path"]) == ("published", "tensor", str(dump))


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_kept_where_nothing_was_written(store: Store, there: bool) -> None:
    if there:
        (store.save_path / "empty").mkdir(parents=True)
    with pytest.raises(OSError, match="empty"):
        store.keep(store.save_path / "empty", window())
    [record] = outcomes(store)
    assert record["status"] == "failed"
    assert str(store.save_path) in record["reason"]


def test_what_a_tool_says_of_its_files_is_told_once(store: Store) -> None:
    told: list[str] = []

    class Log:
        def info(self, event: str, **facts: object) -> None:
            pass

        def warning(self, event: str, **facts: object) -> None:
            told.append(event)

    store.logger = Log()  # type: ignore[assignment]
    for _ in range(2):
        with store.reserve(window(), suffix=".txt") as file:
            file.temporary.write_text("x")
            file.publish(warnings=["no device events"])
    assert told == ["no device events"]


# The pieces underneath.


def test_move_in_from_another_file_system(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "a.rep").write_bytes(b"z" * 1000)
    (small_disk / "folder").mkdir()
    (small_disk / "folder" / "x").write_text("x")
    target = tmp_path / "target"
    assert move_in(small_disk / "a.rep", target, "a.rep").read_bytes() == b"z" * 1000
    assert (move_in(small_disk / "folder", target, "folder") / "x").read_text() == "x"
    assert list(small_disk.iterdir()) == []
    assert partial_files(target) == []


def test_move_in_of_a_file_that_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    assert move_in(tmp_path / "a", tmp_path, "a") == tmp_path / "a"
    assert (tmp_path / "a").read_text() == "x"


def test_move_in_of_a_link_brings_the_content(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    path = move_in(tmp_path / "link", tmp_path / "out", "a")
    assert not path.is_symlink()
    assert path.read_text() == "x"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").exists()


def test_publish_takes_the_next_number_when_somebody_took_the_name(tmp_path: Path) -> None:
    taken = claim(tmp_path, lambda attempt: f"a{attempt}.txt")
    taken.temporary.write_text("ours")
    taken.final.write_text("theirs")
    held = claim(tmp_path, lambda attempt: f"a0-{attempt + 1}.txt")
    assert publish(taken.temporary, taken.final) == tmp_path / "a0-2.txt"
    assert taken.final.read_text() == "theirs"
    assert (tmp_path / "a0-2.txt").read_text() == "ours"
    assert not taken.temporary.exists()
    assert held.temporary.exists()


def test_publish_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(publishing.os, "link", refuse)
    (tmp_path / "a").write_text("theirs")
    (tmp_path / "new").write_text("ours")
    assert publish(tmp_path / "new", tmp_path / "a") == tmp_path / "a-1"
    assert ((tmp_path / "a").read_text(), (tmp_path / "a-1").read_text()) == ("theirs", "ours")
    assert not (tmp_path / "new").exists()


def test_claims_give_up_instead_of_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_MOST_TRIES", 5)
    claim(tmp_path, lambda _: "same")
    with pytest.raises(FileExistsError, match="no free name"):
        claim(tmp_path, lambda _: "same")


def test_checksum_reads_in_blocks(tmp_path: Path) -> None:
    data = os.urandom(3 * 1024 * 1024 + 17)
    (tmp_path / "a").write_bytes(data)
    assert checksum(tmp_path / "a") == f"crc32:{zlib.crc32(data):08x}"


def test_two_processes_never_hold_the_same_name(tmp_path: Path) -> None:
    """Equal pids and clocks, as on two hosts with shared storage."""
    code = """
import json, os, sys
from pathlib import Path
os.getpid = lambda: 4242
sys.path.insert(0, sys.argv[2])
from test_store import make, window
from rankscope.artifacts.ledger import Ledger
store = make(Path(sys.argv[1]), ledger=Ledger(sys.argv[3]))
store.logger = None
print("ready", flush=True)
sys.stdin.readline()
paths = []
for number in range(100):
    with store.reserve(window(), suffix=".txt") as file:
        file.temporary.write_text(f"{sys.argv[3]} {number}")
        paths.append(str(file.publish().path))
print(json.dumps(paths))
"""
    here = str(Path(__file__).parent)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "out"), here, str(tmp_path / f"ledger{number}")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    paths: list[str] = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate()
        assert racer.returncode == 0
        paths += json.loads(out)
    assert len(set(paths)) == 200
    assert len({Path(path).read_text() for path in paths}) == 200
    assert all("pid4242" in path for path in paths)
