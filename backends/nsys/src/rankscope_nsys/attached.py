"""Whether this process runs under nsys, what that nsys was told, and where its reports will lie.

nsys' own command line is the one source that holds for every way of starting it: by `rankscope launch`, by Ray, by
hand. It is found among the ancestors of this process in ``/proc``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankscope_nsys.ends import NEVER, CaptureEnd, parse_end
from rankscope_nsys.flags import full_name

SESSION = "NSYS_PROFILING_SESSION_ID"
"""Set by nsys in every process that it traces."""

DOMAIN = "rankscope"
RANGE = "rankscope.window"
"""The range that a window opens; nsys can be told to capture while it is open."""

INJECTION = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")

_MOST_ANCESTORS = 64
_VALUELESS = frozenset({"help", "storage-metrics"})
_PATTERN = re.compile(r"%(?:q\{(\w+)\}|([hpn%]))")


@dataclasses.dataclass(frozen=True)
class Attached:
    """An nsys that traces this process.

    Attributes:
        session: its session, as in the environment of the processes that it traces.
        pid: of ``nsys profile``, or 0 where it was not found.
        program: the binary that runs there; empty likewise.
        capture: ``cudaProfilerApi``, ``nvtx``, ``none``, …: what starts a capture.
        drives: whether windows of ours do: False for a range of somebody else.
        end: what happens when a capture range ends.
        stem: absolute path of its reports without number and suffix, patterns filled in; empty where unknown.
    """

    session: str
    pid: int = 0
    program: str = ""
    capture: str = ""
    drives: bool = False
    end: CaptureEnd = NEVER
    stem: str = ""


def find_attached(environ: Mapping[str, str], pid: int, proc: Path = Path("/proc")) -> Attached | None:
    """The nsys that traces a process, or None.

    Args:
        environ: the environment of the process.
        pid: of the process.
        proc: stands in for ``/proc`` in tests.
    """
    session = environ.get(SESSION, "")
    if not session:
        return None
    target = pid
    for ancestor in ancestors(pid, proc):
        words = _words(ancestor, proc)
        arguments = _profile_arguments(words)
        if arguments is not None:
            return _described(session, ancestor, arguments, _filled(environ, target), proc)
        if not any(Path(word).name == "nsys-launcher" for word in words[:2]):
            target = ancestor  # in the end the process that nsys itself started: its %p
    return Attached(session)


def read_arguments(words: Sequence[str]) -> dict[str, str]:
    """The options of an ``nsys profile`` command line by full name, up to the application."""
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            if not given and name not in _VALUELESS:
                value = next(rest, "")
            options[name] = value
        elif word.startswith("-") and len(word) > 1:
            options[full_name(word[1])] = word[2:] or next(rest, "")
        else:
            break
    return options


def foreign_injection(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A variable by which somebody other than nsys hooks into NVTX or CUDA, and its value."""
    for name in INJECTION:
        value = environ.get(name, "")
        if value and "ToolsInjection" not in Path(value).name:
            return name, value
    return None


def untraced(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what nsys put there: for a helper that shall not be traced itself."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("NSYS_", "QUADD_"))}
    for name in INJECTION:
        kept.pop(name, None)
    libraries = [path for path in kept.pop("LD_PRELOAD", "").split(":") if path and "/target-linux-" not in path]
    return {**kept, **({"LD_PRELOAD": ":".join(libraries)} if libraries else {})}


def fill_in(pattern: str, *, host: str, pid: int, environ: Mapping[str, str]) -> str:
    """An output name with nsys' patterns filled in; ``%n``, which nobody can know, becomes ``*``."""

    def value(match: re.Match[str]) -> str:
        variable, letter = match.groups()
        if variable is not None:
            return environ.get(variable, "")
        return {"h": host, "p": str(pid), "n": "*", "%": "%"}[letter]

    return _PATTERN.sub(value, pattern)


def _filled(environ: Mapping[str, str], target: int) -> Mapping[str, object]:
    return {"host": os.uname().nodename, "pid": target, "environ": environ}


def _described(session: str, pid: int, arguments: Sequence[str], filling: Mapping[str, object], proc: Path) -> Attached:
    options = read_arguments(arguments)
    capture = options.get("capture-range", "none")
    trigger = options.get("nvtx-capture", "")
    ours = capture == "cudaProfilerApi" or (capture == "nvtx" and trigger in {f"{RANGE}@{DOMAIN}", f"{RANGE}@*"})
    end = parse_end(options.get("capture-range-end", "stop-shutdown"))
    if capture == "none" or end is None:
        end = NEVER
    output = fill_in(options.get("output", "report%n"), **filling)  # type: ignore[arg-type]
    cwd = program = ""
    with contextlib.suppress(OSError):
        cwd = str((proc / str(pid) / "cwd").readlink())
        program = str((proc / str(pid) / "exe").readlink())
    stem = output if output.startswith("/") else f"{cwd}/{output}" if cwd else ""
    return Attached(session, pid, program, capture, ours, end, stem)


def ancestors(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """The processes above a process, nearest first."""
    for _ in range(_MOST_ANCESTORS):
        try:
            text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
            pid = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        if pid <= 0:
            return
        yield pid


def _words(pid: int, proc: Path) -> list[str]:
    try:
        raw = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode("utf-8", "surrogateescape") for word in raw.split(b"\0")][:-1]


def _profile_arguments(words: Sequence[str]) -> Sequence[str] | None:
    """What follows ``nsys profile``; the program may be a script, and then an interpreter comes first."""
    for at in (0, 1):
        if len(words) > at + 1 and Path(words[at]).name == "nsys" and words[at + 1] == "profile":
            return words[at + 2 :]
    return None
