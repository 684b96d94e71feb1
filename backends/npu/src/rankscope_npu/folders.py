"""The folders that torch_npu leaves, ``<host>_<pid>_<time>_ascend_pt``: find them, and tell what they hold.

Only the standard library is used here: the helper process and the command line import this module. Source: torch_npu
2.13.0, ``torch_npu/profiler/analysis/prof_common_func/_path_manager.py`` and ``_profiling_parser.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDING = "_ascend_pt"
SUFFIX = ".ascend"
"""Ending of an artifact of this tool: a directory that holds one folder of torch_npu."""

ABOUT = "rankscope.json"
"""File beside torch_npu's folder that says where it comes from."""

OUTPUT = "ASCEND_PROFILER_OUTPUT"
DONE = "analyse.done"


def find(directory: Path) -> Iterator[Path]:
    """Every folder of torch_npu at or below a directory, in order; what is still being written is left out."""
    if directory.name.endswith(ENDING):
        yield directory
        return
    for root, names, _ in os.walk(directory):
        ours = sorted(name for name in names if name.endswith(ENDING))
        names[:] = sorted(name for name in names if name not in ours and name != ".rankscope")
        found = [name for name in ours if not Path(root, name).is_symlink()]  # it may lead anywhere, to be written to
        for name in found:
            yield Path(root, name)


def inside(directory: Path) -> Path | None:
    """The folder of torch_npu in a directory of ours."""
    return next((path for path in sorted(directory.glob(f"*{ENDING}")) if path.is_dir()), None)


@dataclasses.dataclass(frozen=True)
class Holds:
    """What a folder holds.

    Attributes:
        info: ``profiler_info[_<rank>].json``, which torch_npu writes when it ends a capture; None without.
        framework: bytes of what was recorded of operators.
        device: whether there is a ``PROF_…`` folder, which the device's profiler makes.
    """

    info: Path | None
    framework: int
    device: bool

    @classmethod
    def of(cls, folder: Path) -> Holds:
        """Look into a folder."""
        framework = folder / "FRAMEWORK"
        return cls(
            info=next(iter(sorted(folder.glob("profiler_info*.json"))), None),
            framework=sum(file.stat().st_size for file in framework.glob("*") if file.is_file()),
            device=any(path.is_dir() and any(path.iterdir()) for path in folder.glob("PROF_*")),
        )


def read_info(folder: Path) -> dict[str, Any]:
    """The content of ``profiler_info[_<rank>].json``; empty when there is none, or it cannot be read."""
    info = Holds.of(folder).info
    return {} if info is None else _json(info)


def read_about(folder: Path) -> dict[str, Any]:
    """Where a folder comes from, as rankscope wrote it down beside; empty for a folder of somebody else."""
    return _json(folder.parent / ABOUT)


def wanted_exports(folder: Path) -> tuple[str, ...]:
    """What the analysis of a folder is to write, as was said when it was captured."""
    found: Any = read_info(folder)
    for key in ("config", "experimental_config", "_export_type"):
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, str):
        found = [found]
    return tuple(sorted(str(name) for name in found)) if isinstance(found, list) else ()


def exports(folder: Path) -> tuple[str, ...]:
    """What the analysis of a folder has written: any of db and text."""
    output = folder / OUTPUT
    found = []
    if any(_filled(file) for file in output.glob("*.db")):
        found.append("db")
    if _filled(output / "trace_view.json") or any(_filled(file) for file in output.glob("*.csv")):
        found.append("text")
    return tuple(found)


def analysed(folder: Path, wanted: tuple[str, ...] = ()) -> bool:
    """Whether the analysis of a folder came to its end, with everything that is wanted."""
    return (folder / OUTPUT / DONE).exists() and set(wanted or wanted_exports(folder)) <= set(exports(folder))


def _filled(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except OSError:
        return False


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
