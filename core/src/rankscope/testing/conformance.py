"""The rules of a backend as pytest tests."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

try:
    import pytest
except ImportError as error:
    raise ImportError("rankscope.testing.BackendConformance needs pytest: pip install pytest") from error

from rankscope.testing import scenarios as _scenarios  # noqa: F401 - fills RULES
from rankscope.testing.lanes import Lane, LaneClosed, Result
from rankscope.testing.life import Ended, Facts
from rankscope.testing.rules import RULES, Rule
from rankscope.testing.server import given_factory

_GUARD = "test_no_rule_is_weakened"
_LINES = 25
_BY_MOMENT = {
    "in the middle of the rule": "never end the process from a hook; raise an Exception, which core contains",
    "at its end": "what the tool's library left behind breaks the end of the process: let go of it in stop()",
}


def _test_of(name: str) -> Callable[[BackendConformance, Checked], None]:
    def test(self: BackendConformance, rules: Checked) -> None:  # noqa: ARG001 - pytest calls it as a method
        rules.check(name)

    test.__name__ = f"test_{name}"
    test.__qualname__ = f"BackendConformance.test_{name}"
    test.__doc__ = RULES[name].text
    return test


class BackendConformance:
    """One test for each rule of the contract between rankscope and a backend.

    Subclass it in a test of your tool::

        from rankscope.testing import BackendConformance


        class TestMyTool(BackendConformance):
            tool = "mytool"
            options = {"unit": "ms"}

            def exercise(self):
                my_library.work()

    Each rule is played in a process of its own, by a real ``DistProfiler``; pytest's own process never makes the
    backend. So the test module must be importable from its file, and fixtures do not reach ``exercise``. A rule that a
    tool cannot keep is overridden and marked, and stays visible in every test report::

            @pytest.mark.xfail(reason="mytool's library dies of a fork, see its issue 12")
            def test_fork(self, rules):
                rules.check("fork")

    Attributes:
        tool: name of the tool: its entry point.
        factory: backend class (or other factory) to try instead of an installed tool.
        options: options of the tool, as in ``tool_config.<tool>``.
        preload: modules that the tool imports in ``start``; imported once for all rules instead of once for each.
        light_imports: packages that importing the tool and asking ``available()`` may import.
        must_capture: the tool has to work here and to leave files; else rules about files are skipped, with the tool's
            own reason, where it says that it captured nothing.
        writes_files: False for a tool that only marks what others record.
        environment: more environment variables for the processes that play the rules.
        seconds: how long one rule may take.
    """

    tool: ClassVar[str] = ""
    factory: ClassVar[Callable[..., Any] | None] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    preload: ClassVar[Sequence[str]] = ()
    light_imports: ClassVar[Sequence[str]] = ()
    must_capture: ClassVar[bool] = False
    writes_files: ClassVar[bool] = True
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    seconds: ClassVar[float] = 60.0

    def prepare(self) -> None:
        """Called once in each process before anything else: the place to put stand-ins of libraries in."""

    def exercise(self) -> None:
        """Work that the tool can see; called inside of stages, on any thread."""
        sum(number * number for number in range(1000))

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if getattr(cls, _GUARD, None) is not BackendConformance.test_no_rule_is_weakened:
            raise TypeError(f"{cls.__name__} must leave {_GUARD} as it is; mark single rules as xfail, with a reason")

    @pytest.fixture
    def rules(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
        """Plays the rules of this class that are about to be tested; the same one for all its tests."""
        kind = type(self)
        if not (kind.tool or kind.factory):
            pytest.fail(f"{kind.__name__} names no tool: set `tool`, or `factory`", pytrace=False)
        node = request.node.getparent(pytest.Class)
        if _CHECKED not in node.stash:
            checked = Checked(kind, tmp_path_factory.mktemp("rules"), _asked(request))
            node.stash[_CHECKED] = checked
            node.addfinalizer(checked.close)
        found: Checked = node.stash[_CHECKED]
        return found

    def test_no_rule_is_weakened(self) -> None:
        """No test of the kit was deleted or overridden, unless it is marked xfail with a reason."""
        weakened = [name for name in _tests() if not _kept(type(self), name)]
        if weakened:
            pytest.fail(
                f"{type(self).__name__} deletes or overrides {', '.join(weakened)}.\n"
                '  mend: decorate each with @pytest.mark.xfail(reason="why this tool cannot keep the rule")',
                pytrace=False,
            )

    # Before a capture.
    test_registers = _test_of("registers")
    test_signatures = _test_of("signatures")
    test_options = _test_of("options")
    test_declarations = _test_of("declarations")
    test_available = _test_of("available")
    test_construction = _test_of("construction")
    # Windows.
    test_lifecycle = _test_of("lifecycle")
    test_outcome = _test_of("outcome")
    test_restart = _test_of("restart")
    test_discrete = _test_of("discrete")
    test_early_end = _test_of("early_end")
    test_exit = _test_of("exit")
    test_faults = _test_of("faults")
    # Spans.
    test_exceptions = _test_of("exceptions")
    test_nesting = _test_of("nesting")
    test_labels = _test_of("labels")
    test_threads = _test_of("threads")
    test_async = _test_of("async")
    test_references = _test_of("references")
    # The process and the others.
    test_surroundings = _test_of("surroundings")
    test_state = _test_of("state")
    test_fork = _test_of("fork")
    test_collectives = _test_of("collectives")
    # Files.
    test_places = _test_of("places")
    test_names = _test_of("names")
    test_relocation = _test_of("relocation")


class Checked:
    """The rules of one test class: played ahead, two at a time, and looked up by its tests.

    Args:
        kind: the test class.
        folder: each rule gets a folder of its own in it.
        ahead: rules that are going to be asked for, in that order.
        lanes: servers to share with others, light and not; whoever shares them closes them.
    """

    def __init__(
        self,
        kind: type[BackendConformance],
        folder: Path,
        ahead: Sequence[str] = (),
        lanes: dict[bool, Lane] | None = None,
    ) -> None:
        self._kind = kind
        self._folder = folder
        self._lanes: dict[bool, Lane] = {} if lanes is None else lanes
        self._shared = lanes is not None
        self._submitted: set[str] = set()
        with contextlib.suppress(LaneClosed):  # each test finds out for itself
            for name in ahead:
                self._submit(RULES[name])

    def check(self, name: str) -> None:
        """Fail the running test where the rule is broken, and skip it where it cannot be tried."""
        problem = self.problem(name)
        if problem:
            pytest.fail(problem, pytrace=False)
        result = self.result(name)
        if result.status == "skipped":
            pytest.skip(result.seen)

    def result(self, name: str) -> Result:
        """How a rule came out."""
        rule = RULES[name]
        try:
            self._submit(rule)
            return self._lanes[rule.light].result(self._id(rule))
        except LaneClosed as closed:
            pytest.fail(str(closed), pytrace=False)

    def close(self) -> None:
        """End what is still running."""
        for lane in () if self._shared else self._lanes.values():
            lane.close()

    def _id(self, rule: Rule) -> str:
        return f"{self._kind.__qualname__}.{rule.name}"

    def _submit(self, rule: Rule) -> None:
        if rule.name in self._submitted:
            return
        self._submitted.add(rule.name)
        folder = self._folder / rule.name
        folder.mkdir()
        facts = Facts(
            tool=self._kind.tool or "under_test",
            options=dict(self._kind.options),
            light_imports=list(self._kind.light_imports),
            must_capture=self._kind.must_capture,
            writes_files=self._kind.writes_files,
            seconds=self._kind.seconds,
        )
        self._lane(rule.light).submit(
            {
                "id": self._id(rule),
                "rule": rule.name,
                "folder": str(folder),
                "facts": dataclasses.asdict(facts),
                "subject": self._subject() if self._needs_subject(rule) else None,
            }
        )

    def _lane(self, light: bool) -> Lane:
        if light not in self._lanes:
            folder = self._folder / f"lane{len(self._lanes)}"
            folder.mkdir()
            self._lanes[light] = Lane(
                folder,
                preload=() if light else self._kind.preload,
                load=() if light and not self._own_code() else (self._module(),),
                width=1 if light else min(2, os.cpu_count() or 1),
                variables=self._kind.environment,
            )
        return self._lanes[light]

    def _own_code(self) -> bool:
        """Whether the tool cannot even be made without the test's module."""
        return given_factory(self._kind) is not None or self._kind.prepare is not BackendConformance.prepare

    def _needs_subject(self, rule: Rule) -> bool:
        """A light rule does without the test's module if it can: that may import the tool's libraries."""
        return self._own_code() or not rule.light or rule.name == "surroundings"

    def _subject(self) -> dict[str, Any]:
        return {"module": self._module(), "qualname": self._kind.__qualname__}

    def _module(self) -> dict[str, str]:
        return {"name": self._kind.__module__, "path": str(Path(inspect.getfile(self._kind)).absolute())}

    def problem(self, name: str) -> str:
        """What is wrong, for the author of the backend; empty where the rule holds or cannot be tried."""
        rule, result = RULES[name], self.result(name)
        seen, mend = result.seen, result.mend
        if result.status in {"held", "skipped"} and result.code == 0:
            return ""
        if result.code is None:
            seen = f"the process did not end within {self._kind.seconds:g} seconds" + (f"; {seen}" if seen else "")
            mend = mend or "let no wait in a hook be without a deadline; where it hangs is in its output"
        elif result.status == "none" or result.code != 0:
            when = "in the middle of the rule" if result.status == "none" else "at its end"
            seen = f"the process {Ended(result.code)} {when}" + (f"; {seen}" if seen else "")
            mend = mend or _BY_MOMENT[when]
        output = result.output.rstrip().splitlines()
        told = "".join(f"\n    {line}" for line in output[-_LINES:])
        return (
            f"{self._kind.tool or self._kind.__name__} breaks the rule {rule.name!r}: {rule.text}\n"
            f"  seen: {seen}\n"
            f"  mend: {mend}\n"
            f"  its folder: {self._folder / rule.name}" + (f"\n  its output ends with:{told}" if told else "")
        )


_CHECKED = pytest.StashKey[Checked]()


def _tests() -> list[str]:
    """The tests of the kit."""
    return [f"test_{name}" for name in RULES]


def _kept(kind: type, name: str) -> bool:
    """Whether a test is the kit's own, or replaced in the open."""
    found = inspect.getattr_static(kind, name, None)
    if found is inspect.getattr_static(BackendConformance, name):
        return True
    marks = getattr(found, "pytestmark", ())
    return callable(found) and any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)


def _asked(request: pytest.FixtureRequest) -> list[str]:
    """The rules of this class that the run is going to test; with several workers nobody knows which are whose."""
    if hasattr(request.config, "workerinput"):
        return []
    names = [
        getattr(item, "originalname", None) or item.name
        for item in request.session.items
        if getattr(item, "cls", None) is request.cls
    ]
    rules = [name.removeprefix("test_") for name in names]
    return [name for name in dict.fromkeys(rules) if name in RULES]
