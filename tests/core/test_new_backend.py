"""``rankscope new-backend``: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from rankscope.cli import main


def test_a_whole_distribution_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "my_tool2", "--dir", str(tmp_path / "new"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    folder = Path(answer["directory"])
    assert folder == tmp_path / "new" / "rankscope-my-tool2"
    assert sorted(answer["files"]) == sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    project = (folder / "pyproject.toml").read_text()
    assert '[project.entry-points."rankscope.backends"]\nmy_tool2 = "rankscope_my_tool2:MyTool2Backend"\n' in project
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree)
        assert "$" not in path.read_text()


def test_what_exists_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rankscope-mine").mkdir()
    assert main(["new-backend", "mine", "--dir", str(tmp_path)]) == 2
    assert "exists already; nothing was written" in capsys.readouterr().err
    assert list((tmp_path / "rankscope-mine").iterdir()) == []


@pytest.mark.parametrize(("name", "said"), [
    ("My-Tool", "e.g. my_tool"),
    ("../x", "e.g. x"),
    ("9", "e.g. mytool"),
    ("nsys", "is a tool of rankscope itself (pip install rankscope-nsys)"),
    ("rec", "is a tool already, of recording-tools 1.0"),
])  # fmt: skip
def test_names_that_cannot_be(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert main(["new-backend", name, "--dir", str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_name_close_to_one_of_ours_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "nsyss", "--dir", str(tmp_path)]) == 0
    assert "Did you mean 'nsys'?" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new-backend", "mine", "--dir", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file" / "rankscope-mine") in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == ""
