"""Actors that are driven like one worker: what a ProfileController wants in ``workers=[...]``.

Knows no framework: a `Transport` brings calls to the actors and answers back.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rankscope import environment
from rankscope.integrations.actors.calls import ActorCallError, Calls
from rankscope.integrations.actors.fanout import Outcome
from rankscope.integrations.actors.inside import Reply, describe
from rankscope.integrations.actors.members import Member, Phase, Transport, listed
from rankscope.integrations.actors.nodes import NodeFinish
from rankscope.log import import_nothing_more
from rankscope.types import Artifact

if TYPE_CHECKING:
    from typing_extensions import Self

_SETTLE = ((16, 2.0), (64, 5.0))
"""How many calls at once look for the right thread of a threaded actor, and how many seconds each waits for others."""


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds that the driver waits for all actors together, in each phase. What comes later is not lost.

    Attributes:
        start: opening the windows; the first time also finding out where the actors are.
        advance: telling them that the next step begins inside of an open window.
        stop: closing the windows: the tools' own stops, and their raw files.
        relocate: moving files that a tool wrote elsewhere.
        finish: the tools' last work; it goes on in the background where exports take longer.
        close: the end of the group: exports and the finish command are awaited.
        late: an actor that already owes an answer is not waited for any longer than this.
    """

    start: float = 60.0
    advance: float = 10.0
    stop: float = 120.0
    relocate: float = 120.0
    finish: float = 120.0
    close: float = 300.0
    late: float = 1.0


class ActorGroup:
    """Drives actors like one worker.

    All actors of all roles belong into one group, so that the end of a run is common to them. Nothing that an actor
    does or fails to do stops the others or the training; what is missing is said once, and written to the ledger.

    Args:
        members: the actors.
        transport: brings calls to them.
        deadlines: seconds for each phase.
        max_in_flight: most calls at once.
        strict: whether to raise what the actors' methods raised, after all were called; as ``RANKSCOPE_STRICT`` says
            where it is None.
        finish_per_node: run the finish command once on each node, even where nodes share the directory.

    Attributes:
        members: the actors in the order in which they were given, those of one process included.
    """

    def __init__(
        self,
        members: Iterable[Member],
        transport: Transport,
        *,
        deadlines: Deadlines | None = None,
        max_in_flight: int = 256,
        strict: bool | None = None,
        finish_per_node: bool = False,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight}: at least one call has to be in flight")
        self.deadlines = deadlines or Deadlines()
        strict = bool(environment.flag(environment.STRICT)) if strict is None else strict
        self._calls = Calls(list(members), transport, in_flight=max_in_flight, grace=self.deadlines.late, strict=strict)
        self.members = self._calls.members
        self._finish = NodeFinish(self._calls, seconds=self.deadlines.finish, per_node=finish_per_node)
        self._known = self._open = self._captured = self._closed = False
        self._step: int | None = None
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    # What a controller calls.

    def start_profile(self, *, step: int | None = None, scope: str | None = None) -> None:
        """Open the window of a step in every process that is profiled."""
        if self._closed:
            self._calls.logger.warning("the group is closed: this step is not profiled", step=step)
            return
        self._step, self._open, self._captured = step, True, True
        if not self._known:
            self.find()
        self._drive("start_profile", {"step": step, "scope": scope}, self.deadlines.start)

    def advance_profile(self, *, step: int) -> None:
        """The next step begins inside an open window."""
        self._step = step
        if self._open:
            self._drive("advance_profile", {"step": step}, self.deadlines.advance)

    def abort_profile(self) -> None:
        """The step raised: close its window; ``stop_profile`` follows."""
        if self._open:
            self._stop("abort_profile", {})

    def stop_profile(self, *, last: bool = False) -> None:
        """Close the window; ``last`` is left to the next phases."""
        if self._open:
            self._open = False
            self._stop("stop_profile", {"last": last})

    def relocate_profile(self) -> tuple[Artifact, ...]:
        """Bring files that tools wrote elsewhere to the save path; the moved ones, in the order of the actors."""
        if not self._captured or self._closed:
            return ()
        outcomes = self._drive("relocate_profile", {}, self.deadlines.relocate)
        return tuple(
            file for outcome in outcomes if isinstance(outcome.value, Reply) for file in outcome.value.artifacts
        )

    def finish_profile(self) -> None:
        """Let the tools finish in every process; then the finish command runs, once for each directory.

        Returns when everything is on its way. Where exports take long, the rest is done in the background.
        """
        if self._captured and not self._closed:
            self._finish.begin()
            self._calls.raise_errors()

    # The rest of its life.

    def find(self) -> tuple[Member, ...]:
        """Ask all actors where they are, and which of them share a process. Done at the first window, too."""
        self._known = True
        transport = self._calls.transport
        phase = Phase("the first question", self.deadlines.start, self._step)
        self._calls.each(phase, self._calls.processes, lambda member: transport.run(member, describe, {}))
        self._calls.find_aliases()
        return self.members

    def close(self, timeout: float | None = None) -> None:
        """End of the run: what is open is saved, what is due finished, and waited for. Call it before the actors go.

        Also called at exit. Safe to repeat.

        Args:
            timeout: seconds for all of it; by default ``deadlines.close``.
        """
        if self._closed or self._pid != os.getpid():
            return
        end = time.monotonic() + (self.deadlines.close if timeout is None else timeout)
        atexit.unregister(self._at_exit)
        if self._captured and self._calls.usable(Phase("close", 0.0, self._step)):
            if self._open:
                self._calls.logger.warning(
                    "a window is still open when the group is closed: saving it", step=self._step
                )
                self.stop_profile(last=True)
                self.relocate_profile()
            if not self._finish.begun:
                self._finish.begin()
            self._finish.wait(max(0.0, end - time.monotonic()))
            left = max(1.0, end - time.monotonic())
            self._closed = True
            self._drive("close_profile", {"timeout": left}, left, patient=True)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ActorCallError:  # strict mode: told already, and the block's own exception goes first
            if error is None:
                raise

    def _drive(
        self, method: str, arguments: Mapping[str, Any], seconds: float, *, patient: bool = False
    ) -> list[Outcome]:
        transport = self._calls.transport
        phase = Phase(method, seconds, self._step, patient=patient)
        outcomes = self._calls.each(
            phase, self._calls.profiled, lambda member: transport.call(member, method, arguments)
        )
        self._calls.raise_errors()
        return outcomes

    def _stop(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Also where a stop arrives on another thread of the actor than the start, and has to go back to that one."""
        end = time.monotonic() + self.deadlines.stop
        transport, members = self._calls.transport, self._calls.profiled
        phase = Phase(method, self.deadlines.stop, self._step)
        outcomes = self._calls.each(phase, members, lambda member: transport.call(member, method, arguments))
        waiting = [
            member
            for member, outcome in zip(members, outcomes, strict=True)
            if member.ours and isinstance(outcome.value, Reply) and outcome.value.stopping
        ]
        for calls, patience in _SETTLE:
            left = min(patience, end - time.monotonic())
            if not waiting or left <= 0:
                break
            waiting = self._settle(waiting, calls, left)
        if waiting:
            self._calls.logger.warning(
                "a stop waits for the thread that opened the window, which is busy; it is carried out when that thread "
                "comes to its next annotated call",
                actors=listed(waiting),
                step=self._step,
            )
        self._calls.raise_errors()

    def _settle(self, members: list[Member], calls: int, seconds: float) -> list[Member]:
        """Send so many calls to each at once that one lands on the right thread; those for which none did."""
        repeated = [member for member in members for _ in range(calls)]
        outcomes = self._calls.fan_out(
            repeated,
            lambda member: self._calls.transport.settle(member, seconds),
            seconds + self.deadlines.late,
        )
        done = {member for member, outcome in zip(repeated, outcomes, strict=True) if outcome.value is True}
        return [member for member in members if member not in done]

    def _at_exit(self) -> None:
        if self._pid == os.getpid():
            import_nothing_more()
            try:
                self.close()
            except Exception as error:  # the driver ends as it wanted to
                self._calls.logger.error("the group could not be closed", exc_info=error)
