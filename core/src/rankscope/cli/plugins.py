"""List the installed tools. Nothing of them is imported unless --check asks for it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rankscope import registry

EXAMPLES = """\
examples:
  rankscope plugins
  rankscope plugins --check      imports each tool and asks it whether it works here
  rankscope plugins --json       a list of {name, distribution, version, available, reason, file}"""

_WORDS = {True: "yes", False: "no", None: "not checked"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--check", action="store_true", help="import each tool and ask it whether it works here")
    parser.add_argument("--json", action="store_true", help="print JSON: 'available' is true, false or null")


def run(arguments: argparse.Namespace) -> int:
    """List the tools; always 0, for a tool that does not work here is an answer."""
    rows = [row for tool, infos in registry.providers().items() for row in _rows(tool, infos, check=arguments.check)]
    if arguments.json:
        import json

        print(json.dumps(rows, indent=2))
        return 0
    from rankscope.table import render_table

    if rows:
        cells = [
            (row["name"], row["version"], row["distribution"], _WORDS[row["available"]], row["reason"], row["file"])
            for row in rows
        ]
        headers = ("tool", "version", "distribution", "available", "reason", "file")
        print(render_table(headers if arguments.check else headers[:-1], [row[: 5 + arguments.check] for row in cells]))
    else:
        print("no tool is installed")
    absent = [tool for tool in registry.FIRST_PARTY if tool not in {row["name"] for row in rows}]
    if absent:
        packages = " ".join(registry.FIRST_PARTY[tool] for tool in absent)
        print(f"\nnot installed: {', '.join(absent)}; to install: pip install {packages}")
    return 0


def _rows(tool: str, infos: list[registry.ToolInfo], *, check: bool) -> list[dict[str, Any]]:
    """One row for each distribution that provides the tool."""
    available: bool | None = None
    reason = ""
    if check:
        available, reason = _ask(tool)
    elif len(infos) > 1 or registry.disabled(tool) or not tool.isidentifier():
        # Asked only where the answer is known to be no: each question reads all entry points anew.
        problem = registry.check(tool, "")
        reason = "" if problem is None else problem.message
    return [
        {
            "name": info.name,
            "distribution": info.distribution,
            "version": info.version,
            "available": available,
            "reason": reason,
            "file": _file(info.value) if check else "",
        }
        for info in sorted(infos, key=lambda info: info.provider)
    ]


def _file(value: str) -> str:
    """The file that an entry point's module was imported from; empty where it was not."""
    return str(getattr(sys.modules.get(value.partition(":")[0]), "__file__", None) or "")


def _ask(tool: str) -> tuple[bool, str]:
    """Whether the tool works here, and why not; whatever its code does or prints becomes an answer."""
    from contextlib import redirect_stdout

    from rankscope.errors import ConfigError

    try:
        with redirect_stdout(sys.stderr):
            answer = registry.availability(registry.load(tool))
    except (ConfigError, SystemExit) as error:
        return False, str(error)
    return answer.available, answer.why
