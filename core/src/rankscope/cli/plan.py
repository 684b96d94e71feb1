"""Show what a config will profile in a run of a given size: who, when, with which tool; and the reason of each no."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rankscope.cli import at_least_one
from rankscope.errors import CommandError

if TYPE_CHECKING:
    from rankscope.plan import PlanRow

EXAMPLES = """\
examples:
  rankscope plan profile.yaml --world-size 8
  rankscope plan profile.yaml --world-size 8 --steps-total 100 actor.profiler.ranks=0-3
  cat profile.yaml | rankscope plan - --world-size 8 --json

The exit status is 2 when training would refuse the config."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file; - reads it from standard input")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    parser.add_argument("--world-size", type=at_least_one, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--steps-total", type=at_least_one, metavar="T", help="number of steps of the run, if known")
    parser.add_argument("--json", action="store_true", help="print JSON: {rows: [...], warnings: [...], notes: [...]}")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        CommandError: with everything that is wrong with the config.
    """
    from contextlib import redirect_stdout

    from rankscope.config import ConfigError, load_config
    from rankscope.plan import make_plan

    try:
        source = _standard_input() if arguments.config == "-" else arguments.config
        with redirect_stdout(sys.stderr):  # what tools print when they are imported is not the plan
            config = load_config(source, arguments.overrides)
            plan = make_plan(config, world_size=arguments.world_size, total_steps=arguments.steps_total)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        import json

        print(json.dumps(plan.to_dict(), indent=2))
        return 0
    from rankscope.table import render_table

    headers = ("role", "rank", "step", "tool", "profiled", "reason", "file")
    if plan.rows:
        print(render_table(headers, collapse(plan.rows), right=("step",)))
    if plan.rows and (plan.warnings or plan.notes):
        print()
    for warning in plan.warnings:
        print(f"warning: {warning}")
    for note in plan.notes:
        print(f"note: {note}")
    return 0


def collapse(rows: Iterable[PlanRow]) -> list[tuple[str | int | None, ...]]:
    """Cells of the table; rows that differ only in their rank become one, at the place of the first."""
    from rankscope.ranges import compact

    groups: dict[tuple[Any, ...], list[PlanRow]] = {}
    for row in rows:
        key = (row.role, row.rank is None, row.step, row.tool, row.profiled, _reason(row), _any_rank(row))
        groups.setdefault(key, []).append(row)
    cells: list[tuple[str | int | None, ...]] = []
    for same in groups.values():
        row = same[0]
        ranks = compact(sorted(each.rank for each in same if each.rank is not None))
        step = "all" if row.step is None else row.step
        file = row.file if len(same) == 1 else _any_rank(row)
        cells.append((row.role, ranks or "all", step, row.tool, "yes" if row.profiled else "no", _reason(row), file))
    return cells


def _reason(row: PlanRow) -> str:
    """The reason without the number of the rank, which has a column of its own."""
    if row.rank is None:
        return row.reason
    return re.sub(rf"(?<!local )\brank {row.rank} (is )?\b", "", row.reason)


def _any_rank(row: PlanRow) -> str | None:
    return row.file and re.sub(rf"(?<=[_/])rank{row.rank}(?=[-_]|$)", "rank*", row.file, count=1)


def _standard_input() -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.load(sys.stdin)
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise CommandError(f"standard input is not valid YAML: {error}") from error
    if not OmegaConf.is_dict(config):
        raise CommandError("standard input does not hold a mapping")
    return config
