"""Expected against got, and why not: the ledgers of a save path, merged.

Works from the ledgers alone, on any machine that sees the directory, while the run goes on or long after it.
"""

from __future__ import annotations

import calendar
import dataclasses
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from rankscope.artifacts.ledger import FOLDER, read_ledgers
from rankscope.host import host_name

RowStatus = Literal[
    "published",
    "joined",
    "aborted",
    "exporting",
    "recording",
    "not reached",
    "failed",
    "empty",
    "died",
    "missing",
]
"""What became of a capture.

``published``: the file is there. ``joined``: the file of another role of the same process, or of a later window, holds
it. ``aborted``: there is a file, of a step that raised. ``exporting``, ``recording``: not yet. ``not reached``: the run
did not come so far (yet). ``failed``, ``empty``: the tool or the disk said no. ``died``: the process went away in the
middle. ``missing``: the window was closed without a file, or never opened, and nobody said why.
"""

FINE: frozenset[str] = frozenset({"published", "joined", "aborted"})
"""States in which what was asked for is there."""

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that was expected, or came.

    Attributes:
        role, rank, step, scope, tool: what it is.
        status: what became of it.
        reason: why it is not ``published``, or holds less than was asked, in words.
        path: the file, or empty.
        bytes: its size, or None.
        host, pid, run_id: who was to make it.
    """

    role: str
    rank: int
    step: int | None
    scope: str
    tool: str
    status: RowStatus
    reason: str = ""
    path: str = ""
    bytes: int | None = None
    host: str = ""
    pid: int = 0
    run_id: str = ""


@dataclasses.dataclass(frozen=True)
class Status:
    """What a save path holds.

    Attributes:
        complete: everything that was expected is there.
        rows: one for each file, and one for each expected capture without a file.
        run_ids: all runs that the ledgers know, oldest first; ``rows`` are about the newest unless all were asked for.
        error: why there is nothing to say, or why nothing was expected; empty otherwise.
    """

    complete: bool
    rows: tuple[Row, ...]
    run_ids: tuple[str, ...] = ()
    error: str = ""


def read_status(directory: str | os.PathLike[str], *, all_runs: bool = False) -> Status:
    """Merge the ledgers of a save path.

    Args:
        directory: the save path.
        all_runs: report every run that left its ledger there, not only the newest.
    """
    records = read_ledgers(directory)
    if not records:
        where = Path(directory) / FOLDER
        return Status(False, (), error=f"no ledger in {where}: nothing was profiled there, or it was cleared")
    runs = _runs(records)
    chosen = runs if all_runs else runs[-1:]
    wanted = frozenset().union(*chosen)
    processes: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["run_id"] in wanted:
            processes[record["host"], record["pid"], record["run_id"]].append(record)
    reachable = _reachable(record for process in processes.values() for record in process)
    rows = sorted(
        (row for process in processes.values() for row in _Process(process, reachable).rows()),
        key=lambda row: (
            row.run_id if all_runs else "",
            row.role,
            row.rank,
            row.step or 0,
            row.tool,
            row.scope,
            row.path,
        ),
    )
    run_ids = tuple(run_id for run in runs for run_id in sorted(run))
    if rows:
        return Status(all(row.status in FINE for row in rows), tuple(rows), run_ids)
    planned, why = _nothing(processes.values())
    more = "; earlier runs left something there: --all-runs shows it" if len(runs) > len(chosen) else ""
    return Status(planned, (), run_ids, why + more)


def _reachable(records: Iterable[Record]) -> tuple[int, float]:
    """The first and last step that the run has, as its controllers said; no bounds where there was none."""
    said = [record for record in records if record["kind"] == "controller"]
    firsts = [record["first_step"] for record in said if isinstance(record.get("first_step"), int)]
    lasts = [record["total_steps"] for record in said if isinstance(record.get("total_steps"), int)]
    return min(firsts, default=0), max(lasts, default=math.inf)


def _nothing(processes: Iterable[list[Record]]) -> tuple[bool, str]:
    """Whether it was planned so, and why."""
    plans = [record for process in processes for record in process if record["kind"] == "plan"]
    reasons = dict.fromkeys(
        str(plan.get("reason")) for plan in plans if not plan.get("profiled") and plan.get("reason")
    )
    if not plans:
        return False, (
            "a run was driven with this directory, but no role that its config profiles took part "
            "(does a DistProfiler have the role of a profiler section?)"
        )
    return True, "nothing was expected" + (f": {'; '.join(list(reasons)[:5])}" if reasons else "")


def _runs(records: list[Record]) -> list[set[str]]:
    """Run ids that belong together, oldest run first.

    Without a launcher's id each process has one of its own. Such processes are one run when their times overlap.
    """
    spans: dict[str, list[str]] = {}
    makers: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for record in records:
        run_id, at = record["run_id"], record["time"]
        span = spans.setdefault(run_id, [at, at])
        span[:] = min(span[0], at), max(span[1], at)
        makers[run_id].add((record["host"], record["pid"]))
    runs: list[tuple[list[str], set[str], bool]] = []
    for run_id, span in sorted(spans.items(), key=lambda item: item[1]):
        alone = len(makers[run_id]) == 1
        if alone and runs and runs[-1][2] and span[0] <= runs[-1][0][1]:
            runs[-1][0][1] = max(runs[-1][0][1], span[1])
            runs[-1][1].add(run_id)
        else:
            runs.append((list(span), {run_id}, alone))
    return [ids for _, ids, _ in sorted(runs, key=lambda run: run[0][1])]


_WINDOW = ("tool", "window")


class _Process:
    """The records of one process of one run, and what they add up to."""

    def __init__(self, records: list[Record], reachable: tuple[int, float]) -> None:
        self.records = records
        self.reachable = reachable
        self.host: str = records[0]["host"]
        self.pid: int = records[0]["pid"]
        self.run_id: str = records[0]["run_id"]
        self.plans = {_key(record, "role", "rank", "tool"): record for record in self._of("plan")}
        self.joins = self._of("join")
        self.faults = self._of("fault")
        self.closes = {_key(record, "role"): record for record in self._of("close")}
        self.windows = self._windows()
        self.artifacts = self._artifacts()
        self.alive = _alive(self.host, self.pid, records[0]["time"])

    def rows(self) -> list[Row]:
        """What came, then what was expected and did not come."""
        found = [row for key in self.windows for row in self._window_rows(key)]
        orphans = [record for record in self.artifacts if _key(record, "tool", "window") not in self.windows]
        found += [self._artifact_row(record, None) for record in orphans]
        missing: list[Row] = []
        for plan in self.plans.values():
            if not plan.get("profiled"):
                continue
            for steps in _expected(plan, *self.reachable):
                if not self._covered(plan, steps):
                    missing.append(self._absent_row(plan, steps, found))  # noqa: PERF401  # clearer as a loop
        return found + missing

    def _of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def _windows(self) -> dict[str, Record]:
        windows: dict[str, Record] = {}
        for record in self._of("window"):
            windows.setdefault(_key(record, "tool", "window"), {}).update(
                {**record, "closed": record.get("event") == "close"}
            )
        return windows

    def _artifacts(self) -> list[Record]:
        """The latest word on each file: an export that was begun and then published is one file."""
        latest: dict[str, Record] = {}
        for number, record in enumerate(self._of("artifact")):
            latest[str(record.get("reserved") or record.get("path") or number)] = record
            if record.get("moved_from"):  # what was given up before was found after all
                for key, given_up in list(latest.items()):
                    if given_up.get("status") == "failed" and _key(given_up, *_WINDOW) == _key(record, *_WINDOW):
                        del latest[key]
        return list(latest.values())

    def _window_rows(self, key: str) -> list[Row]:
        window = self.windows[key]
        rows = [self._artifact_row(r, window) for r in self.artifacts if _key(r, "tool", "window") == key]
        if not window["closed"]:
            if self._gone(window):
                if any(row.status in FINE for row in rows):  # collected by whoever started the process
                    return rows
                return [*rows, self._row(window, "died", "the process went away while the window was open")]
            return [*rows, self._row(window, "recording", self._unseen("the window is open"))]
        gave_up = window.get("reason") == "fault" and all(row.status == "empty" for row in rows)
        if rows and not gave_up:
            return rows
        fault = self._fault(window, window.get("step"))
        if fault is not None:
            return [self._row(window, "failed", fault)]
        if window.get("reason") == "start failed":
            return [self._row(window, "failed", "the tool could not be started")]
        reason = "the window was closed and left no file"
        return [self._row(window, "missing", f"the step raised; {reason}" if window.get("aborted") else reason)]

    def _artifact_row(self, record: Record, window: Record | None) -> Row:
        status = str(record.get("status"))
        reason = str(record.get("reason") or "")
        if status == "published":
            aborted = bool(window and window.get("aborted")) or str(record.get("scope")).endswith("-aborted")
            early = f"ended early: {record['ended_early']}" if record.get("ended_early") else ""
            if aborted and window is not None and not window["closed"]:
                reason = "the process went away while the window was open"
            elif aborted:
                reason = "the step raised"
            told = [str(text) for text in record.get("warnings") or ()]
            words = "; ".join(text for text in (reason, early, *told) if text)
            return self._row(record, "aborted" if aborted else "published", words)
        if status == "joined":
            return self._row(record, "joined", reason)
        if status == "exporting" and self._gone(record):
            return self._row(record, "died", "the process went away before the export was done")
        if status == "exporting":
            return self._row(record, "exporting", self._unseen("the file is being written"))
        return self._row(record, "empty" if status == "empty" else "failed", reason)

    def _covered(self, plan: Record, steps: tuple[int, ...]) -> bool:
        """Whether a window or a file of this role says something about these steps."""
        for record in [*self.windows.values(), *self.artifacts]:
            if _same(plan, record, "role", "rank", "tool") and set(steps).intersection(_steps(record)):
                return True
        return False

    def _absent_row(self, plan: Record, steps: tuple[int, ...], found: list[Row]) -> Row:
        step = steps[0]
        for join in self.joins:
            if _same(plan, join, "role", "rank", "tool") and join.get("step") in steps:
                return self._joined_row(plan, join, found)
        fault = self._fault(plan, steps[-1])
        if fault is not None:
            return self._row(plan, "failed", fault, step=step)
        close = self.closes.get(_key(plan, "role"))
        if close is not None:
            last = close.get("last_step")
            if isinstance(last, int) and last >= step:
                return self._row(plan, "missing", f"no window was opened, although step {last} was reached", step=step)
            came = f"the run ended at step {last}" if isinstance(last, int) else "the run ended before its first step"
            why = f" ({close['reason']})" if close.get("reason") else ""
            return self._row(plan, "not reached", came + why, step=step)
        if self._gone(plan):
            return self._row(plan, "not reached", "the process went away before this step", step=step)
        return self._row(plan, "not reached", self._unseen("the run has not come to this step yet"), step=step)

    def _joined_row(self, plan: Record, join: Record, found: list[Row]) -> Row:
        owner, step = join.get("owner_role"), join.get("step")
        same = [row for row in found if (row.role, row.tool) == (owner, plan.get("tool"))]
        covering = [
            row
            for row in same
            if row.step == step
            or any(w.get("role") == owner and {step, row.step} <= _steps(w) for w in self.windows.values())
        ]
        good = [row for row in covering if row.status in FINE]
        reason = f"is in the window of {owner} in the same process"
        if good:
            row = good[0]
            return dataclasses.replace(
                self._row(plan, "joined", reason, step=step), path=row.path, bytes=row.bytes, scope=row.scope
            )
        if covering:
            return self._row(plan, covering[0].status, f"{reason}: {covering[0].reason}", step=step)
        return self._row(plan, "missing", f"{reason}, which left nothing", step=step)

    def _fault(self, about: Record, step: object) -> str | None:
        """Why a tool that is off since a fault yields nothing."""
        for fault in self.faults:
            if not _same(about, fault, "role", "rank", "tool"):
                continue
            when = fault.get("step")
            if not isinstance(when, int) or not isinstance(step, int) or when <= step:
                since = f" in step {when}; the tool is off since" if isinstance(when, int) and when != step else ""
                return f"{fault.get('hook')} failed{since}: {fault.get('error')}"
        return None

    def _gone(self, record: Record) -> bool:
        return self.alive is False or (self.alive is None and _key(record, "role") in self.closes)

    def _unseen(self, reason: str) -> str:
        return reason if self.alive else f"{reason} (the process is on host {self.host}; it cannot be seen from here)"

    def _row(self, record: Record, status: RowStatus, reason: str = "", *, step: int | None = None) -> Row:
        own = record.get("step")
        size = record.get("bytes")
        return Row(
            role=str(record.get("role", "")),
            rank=record["rank"] if isinstance(record.get("rank"), int) else 0,
            step=step if step is not None else own if isinstance(own, int) else None,
            scope=str(record.get("scope") or ""),
            tool=str(record.get("tool", "")),
            status=status,
            reason=reason,
            path=str(record.get("path") or ""),
            bytes=size if isinstance(size, int) else None,
            host=self.host,
            pid=self.pid,
            run_id=self.run_id,
        )


def _key(record: Record, *names: str) -> str:
    """These facts as one text: what a damaged record holds in place of a name or number can be anything."""
    return repr([record.get(name) for name in names])


def _same(one: Record, other: Record, *keys: str) -> bool:
    return all(one.get(key) == other.get(key) for key in keys)


def _steps(record: Record) -> set[int]:
    steps = record.get("steps")
    return {step for step in (record.get("step"), *(steps if isinstance(steps, list) else ())) if isinstance(step, int)}


def _expected(plan: Record, first: int, last: float) -> Iterator[tuple[int, ...]]:
    """The steps of each window that the plan asks for, without those that the run does not have."""
    steps = plan.get("steps")
    wanted = (
        {step for step in steps if isinstance(step, int) and first <= step <= last} if isinstance(steps, list) else ()
    )
    run: list[int] = []
    for step in sorted(wanted):
        if run and plan.get("continuous") and step == run[-1] + 1:
            run.append(step)
            continue
        if run:
            yield tuple(run)
        run = [step]
    if run:
        yield tuple(run)


def _alive(host: str, pid: int, first_record: str) -> bool | None:
    """Whether the process still runs; None when it runs elsewhere and cannot be asked."""
    if host not in {host_name(), os.uname().nodename}:
        return None
    try:
        # The name in brackets may hold blanks and brackets itself: the fields begin after the last one.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        state, started = fields[0], int(fields[19])
        if state in {"Z", "X"}:
            return False
        boot = time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)
        born = boot + started / os.sysconf("SC_CLK_TCK")
        spoke = calendar.timegm(time.strptime(first_record[:19], "%Y-%m-%dT%H:%M:%S"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, IndexError):
        return _signalled(pid)
    return born < spoke + 2  # a process that was born after the first record only inherited the pid


def _signalled(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
