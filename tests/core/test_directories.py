"""Artifacts that are directories, staged before their name is known, and finished by the helper process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recording

from rankscope import DistProfiler, Window
from rankscope.artifacts.exports import exports
from rankscope.artifacts.names import parse_name
from rankscope.artifacts.recover import recover
from rankscope.artifacts.store import Store, partial_files


@pytest.fixture
def store(profiler: Callable[..., DistProfiler]) -> Store:
    return profiler().stores[0]


def window(step: int = 1) -> Window:
    return Window(id=step, role="actor", step=step, steps=(step,), scope="train", reason="step")


def staged(store: Store, step: int = 1) -> Path:
    path = store.stage(window(step))
    (path / "deep").mkdir()
    (path / "deep" / "data").write_bytes(b"1234")
    return path


def submit(store: Store, job: str, **arguments: Any) -> Path:
    path = staged(store)
    with store.reserve(window(), suffix=".dir", part="mb1-2", staged=path) as file:
        assert file.staged == path
        file.finish_later(f"directory_jobs:{job}", arguments)
    return path


def test_a_place_is_there_before_the_name_and_is_nobody_elses(store: Store) -> None:
    first, second = store.stage(window()), store.stage(window())
    assert first != second
    assert first.is_dir()
    assert list(first.iterdir()) == []
    fields = parse_name(first.name.removesuffix(".raw"))
    assert fields is not None
    assert (fields.role, fields.step, fields.part) == ("actor", 1, "")
    assert recording.ledger(store.save_path, "artifact") == []


def test_a_directory_is_finished_by_the_helper(store: Store) -> None:
    path = submit(store, "move", colour="red")
    assert exports().drain(60)
    (artifact,) = store.artifacts
    assert artifact.path.is_dir()
    assert artifact.path.name.endswith("_mb1-2.dir")
    assert (artifact.path / "deep" / "data").read_bytes() == b"1234"
    assert (artifact.path / "about.txt").read_text() == artifact.path.name
    assert artifact.bytes == 4 + len(artifact.path.name)
    assert (artifact.checksum, artifact.events, artifact.facts["colour"]) == ("", 3, "red")
    assert not path.exists()
    assert list(path.parent.iterdir()) == []
    assert partial_files(store.save_path) == []


def test_a_directory_that_cannot_be_finished_is_told_and_kept(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    path = submit(store, "fail")
    assert exports().drain(60)
    assert store.artifacts == []
    [_, record] = recording.ledger(store.save_path, "artifact")
    assert record["status"] == "failed"
    assert "ValueError: damaged" in record["reason"]
    assert (path / "deep" / "data").exists()
    assert partial_files(store.save_path) == []
    # What the helper found out is told here too.
    [line] = [line for line in capfd.readouterr().err.splitlines() if "profile failed" in line]
    assert "ValueError: damaged" in line


def test_nothing_recorded_leaves_nothing(store: Store) -> None:
    path = submit(store, "fail", nothing=True)
    assert exports().drain(60)
    [_, record] = recording.ledger(store.save_path, "artifact")
    assert (record["status"], record["reason"]) == ("empty", "nothing in it")
    assert not path.exists()
    assert partial_files(store.save_path) == []


def test_what_was_staged_goes_with_a_file_that_is_given_up(store: Store) -> None:
    for outcome in ("fail", "empty"):
        path = staged(store)
        with store.reserve(window(), suffix=".dir", staged=path) as file:
            getattr(file, outcome)("not wanted")
        assert not path.exists()


def test_a_name_that_cannot_be_taken_takes_the_staged_data_along(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = staged(store)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "_where_possible", full)
    with pytest.raises(OSError, match="No space"):
        store.reserve(window(), staged=path)
    assert not path.exists()


def test_a_place_that_cannot_be_had_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "_staging_folder", full)
    with pytest.raises(OSError, match="No space"):
        store.stage(window())
    [record] = recording.ledger(store.save_path, "artifact")
    assert (record["status"], record["step"]) == ("failed", 1)


def test_recovery_knows_whose_a_staged_directory_is(store: Store) -> None:
    mine = staged(store)
    theirs = mine.with_name(mine.name.replace(f"pid{parse_name(mine.name.removesuffix('.raw')).pid}", "pid4194304"))
    mine.rename(theirs)
    still = staged(store, 2)
    [left] = recover(store.save_path)
    assert (left.staged, left.status) == (theirs, "no job")
    assert still.exists()
