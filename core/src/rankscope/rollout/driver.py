"""Starts and stops the profilers of several engines: all at once, with deadlines, and without leaving one running."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rankscope.errors import error_text
from rankscope.rollout.calls import FanOut, HttpError, Outcome, post, running_loop
from rankscope.rollout.engine import Engine
from rankscope.rollout.replicas import Replica
from rankscope.rollout.wanted import Wanted

Action = Literal["start", "stop", "compensate", "retry"]
"""What was called, and why: a window begins or ends; the others are stopped because one could not be started; a stop
that failed before is tried again."""


@dataclasses.dataclass(frozen=True)
class ReplicaResult:
    """What came of one call to one replica.

    Attributes:
        replica: its number.
        action: what was called, and why.
        ok: whether the replica is now in the state that was asked for.
        seconds: how long it took, or was waited for.
        error: what went wrong, in words; empty when it is ok.
        note: what is worth saying although it is ok.
    """

    replica: int
    action: Action
    ok: bool
    seconds: float = 0.0
    error: str = ""
    note: str = ""

    def __str__(self) -> str:
        return f"replica {self.replica}: {self.action} {'ok' if self.ok else 'failed: ' + self.error}"


@dataclasses.dataclass(frozen=True)
class Loops:
    """Where coroutines of engines can run.

    Attributes:
        own: the loop that is free while the caller waits elsewhere: that of an ``_async`` method.
        busy: the loop that is held up by the caller.
    """

    own: asyncio.AbstractEventLoop | None = None
    busy: asyncio.AbstractEventLoop | None = None

    @classmethod
    def of_caller(cls) -> Loops:
        """For a synchronous call: the loop that this thread is running cannot do anything meanwhile."""
        return cls(busy=running_loop())


class Driver:
    """Knows of each replica whether its profiler is off, on, or nobody knows.

    Args:
        engine: the adapter.
        replicas: by number, those that are profiled.
        start_timeout, stop_timeout: seconds that a start, a stop may take.

    Attributes:
        uncertain: replicas whose profiler may be on although it should be off, and why.
    """

    def __init__(
        self, engine: Engine, replicas: Mapping[int, Replica], *, start_timeout: float, stop_timeout: float
    ) -> None:
        self.engine = engine
        self.replicas = dict(replicas)
        self.start_timeout = start_timeout
        self.stop_timeout = stop_timeout
        self.uncertain: dict[int, str] = {}
        self._running: dict[int, Outcome] = {}
        self._told: dict[int, Wanted] = {}

    def start(self, wanted: Mapping[int, Wanted], loops: Loops) -> list[ReplicaResult]:
        """Begin a window in each of the replicas; a stop that failed before is tried again first.

        A replica that cannot be brought to rest is not started: some engines would begin a second profiler over the
        first, and crash.
        """
        doubtful = [index for index in wanted if index in self.uncertain]
        results = self.stop(doubtful, loops, action="retry") if doubtful else []
        able: list[int] = []
        for index in wanted:
            why = self._obstacle(index)
            if why:
                results.append(ReplicaResult(index, "start", False, error=why))
            else:
                able.append(index)
        self._told.update({index: wanted[index] for index in able})
        if self.engine.passive:
            return [*results, *(ReplicaResult(index, "start", True) for index in able)]
        self._count(able, loops)
        outcomes = self._call(able, self._start_call, self.start_timeout, loops)
        return [*results, *(self._started(index, outcome) for index, outcome in outcomes.items())]

    def stop(self, indices: Iterable[int], loops: Loops, *, action: Action = "stop") -> list[ReplicaResult]:
        """End the window of each of the replicas; one that ended by itself is as good as stopped."""
        chosen = [index for index in indices if index in self.replicas]
        if self.engine.passive:
            return [ReplicaResult(index, action, True) for index in chosen]
        hanging = [index for index in chosen if self._hangs(index)]
        outcomes = self._call(
            [index for index in chosen if index not in hanging], self._stop_call, self.stop_timeout, loops
        )
        results = [self._stopped(index, outcome, action) for index, outcome in outcomes.items()]
        results += [ReplicaResult(index, action, False, error=_HANGS) for index in hanging]
        self._disarm([result.replica for result in results if result.ok and result.note], loops)
        return sorted(results, key=lambda result: result.replica)

    def compensate(self, results: Sequence[ReplicaResult], loops: Loops) -> list[ReplicaResult]:
        """After a start that failed in some replicas: stop all that record, or may."""
        begun = [result.replica for result in results if result.action == "start" and result.ok]
        return self.stop(
            [*begun, *(index for index in self.uncertain if index not in begun)], loops, action="compensate"
        )

    def notes(self, index: int) -> Sequence[str]:
        """What the engine does differently in its latest window, in words."""
        told = self._told.get(index)
        return () if told is None else self.engine.start_arguments(told).notes

    # One replica.

    def _obstacle(self, index: int) -> str:
        if self.replicas[index].target is None and not self.engine.passive:
            return "nothing is known by which it could be called: give Replica(…, target=…) its handle or URL"
        if self._hangs(index):
            return _HANGS
        if index in self.uncertain:
            return f"not started, since its last window could not be ended: {self.uncertain[index]}"
        return ""

    def _hangs(self, index: int) -> bool:
        """Whether its object is still busy with an earlier call; a server can be asked on another connection."""
        if self.replicas[index].url is not None:
            return False
        outcome = self._running.get(index)
        return outcome is not None and outcome.running

    def _start_call(self, index: int) -> Callable[[float], Any]:
        replica, wanted = self.replicas[index], self._told[index]
        url = replica.url
        if url is None:
            return _prepared(lambda: self.engine.start_call(replica.target, wanted))
        body = self.engine.start_arguments(wanted).arguments
        return lambda seconds: self._post(replica, url + self.engine.start_path, body, seconds)

    def _post(self, replica: Replica, url: str, body: Mapping[str, Any], seconds: float) -> str:
        deadline = time.monotonic() + seconds
        try:
            return post(url, body, replica.headers, seconds)
        except HttpError as error:
            other = self.engine.retry_body(error.status, body)
            if other is None:
                raise
        return post(url, other, replica.headers, deadline - time.monotonic())

    def _stop_call(self, index: int) -> Callable[[float], Any]:
        replica = self.replicas[index]
        url = replica.url
        if url is None:
            return _prepared(lambda: self.engine.stop_call(replica.target))
        return lambda seconds: post(url + self.engine.stop_path, None, replica.headers, seconds)

    def _started(self, index: int, outcome: Outcome) -> ReplicaResult:
        if outcome.ok:
            self.uncertain.pop(index, None)
            return ReplicaResult(index, "start", True, outcome.seconds)
        error = self._explained(outcome.error)
        if self.engine.occupied(outcome.error):
            error = f"a window that somebody else opened is going on in it, and is left alone ({outcome.error})"
        elif outcome.running:
            self.uncertain[index] = "its start did not return"
        elif outcome.began and not _never_arrived(outcome.error):
            self.uncertain[index] = f"its start failed: {outcome.error}"
        return ReplicaResult(index, "start", False, outcome.seconds, error)

    def _stopped(self, index: int, outcome: Outcome, action: Action) -> ReplicaResult:
        wanted = self._told.get(index)
        if outcome.ok:
            self.uncertain.pop(index, None)
            return ReplicaResult(index, action, True, outcome.seconds)
        if wanted is not None and not outcome.running and self.engine.ended_already(outcome.error, wanted):
            self.uncertain.pop(index, None)
            return ReplicaResult(index, action, True, outcome.seconds, note=_ENDED)
        error = self._explained(outcome.error)
        if "Connection refused" in outcome.error:  # its server is gone, and with it what it recorded
            self.uncertain.pop(index, None)
        else:
            self.uncertain[index] = f"its stop failed: {error}"
        return ReplicaResult(index, action, False, outcome.seconds, error)

    def _explained(self, error: str) -> str:
        return f"{error}; {self.engine.no_route}" if "HTTP 404" in error or "HTTP 405" in error else error

    # All of them.

    def _call(
        self, indices: Sequence[int], make: Callable[[int], Callable[[float], Any]], timeout: float, loops: Loops
    ) -> dict[int, Outcome]:
        if not indices:
            return {}
        outcomes = FanOut(
            [make(index) for index in indices],
            timeout,
            loops=[self.replicas[index].loop or loops.own for index in indices],
            busy=loops.busy,
            bounded=[self.replicas[index].url is not None for index in indices],
        ).run()
        found = dict(zip(indices, outcomes, strict=True))
        self._running.update(found)
        return found

    def _count(self, indices: Sequence[int], loops: Loops) -> None:
        """Ask how far the engines are, where a window needs it and somebody can tell."""
        chosen = [
            index for index in indices if self._told[index].start and self.replicas[index].forward_count is not None
        ]
        outcomes = self._call(
            chosen, lambda index: lambda _: _forward_count(self.replicas[index]), self.start_timeout, loops
        )
        for index, outcome in outcomes.items():
            if outcome.ok and isinstance(outcome.value, int):
                self._told[index] = dataclasses.replace(self._told[index], forward_count=outcome.value)

    def _disarm(self, indices: Sequence[int], loops: Loops) -> None:
        """A window that was armed and not reached must not begin later."""
        chosen = {
            index: arguments
            for index in indices
            if index in self._told and (arguments := self.engine.disarm(self._told[index])) is not None
        }

        def make(index: int) -> Callable[[float], Any]:
            replica, arguments = self.replicas[index], chosen[index]
            url = replica.url
            if url is None:
                return _prepared(lambda: self.engine.arm_call(replica.target, arguments))
            return lambda seconds: post(url + self.engine.start_path, arguments, replica.headers, seconds)

        for index, outcome in self._call(list(chosen), make, self.start_timeout, loops).items():
            if not outcome.ok:
                self.uncertain[index] = f"a window that was not reached could not be taken back: {outcome.error}"


_HANGS = "its last call has not returned"
_ENDED = "its window had ended by itself, or was not reached"


class CannotCallError(Exception):
    """An engine's object does not have the method, or not in a form that its adapter knows."""


def _prepared(make: Callable[[], Callable[[], Any]]) -> Callable[[float], Any]:
    """A call of an object; what cannot be called was not called."""

    def call(_: float) -> Any:
        try:
            made = make()
        except Exception as error:
            raise CannotCallError(error_text(error)) from error
        return made()

    return call


def _forward_count(replica: Replica) -> Any:
    assert replica.forward_count is not None  # noqa: S101  # asked before
    return replica.forward_count()


_NOT_HEARD = ("Connection refused", "HTTP 401", "HTTP 403", "HTTP 404", "HTTP 405", "LoopError", "CannotCallError")


def _never_arrived(error: str) -> bool:
    """Whether the engine cannot have heard of it."""
    return any(text in error for text in _NOT_HEARD)
