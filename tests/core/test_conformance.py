"""The kit holds for a good backend, finds out each bad one, and cannot be weakened in silence."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import conformance_bad as bad
import pytest

from rankscope import Window, hookimpl
from rankscope.testing import BackendConformance, RecordingBackend
from rankscope.testing import scenarios as _scenarios  # noqa: F401
from rankscope.testing.conformance import Checked
from rankscope.testing.lanes import Lane
from rankscope.testing.rules import RULES


class TestRecordingBackend(BackendConformance):
    factory = RecordingBackend
    must_capture = True


class TestRecordingBackendInTheHelper(BackendConformance):
    factory = RecordingBackend
    options: ClassVar = {"write": "later"}
    must_capture = True


class Relocating(RecordingBackend):
    """Its library writes to a place of its own, and the file is whole some time later."""

    asked = False

    @hookimpl
    def stop(self, window: Window) -> None:
        report = self.report(window)
        report.with_suffix(".part").write_text("x")

    @hookimpl
    def relocate(self, window: Window, last: bool) -> list[Path]:
        report = self.report(window)
        part = report.with_suffix(".part")
        if part.exists() and (last or self.asked):
            part.rename(report)
        self.asked = True
        return [report] if report.exists() else []

    def report(self, window: Window) -> Path:
        return Path(tempfile.gettempdir()) / f"report-{os.getpid()}-{window.id}.bin"


class TestRelocating(BackendConformance):
    factory = Relocating
    must_capture = True


Find = Callable[[str, str], str]


@pytest.fixture(scope="module")
def problem_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Find]:
    """What the kit says of a test class of conformance_bad and a rule; empty where the rule holds."""
    folder = tmp_path_factory.mktemp("bad")
    module = {"name": bad.__name__, "path": str(Path(bad.__file__).absolute())}
    lanes: dict[bool, Lane] = {}
    for light in (True, False):
        (folder / f"light{light}").mkdir()
        lanes[light] = Lane(folder / f"light{light}", load=[module], width=2)
    checked: dict[str, Checked] = {}
    for name, (rule, _) in bad.BAD.items():
        (folder / name).mkdir()
        checked[name] = Checked(getattr(bad, name), folder / name, [rule], lanes)

    def problem(name: str, rule: str) -> str:
        if name not in checked:
            (folder / name).mkdir()
            checked[name] = Checked(getattr(bad, name), folder / name, [], lanes)
        return checked[name].problem(rule)

    yield problem
    for lane in lanes.values():
        lane.close()


@pytest.mark.parametrize("name", bad.BAD)
def test_a_bad_backend_is_found_out(name: str, problem_of: Find) -> None:
    rule, seen = bad.BAD[name]
    problem = problem_of(name, rule)
    assert problem.splitlines()[0] == f"{getattr(bad, name).tool} breaks the rule {rule!r}: {RULES[rule].text}"
    assert seen in problem
    assert re.search(r"^  mend: \w.{20}", problem, re.MULTILINE), problem
    assert "  its folder: /" in problem


@pytest.mark.torch
def test_a_collective_of_torch_is_found_out(problem_of: Find) -> None:
    assert "a hook used torch.distributed: barrier" in problem_of("OnTorchBarrier", "collectives")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("OnSeedsTorch", "the random numbers of torch go on differently after the start of window 2"),
        ("OnHooksAllModules", "the number of torch's global module hooks is another one after the stop of window 2: 2"),
    ],
)
def test_what_a_window_leaves_in_torch_is_found_out(name: str, seen: str, problem_of: Find) -> None:
    assert seen in problem_of(name, "state")


def test_each_rule_has_a_bad_backend_and_a_test() -> None:
    assert {rule for rule, _ in bad.BAD.values()} == set(RULES)
    tests = {name for name in dir(BackendConformance) if name.startswith("test_")}
    assert tests == {f"test_{name}" for name in RULES} | {"test_no_rule_is_weakened"}
    assert all(rule.text.endswith(".") and len(rule.text) < 160 for rule in RULES.values())


def test_where_a_hook_hangs_is_said(problem_of: Find) -> None:
    assert re.search(r'File ".*conformance_bad.py", line \d+ in start', problem_of("OnHangs", "lifecycle"))
