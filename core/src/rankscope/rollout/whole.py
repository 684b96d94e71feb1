"""Whether an engine has finished a file, and what a trace says of itself. Nothing here changes a file."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import time
import zlib
from pathlib import Path

SETTLED = 0.5
"""Seconds for which a file that cannot prove to be whole must not have changed."""

_BLOCK = 1 << 20
_HEAD = 4 << 20
"""Bytes of a trace in which its facts are looked for: they come before the events."""

_GZIP = 31
"""``wbits`` of zlib for a gzip member; it checks length and CRC at the end."""


@dataclasses.dataclass(frozen=True)
class TraceInfo:
    """What a trace says of itself.

    Attributes:
        is_trace: whether it has a list of events.
        rank, world_size: of the engine's process group (``distributedInfo``), or None.
    """

    is_trace: bool
    rank: int | None = None
    world_size: int | None = None


class Watch:
    """Follows one file until it is whole.

    A gzip file is whole when its last member has been read to the end, with the right length and CRC; it is read once,
    also over several calls. A file of another kind has to end as such files do, and to be left unchanged for a while.

    Attributes:
        path: the file.
        why: what is missing, in words.
        checksum: ``crc32:…`` of a gzip file that is whole, else empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.why = "it was not looked at yet"
        self.checksum = ""
        self._state: tuple[int, int, int] | None = None
        self._since = 0.0
        self._restart()

    def _restart(self) -> None:
        self._offset = 0
        self._crc = 0
        self._member = zlib.decompressobj(_GZIP)
        self._done = False

    def whole(self, deadline: float) -> bool:
        """Whether the file is whole.

        Args:
            deadline: ``time.monotonic()`` at which reading stops, to go on at the next call.

        Raises:
            FileNotFoundError: it is gone.
        """
        now = self._look()
        if now != self._state:
            self._state, self._since = now, time.monotonic()
            self._restart()
        if now[0] == 0:
            self.why = "it is empty"
            return False
        if self.path.name.endswith(".gz"):
            if not self._done and not self._read(deadline):
                return False
            self.checksum = f"crc32:{self._crc:08x}"
        elif not self._ends_well() or time.monotonic() - self._since < SETTLED:
            return False
        return self._look() == now

    def _look(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _read(self, deadline: float) -> bool:
        self.why = "its gzip data has no end"
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while block := file.read(_BLOCK):
                try:
                    self._feed(block)
                except zlib.error as error:
                    self._restart()
                    self.why = f"its gzip data is damaged: {error}"
                    return False
                self._offset += len(block)
                self._crc = zlib.crc32(block, self._crc)
                if len(block) == _BLOCK and time.monotonic() > deadline:
                    return False
        self._done = self._member.eof
        return self._done

    def _feed(self, block: bytes) -> None:
        while block:
            if self._member.eof:
                block = block.lstrip(b"\0")  # padding is allowed
                if not block:
                    return
                self._member = zlib.decompressobj(_GZIP)
            self._member.decompress(block, _BLOCK)
            block = self._member.unconsumed_tail or self._member.unused_data

    def _ends_well(self) -> bool:
        self.why = "it may still be written"
        ending = {".json": b"}]", ".pickle": b"."}.get(self.path.suffix)
        if ending is None:
            return True
        with self.path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64))
            last = file.read().rstrip()[-1:]
        return bool(last) and last in ending


class FolderWatch(Watch):
    """Follows a folder: it is whole when nothing in it has changed for a while."""

    def whole(self, deadline: float) -> bool:
        """Whether nothing changed."""
        del deadline
        found = [below.stat() for below in self.path.rglob("*")]
        now = (sum(one.st_size for one in found), max((one.st_mtime_ns for one in found), default=0), len(found))
        if now != self._state:
            self._state, self._since = now, time.monotonic()
        self.why = "it may still be written"
        return bool(found) and time.monotonic() - self._since >= SETTLED


def read_info(path: Path) -> TraceInfo:
    """What the beginning of a trace says; a file that cannot be read is none."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            head = file.read(_HEAD).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error):
        return TraceInfo(False)
    before, events, _ = head.partition('"traceEvents"')
    found = re.search(r'"distributedInfo"\s*:\s*', before)
    facts = None
    if found is not None:
        try:
            facts, _ = json.JSONDecoder().raw_decode(before, found.end())
        except ValueError:
            facts = None
    if not isinstance(facts, dict):
        return TraceInfo(bool(events))
    rank, world_size = (_number(facts.get(name)) for name in ("rank", "world_size"))
    if rank is None or world_size is None or rank >= world_size:
        return TraceInfo(bool(events))
    return TraceInfo(bool(events), rank, world_size)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
