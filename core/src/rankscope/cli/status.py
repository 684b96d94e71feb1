"""Compare what was expected in a save path with what came, from the ledgers that the run left there."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.errors import CommandError

if TYPE_CHECKING:
    from rankscope.artifacts.status import Row

EXAMPLES = """\
examples:
  rankscope status outputs/profile
  rankscope status outputs/profile --all-runs --json

The exit status is 1 when something that was expected is not there."""

FIELDS = ("role", "rank", "step", "scope", "tool", "status", "reason", "path", "bytes")
"""What JSON output tells of each row."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the save path of a run")
    parser.add_argument(
        "--all-runs", action="store_true", help="every run that left a ledger there, not only the newest"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: {complete: ..., rows: [...]}")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; 0 when it is complete, else 1.

    Raises:
        CommandError: there is no such directory.
    """
    from rankscope.artifacts.status import FINE, read_status

    directory: Path = arguments.directory.expanduser()
    try:
        with os.scandir(directory):
            pass
    except OSError as error:
        raise CommandError(f"cannot read the directory {str(directory)!r}: {error.strerror}") from error
    status = read_status(directory, all_runs=arguments.all_runs)
    if status.error:
        print(status.error, file=sys.stderr)
    if arguments.json:
        import json

        rows = [{field: getattr(row, field) for field in FIELDS} for row in status.rows]
        print(json.dumps({"complete": status.complete, "rows": rows}, indent=2))
    elif status.rows:
        from rankscope.table import render_table

        cells = [_cells(row, directory.resolve()) for row in status.rows]
        headers = ("role", "rank", "step", "scope", "tool", "status", "size", "file", "reason")
        print(render_table(headers, cells, right=("rank", "step", "size")))
        counts = Counter(row.status for row in status.rows)
        there = sum(row.status in FINE for row in status.rows)
        words = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        print(f"\n{there} of {len(status.rows)} are there: {words}")
    return 0 if status.complete else 1


def _cells(row: Row, directory: Path) -> tuple[str | int | None, ...]:
    from rankscope.table import human_size

    file = within(row.path, [directory])
    return row.role, row.rank, row.step, row.scope, row.tool, row.status, human_size(row.bytes), file, row.reason


def within(path: str, directories: Iterable[Path]) -> str:
    """A path as it lies in one of the directories; anywhere else, the whole of it."""
    for directory in directories:
        if path and Path(path).is_relative_to(directory):
            return str(Path(path).relative_to(directory))
    return path
