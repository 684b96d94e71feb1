"""A backend from the scaffold, as its author meets it: installed, listed, its tests green, the demo run with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.cli import main

ROOT = Path(__file__).resolve().parents[2]


def run(site: Path, *words: str, cwd: Path) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    environ["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The scaffold of the tool ``stage_clock``, and a directory where it is installed."""
    parent = tmp_path_factory.mktemp("made")
    assert main(["new-backend", "stage_clock", "--dir", str(parent)]) == 0
    folder = parent / "rankscope-stage-clock"
    site = parent / "site"
    run(site, "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(folder), cwd=parent)
    return folder, site


def test_it_is_listed(made: tuple[Path, Path]) -> None:
    folder, site = made
    rows = json.loads(run(site, "rankscope", "plugins", "--check", "--json", cwd=folder))
    row = next(row for row in rows if row["name"] == "stage_clock")
    assert (row["distribution"], row["available"], row["reason"]) == ("rankscope-stage-clock", True, "")


def test_its_tests_are_green(made: tuple[Path, Path]) -> None:
    folder, site = made
    said = run(site, "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", cwd=folder)
    assert "failed" not in said
    assert "passed" in said
    assert "skipped" not in said


@pytest.mark.torch
@pytest.mark.torchrun
def test_the_demo_leaves_its_artifacts(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, site = made
    words = ["demo", "--tool", "stage_clock", "--steps", "2", "--dir", str(tmp_path), "--json"]
    answer = json.loads(run(site, "rankscope", *words, cwd=ROOT))
    assert answer["complete"] is True
    files = {row["path"] for row in answer["rows"] if row["status"] == "published"}
    assert len(files) == 2
    for file in files:
        stages = json.loads(Path(file).read_text())["stages"]
        assert stages["actor_update"]["runs"] == 1
        assert stages["rollout_generate"]["ms"] > 0
