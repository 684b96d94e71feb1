"""Where raw data is staged."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import recording

from rankscope import DistProfiler, Window
from rankscope.artifacts import places
from rankscope.artifacts.exports import exports
from rankscope.artifacts.store import Store
from rankscope.config import ConfigError

Make = Callable[..., DistProfiler]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's temporary directory, for this test alone."""
    folder = tmp_path / "node-tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let /proc/self/mountinfo say that the device of tmp_path holds a file system of some type."""
    device = tmp_path.stat().st_dev
    text = tmp_path / "mountinfo"

    def say(kind: str, *, number: str = f"{os.major(device)}:{os.minor(device)}") -> None:
        text.write_text(
            "24 1 0:999 / / rw - ext4 /dev/root rw\n"
            f"31 24 {number} / /data rw,relatime shared:5 master:1 - {kind} x rw\n"
        )

    class Redirected(type(tmp_path)):  # type: ignore[misc]
        def __new__(cls, *parts: Any, **more: Any) -> Any:
            if parts == ("/proc/self/mountinfo",):
                return Path(text)
            return Path(*parts, **more)

    monkeypatch.setattr(places, "Path", Redirected)
    return say


def window(step: int = 1) -> Window:
    return Window(id=step, role="actor", step=step, steps=(step,), scope="train", reason="step")


def free(monkeypatch: pytest.MonkeyPatch, room: dict[Path, int]) -> None:
    """Say how much is free in some folders; everywhere else there is plenty."""
    monkeypatch.setattr("rankscope.artifacts.store.free_bytes", lambda folder: room.get(folder, 1 << 50))


# Which file systems are local.


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "zfs", "btrfs"])
def test_local_file_systems(tmp_path: Path, mounted: Callable[[str], None], kind: str) -> None:
    mounted(kind)
    assert places.is_local(tmp_path)
    assert places.is_local(tmp_path / "not" / "there" / "yet")


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "cifs", "smb3", "ceph", "gpfs", "beegfs", "9p", "virtiofs", "fuse.s3fs", "fuse"]
)
def test_file_systems_behind_a_network(tmp_path: Path, mounted: Callable[[str], None], kind: str) -> None:
    mounted(kind)
    assert not places.is_local(tmp_path)
    assert not places.is_local(tmp_path / "not" / "there" / "yet")


def test_what_nobody_can_tell_counts_as_local(
    tmp_path: Path, mounted: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted("nfs", number="0:998")
    assert places.is_local(tmp_path)
    monkeypatch.undo()
    assert places.is_local(Path("/proc/self/fd/none\0such"))


# Which folder.


def test_beside_the_artifacts_where_those_are_local(tmp_path: Path, mounted: Callable[[str], None]) -> None:
    mounted("ext4")
    assert places.staging(tmp_path) == tmp_path / ".rankscope" / "staged"


def test_in_the_temporary_directory_where_they_are_not(
    tmp_path: Path, temporary: Path, mounted: Callable[[str], None]
) -> None:
    mounted("nfs4")
    folder = places.staging(tmp_path / "run")
    assert folder == places.elsewhere(tmp_path / "run")
    assert folder.parent == temporary / f"rankscope-{os.getuid()}"
    assert folder != places.staging(tmp_path / "other")  # two jobs stay apart


def test_the_config_decides(tmp_path: Path, mounted: Callable[[str], None]) -> None:
    mounted("ext4")
    folder = places.staging(tmp_path / "run", tmp_path / "nvme")
    assert folder.parent == tmp_path / "nvme" / f"rankscope-{os.getuid()}"
    assert folder != places.staging(tmp_path / "other", tmp_path / "nvme")


def test_free_bytes(tmp_path: Path) -> None:
    assert 0 < places.free_bytes(tmp_path) == pytest.approx(places.free_bytes(tmp_path / "a" / "b"), rel=0.2)


def test_free_bytes_of_what_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    assert places.free_bytes(tmp_path) == 0


# Nobody else prepares it.


def test_a_folder_is_made_for_us_alone(tmp_path: Path) -> None:
    folder = places.elsewhere(tmp_path)
    places.prepare(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert places.is_ours(folder)
    places.prepare(folder)  # again


def test_a_folder_that_somebody_else_prepared_is_not_used(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, profiler: Make
) -> None:
    store = profiler().stores[0]
    folder = places.elsewhere(store.save_path)
    trap = tmp_path / "trap"
    trap.mkdir()
    (temporary / folder.parent.name).symlink_to(trap)
    with pytest.raises(PermissionError):
        places.prepare(folder)
    assert not places.is_ours(folder)
    monkeypatch.setattr("rankscope.artifacts.store.staging", lambda *_: folder)
    with store.reserve(window()) as file:
        assert file.stage() == places.beside(store.save_path) / f"{file.final.name}.raw"
        file.fail("test")


# Room.


@pytest.fixture
def store(profiler: Make) -> Store:
    return profiler().stores[0]


def test_the_first_folder_with_room_is_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, elsewhere = places.beside(store.save_path), places.elsewhere(store.save_path)
    free(monkeypatch, {beside: 100 * MIB})
    with store.reserve(window()) as file:
        assert file.stage(50 * MIB).parent == beside
        assert not elsewhere.exists()  # nothing is left where nothing is needed
        assert file.stage(100 * MIB).parent == elsewhere
        assert file.staged.parent == elsewhere
        file.fail("test")


def test_the_configured_folder_is_the_first(profiler: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = profiler(stage_dir=str(tmp_path / "nvme")).stores[0]
    own = places.staging(store.save_path, tmp_path / "nvme")
    with store.reserve(window()) as file:
        assert file.staged == own / f"{file.final.name}.raw"
        free(monkeypatch, {own: 0})
        assert file.stage().parent == places.beside(store.save_path)
        file.fail("test")


def test_a_configured_folder_that_cannot_be_made_is_passed_over(profiler: Make, tmp_path: Path) -> None:
    (tmp_path / "nvme").write_text("a file stands there")
    store = profiler(stage_dir=str(tmp_path / "nvme")).stores[0]
    with store.reserve(window(), suffix=".txt") as file:
        file.stage().write_text("raw")
        assert file.staged.parent == places.beside(store.save_path)
        file.finish_later("recording:finish_file", {"seconds": 0})
    assert exports().drain(60)
    assert recording.files(store.save_path) == ["raw finished"]


def test_hardly_any_room_anywhere_is_said(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside, elsewhere = places.beside(store.save_path), places.elsewhere(store.save_path)
    free(monkeypatch, {beside: MIB, elsewhere: 2 * MIB})
    with store.reserve(window()) as file:
        assert file.stage(MIB).parent == elsewhere  # the roomier one
        file.fail("test")
    assert "hardly any room for raw data" in capsys.readouterr().err


def test_raw_data_elsewhere_becomes_a_file_in_the_save_path(profiler: Make, tmp_path: Path, save_path: Path) -> None:
    handle = profiler(stage_dir=str(tmp_path / "nvme"), options={"rec": {"write": "later"}})
    handle.start(step=1)
    handle.stop()
    assert exports().drain(60)
    assert recording.files(save_path) == ["step 1 finished"]
    staged = Path(recording.ledger(save_path, "artifact")[0]["staged"])
    assert staged.is_relative_to(tmp_path / "nvme")
    assert list(staged.parent.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        exports().drain(30)
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_small_disk_is_not_filled_with_raw_data(small_disk: Path, profiler: Make) -> None:
    save_path = small_disk / "out"
    store = profiler(save_path=save_path).stores[0]
    with store.reserve(window(), suffix=".txt") as file:
        assert file.stage(4 * MIB).parent == places.beside(save_path)
        assert file.stage(20 * MIB).parent == places.elsewhere(save_path)
        file.staged.write_text("raw")
        file.finish_later("recording:finish_file", {"seconds": 0})
    assert exports().drain(60)
    assert recording.files(save_path) == ["raw finished"]


# The config.


@pytest.mark.parametrize("value", [3, "s3://bucket/x", "$NO_SUCH_VARIABLE_HERE/x"])
def test_bad_folders_are_named(profiler: Make, value: object) -> None:
    with pytest.raises(ConfigError, match=r"global_profiler\.stage_dir"):
        profiler(stage_dir=value)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_no_folder_means_that_it_is_chosen(profiler: Make, value: str | None) -> None:
    assert profiler(stage_dir=value).stores[0].stage_dir is None


def test_a_folder_is_absolute_and_expanded(profiler: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME", str(tmp_path))
    assert profiler(stage_dir="$NVME/scratch").stores[0].stage_dir == tmp_path / "scratch"
