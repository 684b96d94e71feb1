"""A backend of the first release on this rankscope: installed as it was, and with hooks that have learned more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pluggy
import pytest

from rankscope.dispatch import HOOKS, bind
from rankscope.hookspecs import PROJECT, BackendSpecs, hookspec

FIRST = Path(__file__).resolve().parents[1] / "data" / "first_backend"

PROGRAM = """
import sys
from rankscope import DistProfiler, ProfileController, annotate, plan_launch

config = {
    "global_profiler": {"tool": "first", "steps": [1, 2], "save_path": sys.argv[1], "relocate_results": True},
    "actor": {"profiler": {"enable": True, "tool_config": {"first": {"unit": "ms", "discrete": sys.argv[2] == "d"}}}},
}
assert plan_launch(config).env == {"FIRST_UNIT": "ms"}
with DistProfiler(config, role="actor", rank=0, world_size=1) as profiler:
    with ProfileController(config, workers=[profiler], total_steps=2) as controller:
        for n in (1, 2):
            with controller.step(n), annotate("actor_update", scheduled=True):
                with annotate("mini_batch0"):
                    pass
                profiler.step()
    assert not profiler.faults, profiler.faults
"""

STAGE = [
    "enter actor_update with False",
    "enter mini_batch0 with True",
    "leave mini_batch0",
    "step in actor_update",
    "leave actor_update",
]


@pytest.mark.parametrize("mode", ["continuous", "discrete"])
def test_it_runs_as_it_did(tmp_path: Path, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), mode[0]],
        env={**os.environ, "PYTHONPATH": str(FIRST), "RANKSCOPE_STRICT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "first backend finished" in done.stderr
    for step in (1, 2):
        [file] = tmp_path.glob(f"actor_*_step{step}_rank0-of-1_pid*.txt")
        first, window, *lines = file.read_text().splitlines()
        assert first == f"{file.name} ms"
        scope, reason = ("actor_update", "stage") if mode == "discrete" else ("train", "step")
        assert window == f"actor {step} {scope} {reason} ({step},)"
        assert [line for line in lines if "step1" not in line and "step2" not in line] == STAGE


def test_a_hook_that_has_learned_more_arguments_does_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIRST))
    import rankscope_first

    class Context:
        logger = None

    class More(BackendSpecs):
        """Every hook with one more argument."""

    for hook in HOOKS:
        names = [*_arguments(hook), "news"]
        namespace: dict[str, object] = {}
        exec(f"class Spec: {hook} = lambda self, {', '.join(names)}: None", namespace)
        spec = getattr(namespace["Spec"], hook)
        spec.__qualname__ = f"Spec.{hook}"
        setattr(More, hook, hookspec(spec))
    monkeypatch.setattr("rankscope.dispatch.BackendSpecs", More)
    backend = rankscope_first.FirstBackend(Context(), rankscope_first.FirstOptions())
    bound = bind([("first", backend)])["first"]
    assert bound.keys() == set(HOOKS)
    bound["relocate"](type("W", (), {"step": 7}), True, "news")
    assert backend.relocated == [7]


def _arguments(hook: str) -> tuple[str, ...]:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(BackendSpecs)
    return tuple(getattr(manager.hook, hook).spec.argnames)
