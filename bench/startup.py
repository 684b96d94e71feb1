"""What the command line and the import cost before they do anything."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.common import ROOT, Report, Settings

ABOUT = "rankscope plugins, rankscope --help and import rankscope, beside an interpreter that does nothing"
VERL = False
_HEAVY = ("torch", "omegaconf", "structlog", "pluggy", "numpy", "yaml", "argparse")


def run(settings: Settings) -> Report:
    """Each command in turns."""
    report = Report("startup")
    command = str(Path(sys.executable).with_name("rankscope"))
    python = sys.executable
    commands = {
        "python -c pass": [python, "-c", "pass"],
        "import argparse": [python, "-c", "import argparse"],
        "import rankscope": [python, "-c", "import rankscope"],
        "rankscope --help": [command, "--help"],
        "rankscope plugins": [command, "plugins"],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(4 if settings.quick else 41):
        for name, words in commands.items():
            began = time.perf_counter()
            subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            if number:  # the first turn brings the files into memory
                samples[name].append(1000 * (time.perf_counter() - began))
    series = {name: report.add("fresh process", name, "ms", values) for name, values in samples.items()}
    for name in list(commands)[1:]:
        target = 8 if name == "rankscope plugins" else None
        report.ratio(f"{name} / python -c pass", series[name], series["python -c pass"], target=target)
    for name, code in {
        "import rankscope": "import rankscope",
        "rankscope --help": "import rankscope.cli; rankscope.cli.main(['--help'])",
        "rankscope plugins": "import rankscope.cli; rankscope.cli.main(['plugins'])",
    }.items():
        count, heavy = _modules(code)
        report.add("modules", name, "modules", [count])
        report.note(f"{name} imports {', '.join(heavy) if heavy else 'none'} of {', '.join(_HEAVY)}.")
    return report


def _modules(code: str) -> tuple[int, list[str]]:
    """How many modules it imports, and which of the heavy ones."""
    told = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stderr.splitlines()[-1].split())
    return len(modules), [name for name in _HEAVY if name in modules]
