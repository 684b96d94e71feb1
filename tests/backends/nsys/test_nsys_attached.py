"""Finding the nsys around a process, whoever started it, from a stand-in of ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope_nsys.attached import Attached, fill_in, find_attached, foreign_injection, read_arguments, untraced

Processes = Callable[..., Path]


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    """Writes a ``/proc`` in which each process is the parent of the next: pid -> command line."""

    def write(commands: dict[int, list[str]], cwd: str = "/data") -> Path:
        parent = 1
        for pid, words in commands.items():
            folder = tmp_path / str(pid)
            folder.mkdir()
            (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")
            (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
            (folder / "cwd").symlink_to(cwd)
            (folder / "exe").symlink_to("/opt/nsys/target-linux-x64/nsys")
            parent = pid
        return tmp_path

    return write


OURS = ["-t", "nvtx", "--capture-range=nvtx", "-p", "rankscope.window@rankscope", "--capture-range-end", "repeat:3"]
LAUNCHER = ["/opt/nsys/target-linux-x64/nsys-launcher", "/tmp/x", "11"]
TRACED = {"NSYS_PROFILING_SESSION_ID": "42"}


def attached(proc: Path, pid: int, **env: str) -> Attached:
    found = find_attached({**TRACED, **env}, pid, proc)
    assert found is not None
    return found


def test_a_process_that_no_nsys_traces_has_none(processes: Processes) -> None:
    proc = processes({10: ["nsys", "profile", "python"], 11: ["python"]})
    assert find_attached({}, 11, proc) is None


def test_what_nsys_was_told_is_read_from_its_command_line(processes: Processes) -> None:
    command = ["/usr/bin/nsys", "profile", *OURS, "-o", "/out/%h/pid%p-a", "python", "-o", "not ours"]
    proc = processes({10: command, 11: LAUNCHER, 12: ["python", "train.py"]})
    found = attached(proc, 12)
    assert (found.session, found.pid, found.capture, found.drives) == ("42", 10, "nvtx", True)
    assert (found.end.limit, found.end.deferred) == (3, True)
    assert found.stem == f"/out/{os.uname().nodename}/pid12-a"
    assert found.program == "/opt/nsys/target-linux-x64/nsys"


def test_the_pid_in_the_name_is_that_of_the_process_which_nsys_started(processes: Processes) -> None:
    command = ["/bin/sh", "/usr/local/bin/nsys", "profile", "-oout_%p", "bash", "run.sh"]
    proc = processes({10: command, 11: LAUNCHER, 12: ["bash", "run.sh"], 13: ["python"], 14: ["python", "-c"]})
    assert attached(proc, 14).stem == "/data/out_12"


@pytest.mark.parametrize(("words", "capture", "drives", "ends"), [
    ([], "none", False, False),
    (["-c", "cudaProfilerApi"], "cudaProfilerApi", True, True),
    (["--capture-range", "cudaProfilerApi", "--capture-range-end=none"], "cudaProfilerApi", True, False),
    (["-c", "nvtx", "-p", "rankscope.window@*"], "nvtx", True, True),
    (["-c", "nvtx", "-p", "theirs@rankscope"], "nvtx", False, True),
    (["-c", "hotkey"], "hotkey", False, True),
])  # fmt: skip
def test_whether_our_windows_drive_it(
    processes: Processes, words: list[str], capture: str, drives: bool, ends: bool
) -> None:
    found = attached(processes({10: ["nsys", "profile", *words, "python"], 11: ["python"]}), 11)
    assert (found.capture, found.drives, found.end.ends) == (capture, drives, ends)
    assert found.stem == "/data/report*"


def test_an_nsys_that_is_not_seen_is_attached_all_the_same(processes: Processes) -> None:
    assert attached(processes({10: ["nsys", "launch", "python"], 11: ["python"]}), 11) == Attached("42")
    assert attached(Path("/nonexistent"), 11) == Attached("42")


def test_arguments_in_every_way_of_writing_them() -> None:
    words = ["--trace=nvtx", "--sample", "none", "-o", "a", "-wtrue", "--storage-metrics", "python", "-o", "b"]
    assert read_arguments(words) == {
        "trace": "nvtx",
        "sample": "none",
        "output": "a",
        "show-output": "true",
        "storage-metrics": "",
    }


def test_patterns_of_names_are_filled_in() -> None:
    assert fill_in("%h-%p-%q{RANK}-%n-%%", host="h", pid=3, environ={"RANK": "1"}) == "h-3-1-*-%"
    assert fill_in("%q{NO_SUCH}%x", host="h", pid=3, environ={}) == "%x"


def test_injection_of_somebody_else_is_told_from_that_of_nsys() -> None:
    assert foreign_injection({"NVTX_INJECTION64_PATH": "/o/libToolsInjection64.so"}) is None
    assert foreign_injection({"CUDA_INJECTION64_PATH": "/o/other.so"}) == ("CUDA_INJECTION64_PATH", "/o/other.so")
    assert foreign_injection({}) is None


def test_helpers_are_not_traced() -> None:
    environ = {
        **TRACED,
        "QUADD_AGENT_PID": "1",
        "NVTX_INJECTION64_PATH": "/o/libToolsInjection64.so",
        "LD_PRELOAD": "/o/target-linux-x64/libToolsInjectionProxy64.so:/mine/libjemalloc.so",
        "HOME": "/root",
    }
    assert untraced(environ) == {"LD_PRELOAD": "/mine/libjemalloc.so", "HOME": "/root"}
    assert untraced({"LD_PRELOAD": "/o/target-linux-x64/lib.so"}) == {}
