from __future__ import annotations

import dataclasses
import enum
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from rankscope.artifacts.ledger import Ledger, read_ledgers


def lines(ledger: Ledger) -> list[dict[str, object]]:
    return [json.loads(line) for line in ledger.path.read_text().splitlines()]


def test_a_record_says_who_and_when(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "not" / "there", host="node1", run_id="r1")
    assert ledger.write("plan", role="actor", rank=0, steps=(1, 2))
    assert ledger.path == tmp_path / "not" / "there" / ".rankscope" / f"node1-{os.getpid()}.jsonl"
    [record] = lines(ledger)
    assert record["time"].endswith("Z")
    assert {key: record[key] for key in ("kind", "host", "pid", "run_id", "role", "rank", "steps")} == {
        "kind": "plan",
        "host": "node1",
        "pid": os.getpid(),
        "run_id": "r1",
        "role": "actor",
        "rank": 0,
        "steps": [1, 2],
    }


def test_any_fact_becomes_json(tmp_path: Path) -> None:
    class Colour(enum.Enum):
        RED = "red"

    @dataclasses.dataclass
    class Point:
        x: int

    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no")

    loop: list[object] = []
    loop.append(loop)
    ledger = Ledger(tmp_path)
    assert ledger.write(
        "fault",
        path=Path("/a"),
        error=ValueError("bad"),
        colour=Colour.RED,
        point=Point(3),
        nan=float("nan"),
        mute=Mute(),
        loop=loop,
        keys={1: b"\xff"},
        surrogate="\udc80",
        many="x" * 100_000,
        some={3},
    )
    [record] = lines(ledger)
    assert record["path"] == "/a"
    assert record["error"] == "ValueError: bad"
    assert record["colour"] == "red"
    assert record["point"] == {"x": 3}
    assert record["nan"] == "nan"
    assert record["mute"] == "<Mute without a text>"
    assert record["keys"] == {"1": "\ufffd"}
    assert record["surrogate"] == "\udc80"
    assert str(record["many"]).endswith("(100000 characters)")
    assert record["some"] == [3]
    assert read_ledgers(tmp_path) == lines(ledger)


def test_numbers_of_numpy_stay_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    ledger = Ledger(tmp_path)
    ledger.write("plan", rank=numpy.int64(3), share=numpy.float32(0.5))
    [record] = lines(ledger)
    assert (record["rank"], record["share"]) == (3, 0.5)


def test_writing_never_raises_and_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / ".rankscope").write_text("in the way")
    told: list[str] = []
    ledger = Ledger(tmp_path, on_failure=told.append)
    assert not ledger.write("plan")
    assert not ledger.write("close")
    assert len(ledger.failures) == 2
    assert len(told) == 1
    assert str(tmp_path) in told[0]


def test_a_callback_that_raises_is_contained(tmp_path: Path) -> None:
    (tmp_path / ".rankscope").write_text("in the way")

    def explode(_: str) -> None:
        raise RuntimeError("boom")

    ledger = Ledger(tmp_path, on_failure=explode)
    assert not ledger.write("plan")
    assert "boom" in ledger.failures[1]


def test_a_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a")
    ledger.write("plan")
    ledger.path.unlink()
    ledger.path.parent.rmdir()
    assert ledger.write("close")
    assert [record["kind"] for record in lines(ledger)] == ["close"]


def test_a_forked_child_writes_its_own_file_although_the_lock_was_held(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, host="h")
    ledger.write("plan")
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ledger._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads is what is tested
        child = os.fork()
    if child == 0:
        os._exit(0 if ledger.write("close") else 1)
    _, status = os.waitpid(child, 0)
    release.set()
    thread.join()
    assert status == 0
    assert sorted((record["kind"], record["pid"] == os.getpid()) for record in read_ledgers(tmp_path)) == [
        ("close", False),
        ("plan", True),
    ]


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    threads = [
        threading.Thread(target=lambda n=n: [ledger.write("plan", n=n, fill="y" * 9000) for _ in range(20)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(ledger)) == 160
    assert not ledger.failures


def test_records_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal\n"
        "from rankscope.artifacts.ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1])\n"
        "ledger.write('plan', n=1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["n"] for record in read_ledgers(tmp_path)] == [1]


def test_half_lines_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.write("plan", n=1)
    with ledger.path.open("ab") as file:
        file.write(b'{"kind": "plan", "half')
    ledger.write("plan", n=2)  # begins on a line of its own
    with ledger.path.open("ab") as file:
        file.write(b'[1]\n{"kind": 3}\n\xff\xfe\n{"kind": "plan"}\n' + b"[" * 100_000 + b"\n" + b'{"cut')
    folder = tmp_path / ".rankscope"
    (folder / "foreign.jsonl").write_bytes(bytes(range(256)))
    (folder / "other.json").write_text("{}")
    (folder / "folder.jsonl").mkdir()
    assert [record["n"] for record in read_ledgers(tmp_path)] == [1, 2]
    assert read_ledgers(folder) == read_ledgers(tmp_path)
    assert read_ledgers(tmp_path / "nothing") == []


def test_a_full_disk_costs_a_line_and_not_the_file(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from rankscope.artifacts.ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1])\n"
        "assert ledger.write('plan', n=1)\n"
        "size = ledger.path.stat().st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))\n"
        "assert not ledger.write('plan', n=2)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "assert ledger.write('plan', n=3)\n"
        "assert len(ledger.failures) == 1, ledger.failures\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert [record["n"] for record in read_ledgers(tmp_path)] == [1, 3]


@pytest.mark.parametrize("module", ["ledger", "names", "publish", "status"])
def test_light_imports(module: str) -> None:
    code = (
        f"import sys, rankscope.artifacts.{module}\n"
        "print(*sorted({'structlog', 'omegaconf', 'pluggy', 'yaml', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
