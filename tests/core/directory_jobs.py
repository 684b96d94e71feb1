"""Functions for the helper process that make directories."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope import NothingRecorded


def move(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    (staged / "about.txt").write_text(name)
    temporary.unlink()
    shutil.move(staged, temporary)
    return {"events": 3, **arguments}


def fail(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    temporary.unlink()
    temporary.mkdir()
    (temporary / "half").write_text("of it")
    if arguments.get("nothing"):
        raise NothingRecorded("nothing in it")
    raise ValueError("damaged")
