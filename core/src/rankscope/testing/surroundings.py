"""What belongs to the training and not to a tool: environment, working directory, signals, and the user's folders."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rankscope.testing.rules import RuleBroken

_OF_GLIBC = 1 << 31 | 1 << 32
"""Signals 32 and 33, which glibc itself begins to catch when threads are used in certain ways. Nobody else can."""

_MASKS = {"SigCgt": "caught", "SigIgn": "ignored", "SigBlk": "blocked"}


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a process finds around it, at one moment."""

    environment: dict[str, str]
    directory: str
    handlers: dict[str, Any]
    masks: dict[str, str]

    @classmethod
    def now(cls) -> Surroundings:
        """As they are."""
        handlers = {known.name: signal.getsignal(known) for known in signal.Signals}
        return cls(dict(os.environ), str(Path.cwd()), handlers, _masks())

    def require_same(self, moment: str) -> None:
        """They are now as they were then.

        Raises:
            RuleBroken: something differs.
        """
        now = Surroundings.now()
        changed = sorted(
            name
            for name in {*self.environment, *now.environment}
            if self.environment.get(name) != now.environment.get(name)
        )
        if changed:
            raise RuleBroken(
                f"os.environ is another one {moment}: {', '.join(changed)}",
                "name variables that the tool needs in launch(); they are set before the process starts",
            )
        if self.directory != now.directory:
            raise RuleBroken(
                f"the working directory is {now.directory} {moment}, not {self.directory}",
                "use absolute paths: those of the store, or context.save_path",
            )
        for name, handler in self.handlers.items():
            if now.handlers[name] != handler:
                raise RuleBroken(
                    f"{name} is handled by {now.handlers[name]!r} {moment}, not by {handler!r}",
                    "signals are the training's; core saves open windows at the end of a process",
                )
        for key, what in _MASKS.items():
            if self.masks.get(key) != now.masks.get(key):
                raise RuleBroken(
                    f"other signals are {what} {moment}: {', '.join(_differ(self.masks[key], now.masks[key]))}",
                    "a native library changed it; restore the signal before the hook returns",
                )


def _masks() -> dict[str, str]:
    """What the kernel knows of this thread's signals: native code changes them past Python."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/thread-self/status").read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key in _MASKS:
                found[key] = f"{int(value, 16) & ~_OF_GLIBC:016x}"
    return found


def _differ(before: str, now: str) -> list[str]:
    bits = int(before, 16) ^ int(now, 16)
    numbers = [number + 1 for number in range(64) if bits >> number & 1]
    known = {int(one): one.name for one in signal.Signals}
    return [known.get(number, str(number)) for number in numbers]


class Writes:
    """Files that Python code of this process opened to write; an audit hook sees all of them, for good."""

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}
        self._noting = True
        sys.addaudithook(self._hear)

    def outside(self, allowed: Iterable[Path]) -> list[str]:
        """Those that lie in none of these folders; from now on no more are noted."""
        self._noting = False
        places = tuple(f"{os.path.realpath(place)}/" for place in allowed)
        devices = ("/dev/", "/proc/", "/sys/")
        return sorted(path for path in self.paths if not path.startswith(places + devices))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._noting:
            return
        path, _, flags = arguments
        if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.paths[os.path.realpath(os.fsdecode(path))] = None


def settle(folder: Path) -> dict[str, Path]:
    """From now on home, temporary and working directory of this process are empty folders of this scenario."""
    places = {name: folder / name for name in ("home", "tmp", "cwd")}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    os.environ.update(HOME=str(places["home"]), TMPDIR=str(places["tmp"]))
    os.chdir(places["cwd"])
    tempfile.tempdir = None  # looked up anew
    return places


def tree(folder: Path) -> set[str]:
    """Every file and folder below a folder, by its relative path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
