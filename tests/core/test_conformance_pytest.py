"""The kit as an author of a backend meets it: in a test file of their own, under their own pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import recording

from rankscope import testing
from rankscope.testing import BackendConformance
from rankscope.testing import scenarios as _scenarios  # noqa: F401 - fills RULES
from rankscope.testing.rules import RULES

TESTS = """
import pytest
from recording import RecordingBackend
from rankscope import Availability, hookimpl
from rankscope.testing import BackendConformance


class TestGood(BackendConformance):
    tool = "rec"
    exercised = "work"

    def exercise(self):
        print("exercised", self.exercised)


class TestBad(BackendConformance):
    class factory(RecordingBackend):
        owns = "cupti"

        def __init__(self, context, options):
            super().__init__(context, options)
            print("the object says this")

        @staticmethod
        def launch(options, context):
            return None


class TestOverridden(BackendConformance):
    tool = "rec"

    def test_fork(self, rules):
        pass


class TestDeleted(BackendConformance):
    tool = "rec"
    test_fork = None
    test_names = None


class TestSkipped(BackendConformance):
    tool = "rec"

    @pytest.mark.skip(reason="later")
    def test_fork(self, rules):
        pass


class TestMarkedWithoutReason(BackendConformance):
    tool = "rec"

    @pytest.mark.xfail
    def test_fork(self, rules):
        rules.check("fork")


class TestInTheOpen(BackendConformance):
    factory = TestBad.factory

    @pytest.mark.xfail(reason="declares what no other tool may use")
    def test_declarations(self, rules):
        rules.check("declarations")


class TestInherited(TestInTheOpen):
    options = {"seconds": 1.0}


class TestNameless(BackendConformance):
    pass


class TestElsewhere(BackendConformance):
    class factory(RecordingBackend):
        @staticmethod
        def available():
            return Availability(False, "there is no such device", "buy one")


class TestMustCapture(TestElsewhere):
    must_capture = True


class TestNothingHere(BackendConformance):
    class factory(RecordingBackend):
        @hookimpl
        def stop(self, window):
            self.context.store.missing(window, "nothing ran on the device")


class TestMarksOnly(BackendConformance):
    writes_files = False
    factory = RecordingBackend
    options = {"write": "never"}


class Prepared(RecordingBackend):
    @staticmethod
    def available():
        import stand_in_of_a_library  # noqa: F401

        return Availability(True)


class TestPrepared(BackendConformance):
    factory = Prepared
    environment = {"BAD_TOOL_LEVEL": "3"}

    def prepare(self):
        import os
        import sys
        import types

        assert os.environ["BAD_TOOL_LEVEL"] == "3"
        sys.modules["stand_in_of_a_library"] = types.ModuleType("stand_in_of_a_library")
"""

GUARD = "test_no_rule_is_weakened"
RUN = {
    "TestGood": (GUARD, "test_declarations", "test_lifecycle"),
    "TestBad": (GUARD, "test_declarations"),
    "TestOverridden": (GUARD,),
    "TestDeleted": (GUARD,),
    "TestSkipped": (GUARD,),
    "TestMarkedWithoutReason": (GUARD,),
    "TestInTheOpen": (GUARD, "test_declarations"),
    "TestInherited": (GUARD, "test_declarations"),
    "TestNameless": ("test_lifecycle",),
    "TestElsewhere": ("test_declarations", "test_signatures", "test_construction"),
    "TestMustCapture": ("test_construction",),
    "TestNothingHere": ("test_lifecycle", "test_names"),
    "TestMarksOnly": ("test_outcome", "test_nesting"),
    "TestPrepared": ("test_construction", "test_available"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str]:
    """Outcome of each test, and the whole report."""
    folder = tmp_path_factory.mktemp("author")
    (folder / "test_tools.py").write_text(TESTS)
    site = recording.install(folder / "site")
    nodes = [f"test_tools.py::{kind}::{test}" for kind, tests in RUN.items() for test in tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-W", "error", "-p", "no:cacheprovider", *nodes],
        cwd=folder,
        env=recording.environment(site),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"^(\w+)(?: \[\d+\])? test_tools\.py::(\w+::\w+)", done.stdout, re.MULTILINE)
    return {test: outcome for outcome, test in found}, done.stdout


def test_a_tool_that_is_installed_or_given(outcomes: tuple[dict[str, str], str]) -> None:
    found, report = outcomes
    assert {found[f"TestGood::{test}"] for test in RUN["TestGood"]} == {"PASSED"}
    assert found["TestMarksOnly::test_nesting"] == "PASSED"
    assert "TestMarksOnly::test_outcome" not in found
    assert "the tool writes no files (writes_files is False)" in report


def test_a_broken_rule_says_what_was_seen_and_what_to_do(outcomes: tuple[dict[str, str], str]) -> None:
    found, report = outcomes
    assert found["TestBad::test_declarations"] == "FAILED"
    assert found[f"TestBad::{GUARD}"] == "PASSED"
    (said,) = re.findall(r"_+ TestBad\.test_declarations _+\n(.*?)\n_", report, re.DOTALL)
    assert said.startswith(
        "TestBad breaks the rule 'declarations': What core reads from the class is of the right type"
    )
    assert "\n  seen: owns is 'cupti'\n  mend: make it a set of names" in said
    assert "Traceback" not in said


def test_no_rule_can_be_weakened_in_silence(outcomes: tuple[dict[str, str], str]) -> None:
    found, report = outcomes
    weakened = {test.split("::")[0] for test, outcome in found.items() if GUARD in test and outcome == "FAILED"}
    assert weakened == {"TestOverridden", "TestDeleted", "TestSkipped", "TestMarkedWithoutReason"}
    assert "TestDeleted deletes or overrides test_names, test_fork.\n  mend: decorate each with" in report
    for kind in ("TestInTheOpen", "TestInherited"):
        assert found[f"{kind}::{GUARD}"] == "PASSED"
        assert found[f"{kind}::test_declarations"] == "XFAIL"


def test_the_guard_itself_stays(tmp_path: Path) -> None:
    program = (
        "from rankscope.testing import BackendConformance\n"
        "class TestMine(BackendConformance):\n"
        "    test_no_rule_is_weakened = None\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "TypeError: TestMine must leave test_no_rule_is_weakened as it is" in done.stderr


def test_what_cannot_be_tried_here_is_skipped_with_the_tools_own_reason(outcomes: tuple[dict[str, str], str]) -> None:
    found, report = outcomes
    assert found["TestElsewhere::test_declarations"] == "PASSED"
    assert found["TestElsewhere::test_signatures"] == "PASSED"
    assert "the tool is not available here: there is no such device; buy one" in report
    assert "the tool left no file here: nothing ran on the device" in report
    assert not {"TestElsewhere::test_construction", "TestNothingHere::test_names"} & set(found)  # skipped
    assert found["TestNothingHere::test_lifecycle"] == "PASSED"
    assert found["TestMustCapture::test_construction"] == "FAILED"


def test_a_class_without_a_tool(outcomes: tuple[dict[str, str], str]) -> None:
    found, report = outcomes
    assert found["TestNameless::test_lifecycle"] == "ERROR"
    assert "TestNameless names no tool: set `tool`, or `factory`" in report


def test_a_stand_in_can_be_put_in_place_of_a_library(outcomes: tuple[dict[str, str], str]) -> None:
    found, _ = outcomes
    assert found["TestPrepared::test_construction"] == "PASSED"
    assert found["TestPrepared::test_available"] == "FAILED"  # its stand-in is no excuse for an import


def test_without_pytest_the_kit_says_so() -> None:
    program = (
        "import sys\n"
        "sys.modules['pytest'] = None\n"
        "from rankscope.testing import FakeClock, RecordingBackend, isolated_registry\n"
        "try:\n"
        "    from rankscope.testing import BackendConformance\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "rankscope.testing.BackendConformance needs pytest: pip install pytest\n", done.stderr


def test_rankscope_itself_never_imports_the_kit() -> None:
    program = (
        "import sys, rankscope, rankscope.cli, rankscope.profiler, rankscope.controller\n"
        "print([name for name in sys.modules if 'pytest' in name or name.startswith('rankscope.testing')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_a_module_that_cannot_be_loaded_again_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_once.py").write_text(
        "import os\n"
        "assert os.getcwd() == os.path.dirname(__file__), 'only where it lies'\n"
        "from rankscope.testing import BackendConformance, RecordingBackend\n"
        "class TestOnce(BackendConformance):\n"
        "    factory = RecordingBackend\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "lifecycle"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "seen: AssertionError: only where it lies" in done.stdout


# What the page says.

DOCS = Path(__file__).resolve().parents[2] / "docs"


def sample(page: str, name: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"<!-- sample: {name} -->\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_page_lists_each_rule_in_its_own_words() -> None:
    text = (DOCS / "testing-a-backend.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(test_\w+)` \| (.*) \|$", text, re.MULTILINE)
    order = [name for name in vars(BackendConformance) if name.startswith("test_") and name != GUARD]
    assert rows == [(name, RULES[name.removeprefix("test_")].text) for name in order]


def test_the_page_lists_each_attribute_and_each_part() -> None:
    text = (DOCS / "testing-a-backend.md").read_text(encoding="utf-8")
    attributes = [name for name in vars(BackendConformance) if not name.startswith(("_", "test_")) and name != "rules"]
    rows = re.findall(r"^\| `(\w+)(?:\(\))?` \| ", text, re.MULTILINE)
    assert set(attributes) <= set(rows)
    assert [name for name in testing.__all__ if name not in text] == []


def test_the_backend_of_the_guide_keeps_every_rule(tmp_path: Path) -> None:
    (tmp_path / "rankscope_wallclock.py").write_text(sample("writing-a-backend.md", "backend"))
    (tmp_path / "test_wallclock.py").write_text(sample("testing-a-backend.md", "conformance"))
    site = testing.install_tools(tmp_path / "site", {"wallclock": "rankscope_wallclock:WallclockBackend"})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=recording.environment(site),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert f"{len(RULES) + 1} passed" in done.stdout, done.stdout + done.stderr
