"""What is said of the engines: in the log, and in the ledger, where each wanted rank has its plan, windows, files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.artifacts.ledger import Ledger
from rankscope.artifacts.store import Store
from rankscope.config import Config
from rankscope.host import host_name
from rankscope.ranges import compact
from rankscope.rollout.driver import ReplicaResult
from rankscope.rollout.sessions import Session
from rankscope.rollout.setup import Setup
from rankscope.topology import run_id
from rankscope.types import Artifact, Logger
from rankscope.windows import new_window


class Account:
    """Writes the ledger of one rollout profiler.

    Args:
        setup: what is profiled.
        role: name of the rollout section.
        save_path: directory of the artifacts.
        logger: gets what people should know.
        speaks: whether windows are written: not by an instance that drives no engine, or whose engines leave no files.
    """

    def __init__(self, setup: Setup, role: str, save_path: Path, logger: Logger, *, speaks: bool) -> None:
        self.setup = setup
        self.role = role
        self.logger = logger
        self.speaks = speaks
        self.ledger = Ledger(save_path, host=host_name(), run_id=run_id())
        self.store = Store(
            save_path,
            tool=setup.tool,
            role=role,
            rank=setup.ranks[0] if setup.ranks else 0,
            world_size=setup.world_size,
            topology={},
            host=host_name(),
            ledger=self.ledger,
            logger=logger,
        )
        self._names = {replica.index: replica.shown for replica in setup.replicas}
        self._told: set[str] = set()

    def tell(self, texts: Iterable[str]) -> None:
        """Warn; the same words once."""
        for text in texts:
            if text not in self._told:
                self._told.add(text)
                self.logger.warning(text)

    def plan(self, config: Config, steps: Sequence[int], reason: str, tools: Sequence[str]) -> None:
        """What will be done, or why nothing."""
        setup = self.setup
        if not setup.choice.ranks or setup.engine is None:
            self.logger.warning("no rollout replica is profiled", reason=reason)
            self.ledger.write("plan", role=self.role, rank=0, tool=tools[0], profiled=False, reason=reason)
            return
        self.logger.info(
            "rollout engines are profiled",
            engine=setup.engine.name,
            tool=setup.tool,
            replicas=compact(sorted(setup.choice.ranks)),
            ranks=compact(setup.ranks),
            steps=compact(steps),
            save_path=str(self.ledger.save_path),
        )
        if not self.speaks:
            return
        for rank in setup.ranks:
            self.ledger.write(
                "plan",
                role=self.role,
                rank=rank,
                world_size=setup.world_size,
                tool=setup.tool,
                profiled=True,
                reason=reason,
                steps=steps,
                continuous=config.global_profiler.profile_continuous_steps,
                discrete=False,
            )

    def results(self, results: Sequence[ReplicaResult], step: int | None) -> None:
        """What came of calls to engines."""
        for result in results:
            facts = dataclasses.asdict(result) | {"seconds": round(result.seconds, 3)}
            self.ledger.write("rollout", role=self.role, step=step, **facts)
            name = self._names.get(result.replica, f"replica {result.replica}")
            if not result.ok:
                self.logger.error(f"{name}: {result.action} failed; training goes on", reason=result.error, step=step)
            elif result.note:
                self.logger.info(f"{name}: {result.note}", step=step)

    def open_windows(self, session: Session) -> None:
        """A window begins on each wanted rank."""
        if not self.speaks:
            return
        for rank in self.setup.ranks:
            session.windows[rank] = new_window(
                self.role,
                step=session.step,
                steps=session.steps,
                scope=session.scope,
                reason="manual" if session.step is None else "step",
            )
            self._window("open", rank, session)

    def close_windows(self, session: Session, **facts: Any) -> None:
        """It ends on each of them."""
        for rank in session.windows:
            self._window("close", rank, session, **facts)

    def start_failed(self, session: Session, result: ReplicaResult) -> None:
        """The window of a replica's ranks ends before it began."""
        for rank in self.setup.choice.ranks[result.replica]:
            if rank in session.windows:
                self._window("close", rank, session, reason="start failed")
                self.missing(
                    session, rank, result.replica, f"the engine's profiler could not be started: {result.error}"
                )
                del session.windows[rank]

    def missing(self, session: Session, rank: int, replica: int, reason: str) -> None:
        """A wanted rank left no file."""
        if rank in session.windows:
            facts = self._facts(session, session.step, rank, replica)
            self.store.record({**facts, "window": session.windows[rank].id, "status": "failed", "reason": reason})

    def published(
        self, session: Session | None, step: int | None, rank: int, replica: int, facts: Mapping[str, Any]
    ) -> Artifact | None:
        """A file is there."""
        window = session.windows.get(rank) if session is not None else None
        known = self._facts(session, step, rank, replica) | {"window": None if window is None else window.id}
        return self.store.record({**known, **facts})

    def left(self, replica: int, directory: Path, files: Mapping[str, str]) -> None:
        """What stays in an engine's directory."""
        if not files:
            return
        some = "; ".join(f"{name}: {why}" for name, why in list(files.items())[:5])
        self.logger.info(
            "left in the engine's directory", replica=replica, directory=str(directory), files=len(files), why=some
        )
        self.ledger.write("rollout", role=self.role, action="left", replica=replica, files=files)

    def close(self, step: int | None, *, profiled: bool) -> None:
        """The end: one line for what came out, and a warning where something was asked for and nothing did."""
        self.ledger.write("close", role=self.role, last_step=step, reason="closed")
        files = self.store.artifacts
        if files:
            size = sum(file.bytes for file in files)
            self.logger.info("captured", files=len(files), bytes=size, save_path=str(self.store.save_path))
        elif profiled and self.setup.writes:
            self.logger.warning("engines were profiled and left no file", save_path=str(self.store.save_path))
        elif not profiled and self.speaks:
            self.logger.warning("no engine was profiled: none of the configured steps was reached, or no start worked")

    def _facts(self, session: Session | None, step: int | None, rank: int, replica: int) -> dict[str, Any]:
        return {
            "tool": self.setup.tool,
            "role": self.role,
            "rank": rank,
            "replica": replica,
            "step": step,
            "scope": "train" if session is None else session.scope,
        }

    def _window(self, event: str, rank: int, session: Session, **facts: Any) -> None:
        window = session.windows[rank]
        self.ledger.write(
            "window",
            event=event,
            window=window.id,
            tool=self.setup.tool,
            role=self.role,
            rank=rank,
            step=session.step,
            steps=session.steps,
            scope=session.scope,
            why=window.reason,
            roles=[self.role],
            **facts,
        )
