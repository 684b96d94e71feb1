"""The table: what goes wrong, in which modes and with which contents it is tried, and what has to come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

MODES = ("continuous", "discrete", "scheduled")
CONTENTS = ("cpu", "shapes", "stack")
ONE_EACH = tuple(zip(MODES, CONTENTS, strict=True))
TWO_EACH = (*ONE_EACH, ("continuous", "stack"), ("discrete", "cpu"), ("scheduled", "shapes"))
EVERYTHING = tuple((mode, "all") for mode in MODES)

FINE = {1: "published", 2: "published", 3: "published"}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One thing that goes wrong.

    Attributes:
        name: in words, as in the documentation.
        group: the heading that it stands under there.
        program: function of fault_programs.
        arguments: for it.
        expected: for each step, what ``rankscope status`` has to say: states joined by ``+`` (all of them are there,
            and no others), alternatives by ``|``.
        modes: what differs in one mode.
        why: for a state, words that its reason holds.
        other: the same as ``expected``, of the tool beside torch; None where it does not matter.
        said: words of a message that the process has to leave.
        ends: the process does not live to its end; the helper finishes what it was given.
        clean: nothing may be left in the work folders.
        signal: the exit status is the default one of that signal, negative; else the code.
        code: the exit status with and without profiling.
        cells: (mode, contents) pairs.
        disk: size of a file system of its own.
        seconds: until the process counts as hung.
        looks_at_mode: the training itself does something else in another mode.
    """

    name: str
    group: str
    program: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expected: Mapping[int, str] = dataclasses.field(default_factory=lambda: FINE)
    modes: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other: Mapping[int, str] | None = None
    said: str = ""
    ends: bool = False
    clean: bool = True
    code: int = 0
    cells: tuple[tuple[str, str], ...] = TWO_EACH
    disk: str = ""
    seconds: float = 30.0
    looks_at_mode: bool = False

    def expects(self, mode: str) -> dict[int, str]:
        """What has to come out in a mode."""
        return {**self.expected, **self.modes.get(mode, {})}


CODES = {
    "end": 0,
    "sys.exit": 3,
    "os._exit": 4,
    "exception": 1,
    "SIGTERM": -15,
    "SIGTERM, saving": -15,
    "SIGINT": -2,
    "SIGKILL": -9,
}
WORDS = {
    "end": "an early return",
    "sys.exit": "sys.exit(3)",
    "os._exit": "os._exit(4)",
    "exception": "an unhandled exception",
    "SIGTERM": "SIGTERM",
    "SIGTERM, saving": "SIGTERM with flush_on_sigterm",
    "SIGINT": "Ctrl-C",
    "SIGKILL": "SIGKILL",
}
ABRUPT = ("os._exit", "SIGTERM", "SIGKILL")
PHASES = {
    "start": "while a tool starts",
    "window": "in the window",
    "stop": "while a tool stops",
    "save": "with half a raw trace written",
    "export": "while the file is exported",
}


def _ends() -> Iterator[Scenario]:
    for how, words in WORDS.items():
        for phase, when in PHASES.items():
            if phase in {"start", "stop", "save"} and how in {"end", "sys.exit", "exception"}:
                continue  # what the training does by itself happens outside of the tools
            outcome, discrete = _outcome(how, phase)
            yield Scenario(
                f"{words} {when}",
                "the process ends",
                "ends",
                {"how": how, "phase": phase},
                {1: "published", 2: outcome, 3: "not reached"},
                {"discrete": {2: discrete}},
                ends=how in ABRUPT,
                clean=how not in ABRUPT,
                code=CODES[how],
                cells=ONE_EACH,
            )


def _outcome(how: str, phase: str) -> tuple[str, str]:
    """What becomes of the second step: as one file, and as a file a stage."""
    if phase == "export":
        return "published", "published"
    if how in ABRUPT:  # the rollout is saved by then, or is what is being saved
        return "died", "died" if phase == "save" else "published+died"
    if how == "SIGINT" and phase == "save":
        return "failed", "failed"
    if how == "exception":
        return "aborted", "published"
    return ("published|empty", "published|published+empty") if phase == "start" else ("published", "published")


FULL = "published|failed|published+failed"

BY_HAND = {"outside": "around", "inside": "inside", "beyond": "beyond the end of"}
REASONS = {"outside": "already running", "inside": "started and stopped inside", "beyond": "still runs"}
ONE_FAILED = {**FINE, 2: "failed"}
ONE_ABORTED = {**FINE, 2: "aborted"}
HUNG = {1: "published", 2: "aborted", 3: "failed"}

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("stop is called again and again", "start and stop", "stop_twice"),
    Scenario(
        "a window is never stopped", "start and stop", "not_stopped", expected=ONE_ABORTED, modes={"discrete": FINE}
    ),
    Scenario("another thread stops the window, the one that began it goes on", "start and stop", "stopped_elsewhere"),
    Scenario(
        "the thread that began the window has ended",
        "start and stop",
        "thread_ended",
        expected=ONE_FAILED,
        modes={"scheduled": FINE},
        why={"failed": "which has ended"},
        looks_at_mode=True,
    ),
    Scenario("stages nested 2 deep", "start and stop", "nested", {"depth": 2}),
    Scenario("stages nested 3 deep", "start and stop", "nested", {"depth": 3}),
    Scenario("1,000 spans nested by calls, 1,000 by blocks", "start and stop", "deep"),
    *(
        Scenario(
            f"the user's torch profiler {where} a window",
            "other profilers",
            "by_hand",
            {"where": key},
            ONE_FAILED,
            {"discrete": {2: "published+failed"}} if key == "inside" else {},
            why={"failed": REASONS[key]},
        )
        for key, where in BY_HAND.items()
    ),
    Scenario("the training's stage raises", "errors", "stage_raises", expected=ONE_ABORTED, modes={"discrete": FINE}),
    Scenario(
        "the torch tool cannot start",
        "errors",
        "start_raises",
        expected={1: "published", 2: "failed", 3: "failed"},
        why={"failed": "no profiler today"},
    ),
    *(
        Scenario(f"another tool raises in {hook}", "errors", "neighbour_raises", {"hook": hook})
        for hook in ("start", "annotate", "step", "stop")
    ),
    Scenario(
        "another tool never returns from stop, on a thread of its own",
        "errors",
        "hanging_stop",
        expected=HUNG,
        modes={"discrete": {2: "died"}},
        why={"failed": "has not come back"},
        cells=ONE_EACH,
        looks_at_mode=True,
        clean=False,
    ),
    Scenario("os.fork in a window; the child leaves by os._exit and by sys.exit", "children", "forked"),
    Scenario("multiprocessing (fork) in a window", "children", "processes", {"method": "fork"}),
    Scenario("multiprocessing (spawn) in a window", "children", "processes", {"method": "spawn"}, cells=ONE_EACH),
    Scenario(
        "os.exec in a window",
        "children",
        "execs",
        expected={1: "published", 2: "died", 3: "not reached"},
        modes={"discrete": {2: "published+died"}},
        ends=True,
        clean=False,
    ),
    Scenario("DataLoader workers live in a window and beyond it", "children", "loads"),
    *_ends(),
    Scenario("the idle helper process is killed", "helper and disk", "helper_killed_idle"),
    Scenario("the working helper process is killed", "helper and disk", "helper_killed_working", other=FINE),
    *(
        Scenario(
            f"a disk of {size} fills up",
            "helper and disk",
            "full_disk",
            expected=dict.fromkeys((1, 2, 3), FULL),
            cells=EVERYTHING,
            disk=size,
            clean=False,
        )
        for size in ("64k", "128k", "256k", "512k", "1m", "4m")
    ),
    Scenario(
        "the save path is removed before a start",
        "helper and disk",
        "directory_removed",
        {"when": "start"},
        {2: "published", 3: "published"},
    ),
    Scenario(
        "the save path is removed in a window",
        "helper and disk",
        "directory_removed",
        {"when": "window"},
        {2: "published", 3: "published"},
        {"discrete": {2: "published|published+failed"}},
    ),
    Scenario(
        "the save path is removed before an export",
        "helper and disk",
        "directory_removed",
        {"when": "export"},
        {2: "failed", 3: "published"},
        why={"failed": "cleared"},
    ),
    Scenario("the clock is set back a minute at each look", "odd processes", "clock_set_back"),
    Scenario(
        "90 windows in one process",
        "odd processes",
        "many_sessions",
        expected=dict.fromkeys(range(1, 91), "published"),
        cells=ONE_EACH,
        seconds=120.0,
    ),
    Scenario("the garbage collector is off", "odd processes", "without_gc"),
    Scenario("torch.compile and a backward pass in spans", "odd processes", "compiled", cells=(*ONE_EACH, *EVERYTHING)),
)
