"""Start a command with what the tools of its role need before a process starts, such as nsys.

On a rank that the config does not profile, the command is started as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

from rankscope.cli import at_least_one
from rankscope.errors import CommandError

if TYPE_CHECKING:
    from rankscope.launch import LaunchPlan

EXAMPLES = """\
examples:
  rankscope launch --config profile.yaml --role actor -- python train.py
  torchrun --nproc-per-node 8 --no-python rankscope launch --config profile.yaml -- python train.py
  rankscope launch --config profile.yaml --dry-run -- python train.py

Rank and world size come from the launcher's environment (RANK, WORLD_SIZE, ...). The exit status is the command's; 2
when it could not be started."""

TAKES_COMMAND = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.usage = f"{parser.prog} --config FILE [--role ROLE ...] [options] -- COMMAND ..."
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the profiler config")
    parser.add_argument(
        "--role",
        action="append",
        dest="roles",
        metavar="ROLE",
        help="role that runs in the process; may be repeated (default: every role of the config)",
    )
    parser.add_argument("--steps-total", type=at_least_one, metavar="T", help="number of steps of the run, if known")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON {command, env, tools, reasons}")


def run(arguments: argparse.Namespace) -> int:
    """Start the command; its exit status.

    Raises:
        CommandError: no command, a wrong config, a tool that cannot be launched here, or no such program.
    """
    from rankscope.config import ConfigError
    from rankscope.launch import launcher_of, plan_launch
    from rankscope.topology import detect

    if not arguments.command:
        raise CommandError("no command is given; write it after --, e.g. -- python train.py")
    place = detect()
    try:
        plan = plan_launch(
            arguments.config,
            roles=arguments.roles,
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            total_steps=arguments.steps_total,
            overrides=arguments.overrides,
        )
    except ConfigError as error:
        raise CommandError(str(error)) from error
    if plan.unknown:
        raise CommandError("; ".join(plan.unknown))
    launcher = launcher_of(arguments.command)
    if plan.command_prefix and launcher and place.source == "default":
        tool = next(tool.tool for tool in plan.tools if tool.launch.command_prefix)
        raise CommandError(
            f"{tool} has to be started once for each process, not around {launcher}; write: "
            f"{launcher} ... --no-python rankscope launch --config {arguments.config} -- python ..."
        )
    command = [*plan.command_prefix, *arguments.command]
    if arguments.dry_run:
        _show(plan, command, as_json=arguments.json)
        return 0
    for program in (command[0], arguments.command[0]):  # behind a prefix the latter's absence would be told by others
        if shutil.which(program) is None:
            raise CommandError(f"there is no program {program!r} on PATH")
    return _start(plan, command)


def _show(plan: LaunchPlan, command: list[str], *, as_json: bool) -> None:
    if as_json:
        tools = [tool.tool for tool in plan.tools]
        answer = {"command": command, "env": dict(plan.env), "tools": tools, "reasons": dict(plan.reasons)}
        print(json.dumps(answer, indent=2))
        return
    for role, reason in plan.reasons.items():
        print(f"# {role}: {reason}")
    print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in plan.env.items()), shlex.join(command)]))


def _start(plan: LaunchPlan, command: list[str]) -> int:
    environ = {**os.environ, **plan.env}
    sys.stdout.flush()
    sys.stderr.flush()
    if not plan.command_prefix:
        os.execvpe(command[0], command, environ)  # noqa: S606  # the user's own command
    from rankscope.cli.child import run_child

    code = run_child(command, environ)
    plan.collect()
    return code
