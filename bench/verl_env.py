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
_NEEDED = (
    *("packaging", "ray", "tensordict", "pandas", "torchdata", "transformers", "datasets", "codetiming"),
    *("hydra-core", "orjson", "psutil", "peft", "pyarrow", "pylatexenc"),
)
_CHECK = (
    "import importlib.metadata as m; from verl.utils.profiler import DistProfiler; import torch; "
    "print(m.version('verl'), torch.__version__)"
)


def verl_python() -> str | None:
    """The interpreter that can import verl, or None after saying why there is none."""
    given = os.environ.get("BENCH_VERL_PYTHON")
    if given:
        return given if _works(given) else _without(f"BENCH_VERL_PYTHON={given} cannot import verl's profiler")
    python = str(FOLDER / "bin" / "python")
    if os.path.exists(python) and _works(python):  # noqa: PTH110 - a link, not to be resolved
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
    return python if _works(python) else _without(f"verl {VERSION} was installed, yet its profiler cannot be imported")


def _works(python: str) -> bool:
    try:
        done = subprocess.run([python, "-c", _CHECK], capture_output=True, timeout=300, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _without(reason: str) -> None:
    progress(f"going on without verl: {reason}")
