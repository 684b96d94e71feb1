"""Actors that only exist on paper: what they answer, when they die, and which nodes share a directory."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope import Artifact
from rankscope.integrations.actors.inside import HandleFacts, Place, Reply
from rankscope.integrations.actors.members import Member, State


class DeadError(Exception):
    """The actor is gone for good."""


class AwayError(Exception):
    """The actor cannot be reached now."""


@dataclasses.dataclass
class Paper:
    """An actor on paper.

    Attributes:
        place: where it is.
        dies_at: the name of the call in which it dies.
        silent_at: calls that it does not answer; ``*`` for all.
        raises_at: calls in which its method raises; ``lost_at``: in which it cannot be reached.
        busy: how often it says at the end that files are still being exported.
        files: its files.
    """

    place: Place
    dies_at: str = ""
    silent_at: frozenset[str] = frozenset()
    raises_at: str = ""
    lost_at: str = ""
    busy: int = 0
    files: tuple[Artifact, ...] = ()
    dead: bool = False


class PaperTransport:
    """Brings calls to actors on paper; each is answered at once, or never.

    Attributes:
        log: ``call actor`` for each call, in order.
        commands: which actor ran the finish command, with what it was told.
        left: those that were told to leave it to another one.
        errands: what was sent to nodes.
        most: most calls that were in flight at once.
    """

    def __init__(self, directory_of: Mapping[str, str] | None = None) -> None:
        self.directory_of = directory_of or {}
        self.log: list[str] = []
        self.commands: dict[str, dict[str, Any]] = {}
        self.left: set[str] = set()
        self.errands: list[tuple[str, str]] = []
        self.up = True
        self.lost_nodes: set[str] = set()
        self.most = 0
        self.answers: dict[Hashable, Any] = {}
        self.silent: set[Hashable] = set()
        self._claims: dict[tuple[str, str], str] = {}
        self._ids = itertools.count()

    def usable(self) -> bool:
        return self.up

    def call(self, member: Member, method: str, arguments: Mapping[str, Any]) -> Hashable:
        moved = method == "relocate_profile"
        return self._send(member, method, lambda paper: Reply(paper.place, artifacts=paper.files if moved else ()))

    def settle(self, member: Member, seconds: float) -> Hashable:
        return self._send(member, "settle", lambda paper: True)

    def run(self, member: Member, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Hashable:
        name = function.__name__
        return self._send(member, name, lambda paper: getattr(self, f"_{name}")(member, paper, **arguments))

    def run_on_node(self, node: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Hashable:
        self.errands.append((function.__name__, node))
        if node in self.lost_nodes:
            return self._answer(AwayError(f"node {node} is lost"))
        if function.__name__ == "claim_directory":
            return self._answer(self._claim(arguments["save_path"], node))
        return self._answer("the finish command ended with 0")

    def wait(self, calls: list[Any], seconds: float) -> Sequence[Any]:
        self.most = max(self.most, len(calls))
        done = [call for call in calls if call in self.answers]
        if not done:
            time.sleep(min(seconds, 0.05))
        return done

    def result(self, call: Any) -> Any:
        value = self.answers[call]
        if isinstance(value, Exception):
            raise value
        return value

    def explain(self, error: Exception) -> tuple[State, str]:
        state: State = "dead" if isinstance(error, DeadError) else "unreachable"
        return ("fine" if isinstance(error, ValueError) else state), f"{type(error).__name__}: {error}"

    def answer_late(self, value: Any = None) -> None:
        """Those who were silent answer now."""
        for call in self.silent:
            self.answers[call] = value
        self.silent.clear()

    def count(self) -> Counter[str]:
        """How often each call was made."""
        return Counter(entry.split(" ", 1)[0] for entry in self.log)

    def _send(self, member: Member, name: str, answer: Callable[[Paper], Any]) -> Hashable:
        paper: Paper = member.target
        self.log.append(f"{name} {member.name}")
        if paper.dead or paper.dies_at == name:
            paper.dead = True
            return self._answer(DeadError("its process is gone"))
        if paper.silent_at & {name, "*"}:
            call = next(self._ids)
            self.silent.add(call)
            return call
        if paper.raises_at == name:
            return self._answer(ValueError(f"no {name}"))
        if paper.lost_at == name:
            return self._answer(AwayError("no way"))
        return self._answer(answer(paper))

    def _answer(self, value: Any) -> Hashable:
        call = next(self._ids)
        self.answers[call] = value
        return call

    def _claim(self, save_path: str, node: str) -> str:
        directory = self.directory_of.get(node, "shared") if self.directory_of else node
        return self._claims.setdefault((save_path, directory), node)

    # The functions that a driver runs in actors.

    def _describe(self, member: Member, paper: Paper) -> Reply:
        return Reply(paper.place)

    def _finish_tools(self, member: Member, paper: Paper, *, first: bool = True, give_up: bool = False) -> Reply:
        if paper.busy and not give_up:
            paper.busy -= 1
            return Reply(paper.place, busy=1)
        return Reply(paper.place, artifacts=paper.files)

    def _claim_directory(self, member: Member, paper: Paper, save_path: str, token: str, node: str) -> str:
        return self._claim(save_path, node)

    def _run_command(self, member: Member, paper: Paper, save_path: str, **told: Any) -> Reply:
        self.commands[f"{member.name} {save_path}"] = {
            "others": sorted(file.path.name for file in told["others"]),
            "gone": sorted(pid for _, pid in told["gone"]),
        }
        return Reply(paper.place)

    def _leave_command(self, member: Member, paper: Paper, save_paths: Sequence[str]) -> Reply:
        self.left |= {f"{member.name} {path}" for path in save_paths}
        return Reply(paper.place)


def facts(role: str, rank: int, save_path: str = "/out", **more: Any) -> HandleFacts:
    """What is known of a profiler that captured something and has a finish command."""
    known = {"selected": True, "captured": True, "command": "upload", "named": False}
    return HandleFacts(role, rank, 8, ("rec",), save_path, **{**known, **more}, steps=(1, 2), last_step=1, timeout=30.0)


def member(name: str, node: str, *handles: HandleFacts, **behaviour: Any) -> Member:
    """A member with one file for each profiler; its pid is the number in its name."""
    pid = int("".join(filter(str.isdigit, name)))
    made = handles or (facts("actor", pid),)
    files = tuple(
        Artifact(Path(one.save_path, f"{one.role}{one.rank}"), "rec", one.role, one.rank, 1, "train", 1) for one in made
    )
    return Member(Paper(Place(node, f"host-{node}", pid, made), files=files, **behaviour), name, name)
