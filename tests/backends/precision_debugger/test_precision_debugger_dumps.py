"""Folders of dumps: their names, that nobody else has them, and what is counted in them."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_precision_debugger.dumps import Place, claim, folder_name, look
from rankscope_precision_debugger.settings import Settings


@given(st.text(max_size=300))
def test_any_label_is_a_folder_that_msprobe_accepts(label: str) -> None:
    name = folder_name(label)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", name)
    assert name not in {".", ".."}
    assert not name.startswith((".", "-"))
    assert len(name) <= 120


@given(st.lists(st.text(max_size=30), unique=True, max_size=20))
def test_labels_stay_apart(labels: list[str]) -> None:
    assert len({folder_name(label) for label in labels}) == len(labels)


@pytest.mark.parametrize("label", ["actor_update", "critic-values.2", "A"])
def test_a_plain_label_is_the_folder(label: str) -> None:
    assert folder_name(label) == label


def test_a_folder_is_claimed_once_for_each_run_rank_and_step(tmp_path: Path) -> None:
    first = claim(tmp_path, 2, "actor_update", 3)
    root = tmp_path / "step_2" / "actor_update"
    assert first == Place(root, 2, root / "step2" / "rank3", 1)
    again = claim(tmp_path, 2, "actor_update", 3)
    assert (again.root.name, again.run) == ("actor_update-run2", 2)
    assert claim(tmp_path, 2, "actor_update", 4).root == root
    assert claim(tmp_path, 3, "actor_update", 3).run == 1
    assert claim(tmp_path, None, "actor_update", 3).folder.relative_to(tmp_path).parts == (
        "step_unknown",
        "actor_update",
        "step0",
        "rank3",
    )
    before_the_first = claim(tmp_path, -1, "actor_update", 3)
    assert (before_the_first.root.parent.name, before_the_first.step) == ("step_-1", 0)


def _claims(path: Path) -> list[int]:
    return [claim(path, 1, "stage", 0).run for _ in range(20)]


def test_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        runs = pool.map(_claims, [tmp_path] * 3)
    assert sorted(run for each in runs for run in each) == list(range(1, 61))


def test_a_dropped_dump_leaves_nothing_but_what_is_not_its_own(tmp_path: Path) -> None:
    one, two = claim(tmp_path, 1, "stage", 0), claim(tmp_path, 1, "stage", 1)
    (one.folder / "dump.json").touch()
    one.drop()
    assert [path.name for path in two.folder.parent.iterdir()] == ["rank1"]
    two.drop()
    assert list(tmp_path.iterdir()) == []
    one.drop()  # once more is no error


def test_a_dump_that_is_not_whole_is_set_aside(tmp_path: Path) -> None:
    place = claim(tmp_path, 1, "stage", 0)
    (place.folder / "dump.json").touch()
    assert place.set_aside().name == "incomplete-rank0"
    assert not place.folder.exists()
    assert claim(tmp_path, 1, "stage", 0) == place
    assert place.set_aside().name in {"rank0", "incomplete-rank0"}


@pytest.mark.parametrize("indent", [1, 4, None])
def test_entries_are_counted_however_the_json_is_written(tmp_path: Path, indent: int | None) -> None:
    place = claim(tmp_path, 1, "stage", 0)
    entries = {f"Module.{n}.forward.0": {"input_args": [{"type": "x"}], "output": []} for n in range(3)}
    for data, count in (({}, 0), (entries, 3)):
        (place.folder / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}, indent=indent))
        found = look(place, Settings())
        assert (found.entries, found.files, found.tensors) == (count, 1, 0)
    (place.folder / "dump_tensor_data").mkdir()
    (place.folder / "dump_tensor_data" / "a.pt").touch()
    (place.folder / "construct.json").write_text(json.dumps({"a": None}, indent=indent))
    found = look(place, Settings(task="tensor"))
    assert (found.entries, found.files, found.tensors) == (3, 3, 1)
    assert look(place, Settings(task="structure", level="L0")).entries == 1
    assert look(place, Settings(level="debug")).entries == 0


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"', '{"data": 3}'])
def test_what_is_no_dump_has_no_entries(tmp_path: Path, text: str) -> None:
    place = claim(tmp_path, 1, "stage", 0)
    (place.folder / "dump.json").write_text(text)
    assert look(place, Settings()).entries == 0
