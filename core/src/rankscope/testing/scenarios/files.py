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
    life.exercise()  # what the training leaves there is not the tool's doing
    before = {name: tree(place) for name, place in life.places.items()}
    writes = Writes()
    handle = life.handle()
    life.step(handle, 1)
    life.end(handle)
    mend = "write to reservation.temporary or reservation.staged, or to a folder below context.save_path"
    for name, place in life.places.items():
        # Raw data may be staged in the temporary directory; the folder itself may stay.
        new = sorted(tree(place) - before[name])
        found = [entry for entry in new if not re.fullmatch(r"rankscope-\d+(/staged-\w+)?", entry)]
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
    """Relocation may be asked for again and again: it names finished files once, deletes nothing, and never fails."""
    others = [folder / "of_somebody_else.bin" for folder in (life.save_path, *life.places.values())]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("kept", encoding="utf-8")
    handle = life.handle()
    life.step(handle, 1)
    handle.relocate()
    life.sound(handle, "the first relocation")
    handle.relocate()
    life.sound(handle, "the second relocation")
    life.step(handle, 2)
    life.end(handle)
    moved = Counter(record["moved_from"] for record in life.published() if record.get("moved_from"))
    twice = [path for path, count in moved.items() if count > 1]
    if twice:
        raise RuleBroken(f"moved more than once: {', '.join(twice)}", "name a file only while it is there, and whole")
    kept = [*others, *(Path(record["path"]) for record in life.published())]
    gone = [str(path) for path in kept if not path.exists()]
    if gone:
        raise RuleBroken(f"no longer there: {', '.join(gone)}", "name files; core moves them, and nobody deletes them")
    life.told()
