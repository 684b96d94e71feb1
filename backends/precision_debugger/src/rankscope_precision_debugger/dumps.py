"""Where a dump lies, and what is in it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import zlib
from pathlib import Path

from rankscope_precision_debugger.settings import Settings

_MAX_RUNS = 10_000
_LONGEST = 100
"""Longest name of a stage's folder."""
_ENTRY = re.compile(rb'^  "', re.MULTILINE)
"""msprobe writes JSON with one blank a level: an entry of ``data`` begins with two."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one dump goes.

    Attributes:
        root: ``<save_path>/step_<N>/<stage>``, what msprobe is told.
        step: number that msprobe is told.
        folder: ``<root>/step<N>/rank<R>``, which msprobe makes of them.
        run: 2 for the second time that the stage runs in the step, and so on.
    """

    root: Path
    step: int
    folder: Path
    run: int

    def drop(self) -> None:
        """Nothing came: remove the folder, and those above it that are empty."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.folder.parent, self.root, self.root.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def set_aside(self) -> Path:
        """It is not whole: give it a name that nobody takes for a dump. Where it lies then."""
        aside = self.folder.with_name(f"incomplete-{self.folder.name}")
        with contextlib.suppress(OSError):
            self.folder.rename(aside)
            return aside
        return self.folder


@dataclasses.dataclass(frozen=True)
class Found:
    """What a dump holds.

    Attributes:
        files: number of files.
        tensors: number of tensor files among them.
        entries: number of modules and operators, each once for forward and once for backward.
    """

    files: int
    tensors: int
    entries: int


def claim(save_path: Path, step: int | None, stage: str, rank: int) -> Place:
    """Take a folder for a dump that nobody else has: neither an earlier run of the stage nor an earlier job.

    Raises:
        OSError: the save path cannot be written.
    """
    outer = save_path / ("step_unknown" if step is None else f"step_{step}")
    number = step if step is not None and step >= 0 else 0  # msprobe counts from 0
    label = folder_name(stage)
    for run in range(1, _MAX_RUNS):
        root = outer / (label if run == 1 else f"{label}-run{run}")
        folder = root / f"step{number}" / f"rank{rank}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return Place(root, number, folder, run)
    raise FileExistsError(f"{outer / label} holds {_MAX_RUNS - 1} dumps of this stage and rank already")


def folder_name(stage: str) -> str:
    """The stage as the name of a folder that msprobe accepts; what had to be changed is told apart by a checksum."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", stage)[:_LONGEST].lstrip(".-")
    return (
        name
        if name and name == stage
        else f"{name or 'stage'}-{zlib.crc32(stage.encode('utf-8', 'surrogatepass')):08x}"
    )


def look(place: Place, settings: Settings) -> Found:
    """Count what a finished dump holds.

    Raises:
        OSError: it cannot be read.
    """
    folder = place.folder
    if settings.level == "debug":
        _as_rank(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    name = "construct.json" if settings.task == "structure" else "dump.json"
    file = folder / ("debug.json" if settings.level == "debug" else name)
    return Found(
        files=len(files),
        tensors=sum(path.suffix in {".pt", ".npy"} for path in files),
        entries=_entries(file) if file.is_file() else 0,
    )


def _as_rank(folder: Path) -> None:
    """At level debug msprobe asks torch.distributed for the rank; without it, it names the folder by the process."""
    theirs = folder.with_name(f"proc{os.getpid()}")
    if theirs.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        theirs.rename(folder)


def _entries(file: Path) -> int:
    text = file.read_bytes()
    if file.name == "construct.json":
        return _in_json(text)
    return len(_ENTRY.findall(text)) or _in_json(text)


def _in_json(text: bytes) -> int:
    """The slow way: for small files, and for a msprobe that writes its JSON otherwise."""
    try:
        values = json.loads(text)
    except ValueError:
        return 0
    data = values.get("data", values) if isinstance(values, dict) else ()
    return len(data) if isinstance(data, dict | list) else 0
