"""Run the small PPO example on this machine's CPUs with profiling on, then show what was captured."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from rankscope.cli import at_least_one
from rankscope.cli.stages import NotATraceError, StageTime, as_data, describe, of_role, read_stages
from rankscope.cli.status import within
from rankscope.errors import CommandError
from rankscope.table import human_size, render_table

if TYPE_CHECKING:
    from typing_extensions import Self

    from rankscope.artifacts.status import Row
    from rankscope.config import Config

EXAMPLES = """\
examples:
  rankscope demo
  rankscope demo --nproc 4 --steps 6 global_profiler.steps=2-3
  rankscope demo --tool nsys
  rankscope demo --engine ray
  rankscope demo global_profiler.global_tool_config.torch.discrete=true --dir /tmp/traces

Needs a checkout of the source (for examples/ppo) and torch. Without --dir, and unless global_profiler.save_path is
given, traces go to a new directory outputs/demo-<time>."""

ENGINES = ("torchrun", "ray")
EXAMPLE = Path("examples", "ppo")
SAVE_PATH = "global_profiler.save_path"
_NOISE = b"USDT:"
"""Mark of lines that kineto prints about trace points of the kernel, which nobody asked about."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the profiler config")
    parser.add_argument("--tool", metavar="TOOL", help="short for global_profiler.tool=TOOL")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="what runs it: torchrun (all roles in each process), or ray (a driver; each role has its own processes)",
    )
    parser.add_argument(
        "--nproc",
        type=at_least_one,
        default=2,
        metavar="N",
        help="number of processes, with ray of each role (default: 2)",
    )
    parser.add_argument("--steps", type=at_least_one, metavar="N", help="number of PPO steps")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the traces go")
    parser.add_argument("--config", type=Path, metavar="FILE", help="profiler config instead of the example's own")
    parser.add_argument("--json", action="store_true", help="print JSON; what the run prints goes to standard error")


def run(arguments: argparse.Namespace) -> int:
    """Run the example and show its traces; the status of the run, or 1 when something expected is not there.

    Raises:
        CommandError: the example or torch is missing, or the config is wrong.
    """
    from rankscope.config import ConfigError, load_config

    example = find_example()
    _need("torch", "pip install rankscope-torch torch")
    if arguments.engine == "ray":
        _need("ray", "pip install ray")
    config_file = (arguments.config or example / "profile.yaml").expanduser()
    try:
        tool = [f"global_profiler.tool={arguments.tool}"] if arguments.tool else []
        overrides = [*tool, *arguments.overrides, *_save_path(arguments, config_file)]
        config = load_config(config_file, overrides)
        _refuse_what_cannot_work(config)
        command = _command(arguments, example, config, config_file, overrides)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    roles = [role for role in config.roles() if role.enable]
    paths = [config.global_profiler.save_path, *(role.save_path for role in roles if role.save_path)]
    code = _run(command, output=sys.stderr if arguments.json else sys.stdout)
    captured = Captured([Path(path) for path in dict.fromkeys(paths)])
    if arguments.json:
        print(json.dumps({"exit_status": code, **captured.as_data()}, indent=2))
    else:
        print(f"\n{captured.text()}")
    if code:
        print(f"rankscope demo: the run ended with status {code}", file=sys.stderr)
    return code or (0 if captured.complete else 1)


def find_example(starts: Iterable[Path] | None = None) -> Path:
    """The folder of the example: above this file in a checkout, or above the current directory.

    Raises:
        CommandError: there is none.
    """
    for start in (Path(__file__), Path.cwd()) if starts is None else starts:
        resolved = start.resolve()
        for folder in (resolved, *resolved.parents):
            if (folder / EXAMPLE / "train.py").is_file():
                return folder / EXAMPLE
    raise CommandError(
        f"{EXAMPLE / 'train.py'} was not found above the installed package or the current directory; "
        "the demo needs a checkout of the source: run it there"
    )


def _command(
    arguments: argparse.Namespace, example: Path, config: Config, config_file: Path, overrides: Sequence[str]
) -> list[str]:
    """What is run. With Ray the driver itself gives each actor what its tools need."""
    steps = [] if arguments.steps is None else ["--steps", str(arguments.steps)]
    words = ["--config", str(config_file), *steps, *overrides]
    if arguments.engine == "ray":
        return [sys.executable, str(example / "train_ray.py"), "--nproc", str(arguments.nproc), *words]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.nproc)),
        *_wrap(config, config_file, overrides),
        str(example / "train.py"),
        *words,
    ]


def _refuse_what_cannot_work(config: Config) -> None:
    """Say now what else each process would say.

    Raises:
        ConfigError: a tool cannot work here.
    """
    from rankscope import registry
    from rankscope.errors import ConfigError, Problem

    problems = [
        Problem(role.tool_path, f"tool {tool!r} cannot work here: {answer.why}")
        for role in config.roles()
        for tool in role.tools
        if role.enable and not (answer := registry.availability(registry.load(tool, role.tool_path))).available
    ]
    if problems:
        raise ConfigError(problems)


def _wrap(config: Config, config_file: Path, overrides: Sequence[str]) -> list[str]:
    """The words that start each process with what its tools need; none where they need nothing."""
    from rankscope.launch import plan_launch

    plan = plan_launch(config)
    if not plan.command_prefix and not plan.env:
        return []
    launch = [sys.executable, "-m", "rankscope", "launch", "--config", str(config_file), *overrides]
    return ["--no-python", *launch, "--", sys.executable]


def _viewer(tool: str) -> str:
    """How files of a tool are opened, in words of the tool."""
    from rankscope import registry
    from rankscope.errors import ConfigError

    try:
        return str(getattr(registry.load(tool), "viewer", ""))
    except ConfigError:
        return ""


class Captured:
    """What lies in the save paths of a run.

    Args:
        directories: the save paths.

    Attributes:
        rows: one for each file, joined role and missing capture, each with the stages of its role.
        complete: everything that was expected is there.
        notes: what could not be read, and why.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        from rankscope.artifacts.status import read_status

        self.directories = [path for path in directories if path.is_dir()] or list(directories[:1])
        found = [read_status(directory) for directory in self.directories]
        self.complete = all(status.complete for status in found)
        self.notes = [status.error for status in found if status.error]
        rows = [row for status in found for row in status.rows]
        self.rows: list[tuple[Row, list[StageTime]]] = list(self._with_stages(rows))

    def _with_stages(self, rows: Sequence[Row]) -> Iterator[tuple[Row, list[StageTime]]]:
        sharing: dict[str, list[Row]] = {}
        for row in rows:
            sharing.setdefault(row.path, []).append(row)
        stages = {path: self._read(path) for path in sharing}
        for row in rows:
            others = {other.role for other in sharing[row.path]} - {row.role}
            yield row, of_role(stages[row.path], row.role, others, owner=row.status != "joined")

    def _read(self, path: str) -> list[StageTime]:
        if not path.endswith((".json.gz", ".json")):
            return []
        try:
            return read_stages(Path(path))
        except NotATraceError:
            return []  # of a tool that writes other JSON
        except (OSError, ValueError) as error:
            self.notes.append(f"no stage times of {Path(path).name}: {error}")
            return []

    def text(self) -> str:
        """The table, where the files lie, and how to look at one."""
        files = {row.path: row.bytes or 0 for row, _ in self.rows if row.path}
        where = ", ".join(str(path) for path in self.directories)
        many = "1 file" if len(files) == 1 else f"{len(files)} files"
        parts = [f"traces: {where} ({many}, {human_size(sum(files.values()))})"]
        if self.rows:
            headers = ("role", "rank", "step", "tool", "size", "file", "stage times")
            parts.append(
                render_table(headers, [self._cells(*row) for row in self.rows], right=("rank", "step", "size"))
            )
        parts.extend(f"note: {note}" for note in self.notes)
        if files:
            tools = dict.fromkeys(row.tool for row, _ in self.rows if row.path)
            parts.extend(f"To look at one: {text}" for tool in tools if (text := _viewer(tool)))
        return "\n\n".join(parts)

    def _cells(self, row: Row, stages: Sequence[StageTime]) -> tuple[str | int | None, ...]:
        file = within(row.path, self.directories) if row.path else f"{row.status}: {row.reason}"
        return row.role, row.rank, row.step, row.tool, human_size(row.bytes), file, describe(stages)

    def as_data(self) -> dict[str, Any]:
        """The same for JSON."""
        from rankscope.cli.status import FIELDS

        rows = [{**{key: getattr(row, key) for key in FIELDS}, "stages": as_data(stages)} for row, stages in self.rows]
        return {
            "directories": [str(path) for path in self.directories],
            "complete": self.complete,
            "rows": rows,
            "notes": self.notes,
        }


def _need(package: str, how: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise CommandError(f"the demo needs {package}; install it with: {how}")


def _save_path(arguments: argparse.Namespace, config_file: Path) -> list[str]:
    """The override that sends the traces to a directory of their own, where the user has not said where."""
    chosen = any(text.lstrip("+").partition("=")[0].strip() == SAVE_PATH for text in arguments.overrides)
    if arguments.dir is not None:
        if chosen:
            raise CommandError(f"--dir and {SAVE_PATH}=... say the same thing; give one of them")
        directory = arguments.dir.expanduser().absolute()
    else:
        if chosen or (arguments.config is not None and _has_save_path(config_file)):
            return []
        directory = _fresh(Path.cwd() / "outputs")
    return [f"{SAVE_PATH}={json.dumps(str(directory), ensure_ascii=False)}"]  # a JSON text is one of YAML, too


def _has_save_path(config_file: Path) -> bool:
    from rankscope.config.source import read_source

    return bool(read_source(config_file).global_values.get("save_path"))


def _fresh(parent: Path) -> Path:
    stem = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    directory, number = parent / stem, 1
    while directory.exists():
        number += 1
        directory = parent / f"{stem}-{number}"
    return directory


def _run(command: Sequence[str], output: TextIO) -> int:
    """Run the command with its output passed on; 128 plus the signal's number where a signal ended it."""
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    output.flush()
    with _Signals() as signals:
        # A session of its own: Ctrl-C reaches the launcher once, from us, and it stops its workers in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        signals.pass_on_to(process)
        with process:
            assert process.stderr is not None  # noqa: S101  # for the type checker
            for line in process.stderr:
                if _NOISE not in line:
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()
    if signals.came:
        return 128 + signals.came[0]
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


class _Signals:
    """Sends the first SIGINT or SIGTERM on to a process, where this is the thread that gets them.

    Attributes:
        came: all that came, in order.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on; one that came already is passed on at once."""
        self._process = process
        if self.came:
            process.send_signal(self.came[0])

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        # A second one would only disturb the launcher while it stops its workers.
        if len(self.came) == 1 and self._process is not None:
            self._process.send_signal(number)
        os.write(2, b"rankscope demo: waiting for the run to end\n")
