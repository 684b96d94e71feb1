"""An environment of its own for verl's real profiler, made when it is first needed.

``BENCH_VERL_PYTHON`` names an interpreter that has verl already. Else ``.venv-verl`` is made in the checkout: verl
itself without its dependencies (which are an inference engine and more), then those that its profiler imports.
"""

from __future__ import annotations

import os
import subprocess
import sys

from bench.common import ROOT, progress

VERSION = "0.9.1"
FOLDER = ROOT / ".venv-verl"
READY = FOLDER / ".ready"
_NEEDED = (
    *("packaging", "ray", "tensordict", "pandas", "torchdata", "transformers", "datasets", "codetiming"),
    *("hydra-core", "orjson", "psutil", "peft", "pyarrow", "pylatexenc"),
)
_THERE = "import importlib.metadata as m; m.version('verl'), m.version('torch')"
_WHOLE = "from verl.utils.profiler import DistProfiler; import torch"


def verl_python() -> str | None:
    """The interpreter that can import verl, or None after saying why there is none."""
    given = os.environ.get("BENCH_VERL_PYTHON")
    if given:
        return given if _runs(given, _THERE) else _without(f"BENCH_VERL_PYTHON={given} has no verl or no torch")
    python = str(FOLDER / "bin" / "python")
    if READY.exists() and _runs(python, _THERE):
        return python
    progress(f"installing verl {VERSION} into {FOLDER.name} (once; some minutes)")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(FOLDER)],
        [*install, "-c", "constraints.txt", "torch", "numpy"],
        [*install, "--no-deps", f"verl=={VERSION}"],
        [*install, "-c", "constraints.txt", *_NEEDED],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or "no output").splitlines()[-1]
            return _without(f"{' '.join(command[1:4])} … failed: {last}")
    if not _runs(python, _WHOLE):
        return _without(f"verl {VERSION} was installed, yet its profiler cannot be imported")
    READY.touch()
    return python


def _runs(python: str, code: str) -> bool:
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=300, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _without(reason: str) -> None:
    progress(f"going on without verl: {reason}")
