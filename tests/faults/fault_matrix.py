"""The table: what goes wrong, in which modes and with which contents it is tried, and what has to come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

MODES = ("continuous", "discrete", "scheduled")
CONTENTS = ("cpu", "shapes", "stack")
ALL_CELLS = tuple((mode, contents) for mode in MODES for contents in CONTENTS)
ONE_EACH = tuple(zip(MODES, CONTENTS, strict=True))
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
        expected: for each step, what ``rankscope status`` has to say: states joined by ``+`` (all of them are there, and
            no others), alternatives by ``|``.
        modes: what differs in one mode.
        why: for a state, words that its reason holds.
        other: the same as ``expected``, of the tool beside torch; None where it does not matter.
        said: words of a message that the process has to leave.
        ends: the process does not live to its end, so what it had in its hands may lie about in the work folders.
        signal: the exit status is the default one of that signal, negative; else the code.
        code: the exit status with and without profiling.
        cells: (mode, contents) pairs.
        disk: size of a file system of its own.
        seconds: until the process counts as hung.
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
    code: int = 0
    cells: tuple[tuple[str, str], ...] = ALL_CELLS
    disk: str = ""
    seconds: float = 60.0

    def expects(self, mode: str) -> dict[int, str]:
        """What has to come out in a mode."""
        return {**self.expected, **self.modes.get(mode, {})}


LOST = {2: "died", 3: "not reached"}
"""The window in which the process dies without a word."""

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
            expected, modes = {1: "published", **LOST}, {}
            if phase == "export":
                expected[2] = "published"
            elif how not in ABRUPT:
                expected[2] = "published"
            yield Scenario(
                f"{words} {when}",
                "the process ends",
                "ends",
                {"how": how, "phase": phase},
                expected,
                modes,
                ends=how in ABRUPT,
                code=CODES[how],
                cells=ONE_EACH,
            )


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("stop is called again and again", "start and stop", "stop_twice"),
    Scenario("a window is never stopped", "start and stop", "not_stopped"),
    Scenario(
        "another thread stops the window, the one that began it goes on", "start and stop", "stopped_elsewhere"
    ),
    Scenario("the thread that began the window has ended", "start and stop", "thread_ended"),
    Scenario("stages nested 2 deep", "start and stop", "nested", {"depth": 2}),
    Scenario("stages nested 3 deep", "start and stop", "nested", {"depth": 3}),
    Scenario("1,000 spans nested by calls, 1,000 by blocks", "start and stop", "deep"),
    Scenario("the user's torch profiler around a window", "other profilers", "by_hand", {"where": "outside"}),
    Scenario("the user's torch profiler inside a window", "other profilers", "by_hand", {"where": "inside"}),
    Scenario("the user's torch profiler beyond a window's end", "other profilers", "by_hand", {"where": "beyond"}),
    Scenario("the training's stage raises", "errors", "stage_raises"),
    Scenario("the torch tool cannot start", "errors", "start_raises"),
    *(
        Scenario(f"another tool raises in {hook}", "errors", "neighbour_raises", {"hook": hook})
        for hook in ("start", "annotate", "step", "stop")
    ),
    Scenario("another tool never returns from stop, on a thread of its own", "errors", "hanging_stop", cells=ONE_EACH),
    Scenario("os.fork in a window; the child leaves by os._exit and by sys.exit", "children", "forked"),
    Scenario("multiprocessing (fork) in a window", "children", "processes", {"method": "fork"}),
    Scenario("multiprocessing (spawn) in a window", "children", "processes", {"method": "spawn"}, cells=ONE_EACH),
    Scenario("os.exec in a window", "children", "execs", ends=True),
    Scenario("DataLoader workers live in a window and beyond it", "children", "loads"),
    *_ends(),
    Scenario("the idle helper process is killed", "helper and disk", "helper_killed_idle"),
    Scenario("the working helper process is killed", "helper and disk", "helper_killed_working", other=FINE),
    *(
        Scenario(
            f"a disk of {size} fills up",
            "helper and disk",
            "full_disk",
            cells=EVERYTHING,
            disk=size,
        )
        for size in ("32k", "128k", "256k", "512k", "1m", "4m")
    ),
    Scenario("the save path is removed before a start", "helper and disk", "directory_removed", {"when": "start"}),
    Scenario("the save path is removed in a window", "helper and disk", "directory_removed", {"when": "window"}),
    Scenario("the save path is removed before an export", "helper and disk", "directory_removed", {"when": "export"}),
    Scenario("the clock is set back a minute at each look", "odd processes", "clock_set_back"),
    Scenario("90 windows in one process", "odd processes", "many_sessions", cells=ONE_EACH,
        expected=dict.fromkeys(range(1, 91), "published"), seconds=120.0),
    Scenario("the garbage collector is off", "odd processes", "without_gc"),
    Scenario("torch.compile and a backward pass in spans", "odd processes", "compiled", cells=(*ONE_EACH, *EVERYTHING)),
)
