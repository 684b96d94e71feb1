"""Where raw data is staged: on a local disk, since the training thread waits while it is written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import zlib
from pathlib import Path

from rankscope.artifacts.ledger import FOLDER

STAGED = "staged"

_REMOTE = re.compile(
    r"(?:nfs|lustre|cifs|smb|ceph|gpfs|beegfs|gluster|afs|9p|virtiofs|orangefs|pvfs|panfs|wekafs|fuse)", re.IGNORECASE
)
"""File systems behind a network or a user-space daemon: a stuck server would hold the training thread."""


def staging(save_path: Path, stage_dir: Path | None = None) -> Path:
    """The folder for raw data of a save path.

    Args:
        save_path: where the artifacts end up.
        stage_dir: what the config says; None means: beside the artifacts if they lie on a local disk, else in the
            node's temporary directory.
    """
    if stage_dir is not None:
        return Path(stage_dir) / _own_folder(save_path)
    return beside(save_path) if is_local(save_path) else elsewhere(save_path)


def beside(save_path: Path) -> Path:
    """The staging folder inside a save path."""
    return Path(save_path) / FOLDER / STAGED


def elsewhere(save_path: Path) -> Path:
    """The staging folder of a save path in the node's temporary directory."""
    return Path(tempfile.gettempdir()) / _own_folder(save_path)


def prepare(folder: Path) -> None:
    """Create a staging folder.

    Raises:
        OSError: it cannot be created or written, or somebody else has prepared it for us.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_ours(folder):
        raise PermissionError(errno.EPERM, "belongs to somebody else", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written", str(folder))


def is_ours(folder: Path) -> bool:
    """Whether nobody else can have put jobs into a staging folder: in a temporary directory anybody may create it.

    A folder beside the artifacts is as safe as those.
    """
    folder = Path(folder)
    if folder.name == STAGED:
        return folder.is_dir()
    try:
        found = [path.lstat() for path in (folder, folder.parent)]
    except OSError:
        return False
    return all(stat.S_ISDIR(one.st_mode) and one.st_uid == os.getuid() for one in found)


def is_local(path: Path) -> bool:
    """Whether a path (or the nearest parent that exists) lies on a local file system; True where nobody can tell."""
    try:
        where = Path(path).absolute()
        while not where.exists() and where != where.parent:
            where = where.parent
        device = where.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                words = line.split()
                if words[2] == number:
                    return _REMOTE.match(words[words.index("-") + 1]) is None
    except (OSError, ValueError, IndexError):
        pass
    return True


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that a folder (or its nearest parent) lies on; 0 where that cannot be found out."""
    where = Path(folder)
    try:
        while not where.exists() and where != where.parent:
            where = where.parent
        return shutil.disk_usage(where).free
    except OSError:
        return 0


def _own_folder(save_path: Path) -> str:
    """One folder a user and save path, so that two jobs with one stage_dir stay apart and recovery finds its own."""
    key = zlib.crc32(str(Path(save_path).absolute()).encode())
    return f"rankscope-{os.getuid()}/{STAGED}-{key:08x}"
