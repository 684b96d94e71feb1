"""`rankscope recover`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import recording

from rankscope.cli import main

LEAVE = """
import json, os, sys
from rankscope import DistProfiler, Window
from rankscope.artifacts.exports import Exports
from rankscope.artifacts import helper
from pathlib import Path

def submit(self, store, job):  # as if the helper had been killed before it could begin
    helper.job_file(Path(job["staged"])).write_text(json.dumps(job))

Exports.submit = submit
handle = DistProfiler(json.loads(sys.argv[1]), role="actor", rank=0, world_size=1)
for step in (1, 2):
    handle.start(step=step)
    handle.stop()
if len(sys.argv) > 2:
    window = Window(id=9, role="actor", step=3, steps=(3,), scope="train", reason="step")
    handle.stores[0].reserve(window, suffix=".txt").staged.write_text("half")
os.kill(os.getpid(), 9)
"""


def leave(site: Path, save_path: Path, *words: str, **options: Any) -> None:
    """Leave two staged files of a process that was killed, and a half-written one if asked."""
    config = recording.config(save_path, options={"rec": {"write": "later", **options}})
    done = recording.run_python(site, LEAVE, json.dumps(config), *words)
    assert done.returncode == -9, done.stderr


def run(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankscope", "recover", *map(str, arguments)],
        env=recording.environment(site),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_says_what_became_of_each(site: Path, save_path: Path) -> None:
    leave(site, save_path)
    done = run(site, save_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    paths = [Path(line.removeprefix("published: ")) for line in (first, second)]
    assert sorted(path.read_text() for path in paths) == ["step 1 finished", "step 2 finished"]
    assert "a finishing function that prints" in done.stderr
    status = subprocess.run(
        [sys.executable, "-m", "rankscope", "status", str(save_path), "--json"],
        env=recording.environment(site),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    rows = {row["step"]: row for row in json.loads(status.stdout)["rows"]}
    assert {rows[step]["status"] for step in (1, 2)} == {"published"}
    assert {rows[step]["path"] for step in (1, 2)} == set(map(str, paths))
    again = run(site, save_path)
    assert (again.returncode, again.stdout) == (0, "nothing was left to recover\n")


def test_json_is_json_whatever_a_finishing_function_prints(site: Path, save_path: Path) -> None:
    leave(site, save_path)
    done = run(site, save_path, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [set(row) for row in rows] == [{"staged", "status", "path", "reason"}] * 2
    assert [row["status"] for row in rows] == ["published"] * 2
    assert all(Path(row["path"]).is_file() and not Path(row["staged"]).exists() for row in rows)
    again = run(site, save_path, "--json")
    assert (again.returncode, json.loads(again.stdout)) == (0, [])


def test_raw_data_without_a_job_needs_attention(site: Path, save_path: Path) -> None:
    leave(site, save_path, "raw")
    done = run(site, save_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["published", "published", "no job"]
    kept = Path(lines[-1].removeprefix("no job: ").partition(" (")[0])
    assert kept.read_text() == "half"
    assert "its process died while it was written" in lines[-1]
    assert run(site, save_path).returncode == 1


def test_what_cannot_be_finished_needs_attention(site: Path, save_path: Path) -> None:
    leave(site, save_path, job="raise_error")
    done = run(site, save_path, "--json")
    assert done.returncode == 1
    rows = json.loads(done.stdout)
    assert {row["status"] for row in rows} == {"failed"}
    assert all("RuntimeError: cannot be made (raw data kept in" in row["reason"] for row in rows)
    assert all(row["path"] is None and Path(row["staged"]).exists() for row in rows)


def test_no_such_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover", str(tmp_path / "nowhere")]) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_a_directory_that_never_saw_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing was left to recover\n"


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "out").mkdir()
    assert main(["recover", os.path.join("~", "out")]) == 0
