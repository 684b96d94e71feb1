"""The section "Fault matrix" of docs/reliability.md, made from the matrix: run this file to rewrite it."""

from __future__ import annotations

import re
from pathlib import Path

from fault_matrix import CODES, PHASES, SCENARIOS, WORDS, Scenario

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
TITLE = "## Fault matrix"

INTRODUCTION = """\
Each row is a program that trains for three steps while something happens in the second: with one file a step, with one
file a stage, and with a schedule over mini-batches, and with different contents. Every cell is a process of its own. It
also runs with profiling off, and each time this must hold:

- what the training computes, sees and raises, and the exit status, are those of the run without profiling;
- every file under a final name is whole: it unpacks, is strict JSON, and the rows of stages nest;
- `rankscope status` says of each step what the table says, and why, where it is not `published`;
- unless the process died, nothing is left in the work folders (but for full disks and tools that hang).
"""

AFTER = """\
What is guaranteed when a tool hangs: a hook that never returns holds the thread that called it, and nobody can take
that thread back. Other threads wait for it at most a minute, once, when they open or close a window; from then on they
open none until it returns, and say so, but still save what they have open. The process ends as it would have.

A span that begins in one function and ends in another (`ExitStack.enter_context(annotate(...))`) overlaps the frames of
these functions with `contents: [stack]`; some viewers leave such a row out.
"""


def _words(spec: str) -> str:
    """``published+died`` in words."""
    return " or ".join(" and ".join(f"`{state}`" for state in way.split("+")) for way in spec.split("|"))


def _outcome(scenario: Scenario) -> str:
    """What status says, steps with the same outcome together."""
    return _steps(scenario.expected) + "".join(
        f"; {mode}: {_steps(steps)}"
        for mode, steps in scenario.modes.items()
        if steps.items() - scenario.expected.items()
    )


def _steps(expected: object) -> str:
    assert isinstance(expected, dict)
    groups: dict[str, list[int]] = {}
    for step, spec in expected.items():
        groups.setdefault(spec, []).append(step)
    return ", ".join(f"{_range(steps)} {_words(spec)}" for spec, steps in groups.items())


def _range(steps: list[int]) -> str:
    if len(steps) > 2:
        return f"{steps[0]}-{steps[-1]}"
    return " and ".join(map(str, steps))


def section() -> str:
    """The whole section."""
    groups: dict[str, list[Scenario]] = {}
    for scenario in SCENARIOS:
        groups.setdefault(scenario.group, []).append(scenario)
    total = sum(len(scenario.cells) for scenario in SCENARIOS)
    lines = [
        TITLE,
        "",
        *INTRODUCTION.splitlines(),
        "",
        "| what happens | what status says of the steps | cells |",
        "|---|---|---|",
    ]
    for group, scenarios in groups.items():
        if group == "the process ends":
            lines += [_ends(how, scenarios) for how in WORDS]
        else:
            lines += [f"| {s.name} | {_outcome(s)} | {len(s.cells)} |" for s in scenarios]
    lines += [f"| all {len(SCENARIOS)} scenarios | | {total} |", "", *AFTER.splitlines()]
    return "\n".join(lines) + "\n"


def _ends(how: str, scenarios: list[Scenario]) -> str:
    """One row for a way to end a process, over all moments at which it is tried."""
    mine = [scenario for scenario in scenarios if scenario.arguments["how"] == how]
    outcomes: dict[str, list[str]] = {}
    for scenario in mine:
        outcomes.setdefault(_outcome_of_two(scenario), []).append(PHASES[scenario.arguments["phase"]])
    told = "; ".join(f"{', '.join(phases)}: {outcome}" for outcome, phases in outcomes.items())
    code = CODES[how]
    status = f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
    return f"| {WORDS[how]} ({status}) | step 2 {told} | {sum(len(scenario.cells) for scenario in mine)} |"


def _outcome_of_two(scenario: Scenario) -> str:
    discrete = scenario.modes["discrete"][2]
    plain = _words(scenario.expected[2])
    return plain if discrete == scenario.expected[2] else f"{plain} (discrete: {_words(discrete)})"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before = re.split(rf"^{TITLE}$", text, flags=re.MULTILINE)[0].rstrip()
    PAGE.write_text(f"{before}\n\n{section()}", encoding="utf-8")
