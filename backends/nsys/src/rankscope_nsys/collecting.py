"""The last sweep, in the launcher: reports that nsys finished only after the process had ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rankscope import Context, Window
from rankscope_nsys.attached import fill_in
from rankscope_nsys.ends import SUFFIX, report_name, report_paths
from rankscope_nsys.index import Index, read_indexes
from rankscope_nsys.launching import CONTROLLER, file_name, launch_name, obstacle, output_pattern, ray_is_up
from rankscope_nsys.options import NsysOptions
from rankscope_nsys.reports import Reports, why_no_report

WHOLE = "process"
"""Scope of a report that covers a process from start to end."""

_PAUSE = 0.1


def collect(options: NsysOptions, context: Context) -> None:
    """Move in what the processes of this launch could not, named by their indexes, and say what is missing."""
    if obstacle(os.environ) is not None:  # then launch gave nothing, and said why
        return
    deadline = time.monotonic() + options.report_wait
    while any(_busy(index, context) for _, index in _indexes(context)) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    reports = Reports()
    indexes = _indexes(context)
    busy = []
    for path, index in indexes:
        if _busy(index, context):
            busy.append(index.stem)
            context.logger.warning("a process goes on without its nsys; its reports are left to it", pid=index.pid)
        else:
            _collect_ranges(path, index, context, reports, deadline)
    found = _collect_whole(options, context, reports, deadline, busy)
    if not indexes and not found:
        context.logger.warning(
            "nsys was attached and captured nothing: no capture range opened in the process",
            steps=list(context.steps),
            help="the process may have said why; else: were these steps reached, by a DistProfiler that is started?",
        )


def _indexes(context: Context) -> list[tuple[Path, Index]]:
    name = launch_name(context)
    return [(path, index) for path, index in read_indexes(context.save_path) if index.launch == name]


def _busy(index: Index, context: Context) -> bool:
    """Whether the process will see to its reports itself: nsys was killed, and its application was not."""
    return any(not entry.report for entry in index.ranges) and index.alive(context.host)


def _collect_ranges(path: Path, index: Index, context: Context, reports: Reports, deadline: float) -> None:
    pending = [entry for entry in index.ranges if not entry.report and not _moved(index, entry.number, context)]
    if not pending:
        return
    reports.wait([(index.stem, entry.number) for entry in pending], max(0.0, deadline - time.monotonic()))
    store = context.store.on_behalf_of(index.pid, index.run_id)
    for entry in pending:
        report = reports.find(index.stem, entry.number)
        reserved = report_name(index.stem, entry.number)
        if report is None:
            reason = why_no_report(index.stem, entry.number)
            store.record({**entry.facts(), "status": "failed", "reserved": reserved, "reason": reason})
            continue
        moved = store.adopt(report, entry.as_window(), capture_range=entry.number, reserved=reserved)
        entry.report = moved.path.name
    index.write(path)


def _moved(index: Index, number: int, context: Context) -> bool:
    """Whether the process moved the report, and was killed before it could say so in its index."""
    return any(
        any(context.save_path.glob(f"*_{report.name}"))
        for report in report_paths(index.stem, number)
        if not report.exists()
    )


def _collect_whole(options: NsysOptions, context: Context, reports: Reports, deadline: float, busy: list[str]) -> bool:
    """Reports that no index speaks of: of a process that is captured as a whole, or that died before it could say."""
    pattern, name = output_pattern(options, context), file_name(context)
    filled = Path(fill_in(pattern, host=os.uname().nodename, pid=0, environ=os.environ))
    if not pattern.endswith(name):  # under a name that the user chose there may be reports of other runs: left there
        return any(filled.parent.glob(f"*{SUFFIX}"))
    if ray_is_up() and context.role != CONTROLLER:  # of which rank it is, nobody can tell
        return False
    files = sorted(filled.parent.glob(f"{name.replace('%p', '*')}*{SUFFIX}"))
    files = [path for path in files if not str(path).startswith(tuple(f"{stem}." for stem in busy))]
    for path in files:
        while not reports.whole(path) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        window = Window(id=0, role=context.role, step=None, steps=context.steps, scope=WHOLE, reason="manual")
        context.store.adopt(path, window)
    return bool(files)
