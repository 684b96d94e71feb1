"""RolloutProfiler: profiles the engines that generate the rollouts, step by step, as the config says."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rankscope import environment
from rankscope.config import Config, ConfigError, RoleConfig, load_config
from rankscope.errors import RankscopeError
from rankscope.log import get_logger, import_nothing_more
from rankscope.rollout.account import Account
from rankscope.rollout.calls import in_thread
from rankscope.rollout.driver import Driver, Loops, ReplicaResult
from rankscope.rollout.ending import Ending
from rankscope.rollout.engine import Engine, EngineLaunch
from rankscope.rollout.gathering import Gathering
from rankscope.rollout.replicas import Layout, Replica
from rankscope.rollout.sessions import Session
from rankscope.rollout.setup import Given, Setup, directory_of, work_out
from rankscope.rollout.wanted import Wanted
from rankscope.types import Artifact

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_MOST_RESULTS = 100_000


class RolloutError(RankscopeError):
    """Strict mode: engines could not be started or stopped.

    Attributes:
        results: the calls that failed, in the order in which they were made.
    """

    def __init__(self, results: Sequence[ReplicaResult]) -> None:
        self.results = tuple(results)
        super().__init__("; ".join(str(result) for result in results))


class RolloutProfiler:
    """Profiles rollout engines: what a driver holds for all replicas, or a server for its own.

    It is driven like a worker: put it into ``ProfileController(workers=[…])``, or call the methods yourself around the
    generation of a step. Each of them has an asynchronous twin for code that runs in an engine's event loop::

        rollout = RolloutProfiler(
            config, engine="vllm", replicas=["http://10.0.0.1:8000", "http://10.0.0.2:8000"], layout=Layout(tp=2)
        )
        engine_args = rollout.launch(0).arguments       # when the engine of replica 0 is started
        controller = ProfileController(config, workers=[actor, rollout], total_steps=100)

    ``ranks`` of the rollout section are global GPU ranks: the replica that owns one is profiled, and only the files of
    the listed ranks are surfaced. Nothing that an engine does is raised into the training (except in strict mode, at
    the end of a call): it is logged, and stands in ``results`` and in the ledger.

    Args:
        config: as of `DistProfiler`.
        engine: name of the engine (``vllm``, ``sglang``, ``trtllm``, or another one that is installed).
        replicas: `Replica` objects, or handles and URLs in the order of the replicas.
        layout: sizes of the engine's dimensions. Without it they are asked of the first handle that knows.
        gpus_per_replica: GPUs of a replica, where no layout is known.
        world_size: number of all rollout GPUs. Without it, the given replicas are all there are.
        gpus_per_node: for ``ranks: per_node``.
        role: name of the rollout section.
        engine_options: options of the engine's adapter.
        engine_version: the engine's version, if it is not the one that is installed here.
        overrides: ``key=value`` texts on top of the config.
        total_steps: last step of the run, where it is known.
        drive: False on the other nodes of a replica that spans several: nothing is started or stopped, but the files
            of this node are brought in.
        if_one_fails: when one replica cannot be started: ``stop`` the others, or ``keep`` them recording.
        start_timeout, stop_timeout: seconds that all starts, all stops of a step may take.
        patience: seconds that a relocation waits for files that should be there; once for each step.
        close_patience: the same at the end of the run.

    Attributes:
        enabled: whether the config turns the role on.
        why: why something is profiled, or why not, in words.
        results: what came of each call, the latest last.

    Raises:
        ConfigError: everything that is wrong with the config or the replicas.
    """

    def __init__(
        self,
        config: Any,
        *,
        engine: str | Engine,
        replicas: Iterable[Any],
        layout: Layout | None = None,
        gpus_per_replica: int | None = None,
        world_size: int | None = None,
        gpus_per_node: int | None = None,
        role: str = "rollout",
        engine_options: Mapping[str, Any] | None = None,
        engine_version: str | None = None,
        overrides: Iterable[str] = (),
        total_steps: int | None = None,
        drive: bool = True,
        if_one_fails: str = "stop",
        start_timeout: float = 60.0,
        stop_timeout: float = 300.0,
        patience: float = 2.0,
        close_patience: float = 30.0,
    ) -> None:
        if if_one_fails not in {"stop", "keep"}:
            raise ConfigError(f"if_one_fails is {if_one_fails!r}; write stop or keep")
        self.role = role
        self.config: Config = load_config(config, tuple(overrides), check_tools="names")
        self.section: RoleConfig = self.config.role(role)
        self.save_path = Path(self.section.save_path)
        self.enabled = self.section.enable and bool(self.section.tools) and self.config.active
        self.drive = drive
        self.patience = patience
        self.close_patience = close_patience
        self.closed = False
        self.last_step: int | None = None
        self.results: deque[ReplicaResult] = deque(maxlen=_MOST_RESULTS)
        strict = environment.flag(environment.STRICT)
        self._strict = self.config.global_profiler.strict if strict is None else strict
        self._keep_others = if_one_fails == "keep"
        self._steps = tuple(step for step in self.config.global_profiler.steps if step <= (total_steps or step))
        self._sessions: list[Session] = []
        self._finished = False
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._setup = Setup()
        self.why = self.section.why_off or "global_profiler.steps is not set"
        if not self.enabled:
            return
        given = Given(
            engine,
            list(replicas),
            layout=layout,
            gpus_per_replica=gpus_per_replica,
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            options=engine_options,
            version=engine_version,
        )
        self._setup = setup = work_out(self.config, self.section, given)
        self.why = setup.choice.reason or f"{self.section.ranks.explain()} are selected"
        logger = get_logger(role=role)
        self._account = Account(setup, role, self.save_path, logger, speaks=drive and setup.writes)
        self._account.tell([*setup.choice.warnings, *setup.notes])
        self._account.plan(self.config, self._steps, self.why, self.section.tools)
        if setup.engine is None:
            return
        self._driver = Driver(
            setup.engine,
            {replica.index: replica for replica in setup.profiled},
            start_timeout=start_timeout,
            stop_timeout=stop_timeout,
        )
        self._gathering = Gathering(
            setup, self.save_path, self._account, moves=self.section.relocate_results, foreign=not drive
        )
        self._ending = Ending(
            self.config,
            self.section,
            tool=setup.tool,
            ranks=setup.ranks,
            world_size=setup.world_size,
            ledger=self._account.ledger,
        )
        atexit.register(self._at_exit)

    # Questions.

    @property
    def selected(self) -> bool:
        """Whether a replica is profiled."""
        return self._setup.engine is not None

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All that were given, with their devices; none where the role is off."""
        return self._setup.replicas

    @property
    def profiled(self) -> Mapping[int, tuple[int, ...]]:
        """By number, the replicas that are profiled, and the global ranks whose files are wanted."""
        return self._setup.choice.ranks

    @property
    def engine(self) -> Engine | None:
        """The engine's adapter; None where nothing is profiled."""
        return self._setup.engine

    @property
    def tool(self) -> str:
        """The tool of the config that the engines record with, or an empty text."""
        return self._setup.tool

    @property
    def notes(self) -> tuple[str, ...]:
        """What the engine cannot do of what was asked, in words; logged once."""
        return self._setup.notes

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The engines' files that were brought in, or recorded where they lie."""
        return tuple(self._account.store.artifacts) if self.selected else ()

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The windows so far."""
        return tuple(self._sessions)

    @property
    def recording(self) -> bool:
        """Whether a window is open."""
        return bool(self._sessions) and self._sessions[-1].open

    def directory(self, replica: int) -> Path:
        """Where the engine of a replica writes: ``<save_path>/agent_loop_rollout_replica_<r>``, or its own place."""
        known = next((one for one in self.replicas if one.index == replica), None)
        return directory_of(known or Replica(replica), self.save_path)

    def launch(self, replica: int, **facts: Any) -> EngineLaunch:
        """What the engine of a replica needs when it is started; nothing for a replica that is not profiled.

        Args:
            replica: its number.
            **facts: what the engine's adapter takes besides, e.g. ``fields`` of vLLM's.
        """
        engine, asked = self._setup.engine, self._setup.wanted.get(replica)
        return EngineLaunch() if engine is None or asked is None else engine.launch(asked, **facts)

    # The worker protocol.

    def start_profile(self, *, step: int | None = None, scope: str | None = None) -> bool:
        """Start the profilers of the selected replicas, if this step is profiled.

        Returns:
            Whether any of them records now.
        """
        return self._start(step, scope, Loops.of_caller())

    def stop_profile(self, *, last: bool = False) -> None:
        """Stop them. With ``last`` also relocate and finish; a controller does these for all workers in phases."""
        self._stop(Loops.of_caller())
        if last:
            self.relocate_profile()
            self.finish_profile()

    def abort_profile(self) -> None:
        """The step raised: stop them, and let the ledger say so. ``stop_profile`` may follow."""
        self._stop(Loops.of_caller(), aborted=True)

    def advance_profile(self, *, step: int) -> None:
        """The next step begins inside an open window."""
        self.last_step = step

    def relocate_profile(self) -> tuple[Artifact, ...]:
        """Bring finished files of the listed ranks to the save path, where ``relocate_results`` is set.

        May be repeated: what is not finished yet comes later, under the step that it belongs to.

        Returns:
            The files that came by this call.
        """
        return self._relocate(self.patience, last=False)

    def finish_profile(self) -> None:
        """The last window is over: bring in what is still missing, then run the finish command if it is due here."""
        self._finish()

    def close_profile(self, timeout: float | None = None) -> None:
        """End of the run: stop what is open, also where a stop failed before; bring in late files; say what is missing.

        Args:
            timeout: most seconds to wait for files; by default ``close_patience``.
        """
        self._close(Loops.of_caller(), timeout)

    async def start_profile_async(self, *, step: int | None = None, scope: str | None = None) -> bool:
        """As ``start_profile``; coroutines of engines run in this event loop, which is not held up."""
        return await self._aside(lambda loops: self._start(step, scope, loops))

    async def stop_profile_async(self, *, last: bool = False) -> None:
        """As ``stop_profile``."""
        await self._aside(self._stop)
        if last:
            await self.relocate_profile_async()
            await self.finish_profile_async()

    async def abort_profile_async(self) -> None:
        """As ``abort_profile``."""
        await self._aside(lambda loops: self._stop(loops, aborted=True))

    async def relocate_profile_async(self) -> tuple[Artifact, ...]:
        """As ``relocate_profile``."""
        return await in_thread(self.relocate_profile)

    async def finish_profile_async(self) -> None:
        """As ``finish_profile``."""
        await in_thread(self._finish)

    async def close_profile_async(self, timeout: float | None = None) -> None:
        """As ``close_profile``."""
        await self._aside(lambda loops: self._close(loops, timeout))

    @staticmethod
    async def _aside(function: Callable[[Loops], T]) -> T:
        loops = Loops(own=asyncio.get_running_loop())
        return await in_thread(lambda: function(loops))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close_profile()
        except RolloutError:  # strict mode: told already, and the block's own exception goes first
            if error is None:
                raise

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RolloutProfiler belongs to its process; send the config and make one there")

    # What they do.

    def _on(self) -> bool:
        return self.selected and not self.closed and self._pid == os.getpid()

    def _start(self, step: int | None, scope: str | None, loops: Loops) -> bool:
        if not self._on() or (step is not None and step not in self._steps):
            return False
        with self._lock:
            if self.recording:
                self._account.logger.warning("a window was still open when the next one began", step=self.last_step)
                self._stop(loops, aborted=True)
            self.last_step = step
            asked = self._setup.wanted
            session = Session(
                step, self._covered(step), scope or "train", limited=any(one.limited for one in asked.values())
            )
            self._sessions.append(session)
            if not self.drive:
                session.started.update(asked)
                return False
            self._account.open_windows(session)
            told = {index: dataclasses.replace(one, prefix=session.prefix) for index, one in asked.items()}
            if self._setup.writes:
                _make_directories(told.values())
            results = self._driver.start(told, loops)
            self._keep(results)
            self._account.tell(note for index in told for note in self._driver.notes(index))
            session.recording = {one.replica for one in results if one.action == "start" and one.ok}
            session.started |= session.recording
            failed = [one for one in results if one.action == "start" and not one.ok]
            for result in failed:
                self._account.start_failed(session, result)
            if failed and self._keep_others and session.recording:
                self._keep(self._driver.stop(sorted(self._driver.uncertain), loops, action="compensate"))
            elif failed:
                self._give_up(session, failed, results, loops)
            self._raise(results)
            return bool(session.recording)

    def _give_up(
        self, session: Session, failed: Sequence[ReplicaResult], results: Sequence[ReplicaResult], loops: Loops
    ) -> None:
        """A window without one of its replicas says little: the others are stopped, and keep what they have."""
        names = ", ".join(str(result.replica) for result in failed)
        session.partial.append(f"stopped at once, since replica {names} could not be started")
        self._keep(self._driver.compensate(results, loops))
        self._end(session, reason=session.partial[-1])

    def _stop(self, loops: Loops, *, aborted: bool = False) -> None:
        if not self._on() or not self.recording:
            return
        with self._lock:
            session = self._sessions[-1]
            if aborted:
                session.scope = f"{session.scope}-aborted"
            results = self._driver.stop(sorted(session.recording), loops) if self.drive else []
            self._keep(results)
            session.partial += [
                f"replica {result.replica} could not be stopped: {result.error}" for result in results if not result.ok
            ]
            self._end(session, aborted=aborted)
            self._raise(results)

    def _end(self, session: Session, **facts: Any) -> None:
        session.recording.clear()
        session.stopped = time.monotonic()
        self._account.close_windows(session, **facts)

    def _relocate(self, patience: float, *, last: bool) -> tuple[Artifact, ...]:
        if not self._on():
            return ()
        with self._lock:
            return self._gathering.gather(self._sessions, patience, last=last)

    def _finish(self) -> None:
        if not self._on() or self._finished:
            return
        with self._lock:
            self._relocate(self.close_patience, last=True)
            if any(session.started for session in self._sessions):
                self._finished = True
                wait = self.config.global_profiler.finish_hook_wait
                self._ending.run(step=self.last_step, artifacts=self.artifacts, wait=wait)

    def _close(self, loops: Loops, timeout: float | None) -> None:
        if not self._on():
            self.closed = True
            return
        with self._lock:
            strict, self._strict = self._strict, False  # everything is done first
            kept = len(self.results)
            self._stop(loops)
            if self.drive and self._driver.uncertain:
                self._keep(self._driver.stop(sorted(self._driver.uncertain), loops, action="retry"))
            self._relocate(self.close_patience if timeout is None else timeout, last=True)
            self._finish()
            self._ending.wait()
            self._gathering.say_missing(self._sessions)
            self._account.close(self.last_step, profiled=any(session.started for session in self._sessions))
            self.closed, self._strict = True, strict
            atexit.unregister(self._at_exit)
            self._raise(list(self.results)[kept:])

    def _at_exit(self) -> None:
        if self._pid != os.getpid():
            return
        import_nothing_more()
        try:
            self.close_profile()
        except Exception as error:  # nobody is left to catch it
            self._account.logger.error("the rollout profiler could not be closed", exc_info=error)

    def _covered(self, step: int | None) -> tuple[int, ...]:
        """The steps that a window opened in ``step`` is going to cover."""
        if step is None:
            return ()
        covered = [step]
        if self.config.global_profiler.profile_continuous_steps:
            while covered[-1] + 1 in self._steps:
                covered.append(covered[-1] + 1)
        return tuple(covered)

    def _keep(self, results: Sequence[ReplicaResult]) -> None:
        self.results.extend(results)
        self._account.results(results, self.last_step)

    def _raise(self, results: Sequence[ReplicaResult]) -> None:
        failed = [result for result in results if not result.ok]
        if failed and self._strict:
            raise RolloutError(failed)


def _make_directories(asked: Iterable[Wanted]) -> None:
    """Not every engine creates the directory that it is told to write to."""
    for one in asked:
        with contextlib.suppress(OSError):
            Path(one.directory).mkdir(parents=True, exist_ok=True)
