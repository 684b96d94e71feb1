"""Finish what a killed process or a dead helper left staged for a save path."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from rankscope.errors import CommandError

EXAMPLES = """\
examples:
  rankscope recover outputs/profile
  rankscope recover outputs/profile --json

Run it on the host where the files were made. The exit status is 1 when something could not be finished."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the save path of a run")
    parser.add_argument("--any-host", action="store_true", help="also what hosts that are gone left there")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of {staged, status, path, reason}")


def run(arguments: argparse.Namespace) -> int:
    """Finish everything that can be finished; 0 when nothing is left that needs attention, else 1.

    Raises:
        CommandError: there is no such directory.
    """
    directory: Path = arguments.directory.expanduser().absolute()
    if not directory.is_dir():
        raise CommandError(f"cannot read the directory {str(directory)!r}: there is no such directory")
    from rankscope.artifacts.recover import Recovered, complete, recover

    output = sys.stdout

    def tell(outcome: Recovered) -> None:
        if not arguments.json:
            where = outcome.path or outcome.staged
            text = f"{outcome.status}: {where}" + (f" ({outcome.reason})" if outcome.reason else "")
            print(text, file=output, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # whatever a tool's finishing function prints is no answer of ours
        outcomes = recover(directory, any_host=arguments.any_host, progress=tell)
    if arguments.json:
        rows = [
            {"staged": str(found.staged), "status": found.status, "path": found.path, "reason": found.reason}
            for found in outcomes
        ]
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif not outcomes:
        print("nothing was left to recover")
    return 0 if complete(outcomes) else 1
