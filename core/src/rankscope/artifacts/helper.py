"""The helper process: finishes staged files away from the training process and its interpreter lock.

Started once per training process, without torch. It reads paths of job files from its standard input, one a line, and
answers each with one line of JSON; for the path of a staging folder it finishes what was left there. At the end of the
input it works off what it was given and ends; so it outlives a training process that was killed, and finishes what that
had handed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.artifacts.ledger import Ledger
from rankscope.artifacts.publish import checksum, discard, publish, size_of

NICENESS = 10
JOB = ".job"
"""Ending of a job file, after the name of the staged file."""


class NothingRecorded(Exception):  # noqa: N818 - an outcome, not an error
    """Raised by a finishing function: the staged file holds nothing of what was asked, so no file is published."""


def finish(job: Mapping[str, Any]) -> dict[str, Any]:
    """Finish one staged file: let its tool's function write the temporary file, then publish it.

    Args:
        job: ``function`` (``module:name``), ``staged``, ``temporary``, ``final``, ``facts`` for the ledger, ``ledger``
            (where it is and whose it is) and ``arguments`` of the function.

    Returns:
        The ledger's ``artifact`` record. A failure is one too, with its reason; the staged file then stays.
    """
    began = time.monotonic()
    staged, temporary, final = Path(job["staged"]), Path(job["temporary"]), Path(job["final"])
    outcome: dict[str, Any] = {**job["facts"]}
    keep = False
    try:
        module, _, name = job["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        outcome.update(function(staged, temporary, final.name, job["arguments"]))
        crc = "" if temporary.is_dir() else checksum(temporary)
        size = size_of(temporary)
        path = publish(temporary, final)
        outcome.update(status="published", path=str(path), bytes=size, checksum=crc)
    except NothingRecorded as nothing:
        outcome.update(status="empty", path=None, reason=str(nothing))
    except Exception as error:  # noqa: BLE001 - whatever a file does to its function is told, not suffered
        keep = staged.exists()
        reason = f"{type(error).__name__}: {error}"
        outcome.update(status="failed", path=None, reason=f"{reason} (raw data kept in {staged})" if keep else reason)
    finally:
        discard(temporary)
    if not keep:
        for path in (staged, job_file(staged)):
            discard(path)
    outcome["seconds_background"] = round(time.monotonic() - began, 4)
    place = job["ledger"]
    ledger = Ledger(Path(place["save_path"]), host=place["host"], run_id=place["run_id"], pid=place["pid"])
    ledger.write("artifact", **outcome)
    return outcome


def job_file(staged: Path) -> Path:
    """The job file that lies beside a staged file."""
    return staged.with_name(staged.name + JOB)


def attend(path: Path) -> dict[str, Any] | None:
    """Finish the job of a job file, unless another process has it in hand or has done it.

    Returns:
        The outcome as of ``finish``; None when there was nothing to do.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return None
        if os.fstat(file.fileno()).st_nlink == 0:  # done by somebody between the two lines
            return None
        return finish(json.loads(file.read()))


def _look_after(folder: Path) -> None:
    """Finish what an earlier run left in a staging folder."""
    from rankscope.artifacts.recover import left_over

    for path in left_over(folder):
        attend(path)


def main() -> None:
    """Work off jobs until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the training process
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    # Whatever a finishing function prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        path = Path(os.fsdecode(line.rstrip(b"\n")))
        try:
            if path.is_dir():
                _look_after(path)
                continue
            told, outcome = True, attend(path) or {"status": "taken"}
        except Exception as error:  # noqa: BLE001 - the next job must not suffer from this one
            told, outcome = False, {"status": "failed", "path": None, "reason": f"{type(error).__name__}: {error}"}
        # The training process may be gone; the file and its ledger line are what counts.
        with contextlib.suppress(OSError):
            answers.write(
                json.dumps({"job": str(path), "outcome": outcome, "told": told}, default=str).encode() + b"\n"
            )
            answers.flush()


if __name__ == "__main__":
    main()
