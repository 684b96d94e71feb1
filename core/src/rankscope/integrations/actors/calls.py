"""Calls to the members of a group, and what is learned from their answers: who is gone, late, or raised; told once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from rankscope.artifacts.ledger import Ledger
from rankscope.host import host_name
from rankscope.integrations.actors import fanout
from rankscope.integrations.actors.fanout import Outcome
from rankscope.integrations.actors.inside import Reply
from rankscope.integrations.actors.members import FINE, Member, Phase, State, Transport, listed
from rankscope.log import get_logger
from rankscope.topology import run_id

Item = TypeVar("Item")
Send = Callable[[Member], Hashable]


class ActorCallError(Exception):
    """Strict mode: actors raised while they were driven, all in one error.

    Attributes:
        errors: the method, the actor in words, and what it raised in words.
    """

    def __init__(self, errors: Sequence[tuple[str, str, str]]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(f"{method} of {who}: {error}" for method, who, error in errors))

    def __reduce__(self) -> tuple[type[ActorCallError], tuple[tuple[tuple[str, str, str], ...]]]:
        return (type(self), (self.errors,))


class Calls:
    """The members of a group and their answers.

    Args:
        members: in the order in which they were given.
        transport: brings calls to them.
        in_flight: most calls at once.
        grace: seconds that a member is waited for which owes an answer already.
        strict: whether ``raise_errors`` raises.
    """

    def __init__(
        self, members: Sequence[Member], transport: Transport, *, in_flight: int, grace: float, strict: bool
    ) -> None:
        self.members = tuple(members)
        self.transport = transport
        self.grace = grace
        self.logger = get_logger(part="driver")
        self._in_flight = in_flight
        self._strict = strict
        self._lock = threading.RLock()  # the end may go on in the background
        self._ledgers: dict[str, Ledger] = {}
        self._errors: list[tuple[str, str, str]] = []
        self._said_unusable = False
        self._first_of(lambda member: member.key)

    @property
    def processes(self) -> list[Member]:
        """One member for each process, without those that are dead."""
        return [member for member in self.members if member.alias_of is None and not member.dead]

    @property
    def profiled(self) -> list[Member]:
        """Those of them whose windows have to be opened."""
        return [member for member in self.processes if member.profiled]

    def find_aliases(self) -> None:
        """Members that turned out to be in the process of another one are not called any more."""
        self._first_of(lambda member: member.place and (member.place.node, member.place.pid))

    def _first_of(self, key: Callable[[Member], Hashable]) -> None:
        first: dict[Hashable, Member] = {}
        for member in self.processes:
            same = key(member)
            if same is not None and first.setdefault(same, member) is not member:
                member.alias_of = first[same]

    # Calling.

    def each(self, phase: Phase, members: Sequence[Member], send: Send) -> list[Outcome]:
        """Call some members, learn from what they answer, and tell who did not.

        Returns:
            The outcomes, in the order of the members.
        """
        if not members or not self.usable(phase):
            return [Outcome() for _ in members]
        self._listen(phase, members)
        prompt = [member for member in members if member.owed is None or phase.patient]
        late = [member for member in members if member.owed is not None and not phase.patient]
        found = dict(zip(prompt, self.fan_out(prompt, send, phase.seconds), strict=True))
        found |= zip(late, self.fan_out(late, send, min(phase.seconds, self.grace)), strict=True)
        with self._lock:
            before = {member: member.state for member in members}
            for member, outcome in found.items():
                self._learn(phase, member, outcome)
            self._tell_silent(phase, [member for member in members if before[member] != member.state != FINE], before)
        return [found[member] for member in members]

    def ask(self, phase: Phase, members: Sequence[Member], send: Send) -> list[Outcome]:
        """Like ``each``, but without haste: who does not answer in time has done nothing wrong."""
        if not members or not self.usable(phase):
            return [Outcome() for _ in members]
        outcomes = self.fan_out(members, send, phase.seconds)
        with self._lock:
            for member, outcome in zip(members, outcomes, strict=True):
                if outcome.pending is None:
                    self._learn(phase, member, outcome)
        return outcomes

    def fan_out(self, items: Sequence[Item], send: Callable[[Item], Hashable], seconds: float) -> list[Outcome]:
        """Call, and learn nothing."""
        return fanout.fan_out(
            items,
            send=send,
            wait=self.transport.wait,
            result=self.transport.result,
            seconds=seconds,
            in_flight=self._in_flight,
        )

    def usable(self, phase: Phase) -> bool:
        """Whether anything can be called; if not, that is said once."""
        if self.transport.usable():
            return True
        if not self._said_unusable:
            self._said_unusable = True
            text = "the actors cannot be called any more: was ray.shutdown() called before the group was closed?"
            self.logger.warning(text, phase=phase.name, step=phase.step)
        return False

    def raise_errors(self) -> None:
        """Strict mode: raise what actors raised since the last time.

        Raises:
            ActorCallError: all of it.
        """
        errors, self._errors = self._errors, []
        if errors and self._strict:
            raise ActorCallError(errors)

    # What answers say.

    def _listen(self, phase: Phase, members: Sequence[Member]) -> None:
        """Whether those who owe an answer have given it meanwhile."""
        owing = {member.owed: member for member in members if member.owed is not None}
        for call in self.transport.wait(list(owing), 0.0) if owing else ():
            outcome = Outcome()
            try:
                outcome.value = self.transport.result(call)
            except Exception as error:  # noqa: BLE001 - learned below
                outcome.error = error
            with self._lock:
                owing[call].owed = None
                self._learn(phase, owing[call], outcome)

    def _learn(self, phase: Phase, member: Member, outcome: Outcome) -> None:
        if outcome.pending is not None:
            member.owed = member.owed if member.owed is not None else outcome.pending
            member.state, member.why = "late", f"no answer to {phase.name} within {phase.seconds:g} s"
        elif outcome.error is not None:
            member.state, member.why = self.transport.explain(outcome.error)
            if member.state == FINE:
                self._failed(phase, member, member.why)
        elif member.owed is None or phase.patient:
            member.owed = None
            if member.state != FINE:
                self.logger.info("an actor answers again", actor=str(member), phase=phase.name)
            member.state, member.why = FINE, ""
        if isinstance(outcome.value, Reply):
            member.move(outcome.value.place)
            if outcome.value.error:
                self._failed(phase, member, outcome.value.error, outcome.value.trace)

    def _failed(self, phase: Phase, member: Member, error: str, trace: str = "") -> None:
        self._errors.append((phase.name, str(member), error))
        facts: dict[str, Any] = {"actor": str(member), "phase": phase.name, "step": phase.step, "error": error}
        self.logger.error("an actor raised; the others go on" + f"\n{trace}".rstrip(), **facts)

    def _tell_silent(self, phase: Phase, members: Sequence[Member], before: Mapping[Member, State]) -> None:
        """Who stopped answering in this phase: once in the log, and in the ledgers of their directories."""
        by_reason: dict[str, list[Member]] = defaultdict(list)
        by_path: dict[str, list[Member]] = defaultdict(list)
        somewhere = next((path for member in self.members for path in member.save_paths), None) if members else None
        for member in members:
            for path in member.save_paths or ([somewhere] if somewhere else []):
                by_path[path].append(member)
            if before[member] == FINE:
                by_reason[f"{member.state}: {member.why}"].append(member)
            else:  # it was told already that it does not answer
                self.logger.info("more is known of an actor", actor=str(member), state=member.state, reason=member.why)
        for reason, silent in by_reason.items():
            text = "these did not answer; the others and the training go on"
            self.logger.warning(text, actors=listed(silent), phase=phase.name, step=phase.step, reason=reason)
        for path, silent in by_path.items():
            if path not in self._ledgers:
                self._ledgers[path] = Ledger(path, host=host_name(), run_id=run_id())
            self._ledgers[path].write(
                "unanswered", phase=phase.name, step=phase.step, actors=[member.record() for member in silent]
            )
