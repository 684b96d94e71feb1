"""The actors of a group as the driver knows them: where they are, whether they answer, and their names in words."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from rankscope.integrations.actors.inside import HandleFacts, Place
from rankscope.ranges import compact

State = Literal["fine", "late", "dead", "unreachable"]
"""``late``: it has not answered in time and may do so yet. ``dead``: it never will. ``unreachable``: not now."""

FINE: State = "fine"


@dataclasses.dataclass(frozen=True)
class Phase:
    """A call to all members.

    Attributes:
        name: in words, for messages.
        seconds: its deadline.
        step: the training step, or None.
        patient: wait as long for members that owe an answer already as for the others.
    """

    name: str
    seconds: float
    step: int | None = None
    patient: bool = False


@dataclasses.dataclass(eq=False)
class Member:
    """One actor of a group.

    Attributes:
        target: its handle.
        name: group and number, ``actor[3]``.
        key: the same for handles of the same actor.
        ours: whether it has the methods of `ProfiledRayActor`.
        place: where it was when it answered last.
        alias_of: another member that is in the same process and is called in its place.
        state: whether it answers.
        why: why not, in words.
        owed: the call that it has not answered yet.
        title: its roles and ranks, once they are known.
    """

    target: Any
    name: str
    key: Hashable
    ours: bool = True
    place: Place | None = None
    alias_of: Member | None = None
    state: State = FINE
    why: str = ""
    owed: Hashable | None = None
    title: str = ""

    def __str__(self) -> str:
        return self.title or self.name

    @property
    def dead(self) -> bool:
        """Whether it will never answer again."""
        return self.state == "dead"

    @property
    def node(self) -> str:
        """Id of its node; empty where it never answered."""
        return self.place.node if self.place is not None else ""

    @property
    def handles(self) -> tuple[HandleFacts, ...]:
        """The profilers of its process."""
        return self.place.handles if self.place is not None else ()

    @property
    def profiled(self) -> bool:
        """Whether its windows have to be opened: some profiler is selected, or it is not known to have one."""
        return not self.handles or any(handle.selected for handle in self.handles)

    @property
    def save_paths(self) -> list[str]:
        """The directories of its profilers."""
        return list(dict.fromkeys(handle.save_path for handle in self.handles))

    def move(self, place: Place) -> None:
        """It has answered from there."""
        self.place = place
        self.title = " + ".join(f"{handle.role} rank {handle.rank}" for handle in place.handles) or self.title

    def record(self) -> dict[str, Any]:
        """For the ledger."""
        where = {"node": self.place.node, "host": self.place.host, "pid": self.place.pid} if self.place else {}
        ranks = [{"role": handle.role, "rank": handle.rank} for handle in self.handles]
        facts = {"name": self.name, "actor": str(self.key), **where}
        return {**facts, "ranks": ranks, "state": self.state, "why": self.why}


class Transport(Protocol):
    """How calls come to actors."""

    def usable(self) -> bool:
        """Whether actors can be called at all."""

    def call(self, member: Member, method: str, arguments: Mapping[str, Any]) -> Hashable:
        """Begin to call a method of a profiled worker; the result is a `Reply`, or anything where it has no mix-in."""

    def settle(self, member: Member, seconds: float) -> Hashable:
        """Begin to call ``profile_settle``."""

    def run(self, member: Member, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Hashable:
        """Begin to run a function in the actor's process."""

    def run_on_node(self, node: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Hashable:
        """Begin to run a function on a node, outside of any actor."""

    def wait(self, calls: list[Any], seconds: float) -> Sequence[Any]:
        """Those calls that are done; blocks for the first one, for so many seconds at most."""

    def result(self, call: Any) -> Any:
        """What a call that is done has returned, or raises what it raised."""

    def explain(self, error: Exception) -> tuple[State, str]:
        """What an error says of the actor, and the error in one line; ``fine``: the actor's method raised it."""


def listed(members: Iterable[Member]) -> str:
    """``actor rank 3,5-7; critic[0]``."""
    ranks: dict[str, list[int]] = defaultdict(list)
    names = []
    for member in members:
        for handle in member.handles:
            ranks[handle.role].append(handle.rank)
        names += [] if member.handles else [str(member)]
    words = [f"{role} rank {compact(sorted(found))}" for role, found in ranks.items()]
    return "; ".join([*words, *(names if len(names) <= 8 else [*names[:8], f"… ({len(names)} in all)"])])
