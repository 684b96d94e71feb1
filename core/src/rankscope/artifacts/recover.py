"""Finish what a killed process or a dead helper left staged.

A staged file whose job file is complete has everything that is needed: it is finished exactly as it would have been.
Raw data without a job was still being written when its process died; it is named, and left for the user to look at.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rankscope.artifacts.helper import JOB, attend
from rankscope.artifacts.ledger import read_ledgers
from rankscope.artifacts.names import parse_name
from rankscope.artifacts.places import beside, elsewhere, is_ours
from rankscope.host import born, host_name

_OURS = frozenset({host_name(), os.uname().nodename})


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What became of one staged file.

    Attributes:
        staged: the raw file.
        status: ``published``, ``empty``, ``failed``, ``busy`` (its process or helper still lives) or ``no job``.
        path: the finished file, or None.
        reason: why it is not published.
    """

    staged: Path
    status: str
    path: str | None
    reason: str = ""


def recover(
    save_path: Path, *, any_host: bool = False, progress: Callable[[Recovered], object] = lambda _: None
) -> list[Recovered]:
    """Finish everything that was left staged for a save path on this host.

    Args:
        save_path: directory of the artifacts.
        any_host: also what other hosts left there; only the user can know that they are gone.
        progress: called with each outcome as it comes.
    """
    found: list[Recovered] = []
    for folder in folders(save_path):
        for outcome in _recover_folder(folder, any_host=any_host):
            found.append(outcome)
            progress(outcome)
    return found


def left_over(folder: Path) -> list[Path]:
    """Job files in a staging folder whose process is gone; cheap, for the start of a process."""
    if not is_ours(folder):
        return []
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.name.endswith(JOB)]
    except OSError:
        return []
    return [path for name in sorted(names) if (path := folder / name) and _abandoned(_read(path))]


def folders(save_path: Path) -> list[Path]:
    """The staging folders of a save path on this host, also those that only its ledgers know of."""
    known = [beside(save_path), elsewhere(save_path)]
    for record in read_ledgers(save_path):
        staged = record.get("staged")
        if record.get("kind") == "artifact" and isinstance(staged, str):
            known.append(Path(staged).parent)
    return [folder for folder in dict.fromkeys(known) if is_ours(folder)]


def _recover_folder(folder: Path, *, any_host: bool = False) -> Iterator[Recovered]:
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        yield Recovered(folder, "failed", None, f"{type(error).__name__}: {error}")
        return
    jobs = [path for path in names if path.name.endswith(JOB)]
    for path in jobs:
        staged = path.with_name(path.name.removesuffix(JOB))
        job = _read(path)
        if not job:
            if _writer_is_gone(staged):
                reason = f"its job file {path} is damaged; the raw data is kept as it is"
                yield Recovered(staged, "no job", None, reason)
            elif path.exists():
                yield Recovered(staged, "busy", None, "its process is just handing it over")
            continue
        host = _place(job).get("host")
        if host not in _OURS and not any_host:
            reason = f"it belongs to host {host!r}: recover it there, or with --any-host if that host is gone"
            yield Recovered(staged, "busy", None, reason)
            continue
        if host in _OURS and not _abandoned(job):
            yield Recovered(staged, "busy", None, "the process that it belongs to still runs and will finish it")
            continue
        outcome = attend(path)
        if outcome is None:
            yield Recovered(staged, "busy", None, "another process is finishing it right now")
        else:
            yield Recovered(staged, outcome["status"], outcome.get("path"), outcome.get("reason", ""))
    with_job = {path.name.removesuffix(JOB) for path in jobs}
    for path in names:
        if path not in jobs and path.name not in with_job and _writer_is_gone(path):
            reason = "its process died while it was written; it is kept as it is, remove it when you do not need it"
            yield Recovered(path, "no job", None, reason)


def _abandoned(job: dict[str, Any]) -> bool:
    place = _place(job)
    return place.get("host") in _OURS and not _lives(place.get("pid"), place.get("born"))


def _place(job: dict[str, Any]) -> dict[str, Any]:
    place = job.get("ledger")
    return place if isinstance(place, dict) else {}


def _writer_is_gone(path: Path) -> bool:
    """Whether the pid in a staged file's name belongs to nobody any more."""
    fields = parse_name(path.name.removesuffix(".raw"))
    return fields is None or not _lives(fields.pid)


def _read(path: Path) -> dict[str, Any]:
    """A job; empty when its file is gone, half written or otherwise not what ``helper.finish`` can work with."""
    try:
        job = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(job, dict) or not isinstance(job.get("facts"), dict):
        return {}
    whole = all(isinstance(job.get(key), str) for key in ("function", "staged", "temporary", "final"))
    return job if whole and "arguments" in job and {"save_path", "host", "run_id", "pid"} <= _place(job).keys() else {}


def _lives(pid: object, since: object = None) -> bool:
    """Whether a process still runs; ``since`` is when it was born, else a later one with its pid counts as well."""
    now = born(pid) if isinstance(pid, int) and pid > 0 else None
    return now is not None and (since is None or since == now)


def complete(outcomes: Iterable[Recovered]) -> bool:
    """Whether nothing was left that needs somebody's attention."""
    return all(outcome.status in {"published", "empty", "busy"} for outcome in outcomes)
