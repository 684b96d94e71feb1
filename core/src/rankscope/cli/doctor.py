"""Look for what could keep traces from coming: on this machine and, with a config, in what it asks for."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rankscope.cli import at_least_one

EXAMPLES = """\
examples:
  rankscope doctor                                this machine, and every installed tool
  rankscope doctor profile.yaml --world-size 8    also what the config asks for
  rankscope doctor profile.yaml --no-selftest --json

Run it where the training will run. The exit status is 1 when there is a problem."""

_MARKS = {"ok": "ok", "note": "--", "warning": "?", "problem": "!!"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of the profiler config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    parser.add_argument("--world-size", type=at_least_one, default=1, metavar="N", help="number of ranks (default: 1)")
    parser.add_argument("--no-selftest", action="store_true", help="make no small capture with each tool")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of {subject, verdict, text, hint}")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found, as it is found; 1 when there is a problem, else 0."""
    from contextlib import redirect_stdout

    from rankscope.doctor import Finding, examine

    output = sys.stdout
    found: list[Finding] = []
    with redirect_stdout(sys.stderr):  # what tools print when they are imported is no finding
        for finding in examine(
            arguments.config,
            overrides=arguments.overrides,
            world_size=arguments.world_size,
            selftest=not arguments.no_selftest,
            progress=lambda text: print(f"... {text}", file=sys.stderr),
        ):
            found.append(finding)
            if not arguments.json:
                hint = f"\n   way out: {finding.hint}" if finding.hint else ""
                print(f"{_MARKS[finding.verdict]:<3}{finding.subject}: {finding.text}{hint}", file=output, flush=True)
    problems = sum(finding.verdict == "problem" for finding in found)
    if arguments.json:
        json.dump([dataclasses.asdict(finding) for finding in found], output, indent=1)
        print(file=output)
    else:
        print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}", file=output)
    return 1 if problems else 0
