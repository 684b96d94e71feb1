"""Pieces of the npu tool: what is heard, what folders hold, and the command where there is no torch_npu."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_npu import folders
from rankscope_npu.marks import MOST_BYTES, Labels
from rankscope_npu.said import Said, listening, shortened

ERROR = "[2026-11-30 01:54:44] [ERROR] [18852] profiler.py: "


def test_messages_are_told_apart_even_behind_a_progress_display() -> None:
    said = Said()
    said.add(
        f"{ERROR}first\nof two lines\n|\b/\b-{ERROR}second|\b\\[2026-11-30 01:54:44] [INFO] [1] profiler.py: news\n"
        "[2026-11-30 01:54:44] [WARNING] [1] profiler.py: Incorrect schedule: Stop profiler while current state is "
        "RECORD which may result in incomplete parsed data.\n"
        "[2026-11-30 01:54:44] [WARNING] [1] profiler.py: reset it to default\n"
    )
    assert said.errors == ["first\nof two lines", "second"]
    assert said.warnings == ["reset it to default"]
    assert said.words == "first of two lines; second"


def test_a_long_story_is_cut() -> None:
    assert shortened(["same", "same", "x" * 1000]).startswith("same; xxx")
    assert len(shortened(["x" * 1000])) == 600


def test_listening_ends_with_the_block_also_for_who_kept_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    before, kept = sys.stdout, []

    def fails() -> None:
        with listening() as said:
            kept.extend([sys.stdout, said])
            print(f"{ERROR}heard")
            raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        fails()
    assert sys.stdout is before
    stream, said = kept
    assert said.errors == ["heard"]
    print("later", file=stream)
    assert capsys.readouterr().out == "later\n"


def test_a_stream_that_somebody_changed_meanwhile_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    theirs = io.StringIO()
    with listening():
        monkeypatch.setattr(sys, "stdout", theirs)
    assert sys.stdout is theirs


@given(st.text())
def test_labels_are_printable_short_and_told_apart(label: str) -> None:
    labels = Labels()
    safe = labels.safe(label)
    assert safe
    assert safe.isprintable()
    assert not {'"', "\\"} & set(safe)
    assert len(safe.encode()) <= MOST_BYTES
    assert labels.changed.get(safe, safe) == label
    assert labels.safe(label) == safe


def test_plain_labels_stay_as_they_are() -> None:
    labels = Labels()
    for label in ("actor_update", "mini batch 3", "生成", "a/b:c"):
        assert labels.safe(label) == label
    assert labels.changed == {}


def make_folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def test_folders_are_found_wherever_they_lie_but_not_while_they_are_written(tmp_path: Path) -> None:
    one = make_folder(tmp_path / "a.ascend" / "host_1_2_ascend_pt", FRAMEWORK__ops="x")
    two = make_folder(tmp_path / "deep" / "er" / "host_3_4_ascend_pt", FRAMEWORK__ops="x")
    make_folder(tmp_path / ".rankscope" / "staged" / "b.raw" / "host_5_6_ascend_pt", FRAMEWORK__ops="x")
    make_folder(one / "PROF_1" / "nested_ascend_pt")
    (tmp_path / "link_ascend_pt").symlink_to("/")  # it would be written to
    assert list(folders.find(tmp_path)) == [one, two]
    assert list(folders.find(one)) == [one]


def test_what_a_folder_holds(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "h_1_2_ascend_pt", FRAMEWORK__ops="four", profiler_info_3_DOT_json="{}")
    (folder / "PROF_1").mkdir()
    holds = folders.Holds.of(folder)
    assert (holds.info, holds.framework, holds.device) == (folder / "profiler_info_3.json", 4, False)
    (folder / "PROF_1" / "device_0").mkdir()
    assert folders.Holds.of(folder).device
    assert folders.Holds.of(tmp_path) == folders.Holds(None, 0, False)


def test_what_is_wanted_and_what_is_there(tmp_path: Path) -> None:
    config = {"config": {"experimental_config": {"_export_type": ["text", "db"]}}}
    folder = make_folder(tmp_path / "h_1_2_ascend_pt", profiler_info_DOT_json=json.dumps(config))
    assert folders.wanted_exports(folder) == ("db", "text")
    assert not folders.analysed(folder)
    output = folder / folders.OUTPUT
    output.mkdir()
    (output / folders.DONE).touch()
    (output / "trace_view.json").write_text("[]")
    (output / "ascend_pytorch_profiler.db").touch()
    assert folders.exports(folder) == ("text",)
    assert not folders.analysed(folder)
    assert folders.analysed(folder, ("text",))
    (output / "ascend_pytorch_profiler.db").write_text("data")
    assert folders.analysed(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"config": 3}', '{"config": {"experimental_config": 4}}'])
def test_a_damaged_info_wants_nothing(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path / "h_1_2_ascend_pt", profiler_info_DOT_json=text)
    assert folders.wanted_exports(folder) == ()


def analyse(*words: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "rankscope", "analyse", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_the_command_says_what_it_cannot_do(tmp_path: Path) -> None:
    code, out, err = analyse(str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert "there is no such directory" in err
    code, out, err = analyse(str(tmp_path))
    assert (code, out) == (2, "")
    assert "no folder whose name ends in _ascend_pt" in err


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_the_command_without_torch_npu(tmp_path: Path) -> None:
    make_folder(tmp_path / "host_1_2_ascend_pt", FRAMEWORK__ops="x")
    code, out, err = analyse(str(tmp_path))
    assert (code, out) == (2, "")
    assert "torch_npu is not installed here" in err
    assert "pip install" in err


def test_what_is_analysed_already_needs_no_torch_npu(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "x.ascend" / "host_1_2_ascend_pt", FRAMEWORK__ops="x")
    (folder / folders.OUTPUT).mkdir()
    (folder / folders.OUTPUT / folders.DONE).touch()
    (folder.parent / folders.ABOUT).write_text(json.dumps({"role": "ref", "rank": 1, "step": 2, "scope": "train"}))
    code, out, _ = analyse(str(tmp_path), "--json")
    assert code == 0
    document = json.loads(out)
    assert document["complete"] is True
    [row] = document["rows"]
    assert {"role": "ref", "rank": 1, "step": 2, "status": "already", "path": str(folder)}.items() <= row.items()


def test_the_help_has_an_example() -> None:
    code, out, _ = analyse("--help")
    assert code == 0
    assert "rankscope analyse outputs/profile" in out
