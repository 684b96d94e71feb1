"""The ``rankscope`` command. Start-up is part of its use, so each command is imported only when it is called for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from rankscope.errors import CommandError

COMMANDS = {
    "plugins": "list the installed tools, and whether they work here",
    "plan": "show what a config will profile, and why not",
    "status": "compare what was expected in a directory with what came",
    "recover": "finish what a killed process left unfinished in a directory",
    "launch": "start a command with what the tools of its role need before a process starts",
    "doctor": "look for what could keep traces from coming",
    "new-backend": "write a new tool: a complete distribution that works at once",
    "demo": "run the small PPO example with profiling on",
}
"""Each command, which is also the name of its module here (with _ for -), and what it is for."""

_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""What a shell reports for a program that SIGINT or SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after ``rankscope``; by default those of this process.

    Returns:
        The exit status: 0, 1 where the answer is no, 2 where the question cannot be answered.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command, known = "", False
    try:
        if not words or words[0].startswith("-"):
            return _without_command(words)
        command = words[0]
        module = _module(command)
        known = True
        words, rest = _split(words[1:]) if getattr(module, "TAKES_COMMAND", False) else (words[1:], [])
        arguments = _parser(command, module).parse_intermixed_args(words)
        arguments.command = rest
        code: int = module.run(arguments)
        sys.stdout.flush()
    except CommandError as error:
        name = f"rankscope {command}" if known else "rankscope"
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # argparse: help, version or a usage error
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return _BROKEN_PIPE
    return code


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and after the first ``--`` those of the command to start."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _without_command(words: list[str]) -> int:
    commands = "\n".join(f"  {name:<11} {purpose}" for name, purpose in (COMMANDS | _of_tools()).items())
    parser = argparse.ArgumentParser(
        prog="rankscope",
        usage="rankscope [--help | --version] COMMAND ...",
        description="Profiling of distributed training.",
        epilog=f"commands:\n{commands}\n\n'rankscope COMMAND --help' says more.\n\nexample:\n  rankscope plugins",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    arguments = parser.parse_args(words)
    if arguments.version:
        from importlib.metadata import version

        print(f"rankscope {version('rankscope')}", flush=True)
        return 0
    parser.print_help(sys.stderr)
    return 2


def _of_tools() -> dict[str, str]:
    """The commands that installed tools bring along, and whose they are."""
    from rankscope import registry

    return {name: f"(of {info.distribution})" for name, info in registry.commands().items() if name not in COMMANDS}


def _module(command: str) -> ModuleType:
    if command in COMMANDS:
        from importlib import import_module

        return import_module(f"{__name__}.{command.replace('-', '_')}")
    from rankscope import registry

    found = registry.load_command(command)
    if found is None:
        raise CommandError(_unknown(command))
    return found


def _parser(command: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"rankscope {command}",
        description=module.__doc__,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def _unknown(command: str) -> str:
    from rankscope.errors import did_you_mean, listing

    commands = [*COMMANDS, *_of_tools()]
    return f"no command named {command!r}.{did_you_mean(command, commands)} Commands: {listing(commands)}"


def _forget_output() -> None:
    """Whoever read our output went away: keep the interpreter from flushing into the broken pipe at its exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def at_least_one(text: str) -> int:
    """The type of an option that counts things."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number
