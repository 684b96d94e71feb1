"""The script that unpacks nsys for these tests gives up softly, with the reason in words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("install_nsys.sh")


def install(*arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(SCRIPT), *arguments],
        env={"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with what the script needs of a plain system, and no apt."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("mkdir", "tail", "timeout", "grep", "head", "sed"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def test_without_apt_it_says_so_and_does_not_fail(tools: Path, tmp_path: Path) -> None:
    done = install(str(tmp_path / "nsys"), path=str(tools))
    assert done.returncode == 0
    assert done.stderr == "nsys was not installed: there is no apt-get here; this script works on Debian\n"


def test_what_was_unpacked_before_is_kept(tools: Path, tmp_path: Path) -> None:
    program = tmp_path / "nsys" / "root" / "usr" / "bin" / "nsys"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho version 1\n")
    program.chmod(0o755)
    (tools / "sh").symlink_to("/bin/sh")
    done = install(str(tmp_path / "nsys"), path=str(tools))
    assert (done.returncode, done.stdout, done.stderr) == (0, "version 1\n", "")


def test_a_wrong_call_is_an_error(tools: Path) -> None:
    done = install(path=str(tools))
    assert done.returncode == 2
    assert "usage" in done.stderr
