from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import recording

import rankscope

ROOT = Path(__file__).resolve().parents[2]


def test_every_public_name_is_there_and_explained() -> None:
    for name in rankscope.__all__:
        value = getattr(rankscope, name)
        assert inspect.getdoc(value), name
        assert name in dir(rankscope)
    assert len(set(rankscope.__all__)) == len(rankscope.__all__)
    assert sorted(rankscope.__all__) == list(rankscope.__all__)


def test_lazy_names_and_typed_names_are_the_same() -> None:
    tree = ast.parse(Path(rankscope.__file__).read_text())
    typed = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {(module, name) for name, module in rankscope._WHERE.items()}
    assert {name for _, name in typed} | {"annotate"} == set(rankscope.__all__)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'rankscope' has no attribute 'Profiler'"):
        rankscope.Profiler  # noqa: B018
    with pytest.raises(ImportError):
        from rankscope import profile_everything  # noqa: F401


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert rankscope.__version__ == version("rankscope")


def test_the_hot_path_starts_light(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rankscope import annotate\n"
        "@annotate('a')\n"
        "def f(): return 1\n"
        "f()\n"
        "heavy = {'pluggy', 'structlog', 'omegaconf', 'yaml', 'torch', 'asyncio', 'rankscope.registry', "
        "'rankscope.dispatch', 'rankscope.config', 'importlib.metadata'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert recording.run_python(tmp_path, program).stdout == "[]\n"


def test_annotate_stays_a_function_whatever_is_imported(tmp_path: Path) -> None:
    """The module of the same name must not take its place."""
    program = (
        "import rankscope.annotate\nfrom rankscope import *\nimport rankscope\nprint(callable(rankscope.annotate))"
    )
    assert recording.run_python(tmp_path, program).stdout == "True\n"


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "MYPYPATH": os.pathsep.join([str(ROOT / "core" / "src")])}
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )


def test_typed_use_of_the_public_surface(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from rankscope import DistProfiler, annotate\n"
        "@annotate('a')\n"
        "def f(x: int) -> str:\n"
        "    return str(x)\n"
        "f('text')\n"
        "reveal_type(f)\n"
        "DistProfiler({}, 'actor')\n"
        "annotate('a', schedule=True)\n"
    )
    result = mypy("--cache-dir", str(tmp_path / "cache"), str(ROOT / "tests" / "typing" / "public_api.py"), str(wrong))
    lines = [line for line in result.stdout.splitlines() if ": note: " not in line or "Revealed" in line]
    of_wrong = [line for line in lines if "wrong.py" in line]
    assert [line for line in lines if line not in of_wrong] == []
    assert list(dict.fromkeys(line.split(":")[1] for line in of_wrong)) == ["5", "6", "7", "8"]
    assert 'Revealed type is "def (x: int) -> str"' in of_wrong[1].replace("builtins.", "")
