"""Measure rankscope beside torch alone and beside verl's profiler, in one run; print medians and ratios.

example: python bench/run.py --quick --only spans
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, this folder is there instead

from bench.common import RESULTS, ROOT, ChildFailed, Report, Settings, as_markdown, as_text, number, progress
from bench.verl_env import verl_python

SUBJECTS = ("startup", "spans", "start", "discrete", "export", "scale")
PAGE = ROOT / "docs" / "performance.md"
_BLOCKS = re.compile(r"(<!-- bench:begin (\S+) -->\n)(.*?)(<!-- bench:end -->)", re.DOTALL)


def main() -> int:
    """Run what was asked for. Exit status 1 when a subject could not be measured at all."""
    options = _options()
    if options.list:
        for subject in SUBJECTS:
            print(f"{subject:<9} {_module(subject).ABOUT}")
        return 0
    if options.write_docs:
        return _write_docs()
    subjects = options.only or list(SUBJECTS)
    needs_verl = any(getattr(_module(subject), "VERL", True) for subject in subjects)
    verl = verl_python() if needs_verl and not options.without_verl else None
    settings = Settings(quick=options.quick, verl=verl, sizes=tuple(options.sizes))
    reports: dict[str, Report] = {}
    failed = False
    for subject in subjects:
        began = time.monotonic()
        progress(f"{subject} …")
        try:
            report = _module(subject).run(settings)
        except ChildFailed as error:
            progress(f"{subject} could not be measured: {error}")
            failed = True
            continue
        progress(f"{subject}: {time.monotonic() - began:.0f} s")
        reports[subject] = report
        print(as_text(report), end="\n\n", flush=True)
    if reports:
        _keep(reports, settings)
        _tell_targets(reports)
    return int(failed)


def _options() -> argparse.Namespace:
    text, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="bench/run.py",
        description=text,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", action="append", choices=SUBJECTS, metavar="SUBJECT", help="one subject; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: about a minute")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[5, 50, 300],
        metavar="MB",
        help="raw trace sizes of the subject export; 300 MB alone takes half an hour",
    )
    parser.add_argument("--without-verl", action="store_true", help="leave verl out, and do not install it")
    parser.add_argument("--list", action="store_true", help="list the subjects")
    parser.add_argument(
        "--write-docs", action="store_true", help=f"measure nothing: fill {PAGE.name} from the latest kept results"
    )
    return parser.parse_args()


def _module(subject: str) -> Any:
    return importlib.import_module(f"bench.{subject}")


def _keep(reports: dict[str, Report], settings: Settings) -> None:
    now = dt.datetime.now(dt.timezone.utc)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{now:%Y%m%d-%H%M%S}-{os.getpid()}.json"
    kept = {
        "when": now.isoformat(timespec="seconds"),
        "quick": settings.quick,
        "verl": settings.verl is not None,
        "machine": _machine(),
        "subjects": {subject: report.plain() for subject, report in reports.items()},
    }
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    progress(f"kept in {path.relative_to(ROOT)}")


def _machine() -> dict[str, Any]:
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text(encoding="utf-8", errors="replace"))
        model = found[1] if found else ""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": model,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": os.getloadavg()[0],
    }


def _tell_targets(reports: dict[str, Report]) -> None:
    ratios = [(subject, one) for subject, report in reports.items() for one in report.ratios if one.met is not None]
    missed = [(subject, one) for subject, one in ratios if not one.met]
    print(f"targets: {len(ratios) - len(missed)} met, {len(missed)} missed")
    for subject, one in missed:
        print(f"  {subject}: {one.what} = {number(one.value)}, wanted {one.wanted}")


# The page.


def _write_docs() -> int:
    newest = _newest()
    if not newest:
        progress(f"no results in {RESULTS.relative_to(ROOT)}: run this without --write-docs first")
        return 1
    text = PAGE.read_text(encoding="utf-8")

    def fill(match: re.Match[str]) -> str:
        subject = match[2]
        if subject not in newest:
            progress(f"nothing was kept of {subject}: its block stays as it is")
            return match[0]
        kept = newest[subject]
        machine = kept["machine"]
        words = [
            f"Measured {kept['when'][:10]}",
            f"{machine['cores']} cores {machine['processor']}".rstrip(),
            f"Python {machine['python']}",
            f"torch {machine['torch']}",
        ]
        if kept["quick"]:
            words.append("a quick run: small sizes, few repeats")
        body = as_markdown(Report.from_plain(subject, kept["subjects"][subject]))
        return f"{match[1]}{', '.join(words)}.\n\n{body}\n{match[4]}"

    PAGE.write_text(_BLOCKS.sub(fill, text), encoding="utf-8")
    progress(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def _newest() -> dict[str, Any]:
    """For each subject the latest run that holds it; a whole run goes before a quick one."""
    found: dict[str, Any] = {}
    for kept in sorted(_results(), key=lambda kept: (not kept["quick"], kept["when"])):
        for subject in kept["subjects"]:
            found[subject] = kept
    return found


def _results() -> Iterator[Any]:
    for path in sorted(RESULTS.glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
