"""Write a new backend: a complete distribution that works at once, to be filled with what your tool does."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from rankscope.errors import CommandError, did_you_mean

EXAMPLES = """\
example:
  rankscope new-backend mytool
  cd rankscope-mytool
  pip install -e '.[test]'
  pytest

NAME becomes the tool's name in configs. The distribution goes to a new directory rankscope-NAME in the current one, or
in --dir; nothing that exists is touched."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("name", metavar="NAME", help="name of the tool: lower-case letters, digits and _")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="D", help="where its directory is made")
    parser.add_argument("--json", action="store_true", help="print JSON: {directory, files}")


def run(arguments: argparse.Namespace) -> int:
    """Write the files.

    Raises:
        CommandError: the name cannot be one, is taken, or the directory exists or cannot be written.
    """
    name = arguments.name
    _check(name)
    directory = arguments.dir.expanduser() / f"rankscope-{name.replace('_', '-')}"
    texts = _texts(name)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir()
        for path, text in texts.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError as error:
        raise CommandError(f"{str(directory)!r} exists already; nothing was written") from error
    except OSError as error:
        raise CommandError(f"cannot write to {str(directory)!r}: {error.strerror}") from error
    if arguments.json:
        json.dump({"directory": str(directory), "files": list(texts)}, sys.stdout, indent=1)
        print()
        return 0
    for path in texts:
        print(directory / path)
    print(f"\nnext: cd {directory} && pip install -e '.[test]' && pytest")
    return 0


def _check(name: str) -> None:
    from rankscope import registry

    if not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789") or "mytool"
        raise CommandError(f"{name!r} is no name of a tool: lower-case letters, digits and _; e.g. {better}")
    if name in registry.FIRST_PARTY:
        raise CommandError(f"{name!r} is a tool of rankscope itself (pip install {registry.FIRST_PARTY[name]})")
    taken = registry.providers().get(name)
    if taken:
        raise CommandError(f"{name!r} is a tool already, of {taken[0].provider}; choose another name")
    near = did_you_mean(name, registry.FIRST_PARTY)
    if near:
        print(f"note: {name!r} is close to the name of a tool of rankscope.{near}", file=sys.stderr)


def _texts(name: str) -> dict[str, str]:
    """The files of the distribution by path, as text."""
    words = "".join(part.capitalize() for part in name.split("_") if part)
    package = f"rankscope_{name}"
    now = version("rankscope")
    major, minor = now.split(".")[:2]
    facts = {
        "tool": name,
        "package": package,
        "distribution": f"rankscope-{name.replace('_', '-')}",
        "class_name": f"{words}Backend",
        "options_name": f"{words}Options",
        "suffix": f".{name}.json",
        "version": f"{major}.{minor}",
        "next_version": f"{major}.{int(minor) + 1}" if major == "0" else str(int(major) + 1),
    }
    folder = files("rankscope") / "scaffold"

    def filled(file: str) -> str:
        return Template((folder / file).read_text(encoding="utf-8")).substitute(facts)

    return {
        "pyproject.toml": filled("pyproject.toml.txt"),
        "README.md": filled("README.md.txt"),
        os.path.join("src", package, "__init__.py"): filled("module.py.txt"),  # noqa: PTH118 - a text for people
        os.path.join("src", package, "py.typed"): "",  # noqa: PTH118
        os.path.join("tests", f"test_{name}.py"): filled("test_module.py.txt"),  # noqa: PTH118
    }
