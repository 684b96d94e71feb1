"""A session: one window of the rollout engines, and which of their files belong to it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rankscope.rollout.engine import EngineFile
from rankscope.rollout.wanted import make_prefix
from rankscope.types import Window


@dataclasses.dataclass(eq=False)
class Session:
    """One window of all profiled replicas.

    Attributes:
        step: training step that opened it, or None.
        steps: all that it may cover.
        scope: what it covers.
        limited: whether engines end it by themselves, by a token window.
        prefix: begins the names of its files, where the engine can do that.
        windows: by global rank, what goes into the ledger.
        recording: replicas that were started and not stopped.
        started: replicas that have recorded anything.
        partial: why it does not hold all that was asked, in words.
        came: by replica and what its files have in common, how many belong here.
        ranks: by replica, ranks whose file came.
        unknown: by replica, how many traces came of which nobody knows the GPU.
        began, stopped: seconds of the monotonic clock; None while it is open.
        began_ns: nanoseconds since the epoch.
        waited: whether its files were waited for already.
    """

    step: int | None
    steps: tuple[int, ...]
    scope: str
    limited: bool = False
    prefix: str = ""
    windows: dict[int, Window] = dataclasses.field(default_factory=dict)
    recording: set[int] = dataclasses.field(default_factory=set)
    started: set[int] = dataclasses.field(default_factory=set)
    partial: list[str] = dataclasses.field(default_factory=list)
    came: Counter[Any] = dataclasses.field(default_factory=Counter)
    ranks: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    unknown: Counter[int] = dataclasses.field(default_factory=Counter)
    began: float = dataclasses.field(default_factory=time.monotonic)
    began_ns: int = dataclasses.field(default_factory=time.time_ns)
    stopped: float | None = None
    waited: bool = False

    def __post_init__(self) -> None:
        self.prefix = self.prefix or make_prefix(self.step)

    @property
    def open(self) -> bool:
        """Whether it was not stopped yet."""
        return self.stopped is None


@dataclasses.dataclass(frozen=True)
class Sighting:
    """A file that was seen for the first time.

    Attributes:
        file: what its name says.
        seen: when, in seconds of the monotonic clock.
        written_ns: when it was written, in nanoseconds since the epoch: by its name, else by the file system.
    """

    file: EngineFile
    seen: float
    written_ns: int


def assign(sightings: Iterable[Sighting], sessions: Sequence[Session], replica: int) -> dict[str, Session]:
    """Which session each new file belongs to, by name. Files that belong to none are left out.

    A prefix in the name decides. Without one: an engine writes when a window ends, one worker's files in the order of
    its windows; so a file belongs to the latest window that began before it, but to the one before while that window is
    still open, or when that one still lacks a file of this worker and the later one has got its own.

    Args:
        sightings: files of one replica.
        sessions: those in which the replica took part, in the order in which they began.
        replica: its number.
    """
    found: dict[str, Session] = {}
    groups: dict[Any, list[Sighting]] = {}
    for sighting in sightings:
        by_prefix = next((one for one in sessions if one.prefix == sighting.file.prefix), None)
        if by_prefix is not None:
            found[sighting.file.name] = by_prefix
            by_prefix.came[replica, sighting.file.identity] += 1
        elif not sighting.file.prefix:
            groups.setdefault(sighting.file.identity, []).append(sighting)
    for identity, group in groups.items():
        group.sort(key=lambda one: one.written_ns)
        lacking = [one for one in sessions if not one.came[replica, identity] and _may_own(one, group[-1])]
        for number, sighting in enumerate(group):
            several = len(group) == len(lacking) > 1 and _may_own(lacking[number], sighting)
            session = lacking[number] if several else _owner(sighting, sessions, replica)
            if session is not None:
                found[sighting.file.name] = session
                session.came[replica, identity] += 1
    return found


def _may_own(session: Session, sighting: Sighting) -> bool:
    """Whether the file can have been written by then."""
    return session.began <= sighting.seen and (not session.open or session.limited)


def _owner(sighting: Sighting, sessions: Sequence[Session], replica: int) -> Session | None:
    able = [one for one in sessions if _may_own(one, sighting)]
    if not able:
        return None
    latest = able[-1]
    key = (replica, sighting.file.identity)
    earlier = [one for one in able[:-1] if not one.came[key]]
    # Clocks of engine and file system may differ a little from ours; a file from before the window is clearly older.
    if earlier and (latest.came[key] or sighting.written_ns < latest.began_ns - _SKEW):
        return earlier[-1]
    return latest


_SKEW = 50_000_000
