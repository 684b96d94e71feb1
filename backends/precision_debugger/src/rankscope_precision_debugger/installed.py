"""Whether msprobe is installed, found without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from rankscope import Availability

DISTRIBUTION = "mindstudio-probe"
OLDEST = (26, 0)
"""Older ones cannot be told the rank."""
COST = "a step with dumped stages takes 3 to 10 times as long, and each dump several MB or more"
_HINT = f"pip install {DISTRIBUTION}"


def availability() -> Availability:
    """Yes; or no, and what to install. Imports nothing."""
    try:
        return _availability()
    except Exception as error:  # noqa: BLE001 - whatever lies in site-packages
        return Availability(False, f"msprobe cannot be looked for: {type(error).__name__}: {error}", _HINT)


def _availability() -> Availability:
    version = _version(DISTRIBUTION)
    spec = importlib.util.find_spec("msprobe")
    if spec is None:
        return Availability(False, "msprobe is not installed", _HINT)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "pytorch" / "__init__.py").is_file() for folder in folders):
        other = _version("msprobe")
        named = f"'msprobe' {other}" if other else f"the module {spec.origin}"
        return Availability(
            False,
            f"another msprobe is installed: {named} is not the one of MindStudio, which PyPI calls {DISTRIBUTION}",
            f"pip uninstall msprobe && {_HINT}",
        )
    if importlib.util.find_spec("torch") is None:
        return Availability(False, "torch is not installed", "pip install torch")
    numbers = [int(word) for word in (version or "").split(".")[:2] if word.isdigit()]
    if len(numbers) == 2 and tuple(numbers) < OLDEST:
        return Availability(False, f"{DISTRIBUTION} {version} is too old", f"pip install '{DISTRIBUTION}>=26.0'")
    return Availability(True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
