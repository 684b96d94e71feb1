"""Each distribution as a wheel: installed alone beside core in a clean environment that lacks its library."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from rankscope import registry

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = {
    "core": "rankscope",
    **{f"backends/{tool}": package for tool, package in registry.FIRST_PARTY.items()},
    "integrations/verl": "rankscope-verl",
}

NEEDS = {
    "torch": "pip install torch",
    "torch_memory": "pip install torch",
    "nsys": "pip install nvtx",
    "npu": "torch-npu",
    "precision_debugger": "pip install mindstudio-probe",
}
"""What each tool has to say where its library is missing."""


def run(*words: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL, check=False)
    assert bool(done.returncode) is fails, f"{words}\n{done.stdout}{done.stderr}"
    return done


@cache
def _sources(parent: Path) -> None:
    for member in MEMBERS:
        shutil.copytree(
            ROOT / member, parent / member, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "dist")
        )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All wheels, built from copies: nothing is left in the checkout."""
    parent = tmp_path_factory.mktemp("wheels")
    _sources(parent)
    for member in MEMBERS:
        build = ("-m", "build", "--no-isolation", "--outdir", str(parent / "dist"))
        run(sys.executable, *build, str(parent / member))
    return parent / "dist"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """A clean environment with core and what core needs."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip(folder, "install", str(wheel(wheels, "rankscope")))
    return folder


def pip(folder: Path, *words: str) -> None:
    run(sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--quiet", *words)


def wheel(wheels: Path, distribution: str) -> Path:
    [found] = wheels.glob(f"{distribution.replace('-', '_')}-[0-9]*.whl")
    return found


@pytest.mark.parametrize("tool", registry.FIRST_PARTY)
def test_a_tool_alone_beside_core_says_what_its_library_is(
    wheels: Path, clean: Path, tmp_path: Path, tool: str
) -> None:
    """Without its dependencies the tool is listed, and a config that asks for it says what to install."""
    package = registry.FIRST_PARTY[tool]
    pip(clean, "install", "--no-deps", str(wheel(wheels, package)))
    try:
        rankscope = str(clean / "bin/rankscope")
        rows = json.loads(run(rankscope, "plugins", "--check", "--json").stdout)
        assert [(row["name"], row["distribution"]) for row in rows] == [(tool, package)]
        assert rows[0]["available"] is False
        assert NEEDS[tool] in rows[0]["reason"]
        config = {
            "global_profiler": {"steps": [1], "tool": tool, "save_path": str(tmp_path)},
            "actor": {"profiler": {"enable": True}},
        }
        program = f"from rankscope import DistProfiler; DistProfiler({config!r}, role='actor', rank=0, world_size=1)"
        done = run(str(clean / "bin/python"), "-c", program, fails=True)
        error = done.stderr.rsplit("ConfigError", 1)[-1]
        assert NEEDS[tool] in error
        assert "global_profiler.tool" in error
        assert list(tmp_path.iterdir()) == []
        another = next(other for other in registry.FIRST_PARTY if other != tool)
        program = program.replace(f"'tool': '{tool}'", f"'tool': '{another}'")
        done = run(str(clean / "bin/python"), "-c", program, fails=True)
        assert f"pip install {registry.FIRST_PARTY[another]}" in done.stderr
    finally:
        pip(clean, "uninstall", "--yes", package)
    assert json.loads(run(rankscope, "plugins", "--json").stdout) == []


def test_the_wheels_are_complete(wheels: Path) -> None:
    import zipfile

    for folder, distribution in MEMBERS.items():
        with zipfile.ZipFile(wheel(wheels, distribution)) as archive:
            names = archive.namelist()
            metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        assert any(name.endswith("/py.typed") for name in names), distribution
        assert any(name.endswith("licenses/LICENSE") for name in names), distribution
        archives = list(wheels.glob(f"{distribution.replace('-', '_')}-[0-9]*.tar.gz"))
        assert len(archives) == 1, distribution
        sources = {path.name for path in (wheels.parent / folder / "src").rglob("*.py")}
        assert sources <= {Path(name).name for name in names}, distribution
        assert "License-Expression: Apache-2.0" in metadata
        assert "Typing :: Typed" in metadata


def test_all_of_them_and_an_outsider_s_together(wheels: Path, clean: Path, tmp_path: Path) -> None:
    from rankscope.cli import main

    assert main(["new-backend", "outside", "--dir", str(tmp_path)]) == 0
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", str(tmp_path / "rankscope-outside"))
    outsider = wheel(tmp_path / "rankscope-outside" / "dist", "rankscope-outside")
    ours = [str(wheel(wheels, package)) for package in registry.FIRST_PARTY.values()]
    pip(clean, "install", "--no-deps", *ours, str(outsider))
    try:
        rankscope = str(clean / "bin/rankscope")
        rows = json.loads(run(rankscope, "plugins", "--json").stdout)
        assert {row["name"] for row in rows} == {*registry.FIRST_PARTY, "outside"}
        assert {row["version"] for row in rows} == {"0.1.0"}
        assert "outside: self-test: " in run(rankscope, "doctor").stdout
        for command in registry.FIRST_PARTY_COMMANDS:
            assert "example" in run(rankscope, command, "--help").stdout
    finally:
        pip(clean, "uninstall", "--yes", "rankscope-outside", *registry.FIRST_PARTY.values())
