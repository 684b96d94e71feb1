"""A window's life: order, repetition, early ends, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rankscope import annotate, dispatch
from rankscope.testing.configs import read_ledger
from rankscope.testing.life import Life, described
from rankscope.testing.rules import RuleBroken, rule


@rule
def lifecycle(life: Life) -> None:
    """A start, any number of spans and steps (also none), a stop, relocation and the end go through without a fault."""
    handle = life.handle()
    life.start(handle, 1)
    life.train(handle)
    life.stop(handle, 1)
    life.start(handle, 2)
    with annotate("only_a_span"):
        life.exercise()
    life.stop(handle, 2)
    life.start(handle, 3)
    handle.step()
    handle.step()
    life.sound(handle, "steps outside of any span")
    life.stop(handle, 3)
    life.start(handle, 4)
    life.stop(handle, 4)
    life.start(handle, 5)
    life.train(handle)
    handle.advance(step=6)
    life.train(handle)
    life.stop(handle, 6)
    life.end(handle)


@rule
def outcome(life: Life) -> None:
    """Every window leaves a whole file, or the ledger says in words why not; also one in which nothing happened."""
    handle = life.handle()
    life.step(handle, 1)
    life.start(handle, 2)
    life.stop(handle, 2)
    life.end(handle)
    life.told()
    for record in life.require_files():
        path = Path(record["path"])
        if not path.exists():
            raise RuleBroken(f"{path.name} is in the ledger and not on the disk", "publish what is whole, and keep it")
        size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
        if not size:
            raise RuleBroken(f"{path.name} is empty", "call reservation.empty(reason) instead of publishing nothing")
        if path.is_file() and size != record["bytes"]:
            raise RuleBroken(
                f"{path.name} has {size} bytes; it had {record['bytes']} when it was published",
                "publish a file when nobody writes to it any more",
            )


@rule
def restart(life: Life) -> None:
    """Windows can be opened again and again: by a handle, by another role's, and by a new one after the end."""
    handle, other = life.handle(), life.handle("critic")
    life.step(handle, 1)
    life.step(handle, 2)
    life.step(other, 3)  # the tool's second object in this process
    life.step(handle, 4)
    life.start(handle, 5)
    other.start(step=5)  # joins: its object hears nothing
    life.train(other)
    life.stop(other, 5)
    life.stop(handle, 5)
    life.end(handle, other)
    later = life.handle()
    life.step(later, 6)
    life.end(later)
    life.told()
    _all_alike(life)


def _all_alike(life: Life) -> None:
    """Windows of one scope, in which the same was done, leave the same number of files."""
    first: dict[str, int] = {}
    for window, outcome in life.outcomes():
        count = sum(record["status"] == "published" for record in outcome)
        expected = first.setdefault(window["scope"], count)
        if count != expected:
            reasons = "; ".join(str(record.get("reason")) for record in outcome if record.get("reason"))
            raise RuleBroken(
                f"the first window of its kind left {_files(expected)}, {described(window)} {_files(count)}"
                + (f": {reasons}" if reasons else ""),
                "let go in stop() of all that start() took, so that the next start() finds it free",
            )


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


@rule
def discrete(life: Life) -> None:
    """With discrete set, each stage is a window of its own; a stage inside a stage is a range in its file."""
    handle = life.handle(options={"discrete": True})
    for step in (1, 2):
        life.start(handle, step)
        with annotate("generate"):
            life.exercise()
        life.train(handle)
        with annotate("outer"), annotate("inner"):
            life.exercise()
        life.stop(handle, step)
    life.end(handle)
    life.told()
    _all_alike(life)
    scopes = [window["scope"] for window in life.opened()]
    expected = ["generate", "actor_update", "outer"] * 2
    if scopes != expected:
        raise RuleBroken(f"windows were opened for {scopes}, not for {expected}", "leave discrete mode to core")


@rule
def early_end(life: Life) -> None:
    """A window can end before its stop, in the middle of running spans; the next one is a window like any other."""
    handle = life.handle(options={"max_seconds": 3600})
    life.start(handle, 1)
    with annotate("outer", scheduled=True), annotate("inner"):
        life.exercise()
        with _hours_later(), annotate("mini_batch0"):
            life.exercise()
    life.sound(handle, "the early end of a window")
    if handle.recording:
        raise RuleBroken("max_seconds did not end the window", "leave max_seconds to core: let over_budget be None")
    life.stop(handle, 1)
    life.step(handle, 2)
    life.end(handle)
    life.told()


def _hours_later() -> Any:
    """In the block core thinks that two hours have passed."""
    now = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)
    return mock.patch.object(dispatch, "time", now)


@rule
def exit_(life: Life) -> None:
    """A process may end with an open window: it ends in time, with its own exit status, and the window is saved."""

    def program() -> None:
        handle = life.handle()
        handle.start(step=1)
        life.train(handle)

    ended = life.process(program)
    if ended.code != 0:
        raise RuleBroken(
            f"the process {ended}",
            "stop() also runs at the end of Python: start no threads or pools there, import what it needs in start(), "
            "and let no wait be without a deadline",
        )
    faults = _faults(life)
    if faults:
        raise RuleBroken(f"at the end of Python {faults}", "start no threads or pools in stop(); import early")
    life.told()


def _faults(life: Life) -> str:
    def text(record: Mapping[str, Any]) -> str:
        return f"{record['tool']}.{record['hook']} raised {record['error']}"

    return "; ".join(text(record) for record in read_ledger(life.save_path, "fault"))


@rule
def faults(life: Life) -> None:
    """Where nothing can be saved the training goes on, and what the tool held is free for the next handle."""
    first = life.handle()
    life.step(first, 1)
    life.end(first)
    expected = len(life.published())
    with life.nowhere() as save_path:
        doomed = life.handle("critic", save_path=save_path)
        doomed.start(step=2)
        life.train(doomed)
        doomed.stop()
        doomed.stop(last=True)
        doomed.close()
    later = life.handle("ref")
    life.step(later, 3)
    life.end(later)
    life.told()
    after = len(life.published()) - expected
    if after < expected:
        reasons = [str(record.get("reason")) for record in life.artifacts() if record["status"] != "published"]
        raise RuleBroken(
            f"before a failed save a window left {_files(expected)}, after it {_files(after)}: {'; '.join(reasons)}",
            "let go of the tool's library before the file is reserved, or in a finally",
        )
