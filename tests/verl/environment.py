"""Make the environment of `make test-verl`.

The benchmark has an environment with verl, whose own profiler it measures, so rankscope must not be in it. This one
lies above it: it sees everything that is there, and adds what the tests need.

Run it from the root of the checkout: ``python tests/verl/environment.py FOLDER MEMBER…``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(folder: str, members: list[str]) -> str | None:
    """Make or complete the environment; what went wrong is returned in words."""
    sys.path.insert(0, str(ROOT))
    from bench.verl_env import verl_python

    below = verl_python()
    if below is None:
        return "there is no verl to test with, see above"
    python = str(Path(folder) / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([below, "-m", "venv", folder], check=True)
    site, theirs = _site(python), _site(below)
    (Path(site) / "verl_below.pth").write_text(f"{theirs}\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt"]
    editable = [word for member in members for word in ("-e", f"./{member}")]
    done = subprocess.run([*install, "-r", "tests/verl/requirements.txt", *editable], cwd=ROOT, check=False)
    return "pip failed, see above" if done.returncode else None


def _site(python: str) -> str:
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
