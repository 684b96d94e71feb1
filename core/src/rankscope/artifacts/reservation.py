"""A reservation: a name that is taken, and what becomes of the file behind it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rankscope.artifacts.exports import exports
from rankscope.artifacts.publish import Claim, checksum, discard, publish, size_of
from rankscope.host import born
from rankscope.types import Artifact

if TYPE_CHECKING:
    from typing_extensions import Self

    from rankscope.artifacts.store import Store
    from rankscope.types import Window

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Reservation:
    """A name that is taken, and the temporary file behind it.

    As a context manager it cannot be forgotten: when the block ends without ``publish``, ``fail``, ``empty`` or
    ``hand_over``, the file counts as failed, with the exception's text if there was one. The exception passes on.

    Attributes:
        final: where the file will appear.
        window: what it covers.
        scope: the label in its name.
    """

    def __init__(
        self, store: Store, window: Window, scope: str, taken: Claim, fallen_back: bool, *, staged: Path | None = None
    ) -> None:
        self.final = taken.final
        self.window = window
        self.scope = scope
        self._store = store
        self._temporary = taken.temporary
        self._facts = store._facts(window, scope) | {"reserved": taken.final.name}  # noqa: SLF001
        if fallen_back:
            self._facts["fallback_from"] = str(store.save_path)
        self._staged = staged
        self._settled = False
        self._handed_over = False

    @property
    def temporary(self) -> Path:
        """The file to write; its directory is there at the moment of asking, even if someone cleared the save path."""
        if not self._settled:
            with contextlib.suppress(OSError):
                self._temporary.parent.mkdir(parents=True, exist_ok=True)
        return self._temporary

    @property
    def settled(self) -> bool:
        """Whether the outcome is known."""
        return self._settled

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger says of this file, for whoever publishes it elsewhere and reports to ``store.record``."""
        return dict(self._facts)

    def publish(self, *, events: int | None = None, checksum: str | None = None, **facts: Any) -> Artifact:
        """Let the written file appear under its final name.

        Args:
            events: number of events of what was asked.
            checksum: of the file, if it is known already.
            **facts: for the ledger and the artifact.

        Raises:
            OSError: nothing was written, or the file cannot be placed. The ledger has it as failed.
            ValueError: the outcome is known already.
        """
        self._open()
        try:
            size = size_of(self._temporary)
            if size == 0:
                raise OSError(errno.ENODATA, "nothing was written", str(self._temporary))
            crc = checksum if checksum is not None else checksum_of(self._temporary)
            final = publish(self._temporary, self.final, sync=False)
        except OSError as error:
            self.fail(explained(error, self.final.parent))
            raise
        self._settled = True
        return self._store._published({**facts, **self._facts}, final, size, crc, events)  # noqa: SLF001

    def fail(self, reason: str, **facts: Any) -> None:
        """Nothing usable came out: remove the temporary file and say why. No effect once the outcome is known."""
        self._give_up("failed", reason, facts)

    def empty(self, reason: str, **facts: Any) -> None:
        """The window held nothing of what was asked: remove the temporary file and say why."""
        self._give_up("empty", reason, facts)

    def hand_over(self, **facts: Any) -> None:
        """Somebody else will publish the temporary file (the helper, a thread): leave it, and note ``exporting``.

        Afterwards ``publish``, ``fail`` and ``empty`` still work; or report to ``store.record`` with ``facts`` of this
        reservation.
        """
        self._open()
        self._handed_over = True
        self._store._line({**facts, **self._facts}, "exporting", path=self.final)  # noqa: SLF001

    @property
    def staged(self) -> Path:
        """Where a tool may write raw data that the helper process then makes into the file; unique to this name."""
        return self._staged if self._staged is not None else self.stage()

    def stage(self, expected: int = 0) -> Path:
        """Choose where the raw data goes: on a local disk with enough room, and return that path.

        Args:
            expected: bytes, as far as anybody can know; 0 where nobody does.
        """
        folder = self._store._staging_folder(self.final.parent, expected)  # noqa: SLF001
        self._staged = folder / f"{self.final.name}.raw"
        return self._staged

    def finish_later(self, function: str, arguments: Mapping[str, Any], **facts: Any) -> None:
        """Let the helper process make the file out of ``staged`` and publish it; returns at once.

        The function is called there as ``function(staged, temporary, name, arguments)``, writes the temporary file and
        returns facts for the ledger (``events`` among them). It may raise ``NothingRecorded``. If this process is
        killed, the helper still finishes its work.

        Args:
            function: ``module:name``; the module must be importable, and light.
            arguments: plain data for it.
            **facts: for the ledger.

        Raises:
            OSError: the job cannot be written. The ledger has it as failed.
        """
        if not self._store.has_room():  # nobody asked ``admit`` before
            self.fail(self._store.no_room)
            return
        self.hand_over(staged=str(self.staged), **facts)
        ledger = self._store.ledger
        job = {
            "function": function,
            "staged": str(self.staged),
            "temporary": str(self._temporary),
            "final": str(self.final),
            "facts": {**facts, **self._facts},
            "ledger": {
                "save_path": str(ledger.save_path),
                "host": ledger.host,
                "run_id": ledger.run_id,
                "pid": os.getpid(),
                "born": born(os.getpid()),
            },
            "arguments": dict(arguments),
        }
        try:
            exports().submit(self._store, job)
        except OSError as error:
            # Without a job nobody can use the raw data, and on a full disk the ledger needs the room to say so.
            discard(self.staged)
            self.fail(explained(error, self.final.parent))
            raise
        self._settled = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._settled or (self._handed_over and error is None):
            return
        self.fail("not published" if error is None else explained(error, self.final.parent))

    def _open(self) -> None:
        if self._settled:
            raise ValueError(f"the outcome of {self.final.name} is known already")

    def _give_up(self, status: str, reason: str, facts: Mapping[str, Any]) -> None:
        if self._settled:
            return
        self._settled = True
        if self._staged is not None and not self._handed_over:  # half of it, which no job will ever make a file of
            discard(self._staged)
        discard(self._temporary)
        self._store._line({**facts, **self._facts}, status, path=None, reason=reason)  # noqa: SLF001


def checksum_of(path: Path) -> str:
    """The checksum of a file; empty for a directory."""
    return "" if path.is_dir() else checksum(path)


def explained(error: BaseException, directory: Path) -> str:
    """An error in words, with the room that is left where a disk is full."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in _FULL:
        with contextlib.suppress(OSError):
            text += f" ({shutil.disk_usage(directory).free / 2**20:.1f} MiB free in {directory})"
    return text
