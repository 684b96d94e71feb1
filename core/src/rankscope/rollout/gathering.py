"""Brings the engines' files in: those that are whole and wanted, each under its step, until the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rankscope.artifacts.publish import checksum, move_in, size_of
from rankscope.errors import error_text
from rankscope.rollout.account import Account
from rankscope.rollout.sessions import Session
from rankscope.rollout.setup import Setup, directory_of
from rankscope.rollout.traces import Ready, ReplicaTraces
from rankscope.types import Artifact

_READING = 2.0
"""Seconds that one look at all files may take, since whole files are read to find that out. The rest is read later."""

_PACE = 0.05
"""Seconds between two looks at a directory in which files are awaited."""

_CAPTURES = frozenset({"trace", "unknown", "memory"})
"""Kinds of files that a wanted rank is asked for."""


class Gathering:
    """The files of all profiled replicas.

    Args:
        setup: what is profiled.
        save_path: directory of the artifacts.
        account: hears of every file.
        moves: whether files are moved to the save path, or recorded where they lie.
        foreign: whether files of other processes' windows count: on a node that drives no engine itself.
    """

    def __init__(self, setup: Setup, save_path: Path, account: Account, *, moves: bool, foreign: bool) -> None:
        self._ranks = setup.choice.ranks
        self._save_path = save_path
        self._account = account
        self._moves = moves
        self._waited_at_end = False
        self._traces: dict[int, ReplicaTraces] = {}
        if setup.engine is None or not setup.writes:
            return
        for replica in setup.profiled:
            self._traces[replica.index] = ReplicaTraces(
                replica.index,
                directory_of(replica, save_path),
                replica.devices or (),
                self._ranks[replica.index],
                setup.engine,
                layout=setup.layouts[replica.index],
                foreign=foreign,
            )

    def gather(self, sessions: Sequence[Session], patience: float, *, last: bool) -> tuple[Artifact, ...]:
        """Take what is whole and wanted.

        Args:
            sessions: all windows so far.
            patience: seconds to wait for what should be there; for each window once, and once more at the end.
            last: the end: what cannot be placed then is taken as it is.
        """
        deadline = time.monotonic() + (0.0 if last and self._waited_at_end else patience)
        came: list[Artifact] = []
        while True:
            came += self._sweep(sessions, last=False, deadline=max(deadline, time.monotonic() + _READING))
            if time.monotonic() >= deadline or not self._awaited(sessions, last=last):
                break
            time.sleep(_PACE)
        if last:
            came += self._sweep(sessions, last=True, deadline=max(deadline, time.monotonic() + _READING))
        for session in sessions:
            session.waited = session.waited or not session.open
        self._waited_at_end = last
        return tuple(came)

    def say_missing(self, sessions: Sequence[Session]) -> None:
        """The end: which wanted rank left nothing, and what else stays in the engines' directories."""
        for session in sessions:
            for index, ranks in self._lacking(session).items():
                words = [f"the engine of replica {index} left no file of it", *session.partial]
                if session.limited:
                    words.append("its token window may not have been reached")
                reason = "; ".join(words)
                for rank in ranks:
                    self._account.missing(session, rank, index, reason)
        for index, traces in self._traces.items():
            self._account.left(index, traces.directory, traces.left())

    def _awaited(self, sessions: Sequence[Session], *, last: bool) -> bool:
        """Whether a file should be there that is not."""
        waiting = [session for session in sessions if not session.open and (last or not session.waited)]
        if any(self._lacking(session) for session in waiting):
            return True
        return last and any(traces.unfinished for traces in self._traces.values())

    def _lacking(self, session: Session) -> dict[int, tuple[int, ...]]:
        """By replica, ranks whose file did not come; a file of an unknown GPU stands for any of them."""
        found = {}
        for index in sorted(session.started & set(self._traces)):
            came = session.ranks.get(index, ())
            lacking = tuple(rank for rank in self._ranks[index] if rank not in came)
            if len(lacking) > session.unknown[index]:
                found[index] = lacking
        return found

    def _sweep(self, sessions: Sequence[Session], *, last: bool, deadline: float) -> list[Artifact]:
        came = []
        for index, traces in self._traces.items():
            own = [session for session in sessions if index in session.started]
            for ready in traces.ready(own, last=last, deadline=deadline):
                artifact = self._bring(index, traces, ready)
                if artifact is not None:
                    came.append(artifact)
        return came

    def _bring(self, replica: int, traces: ReplicaTraces, ready: Ready) -> Artifact | None:
        """Move one file, or leave it where it is if that is what the config says, and take note of it."""
        try:
            folder = ready.path.is_dir()  # torch_npu's, which the analysis wants to find as it is
            moves = self._moves and not folder
            final = move_in(ready.path, self._save_path, ready.name) if moves else ready.path
            size, crc = size_of(final), ready.checksum or ("" if folder else checksum(final))
        except FileNotFoundError:
            return None  # another node's instance was faster
        except OSError as error:
            self._account.tell([f"{ready.path} could not be brought in: {error_text(error)}"])
            return None
        traces.take(ready)
        session, capture = ready.session, ready.file.kind in _CAPTURES
        warnings = list(session.partial) if session is not None else []
        if capture and ready.rank is None:
            warnings.append(f"nobody can tell of which GPU of replica {replica} this is: {ready.why}")
        if session is not None and capture:
            if ready.rank is None:
                session.unknown[replica] += 1
            else:
                session.ranks.setdefault(replica, set()).add(ready.rank)
        facts = {
            "path": str(final),
            "bytes": size,
            "checksum": crc,
            "file": ready.file.kind,
            "gpu_known": ready.rank is not None,
            **({"moved_from": str(ready.path)} if moves else {}),
            **({"warnings": warnings} if warnings else {}),
        }
        rank = ready.rank if ready.rank is not None else self._ranks[replica][0]
        return self._account.published(session, ready.step, rank, replica, facts)
