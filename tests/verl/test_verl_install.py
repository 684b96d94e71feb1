"""Putting rankscope into verl and taking it out again: hooks on imports, versions, misfits, the off switch."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import verl
import verl.utils.profiler
from verl.utils.profiler import DistProfiler, ProfilerConfig
from verl.utils.profiler.config import TorchProfilerToolConfig

from rankscope_verl import after_import as hooks
from rankscope_verl import install as installing
from rankscope_verl.changes import Changes, MisfitError

OURS = ("__init__", "start", "stop", "step", "run_finish_hook", "annotate")


def is_verls(name: str) -> bool:
    return not hasattr(getattr(vars(DistProfiler)[name], "__func__", vars(DistProfiler)[name]), "__wrapped__")


@pytest.fixture
def reinstalled() -> Iterator[None]:
    yield
    installing.uninstall()
    assert installing.install()
    assert installing.in_place()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that nobody has imported yet."""
    name = f"late_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import value as taken\n")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    hooks.forget([name, f"{name}.inner"])
    assert hooks._finder not in sys.meta_path or hooks._actions


# Hooks on imports.


def test_an_action_runs_before_others_can_take_names_out_of_the_module(package: str) -> None:
    seen: list[ModuleType] = []

    def act(module: ModuleType) -> None:
        seen.append(module)
        module.value = 2  # type: ignore[attr-defined]

    hooks.after_import(f"{package}.inner", act)
    assert seen == []
    made = importlib.import_module(package)
    assert made.taken == 2
    inner = sys.modules[f"{package}.inner"]
    assert seen == [inner]
    assert type(inner.__loader__).__name__ == type(inner.__spec__.loader).__name__ == "SourceFileLoader"
    assert inspect.getsource(inner) == "value = 1\n"
    hooks.after_import(f"{package}.inner", seen.append)
    assert seen == [inner, inner]


def test_a_module_that_fails_or_is_not_there_is_left_as_it_is(package: str, tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    (tmp_path / package / "inner.py").write_text("raise RuntimeError('its own')\n")
    hooks.after_import(f"{package}.inner", seen.append)
    hooks.after_import(f"{package}.nowhere", seen.append)
    with pytest.raises(RuntimeError, match="its own"):
        importlib.import_module(f"{package}.inner")
    (tmp_path / package / "inner.py").write_text("value = 1\n")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.nowhere")
    importlib.import_module(f"{package}.inner")
    assert [module.__name__ for module in seen] == [f"{package}.inner"]
    hooks.forget([f"{package}.nowhere"])


def test_a_hooked_module_can_be_run_as_a_program(package: str, tmp_path: Path) -> None:
    program = "import runpy, sys; from rankscope_verl.after_import import after_import\n"
    program += f"after_import('{package}.inner', print); print(runpy.run_module('{package}.inner')['value'])"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"


# Changes.


class Theirs:
    def greet(self, name: str, loud: bool = False) -> str:
        return f"hello {name}"

    @classmethod
    def make(cls, size: int) -> str:
        return f"{cls.__name__} {size}"


def test_changes_are_made_and_undone() -> None:
    before = dict(vars(Theirs))
    changes = Changes()
    changes.replace(
        Theirs, "greet", "self, name, loud", lambda old: lambda self, name, loud=False: old(self, name) + "!"
    )
    changes.replace(Theirs, "make", "cls, size", lambda old: classmethod(lambda cls, size: old.__func__(cls, size + 1)))
    changes.put(Theirs, "more", 1)
    changes.put(Theirs, "more", 2)
    assert (Theirs().greet("you"), Theirs.make(1), Theirs.more) == ("hello you!", "Theirs 2", 2)  # type: ignore[attr-defined]
    changes.undo()
    assert {key: vars(Theirs).get(key) for key in before} == before
    assert not hasattr(Theirs, "more")


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("gone", "self", r"Theirs\.gone is not there"),
        ("greet", "self, name", r"Theirs\.greet takes \(self, name, loud\), not \(self, name\)"),
    ],
)
def test_what_is_not_as_it_was_read_is_named(name: str, parameters: str, reason: str) -> None:
    with pytest.raises(MisfitError, match=reason):
        Changes().replace(Theirs, name, parameters, lambda old: old)


# The whole.


def test_uninstalled_verl_is_as_it_was(reinstalled: None, save_path: Path) -> None:
    assert not any(is_verls(name) for name in OURS)
    assert hasattr(verl.utils.profiler.DistProfilerExtension, "finish_profile")
    installing.uninstall()
    assert all(is_verls(name) for name in OURS)
    assert not hasattr(verl.utils.profiler.DistProfilerExtension, "finish_profile")
    assert hooks._finder not in sys.meta_path
    options = TorchProfilerToolConfig(contents=["cpu"])
    config = ProfilerConfig(
        tool="torch", enable=True, ranks=[0], save_path=str(save_path), tool_config={"torch": options}
    )
    profiler = DistProfiler(rank=0, config=config, tool_config=options, save_file_prefix="actor")
    profiler.start(role="train", profile_step=3)
    profiler.stop()
    assert [path.name.split("_rank")[0] for path in save_path.iterdir()] == ["actor_train_step3"]
    with pytest.raises(AssertionError, match="Profiler contents only supports"):
        TorchProfilerToolConfig(contents=["flops"])


@pytest.mark.parametrize("version", ["0.9.2", "1.0.0.dev"])
def test_another_version_of_verl_keeps_its_own_profiler(
    version: str, reinstalled: None, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    installing.uninstall()
    said()
    with monkeypatch.context() as patch:
        patch.setattr(verl, "__version__", version)
        assert not installing.install()
        assert all(is_verls(name) for name in OURS)
        text = said()
        assert text.count("warning") == 1
        assert f"not tested with verl {version}" in text
        assert "tested=0.9.1" in text
        patch.setenv("RANKSCOPE_VERL", "force")
        assert installing.install()
        assert installing.in_place()
        assert "warning" not in said()


@pytest.mark.parametrize("value", ["0", "off"])
def test_the_off_switch_leaves_verl_alone_without_a_word(
    value: str, reinstalled: None, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    installing.uninstall()
    said()
    monkeypatch.setenv("RANKSCOPE_VERL", value)
    assert not installing.install()
    assert all(is_verls(name) for name in OURS)
    assert said() == ""
    monkeypatch.delenv("RANKSCOPE_VERL")


def test_a_verl_that_looks_different_keeps_its_own_profiler(
    reinstalled: None, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    installing.uninstall()
    said()

    def start(self: Any, step: int) -> None:
        """What a later verl might have."""

    with monkeypatch.context() as patch:
        patch.setattr(DistProfiler, "start", start)
        installing.install()
        assert not installing.in_place()
        assert vars(DistProfiler)["start"] is start
        assert all(is_verls(name) for name in OURS if name != "start")
        text = said()
    assert text.count("warning") == 1
    assert "does not fit verl.utils.profiler; verl's own profiler is used" in text
    assert "DistProfiler.start takes (self, step), not (self, kwargs)" in text


def test_a_part_that_does_not_fit_costs_that_part_only(
    reinstalled: None, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    import verl.trainer.constants_ppo as constants

    installing.uninstall()
    with monkeypatch.context() as patch:
        patch.delattr(constants, "_uses_torch_profiler")
        said()
        assert installing.install()
        assert installing.in_place()
        text = said()
        assert text.count("warning") == 1
        assert "does not fit verl.trainer.constants_ppo; only global_profiler.tool counts" in text


def test_an_error_in_the_plugin_leaves_verl_as_it_was(
    reinstalled: None, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    from rankscope_verl import options

    installing.uninstall()
    said()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr(options, "change", fail)
        installing.install()
        assert not installing.in_place()
        assert all(is_verls(name) for name in OURS)
        assert "ZeroDivisionError: a mistake of ours" in said()
    with monkeypatch.context() as patch:
        patch.setattr(installing, "_fits", fail)
        assert not installing.install()
        assert "rankscope could not be put into verl" in said()


def test_a_program_that_does_not_want_plugins_gets_verl_as_it_is() -> None:
    program = "import sys, verl, verl.utils.profiler as p; print(hasattr(p.DistProfiler.start, '__wrapped__'), "
    program += "any(name.startswith('rankscope') for name in sys.modules))"
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == ["False", "False"]
