"""The end of a run over many nodes: tools finish in every process, the finish command runs once for each directory.

A directory is mostly local to a node, so that each node that holds files has its own run of the command. Where nodes
share it, one of them speaks for all: they find out by a file that only the first of them can make.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankscope.integrations.actors import ending
from rankscope.integrations.actors.fanout import Outcome
from rankscope.integrations.actors.inside import HandleFacts, Reply
from rankscope.integrations.actors.members import FINE, Member, Phase

if TYPE_CHECKING:
    from rankscope.integrations.actors.calls import Calls
    from rankscope.types import Artifact

NAME = "finish_profile"

PACE = 0.5
"""Seconds between two questions whether exports are done."""

SLICE = 5.0
"""Seconds for which one question is waited for before the others are looked at."""

HURRY = 30.0
"""Seconds that the end of the group allows for sending off the commands when exports took too long."""

Pairs = list[tuple[Member, HandleFacts]]


@dataclasses.dataclass
class _Team:
    """Nodes that share a directory.

    Attributes:
        nodes: the one that speaks for all comes first.
        able: members that could run the command, in the order in which they are asked to.
        dead: members of these nodes that are dead.
    """

    nodes: list[str]
    able: list[Member]
    dead: Pairs


class NodeFinish:
    """Carries the end out for a group, in the background where exports are not done.

    Args:
        calls: the members, and how to call them.
        seconds: deadline of each of its phases.
        per_node: run the command on each node, without asking whether nodes share the directory.

    Attributes:
        begun: whether it was asked for.
    """

    def __init__(self, calls: Calls, *, seconds: float, per_node: bool) -> None:
        self.begun = False
        self._calls = calls
        self._phase = Phase(NAME, seconds)
        self._per_node = per_node
        self._token = secrets.token_hex(8)
        self._files: dict[Member, Sequence[Artifact]] = {}
        self._on_node: dict[str, list[Member]] = defaultdict(list)
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._errands: dict[Hashable, str] = {}

    def begin(self) -> None:
        """Finish now; what has to wait for exports is done in the background."""
        self.begun = True
        if self._thread is not None:  # of an earlier run with the same actors
            self._thread.join(self._phase.seconds)
        busy = self._finish_tools(self._calls.profiled, self._phase)
        if not busy:
            self._run_commands()
            return
        thread = threading.Thread(target=self._later, args=(busy,), name="rankscope-finish-nodes", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is on its way out: there is no training that would wait
            self._later(busy)
        else:
            self._thread = thread

    def wait(self, seconds: float) -> None:
        """The group ends: wait for what is done in the background; when the time is over, do it with what is there."""
        end = time.monotonic() + seconds
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._hurry.set()
                self._thread.join(HURRY)
        while self._errands:
            done = self._calls.transport.wait(list(self._errands), max(0.0, end - time.monotonic()))
            if not done:
                break
            for call in done:
                self._tell_errand(self._errands.pop(call), call)

    # Tools.

    def _finish_tools(self, members: Sequence[Member], phase: Phase, **how: bool) -> list[Member]:
        """Ask processes to finish; those whose files are not whole yet."""
        outcomes = self._calls.each(phase, members, self._question(how))
        return [member for member, outcome in zip(members, outcomes, strict=True) if self._busy(member, outcome)]

    def _question(self, how: Mapping[str, bool]) -> Callable[[Member], Hashable]:
        return lambda member: self._calls.transport.run(member, ending.finish_tools, how)

    def _busy(self, member: Member, outcome: Outcome) -> bool:
        if not isinstance(outcome.value, Reply):
            return False
        self._files[member] = outcome.value.artifacts
        return outcome.value.busy > 0

    def _later(self, busy: Sequence[Member]) -> None:
        limit = max((facts.timeout for member in busy for facts in member.handles), default=0.0)
        end = time.monotonic() + limit
        asked: dict[Member, Hashable] = {}
        question = self._question({"first": False})

        def ask(member: Member) -> Hashable:
            """One question at a time: an actor that trains answers when it comes to it."""
            return asked.pop(member, None) or question(member)

        while busy and time.monotonic() < end and not self._hurry.wait(PACE):
            outcomes = self._calls.ask(Phase(NAME, SLICE), busy, ask)
            found = list(zip(busy, outcomes, strict=True))
            asked = {member: outcome.pending for member, outcome in found if outcome.pending is not None}
            busy = [member for member, outcome in found if outcome.pending is not None or self._busy(member, outcome)]
        if busy:
            text = "exports are not finished yet: the finish command runs without them"
            self._calls.logger.warning(text, actors=len(busy))
            self._finish_tools(busy, self._phase, first=False, give_up=True)
        self._run_commands()

    # The finish command.

    def _run_commands(self) -> None:
        self._on_node = defaultdict(list)
        for member in self._calls.members:
            if member.place is not None and member.alias_of is None:
                self._on_node[member.node].append(member)
        for path, due in self._due().items():
            self._run_for(path, due)

    def _due(self) -> dict[str, dict[str, Pairs]]:
        """By directory and node: whose process has a finish command to run; those who answer come first."""
        found: dict[str, dict[str, Pairs]] = defaultdict(lambda: defaultdict(list))
        for member in self._calls.members:
            if member.alias_of is None:
                for facts in member.handles:
                    if facts.command is not None:
                        found[facts.save_path][member.node].append((member, facts))
        for due in found.values():
            for pairs in due.values():
                pairs.sort(key=lambda pair: pair[0].state != FINE)
        return found

    def _run_for(self, path: str, due: Mapping[str, Pairs]) -> None:
        named = _distinct(member for pairs in due.values() for member, facts in pairs if facts.named)
        self._run(path, [_Team([], [member], []) for member in named if member.state == FINE], alone=True)
        chosen = set(named)
        rest = {node: [pair for pair in pairs if pair[0] not in chosen] for node, pairs in due.items()}
        teams = self._teams(path, rest)
        speakers = self._run(path, teams, alone=False)
        if speakers:
            self._calls.logger.info(
                "the finish command runs once for each directory",
                save_path=path,
                by="; ".join(f"{speaker} on node {speaker.node[:12]}" for speaker in speakers[:8]),
                directories=len(speakers),
            )
        done = {*named, *speakers}
        silent = _distinct(member for pairs in due.values() for member, _ in pairs if member not in done)
        self._leave(path, [member for member in silent if not member.dead])
        for team in teams:
            if not team.able and team.dead:
                self._send_errand(path, team)

    def _teams(self, path: str, due: Mapping[str, Pairs]) -> list[_Team]:
        """The nodes by directory. One whose actors are only late is left to itself: they finish at their own end."""
        able = {node: _distinct(member for member, _ in pairs if member.state == FINE) for node, pairs in due.items()}
        dead = {node: [pair for pair in pairs if pair[0].dead] for node, pairs in due.items()}
        alive = [node for node in due if able[node]]
        gone = [node for node, pairs in due.items() if pairs and len(dead[node]) == len(pairs)]
        speaker = {node: node for node in (*alive, *gone)}
        if len(speaker) > 1 and not self._per_node:
            for nodes in (alive[:1], alive[1:]):  # the first node goes first: it speaks for those that share with it
                speaker |= self._claims(path, {node: able[node] for node in nodes})
            speaker |= self._claims_of_the_dead(path, gone)
        teams: dict[str, _Team] = {}
        for node in sorted(speaker, key=lambda node: speaker[node] != node):
            team = teams.setdefault(speaker[node], _Team([], [], []))
            team.nodes.append(node)
            team.able += able[node]
            team.dead += dead[node]
        return list(teams.values())

    def _claims(self, path: str, alive: Mapping[str, list[Member]]) -> dict[str, str]:
        """Which node speaks for each node, as the nodes see the directory; one that cannot say it is left out."""
        found: dict[str, str] = {}
        able = {node: iter(members) for node, members in alive.items()}
        while able:
            asked = {node: member for node, members in able.items() if (member := next(members, None)) is not None}
            values = self._each(
                list(asked.values()),
                ending.claim_directory,
                {member: {"save_path": path, "token": self._token, "node": node} for node, member in asked.items()},
            )
            found |= {node: value for node, value in zip(asked, values, strict=True) if isinstance(value, str)}
            able = {node: members for node, members in able.items() if node in asked and node not in found}
        return found

    def _claims_of_the_dead(self, path: str, nodes: Sequence[str]) -> dict[str, str]:
        """The same for nodes on which no actor is left."""

        def send(node: str) -> Hashable:
            arguments = {"actor": None, "save_path": path, "token": self._token, "node": node}
            return self._calls.transport.run_on_node(node, ending.claim_directory, arguments)

        outcomes = self._calls.fan_out(nodes, send, self._phase.seconds)
        return {n: outcome.value for n, outcome in zip(nodes, outcomes, strict=True) if isinstance(outcome.value, str)}

    def _run(self, path: str, teams: Sequence[_Team], *, alone: bool) -> list[Member]:
        """In each team the first member that can do it runs the command; who did."""
        done: list[Member] = []
        waiting = [(team, iter(team.able)) for team in teams]
        while waiting:
            tried = {member: pair for pair in waiting if (member := next(pair[1], None)) is not None}
            arguments = {member: self._what(path, pair[0], member, alone=alone) for member, pair in tried.items()}
            values = self._each(list(tried), ending.run_command, arguments)
            good = {member for member, value in zip(tried, values, strict=True) if isinstance(value, Reply)}
            done += [member for member in tried if member in good]
            waiting = [pair for member, pair in tried.items() if member not in good]
        return done

    def _what(self, path: str, team: _Team, speaker: Member, *, alone: bool) -> dict[str, Any]:
        """What one process has to know to speak for others."""
        others: list[Artifact] = []
        gone = []
        below = f"{path.rstrip('/')}/"
        for member in () if alone else (member for node in team.nodes for member in self._on_node[node]):
            if member.dead and member.place is not None:
                gone.append((member.place.host, member.place.pid))
            elif member is not speaker:
                others += [file for file in self._files.get(member, ()) if str(file.path).startswith(below)]
        return {"save_path": path, "token": self._token, "others": others, "gone": gone}

    def _leave(self, path: str, members: Sequence[Member]) -> None:
        self._each(members, ending.leave_command, {member: {"save_paths": [path]} for member in members})

    def _each(
        self, members: Sequence[Member], function: Any, arguments: Mapping[Member, Mapping[str, Any]]
    ) -> list[Any]:
        run = self._calls.transport.run
        outcomes = self._calls.each(self._phase, members, lambda member: run(member, function, arguments[member]))
        return [outcome.value for outcome in outcomes]

    # Nodes on which all are dead.

    def _send_errand(self, path: str, team: _Team) -> None:
        node, facts = team.nodes[0], team.dead[0][1]
        places = [member.place for member, _ in team.dead if member.place is not None]
        gone = [(place.host, place.pid) for place in places]
        arguments = {"facts": facts, "token": self._token, "gone": gone}
        what = f"{len(team.dead)} dead on node {node[:12]}, {path}"
        try:
            call = self._calls.transport.run_on_node(node, ending.run_for_the_dead, arguments)
        except Exception as error:  # noqa: BLE001 - told like an errand that failed on its way
            self._tell_failed(what, error)
        else:
            self._errands[call] = what

    def _tell_errand(self, what: str, call: Hashable) -> None:
        try:
            outcome = self._calls.transport.result(call)
        except Exception as error:  # noqa: BLE001 - the node may be lost, too
            self._tell_failed(what, error)
        else:
            self._calls.logger.info("the end for dead actors", actors=what, outcome=outcome)

    def _tell_failed(self, what: str, error: Exception) -> None:
        text = "what dead actors left was not finished; look at it with: rankscope recover"
        self._calls.logger.warning(text, actors=what, reason=self._calls.transport.explain(error)[1])


def _distinct(members: Iterable[Member]) -> list[Member]:
    return list(dict.fromkeys(members))
