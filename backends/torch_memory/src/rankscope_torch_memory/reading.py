"""Read a snapshot without running anything that is in it.

A snapshot is a pickle, and a pickle can name any function to be called. This reader builds dicts, lists, tuples, sets,
texts and numbers; everything else is refused, and so nothing is ever called.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

_STOP = b"."
_PROTOCOL = b"\x80"
_MEBI = 1 << 20


class SnapshotError(ValueError):
    """The file is no snapshot, is cut off, or holds more than plain containers."""


class _Reader(pickle.Unpickler):
    """An unpickler that knows no name of anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(
            f"refused: it asks for {module}.{name}, and a snapshot holds nothing but plain containers, texts and "
            "numbers; whoever made this file may want to run code on your machine"
        )

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002
        raise SnapshotError("refused: it refers to objects outside of the file")


def load(path: Path) -> dict[str, Any]:
    """The content of a snapshot file.

    Raises:
        SnapshotError: it is none, or it is cut off, or it would have to run code to be read.
        OSError: the file cannot be read.
    """
    _look(path)
    with path.open("rb") as file, _without_collector():
        try:
            found = _Reader(file).load()
        except SnapshotError:
            raise
        except MemoryError:
            raise SnapshotError("it needs more memory than a snapshot of its size") from None
        except Exception as error:  # noqa: BLE001
            # A broken pickle can make nearly any exception: see the documentation of pickle.load.
            raise SnapshotError(f"it is no whole pickle: {type(error).__name__}: {error}") from None
    return checked(found)


def checked(found: Any) -> dict[str, Any]:
    """The same object, if it has the form of a snapshot.

    Raises:
        SnapshotError: it has not.
    """
    if isinstance(found, list) and all(isinstance(item, dict) and "blocks" in item for item in found):
        found = {"segments": found}  # what memory_snapshot() returns, and what torch saved up to 1.13
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise SnapshotError(f"it is a pickle, but no memory snapshot: {_described(found)} without a list 'segments'")
    if not isinstance(found.get("device_traces", []), list):
        raise SnapshotError("it is no memory snapshot: its 'device_traces' are no list")
    return found


def _described(found: Any) -> str:
    if isinstance(found, Mapping):
        keys = ", ".join(repr(key)[:30] for key in list(found)[:5])
        return f"a mapping with {keys}" if keys else "an empty mapping"
    return f"a {type(found).__name__}"


def _look(path: Path) -> None:
    """Tell at once what is no pickle at all, or only a part of one."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
        raise SnapshotError("it is no file")
    with path.open("rb") as file:
        begin = file.read(8)
        if not begin:
            raise SnapshotError("the file is empty")
        file.seek(-1, 2)
        end = file.read(1)
    if begin.startswith(b"PK\x03\x04"):
        raise SnapshotError("it is a zip archive, as torch.save writes it, and no memory snapshot")
    if begin.startswith(b"\x1f\x8b"):
        raise SnapshotError("it is compressed; unpack it first (gunzip)")
    if not begin.startswith(_PROTOCOL):
        raise SnapshotError("it is no pickle of a memory snapshot")
    if end != _STOP:
        raise SnapshotError("it is cut off: the end is missing")


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of new containers, none of them garbage: looking for some takes longer than reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def bounded_memory(path: Path) -> Iterator[None]:
    """Let this process take no more memory than a file of this size can need: a few bytes can ask for any amount.

    For a process of its own (the command), never for a training.
    """
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    wanted = taken + 1024 * _MEBI + 64 * path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
