"""Where files end up, and under which names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.artifacts.names import parse_name
from rankscope.testing.fakes import FakeClock, FakeWorld
from rankscope.testing.life import Life
from rankscope.testing.rules import RuleBroken, rule
from rankscope.testing.surroundings import Writes, tree


@rule
def places(life: Life) -> None:
    """Nothing is written but below save_path: not to the working directory, the home or the temporary directory."""
    writes = Writes()
    handle = life.handle()
    life.step(handle, 1)
    life.end(handle)
    mend = "write to reservation.temporary or reservation.staged, or to a folder below context.save_path"
    for name, place in life.places.items():
        # Raw data may be staged in the temporary directory; the folder itself may stay.
        found = [entry for entry in sorted(tree(place)) if not re.fullmatch(r"rankscope-\d+(/staged-\w+)?", entry)]
        if found:
            raise RuleBroken(f"in the {name} directory there is now {', '.join(found)}", mend)
    outside = writes.outside([life.save_path, *life.places.values()])
    if outside:
        raise RuleBroken(f"written outside of save_path: {', '.join(outside)}", mend)


@rule
def names(life: Life) -> None:
    """Names are unique: for each rank, each process and each window, also when they are made at the same moment."""
    world = FakeWorld(2)

    def window_of(rank: int) -> Callable[[], None]:
        def body() -> None:
            with FakeClock().installed():
                handle = life.handle(rank=world.place(rank)["rank"], world_size=world.size)
            life.step(handle, 1)
            life.step(handle, 1)
            life.end(handle)

        return body

    for ended in life.processes([window_of(0), window_of(1), window_of(0)]):
        if ended.code != 0:
            raise RuleBroken(f"one of three processes with one save path {ended}", "its output is below")
    files = life.require_files()
    counts = Counter(record["path"] for record in files)
    twice = [Path(path).name for path, count in counts.items() if count > 1]
    if twice:
        raise RuleBroken(
            f"written by more than one window: {', '.join(twice)}",
            "take names from context.store.reserve(), or put rank, pid and window.id into them",
        )
    for record in files:
        path = Path(record["path"])
        if not path.exists():
            raise RuleBroken(f"{path.name} was published and is gone", "never write to a name that another one may use")
        _check_name(path.relative_to(life.save_path), record)


def _check_name(path: Path, record: dict[str, Any]) -> None:
    """Rank and process are in the name; a file that was not named by the store may say it in its folders."""
    fields = parse_name(path.name)
    if fields is not None:
        found = {"rank": fields.rank, "pid": fields.pid, "step": fields.step}
        expected = {key: record[key] for key in found}
        if found != expected:
            raise RuleBroken(f"{path} says {found}; it is of {expected}", "take names from context.store.reserve()")
    elif not re.search(rf"rank[-_]?{record['rank']}(?!\d)", str(path)):
        raise RuleBroken(f"{path} does not say that it is of rank {record['rank']}", "put rank<number> into the path")


@rule
def relocation(life: Life) -> None:
    """relocate() may be called again and again: it names finished files once, deletes nothing, and never fails."""
    handle = life.handle()
    life.step(handle, 1)
    handle.relocate()
    life.sound(handle, "the first relocation")
    folders = [life.save_path, *life.places.values()]
    before = {folder: tree(folder) for folder in folders}
    handle.relocate()
    life.sound(handle, "the second relocation")
    gone = {str(folder / entry) for folder in folders for entry in before[folder] - tree(folder) if _whole(entry)}
    life.step(handle, 2)
    life.end(handle)
    moved = Counter(record["moved_from"] for record in life.published() if record.get("moved_from"))
    twice = [path for path, count in moved.items() if count > 1]
    if twice:
        raise RuleBroken(f"moved more than once: {', '.join(twice)}", "name a file only while it is there, and whole")
    gone -= set(moved)
    gone |= {record["path"] for record in life.published() if not Path(record["path"]).exists()}
    if gone:
        raise RuleBroken(
            f"no longer there: {', '.join(sorted(gone))}", "name files; core moves them, and nobody deletes them"
        )
    life.told()


def _whole(entry: str) -> bool:
    """Not one of those that core and its helper process write and move away while they work."""
    return not entry.startswith((".rankscope/", "rankscope-"))
