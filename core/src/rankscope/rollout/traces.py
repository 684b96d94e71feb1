"""The directory that one replica's engine writes to: what is new there, whole, and of which GPU and window."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rankscope.rollout.engine import Engine, EngineFile
from rankscope.rollout.names import locate, relocated_name
from rankscope.rollout.replicas import Layout
from rankscope.rollout.sessions import Session, Sighting, assign
from rankscope.rollout.wanted import prefix_step
from rankscope.rollout.whole import FolderWatch, TraceInfo, Watch, read_info

ASCEND = "_ascend_pt"
"""Ending of the folder that torch_npu's profiler writes instead of a file; such a folder is recorded where it lies."""

_ASCEND_TIME = re.compile(rf"(?:_\d{{8,}})?{ASCEND}$", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a directory says of one name in it; two are equal while nobody wrote to the file."""

    name: str
    inode: int
    size: int
    written_ns: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Ready:
    """A file that is whole and wanted.

    Attributes:
        path: where it lies.
        file: what its name says.
        rank: global rank of its GPU, or None.
        why: why nobody knows the GPU, in words.
        step: training step that it belongs to, or None.
        session: its window, or None for a file of another process's window.
        name: what it is called in the save path.
        checksum: of its bytes, where that is known already.
    """

    path: Path
    file: EngineFile
    rank: int | None
    why: str
    step: int | None
    session: Session | None
    name: str
    checksum: str


@dataclasses.dataclass(eq=False)
class _Known:
    file: EngineFile
    watch: Watch
    session: Session | None
    step: int | None
    info: TraceInfo | None = None
    done: Entry | None = None


class ReplicaTraces:
    """Looks through one replica's directory, again and again, and never touches what is not the engine's.

    Args:
        replica: its number.
        directory: where the engine writes; need not exist yet. What lies there now belongs to somebody else.
        devices: global ranks of its GPUs.
        wanted: those whose files are wanted.
        engine: the adapter.
        layout: the engine's, where it is known.
        foreign: whether windows of other processes count: on a node that drives no engine itself.
    """

    def __init__(
        self,
        replica: int,
        directory: Path,
        devices: tuple[int, ...],
        wanted: Iterable[int],
        engine: Engine,
        *,
        layout: Layout | None = None,
        foreign: bool = False,
    ) -> None:
        self.replica = replica
        self.directory = directory
        self.devices = devices
        self.wanted = frozenset(wanted)
        self.engine = engine
        self.layout = layout
        self._foreign = foreign
        self._before = {entry.name: entry for entry in _entries(directory)}
        self._present: dict[str, Entry] = {}
        self._known: dict[str, _Known] = {}
        self._seen: dict[object, EngineFile] = {}
        self._left: dict[str, tuple[int, str]] = {}

    def ready(self, sessions: Sequence[Session], *, last: bool, deadline: float) -> list[Ready]:
        """The files that are whole, wanted, and not taken yet.

        Args:
            sessions: windows in which the replica took part, in their order.
            last: no further look follows: a file whose GPU cannot be told is given out as such.
            deadline: ``time.monotonic()`` at which reading stops.
        """
        found = {entry.name: entry for entry in _entries(self.directory)}
        self._present = {name: entry for name, entry in found.items() if self._before.get(name) != entry}
        for name, known in list(self._known.items()):
            # Moved, by us or by another node's instance; or written anew under the same name.
            if name not in self._present or known.done not in {None, self._present[name]}:
                del self._known[name]
        self._left = {name: left for name, left in self._left.items() if name in self._present}
        self._meet(sessions)
        looks = (self._look(known, last=last, deadline=deadline) for known in list(self._known.values()))
        return [ready for ready in looks if ready is not None]

    def take(self, ready: Ready) -> None:
        """The file was brought in, or recorded where it lies."""
        self._finish(ready.file.name)

    @property
    def unfinished(self) -> bool:
        """Whether a file of ours is still being written."""
        return any(known.done is None for known in self._known.values())

    def left(self) -> dict[str, str]:
        """What stays in the directory although it could be a result, by name, and why."""
        growing = {name: known.watch.why for name, known in self._known.items() if known.done is None}
        return {**{name: why for name, (_, why) in self._left.items()}, **growing}

    def _finish(self, name: str) -> None:
        if name in self._known:
            self._known[name].done = self._present.get(name)

    def _meet(self, sessions: Sequence[Session]) -> None:
        """Note files that were not there before, and the window they belong to."""
        files: dict[str, EngineFile] = {}
        sightings = []
        now = time.monotonic()
        for name, entry in self._present.items():
            if name in self._known or (name in self._left and self._left[name][0] == entry.inode):
                continue
            file, why = self._parse(entry)
            if file is None:
                self._left[name] = (entry.inode, why)
                continue
            files[name] = file
            self._seen[file.identity] = file
            sightings.append(Sighting(file, now, entry.written_ns if file.stamp is None else file.stamp))
        owners = assign(sightings, sessions, self.replica)
        for name, file in files.items():
            session = owners.get(name)
            if session is None and not (file.prefix or self._foreign):
                # Somebody else switched the profiler on.
                self._left[name] = (self._present[name].inode, "it was written outside of every window")
                continue
            self._left.pop(name, None)
            step = session.step if session is not None else prefix_step(file.prefix)
            watch = (FolderWatch if self._present[name].kind else Watch)(self.directory / name)
            self._known[name] = _Known(file, watch, session, step)

    def _parse(self, entry: Entry) -> tuple[EngineFile | None, str]:
        """What a name says, or why it is left alone."""
        name = entry.name
        if entry.kind == _FOLDER and name.endswith(ASCEND):
            file = self.engine.parse(f"{_ASCEND_TIME.sub('', name)}.pt.trace.json.gz")
            return dataclasses.replace(file or EngineFile(name), name=name), ""
        if entry.kind:
            return None, entry.kind
        if name.startswith(".") or name.endswith((".tmp", ".part", ".lock")):
            return None, "it is a temporary file"
        file = self.engine.parse(name)
        if file is None and name.endswith((".json", ".json.gz")):
            file = EngineFile(name, "unknown")
        return file, _NO_FILE

    def _look(self, known: _Known, *, last: bool, deadline: float) -> Ready | None:
        file, watch = known.file, known.watch
        if known.done is not None:
            return None
        try:
            if not watch.whole(deadline):
                return None
        except OSError as error:
            watch.why = f"it cannot be read: {error.strerror or error}"
            return None
        folder = bool(self._present[file.name].kind)
        if file.kind in {"trace", "unknown"} and known.info is None and not folder:
            known.info = read_info(watch.path)
            if file.kind == "unknown" and not known.info.is_trace:
                del self._known[file.name]
                self._left[file.name] = (self._present[file.name].inode, f"{_NO_FILE}, and it holds no trace")
                return None
        place = locate(
            self.engine, file, self.devices, layout=self.layout, seen=tuple(self._seen.values()), info=known.info
        )
        if place.local is None and not place.settled and not last:
            watch.why = place.reason
            return None
        rank = None if place.local is None else self.devices[place.local]
        if rank is not None and rank not in self.wanted:
            self._finish(file.name)  # the rest of its replica records too; its files stay where they are
            return None
        # With one GPU a replica, its number is the rank, and is not said twice.
        said = None if self.devices == (self.replica,) else rank
        name = relocated_name(self.replica, said, known.step, file.shown)
        return Ready(watch.path, file, rank, place.reason, known.step, known.session, name, watch.checksum)


_NO_FILE = "no file of this engine is called so"
_FOLDER = "it is a directory"


def _entries(directory: Path) -> list[Entry]:
    """What is in a directory, by name; nothing where there is none."""
    try:
        with os.scandir(directory) as found:
            return sorted((_entry(one) for one in found), key=lambda entry: entry.name)
    except OSError:
        return []


def _entry(one: os.DirEntry[str]) -> Entry:
    try:
        found = one.stat(follow_symlinks=False)
    except OSError:  # gone since
        return Entry(one.name, 0, 0, 0, "it is gone")
    if stat.S_ISREG(found.st_mode):
        return Entry(one.name, found.st_ino, found.st_size, found.st_mtime_ns, "")
    # The size and time of a directory change with what is in it.
    return Entry(one.name, found.st_ino, 0, 0, _FOLDER if stat.S_ISDIR(found.st_mode) else "it is a link")
