"""The store: reserve a name, write to a temporary file, publish it; the ledger hears of each outcome."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.artifacts.exports import exports
from rankscope.artifacts.ledger import FOLDER, Ledger
from rankscope.artifacts.names import (
    MAX_LABEL,
    NameFields,
    clean_label,
    fit,
    format_name,
    numbered,
    time_text,
)
from rankscope.artifacts.places import beside, elsewhere, free_bytes, prepare, staging
from rankscope.artifacts.publish import Claim, checksum, claim, discard, move_in, size_of
from rankscope.artifacts.reservation import Reservation, checksum_of, explained
from rankscope.types import Artifact

if TYPE_CHECKING:
    from rankscope.types import Logger, Window

_ABORTED = "-aborted"
_PROBE = bytes(64 * 1024)
_SPARE = 16 << 20
"""Bytes that shall stay free beside what is expected."""
_FIXED = frozenset({"tool", "role", "rank", "step", "scope", "window", "status", "path", "bytes", "checksum", "events"})


class Store:
    """Where one tool of one role in one process puts its artifacts.

    Args:
        save_path: directory of the artifacts; created when it is needed, also when it vanished meanwhile.
        tool, role, rank, world_size, topology, host: what names and records say.
        ledger: gets one line for each outcome.
        clock: nanoseconds since the epoch.
        logger: gets one line for each published file; None is silent.
        stage_dir: where raw data is staged; None chooses a local disk.
        max_exports: files that may be with the helper process at once.
        wait_for_exports: most seconds that ``admit`` waits for one of them; 0 gives the new file up at once.

    Attributes:
        artifacts: what was published so far, in order.
        why_nothing: the latest reason why a file did not come; empty while there was none.
    """

    def __init__(
        self,
        save_path: Path,
        *,
        tool: str,
        role: str,
        rank: int,
        world_size: int | None,
        topology: Mapping[str, int],
        host: str,
        ledger: Ledger,
        clock: Callable[[], int] = time.time_ns,
        logger: Logger | None = None,
        stage_dir: Path | None = None,
        max_exports: int = 32,
        wait_for_exports: float = 120.0,
    ) -> None:
        self.save_path = Path(save_path)
        self.tool = tool
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.topology = dict(topology)
        self.host = host
        self.ledger = ledger
        self.clock = clock
        self.logger = logger
        self.stage_dir = stage_dir
        self.max_exports = max_exports
        self.wait_for_exports = wait_for_exports
        self.artifacts: list[Artifact] = []
        self._warned = False
        self._told: set[str] = set()
        self.why_nothing = ""
        self._next = ("", 0)  # the latest millisecond and its next counter: spares a walk over taken names

    def stage(self, window: Window, *, expected: int = 0) -> Path:
        """A new directory on a local disk, for a tool that has to write before it knows what its file will hold.

        Hand it to ``reserve`` when there is something to make a file of, else remove it.

        Args:
            window: what is captured.
            expected: bytes, as far as anybody can know; 0 where nobody does.

        Raises:
            OSError: no place can be written. The ledger has it as failed.
        """
        name = format_name(self._fields(window, clean_label(window.scope)))
        try:
            folder = self._staging_folder(self.save_path, expected)
            for attempt in itertools.count():
                path = folder / f"{numbered(name, attempt)}.raw"
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    return path
        except OSError as error:
            self._line(self._facts(window, window.scope), "failed", path=None, reason=explained(error, self.save_path))
            raise
        raise AssertionError("unreachable: the count has no end")

    def reserve(
        self,
        window: Window,
        *,
        suffix: str = "",
        part: str = "",
        scope: str | None = None,
        aborted: bool = False,
        staged: Path | None = None,
    ) -> Reservation:
        """Take a name for one file of a window.

        Args:
            window: what the file covers.
            suffix: ending of the name, with its dot: ``.json.gz``.
            part: ``mb3``, ``mb3-4`` or ``part2`` when the file holds a part of the window.
            scope: instead of the window's.
            aborted: the step raised; ``-aborted`` is appended to the scope.
            staged: raw data that lies in a directory of ``stage`` already. It is removed when nothing comes of it.

        Raises:
            OSError: neither the save path nor the fallback directory can be written. The ledger has it as failed.
            ValueError: suffix or part breaks the grammar of names.
        """
        label = clean_label(window.scope if scope is None else scope)
        if aborted and not label.endswith(_ABORTED):
            label = clean_label(label, MAX_LABEL - len(_ABORTED)) + _ABORTED if label else _ABORTED[1:]
        fields = dataclasses.replace(self._fields(window, label), part=part, suffix=suffix)
        first = self._next[1] if self._next[0] == fields.time else 0

        def name(attempt: int) -> str:
            self._next = (fields.time, first + attempt + 1)
            return format_name(dataclasses.replace(fields, counter=first + attempt))

        def take(directory: Path) -> Claim:
            taken = claim(directory, name)
            try:
                _probe(taken.temporary)
            except OSError:
                taken.temporary.unlink(missing_ok=True)
                raise
            return taken

        try:
            taken, fallen_back = self._where_possible(take)
        except OSError as error:
            self._line(self._facts(window, label), "failed", path=None, reason=explained(error, self.save_path))
            if staged is not None:
                discard(staged)
            raise
        return Reservation(self, window, label, taken, fallen_back, staged=staged)

    def _fields(self, window: Window, scope: str) -> NameFields:
        return NameFields(
            role=window.role,
            scope=scope,
            step=window.step,
            rank=self.rank,
            world_size=self.world_size,
            topology=self.topology,
            pid=os.getpid(),
            time=time_text(self.clock()),
        )

    def _staging_folder(self, save_path: Path, expected: int) -> Path:
        """Where raw data goes: a local disk with enough room, or the one with the most."""
        wanted = dict.fromkeys([staging(save_path, self.stage_dir), beside(save_path), elsewhere(save_path)])
        needed = expected + expected // 10 + _SPARE
        usable: list[Path] = []
        for place in wanted:
            with contextlib.suppress(OSError):
                prepare(place)
                usable.append(place)
                if free_bytes(place) >= needed:
                    return place
        folder = max(usable or wanted, key=free_bytes)
        if self.logger is not None:
            self.logger.warning(
                "hardly any room for raw data", folder=str(folder), free=free_bytes(folder), expected=expected
            )
        return folder

    def admit(self, window: Window) -> bool:
        """Whether one more file may be handed to the helper process now; to be asked before raw data is written.

        With too many under way it waits, as long as the config allows, or gives the new file up. Both are told.
        """
        if self.has_room():
            return True
        self.missing(window, self.no_room)
        return False

    @property
    def no_room(self) -> str:
        """Why a file is given up."""
        return f"given up: {self.max_exports} files are still being exported (max_exports)"

    def has_room(self) -> bool:
        """The same, which tells nothing where the answer is no."""
        if exports().pending < self.max_exports:
            return True
        if self.logger is not None and self.wait_for_exports:
            self.logger.warning("waiting for exports: as many as are allowed are under way", files=self.max_exports)
        return exports().drain(self.wait_for_exports, below=self.max_exports)

    def adopt(self, path: Path, window: Window, **facts: Any) -> Artifact:
        """Move in a finished file or directory that the tool wrote elsewhere.

        Its name becomes ``[role_][scope_][step<S>_]rank<r>_<host>_<name>``.

        Args:
            path: where it lies.
            window: what it covers.
            **facts: for the ledger and the artifact.

        Raises:
            OSError: the file is missing, or no place can be written. The ledger has it as failed.
        """
        step = "" if window.step is None else f"step{window.step}"
        labels = [clean_label(window.role), clean_label(window.scope), step, f"rank{self.rank}", clean_label(self.host)]
        name = fit("_".join([*filter(None, labels), path.name]))
        facts = self._facts(window, window.scope) | facts | {"moved_from": str(path)}
        try:
            final, fallen_back = self._where_possible(lambda directory: move_in(path, directory, name))
            crc = "" if final.is_dir() else checksum(final)
            size = size_of(final)
        except OSError as error:
            self._line(facts, "failed", path=None, reason=explained(error, self.save_path))
            raise
        if fallen_back:
            facts["fallback_from"] = str(self.save_path)
        return self._published(facts, final, size, crc, None)

    def on_behalf_of(self, pid: int, run_id: str) -> Store:
        """The same store, with the ledger of another process of this host: for what that could not collect."""
        other = copy.copy(self)
        other.ledger = Ledger(self.ledger.save_path, host=self.ledger.host, run_id=run_id, pid=pid)
        return other

    def keep(self, path: Path, window: Window, *, events: int | None = None, **facts: Any) -> Artifact:
        """Take note of a file or directory that the tool wrote, whole, at its place in the save path.

        Args:
            path: where it lies.
            window: what it covers.
            events: number of events of what was asked.
            **facts: for the ledger and the artifact.

        Raises:
            OSError: it is missing or empty. The ledger has it as failed.
        """
        known = self._facts(window, window.scope) | facts
        try:
            size = size_of(path)
            if size == 0:
                raise OSError(errno.ENODATA, "nothing was written", str(path))
            crc = checksum_of(path)
        except OSError as error:
            self._line(known, "failed", path=None, reason=explained(error, self.save_path))
            raise
        return self._published(known, path, size, crc, events)

    def record(self, artifact: Mapping[str, Any], *, ledger: bool = True) -> Artifact | None:
        """Take note of an outcome that another process (the helper) brought about.

        Args:
            artifact: facts as in the ledger's ``artifact`` records; tool, role and rank default to this store's.
            ledger: whether the line still has to be written.

        Returns:
            The artifact if its status is ``published`` (the default), else None.
        """
        facts = {"tool": self.tool, "role": self.role, "rank": self.rank, "status": "published", **artifact}
        status = facts.pop("status")
        if status != "published":
            outcome = {"path": None, "reason": "", **facts}
            if ledger:
                self._line(facts, status, **outcome)
            else:
                self._tell(status, outcome)
            return None
        final, size, crc = Path(facts["path"]), int(facts.get("bytes") or 0), str(facts.get("checksum") or "")
        return self._published(facts, final, size, crc, facts.get("events"), ledger=ledger)

    def missing(self, window: Window, reason: str, *, status: str = "failed") -> None:
        """Say that a window leaves no file behind, and why, where no name was reserved yet."""
        self._line(self._facts(window, window.scope), status, path=None, reason=reason)

    def _facts(self, window: Window, scope: str) -> dict[str, Any]:
        early = {"ended_early": window.ended} if window.ended else {}
        return {
            **early,
            "tool": self.tool,
            "role": window.role,
            "rank": self.rank,
            "step": window.step,
            "scope": scope,
            "window": window.id,
        }

    def _line(self, facts: Mapping[str, Any], status: str, **more: Any) -> None:
        self.ledger.write("artifact", **{**facts, **more, "status": status})
        self._tell(status, {**facts, **more})

    def _tell(self, status: str, facts: Mapping[str, Any]) -> None:
        """A window that leaves nothing is told, whoever found that out."""
        if status in {"failed", "empty"} and facts.get("reason"):
            self.why_nothing = str(facts["reason"])
        if status in {"failed", "empty"} and self.logger is not None:
            shown = {key: facts.get(key) for key in ("tool", "step", "scope")}
            self.logger.warning(f"profile {status}", **shown, reason=facts.get("reason", ""), path=facts.get("path"))

    def _published(
        self, facts: Mapping[str, Any], final: Path, size: int, crc: str, events: int | None, *, ledger: bool = True
    ) -> Artifact:
        artifact = Artifact(
            path=final,
            tool=facts["tool"],
            role=facts["role"],
            rank=facts["rank"],
            step=facts.get("step"),
            scope=facts.get("scope") or "",
            bytes=size,
            checksum=crc,
            events=events,
            facts={key: value for key, value in facts.items() if key not in _FIXED},
        )
        self.artifacts.append(artifact)
        if ledger:
            self._line(facts, "published", path=final, bytes=size, checksum=crc, events=events)
        if self.logger is not None:
            self.logger.info("profile saved", tool=facts["tool"], path=str(final), bytes=size, events=events)
            for warning in facts.get("warnings") or ():
                self._warn(facts["tool"], str(warning), final)
        return artifact

    def _warn(self, tool: str, warning: str, path: Path) -> None:
        """What a tool says of its file; the same words once."""
        if self.logger is not None and warning not in self._told:
            self._told.add(warning)
            self.logger.warning(warning, tool=tool, path=str(path))

    def _where_possible(self, take: Callable[[Path], Any]) -> tuple[Any, bool]:
        """Do it in the save path, else once more in the fallback directory. (result, whether it is the fallback)."""
        try:
            self.save_path.mkdir(parents=True, exist_ok=True)
            return take(self.save_path), False
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self.save_path.is_dir():
                raise  # the source is missing, not the place
            first = error
        try:
            directory = self._fallback()
            result = take(directory)
        except OSError as error:
            raise error from first
        if self.logger is not None and not self._warned:
            self._warned = True
            reason = explained(first, self.save_path)
            self.logger.warning(
                "the save path cannot be written; artifacts go to a fallback directory",
                save_path=str(self.save_path),
                fallback=str(directory),
                reason=reason,
            )
        return result, True

    def _fallback(self) -> Path:
        """``<tempdir>/rankscope-<uid>/<save path>``, which nobody else can have prepared for us."""
        base = Path(tempfile.gettempdir(), f"rankscope-{os.getuid()}")
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to somebody else", str(base))
        directory = base / clean_label(str(self.save_path))
        directory.mkdir(parents=True, exist_ok=True)
        return directory


def partial_files(directory: Path) -> list[Path]:
    """Files in a save path that were begun and neither published nor removed: being written, or left by a kill."""
    folder = Path(directory) / FOLDER / "partial"
    return sorted(folder.glob("*.part")) if folder.is_dir() else []


def _probe(path: Path) -> None:
    """Find out now whether the disk takes data, and not after the capture."""
    with path.open("r+b", buffering=0) as file:
        written = file.write(_PROBE)
        file.truncate(0)
    if written != len(_PROBE):
        raise OSError(errno.ENOSPC, "no space left for a file", str(path))
