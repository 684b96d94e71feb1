"""Files that appear whole, under a name that nobody else has: claim a name, write, publish.

Only the standard library is used here: the helper process imports this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rankscope.artifacts.ledger import FOLDER
from rankscope.artifacts.names import fit, numbered

PARTIAL = Path(FOLDER, "partial")
"""Where files lie, relative to their directory, until they are whole."""

BLOCK = 1 << 20
_MOST_TRIES = 100_000
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A name that belongs to this process until the temporary file is published or removed.

    Attributes:
        final: where the file will appear.
        temporary: where it is written; exists and is empty.
    """

    final: Path
    temporary: Path


def claim(directory: Path, make_name: Callable[[int], str]) -> Claim:
    """Take a free name in a directory, which is created when it is missing.

    The temporary file is created exclusively and carries the final name, so two processes never hold the same one,
    whether they run on one host or meet on shared storage with equal pids and clocks.

    Args:
        directory: where the file will appear.
        make_name: the name for the attempt 0, 1, …; a new one for each attempt.

    Raises:
        OSError: the directory cannot be written, or no attempt was free.
    """
    for attempt in range(_MOST_TRIES):
        name = make_name(attempt)
        final = directory / name
        if os.path.lexists(final):
            continue
        temporary = _create(directory / PARTIAL / f"{name}.part")
        if temporary is None:
            continue
        if os.path.lexists(final):  # published by somebody between the two looks
            discard(temporary)
            continue
        return Claim(final, temporary)
    raise FileExistsError(errno.EEXIST, "no free name was found", str(directory))


def publish(temporary: Path, final: Path, *, sync: bool = True) -> Path:
    """Let a whole file appear under its final name, in one step and without overwriting.

    Args:
        temporary: the written file; it is gone afterwards.
        final: the wanted name. If somebody took it meanwhile, the next free number is used.
        sync: first wait until the data is on the disk.

    Returns:
        The path under which the file appeared.

    Raises:
        OSError: the file is missing, or the directory cannot be written.
    """
    if sync:
        _sync(temporary)
    for path in _free(final):
        try:
            _place(temporary, path)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            return _bring_over(temporary, path)
        return path
    raise FileExistsError(errno.EEXIST, "no free name was found", str(final))


def move_in(source: Path, directory: Path, name: str) -> Path:
    """Bring in a finished file (or directory) that a tool wrote elsewhere; never overwrites.

    On the same file system it is renamed. From another one it is copied under a temporary name, synced, published, and
    only then removed at its old place. A source that already lies at its destination is left there.

    Returns:
        Where it lies now.

    Raises:
        OSError: the source is missing, or the directory cannot be written.
    """
    final = directory / fit(name)
    if not source.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file to bring in", str(source))
    with contextlib.suppress(FileNotFoundError):
        if source.samefile(final):
            return final
    directory.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        path = _bring_over(source, final, remove=False)
        source.unlink()
        return path
    return publish(source, final, sync=False)


def checksum(path: Path) -> str:
    """``crc32:xxxxxxxx`` of a file's bytes, read in blocks of one MiB.

    Raises:
        OSError: the file cannot be read.
    """
    value = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            value = zlib.crc32(block, value)
    return f"crc32:{value:08x}"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory.

    Raises:
        OSError: there is no such file.
    """
    if path.is_dir():
        return sum(below.stat().st_size for below in path.rglob("*") if below.is_file())
    return path.stat().st_size


def _create(path: Path) -> Path | None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        try:
            file = os.open(path, flags, 0o644)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, flags, 0o644)
    except FileExistsError:
        # Also what mkdir says when a file stands where a directory should be: that is not a taken name.
        if not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(path.parent)) from None
        return None
    os.close(file)
    return path


def _free(final: Path) -> Iterator[Path]:
    """The wanted path, then its alternatives that no other process has claimed."""
    yield final
    for number in range(1, _MOST_TRIES):
        path = final.with_name(numbered(final.name, number))
        if not os.path.lexists(path.parent / PARTIAL / f"{path.name}.part"):
            yield path


def _place(source: Path, final: Path) -> None:
    """Give a file its final name unless that is taken (FileExistsError)."""
    if not source.is_dir():
        try:
            os.link(source, final)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            source.unlink()
            return
    # No links here, or a directory. Names of ours are exclusive already through their claim.
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, "the name is taken", str(final))
    source.rename(final)


def _bring_over(source: Path, final: Path, *, remove: bool = True) -> Path:
    """Copy from another file system, then publish the copy."""
    target = claim(final.parent, lambda attempt: numbered(final.name, attempt))
    try:
        if source.is_dir():
            target.temporary.unlink()
            shutil.copytree(source, target.temporary)
        else:
            with source.open("rb") as read, target.temporary.open("wb") as write:
                shutil.copyfileobj(read, write, BLOCK)
                write.flush()
                os.fsync(write.fileno())
            shutil.copystat(source, target.temporary)
        path = publish(target.temporary, target.final, sync=False)
    except BaseException:
        discard(target.temporary)
        raise
    if remove:
        discard(source)
    return path


def _sync(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for below in path.rglob("*"):
            if below.is_file() and not below.is_symlink():
                _sync(below)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def discard(path: Path) -> None:
    """Remove a file or a directory with all that is in it; it may be gone already."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
