"""What a process needs to run under nsys: the command prefix, and the same as entries of a Ray ``runtime_env``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankscope import ConfigError, Context, Launch
from rankscope.errors import did_you_mean
from rankscope.host import born
from rankscope_nsys.attached import DOMAIN, RANGE, SESSION, ancestors, fill_in, find_attached, foreign_injection
from rankscope_nsys.ends import parse_end
from rankscope_nsys.flags import SHORT, Binary, binary
from rankscope_nsys.options import NsysOptions
from rankscope_nsys.session import FOLDER, LAUNCH

CONTROLLER = "controller"
"""Role of the process that drives the others; it is captured as a whole."""

INSTALL = "Nsight Systems (https://developer.nvidia.com/nsight-systems)"

_LETTERS = {name: letter for letter, name in SHORT.items()}


def launch(options: NsysOptions, context: Context) -> Launch:
    """What `NsysBackend.launch` returns.

    Nothing where nsys must not be attached: inside of another nsys, or where somebody else hooks into NVTX or CUDA.

    Raises:
        ConfigError: nsys is not installed, or does not know an option.
    """
    problem = obstacle(os.environ)
    in_the_way = problem is not None
    if problem is not None:
        context.logger.warning(f"nsys is not put in front of the command: {problem}")
        if not ray_is_up() or foreign_injection(os.environ) is not None or _ray_runs_below_nsys():
            return Launch()
    program = shutil.which(options.nsys)
    known = binary(program) if program is not None else None
    if known is None:
        _tell_missing_program(options, context)
    chosen = profile_options(options, context, known)
    if known is not None:
        _check_options(known, chosen)
    if ray_is_up():
        _check_for_ray(options, context)
    environ = {LAUNCH: launch_name(context)}
    return Launch(
        env={} if in_the_way else environ,
        runtime_env={"nsight": ray_options(chosen), "env_vars": environ},
        command_prefix=() if in_the_way or known is None else command(known.path, chosen),
    )


def obstacle(environ: Mapping[str, str]) -> str | None:
    """What keeps nsys from being put in front of a command started from here, or None."""
    injection = foreign_injection(environ)
    if injection is not None:
        name, value = injection
        return f"another tool has set {name}={value}, and nsys would take its place; unset it first"
    if environ.get(SESSION):
        return "this process runs under nsys already, which traces its children too"
    return None


def profile_options(options: NsysOptions, context: Context, known: Binary | None) -> dict[str, str]:
    """Every option of ``nsys profile`` by its full name, with the output."""
    controller = context.role == CONTROLLER
    chosen = options.nsight_options(controller=controller)
    wanted = chosen.get("capture-range")
    if options.capture != "auto" and not controller:
        wanted = {"cuda": "cudaProfilerApi", "nvtx": "nvtx"}[options.capture]
    elif wanted != "none" and not controller and wanted != "nvtx":
        has_cuda = cuda_device()
        if wanted == "cudaProfilerApi" and not has_cuda:
            context.logger.info("there is no CUDA device: nsys captures by an NVTX range")
        wanted = "cudaProfilerApi" if has_cuda else "nvtx"
    if wanted in {None, "none"}:
        for name in ("capture-range", "capture-range-end"):
            chosen.pop(name, None)
    else:
        chosen["capture-range"] = str(wanted)
        if wanted == "nvtx":
            chosen["nvtx-capture"] = f"{RANGE}@{DOMAIN}"
            _check_domains(chosen)
        expected = capture_count(options, context)
        chosen.setdefault("capture-range-end", range_end(expected, known))
        _check_end(chosen["capture-range-end"], expected, context)
    chosen["output"] = _output(options, context, chosen.get("output"))
    if "capture-range" in chosen:
        _check_output(chosen["output"])
    return chosen


def capture_count(options: NsysOptions, context: Context) -> int | None:
    """How many windows the plan has: stretches of steps, or steps times stages. None where nobody knows."""
    steps = context.steps
    if not steps:
        return None
    if options.discrete:
        return len(steps) * options.stages_per_step if options.stages_per_step else None
    if context.continuous:
        return sum(1 for step in steps if step - 1 not in steps)
    return len(steps)


def range_end(expected: int | None, known: Binary | None) -> str:
    """The value of ``--capture-range-end``: each range a report, written as early as this nsys can."""
    count = "" if expected is None else f":{expected}"
    return f"repeat{count}{':async' if known is not None and known.writes_early else ''}"


def command(program: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """The words to put in front of a command."""
    return (program, "profile", *(f"--{name}={value}" for name, value in sorted(chosen.items())))


def ray_options(chosen: Mapping[str, str]) -> dict[str, str]:
    """The same for Ray 2.x (``ray/_private/runtime_env/nsight.py``): names without dashes.

    Ray joins ``o``, and only that name, to a folder of its own, where an absolute path wins; and it hands all of them
    to a shell as they are.
    """
    found = {}
    for name, value in sorted(chosen.items()):
        if name == "output":
            found["o"] = "".join(letter if _plain(letter) else f"\\{letter}" for letter in value)
        else:
            found[name] = value if all(map(_plain, value)) else shlex.quote(value)
    return found


def launch_name(context: Context) -> str:
    """A name for what this launcher starts with this role and rank: the same in ``launch`` and in ``collect``."""
    return _name(context, context.role, context.rank)


def file_name(context: Context) -> str:
    """What its reports are called until they are moved.

    The same for all ranks of a role: Ray's nsight plugin keeps one command, that of the latest ``runtime_env``, and
    ranks that are started at the same time may get each other's.
    """
    return f"pid%p-{_name(context, context.role)}"


def _name(context: Context, *more: object) -> str:
    facts = (context.host, context.pid, born(context.pid), *more)
    return hashlib.blake2s(repr(facts).encode(), digest_size=4).hexdigest()


def reports_folder(options: NsysOptions, context: Context) -> Path:
    """Where reports lie until they are whole, as a pattern of nsys; only the option `reports` may bring some along."""
    save_path = Path(str(context.save_path).replace("%", "%%"))
    if options.reports is None:
        return save_path / FOLDER / "%h"
    return save_path / Path(options.reports).expanduser()


def output_pattern(options: NsysOptions, context: Context) -> str:
    """The output as nsys is told, absolute or relative to the process's directory."""
    own = options.nsight_options(controller=context.role == CONTROLLER).get("output")
    return own or str(reports_folder(options, context) / file_name(context))


def how_to_start(context: Context) -> str:
    """The command that would have put this process under nsys."""
    if in_ray():
        return "start the actor with .options(runtime_env=rankscope.integrations.ray.runtime_env(config, ...))"
    words = getattr(sys, "orig_argv", sys.argv)
    line = shlex.join([Path(words[0]).name, *words[1:]]) if words else "python train.py"
    line = line if len(line) <= 200 else "python train.py ..."
    ours = f"rankscope launch --config <your config> --role {shlex.quote(context.role)} -- {line}"
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchrun ... --no-python {ours}"
    return ours


def in_ray() -> bool:
    """Whether this process is a driver or a worker of Ray."""
    return bool(os.environ.get("RAY_JOB_ID")) or ray_is_up()


def cuda_device() -> bool:
    """Whether this machine, or the Ray cluster, has a CUDA device; no driver is loaded for that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in {"", "-1", "NoDevFiles"}:
        return False
    if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists():
        return True
    if ray_is_up():
        with contextlib.suppress(Exception):
            return bool(sys.modules["ray"].cluster_resources().get("GPU"))
    return False


def _plain(letter: str) -> bool:
    return (letter.isascii() and letter.isalnum()) or letter in "@%+=:,./-_{}"


def _output(options: NsysOptions, context: Context, own: str | None) -> str:
    """The output; its folder is made, since nsys does not."""
    pattern = own or output_pattern(options, context)
    with contextlib.suppress(OSError):  # the process tries again
        Path(_filled(pattern)).parent.mkdir(parents=True, exist_ok=True)
    return pattern


def _filled(pattern: str) -> str:
    return fill_in(pattern, host=os.uname().nodename, pid=0, environ=os.environ)


def _tell_missing_program(options: NsysOptions, context: Context) -> None:
    if not ray_is_up():
        raise ConfigError(
            f"tool 'nsys' needs the program {options.nsys!r}, which is not on PATH; install {INSTALL}, or name the "
            "program in tool_config.nsys.nsys"
        )
    context.logger.warning("nsys is not on PATH here; the nodes on which Ray starts the workers need it there")


def _check_options(known: Binary, chosen: Mapping[str, str]) -> None:
    if not known.options:
        raise ConfigError(f"{known.path} does not work here: `{known.path} profile --help` prints no options")
    strange = [name for name in chosen if name not in known.options]
    if strange:
        hints = "; ".join(f"{name!r}.{did_you_mean(name, known.options)}" for name in strange)
        raise ConfigError(f"tool 'nsys': {known.path} {known.version} has no option {hints}".rstrip())


def _check_domains(chosen: Mapping[str, str]) -> None:
    """A filter that drops our domain would also drop the range that starts the capture."""
    included, excluded = (chosen.get(f"nvtx-domain-{way}", "").split(",") for way in ("include", "exclude"))
    if (included != [""] and DOMAIN not in included) or DOMAIN in excluded:
        raise ConfigError(
            f"tool 'nsys': the NVTX domain filter leaves out {DOMAIN!r}, in which windows open the capture; add it to "
            "nvtx-domain-include, or take it out of nvtx-domain-exclude"
        )


def _check_output(pattern: str) -> None:
    """In front of these two signs nsys 2023.4 puts another, looks for that name, and crashes at the first report."""
    found = [letter for letter in '"&' if letter in _filled(pattern)]
    if found:
        raise ConfigError(
            f"tool 'nsys': nsys cannot write reports below a path with {' or '.join(found)}, and its reports are to be "
            f"{pattern!r}; choose another save_path, or a folder for unfinished reports in tool_config.nsys.reports"
        )


def _check_end(text: str, expected: int | None, context: Context) -> None:
    end = parse_end(text)
    if end is not None and end.limit is not None and (expected is None or end.limit < expected):
        context.logger.warning(
            "nsys will capture fewer windows than there may be",
            capture_range_end=text,
            windows=expected if expected is not None else "unknown",
            help="leave capture-range-end out (null): it is computed from the plan",
        )


def ray_is_up() -> bool:
    """Whether this process is connected to a Ray cluster; Ray is not imported for that."""
    ray = sys.modules.get("ray")
    with contextlib.suppress(Exception):
        return ray is not None and bool(ray.is_initialized())
    return False


def _check_for_ray(options: NsysOptions, context: Context) -> None:
    """Ray 2.x starts ``nsys`` and ``python`` as PATH has them, whatever the driver runs with."""
    if options.nsys != "nsys":
        context.logger.warning("Ray takes nsys from PATH; the option `nsys` is for rankscope launch")
    found = shutil.which("python")
    if found is None or _prefix(found) != str(Path(sys.prefix)):
        context.logger.warning(
            "Ray starts workers under nsys with the `python` of PATH, which is another one than this",
            found=found or "none",
            this=sys.executable,
            help=f"put {Path(sys.executable).parent} first on PATH before `ray start` or ray.init()",
        )


def _prefix(program: str) -> str:
    """The environment of a Python program: the folder above its ``bin``."""
    return str(Path(program).parent.parent)


def _ray_runs_below_nsys() -> bool:
    """Whether the raylet of this node was started by the process tree that our nsys traces."""
    attached = find_attached(os.environ, os.getpid())
    if attached is None or not attached.pid:
        return False
    return any(attached.pid in ancestors(pid) for pid in _raylets())


def _raylets() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program = (folder / "cmdline").read_bytes().split(b"\0")[0]
            if program.endswith(b"/raylet"):
                yield int(folder.name)
