"""torch_memory with the real caching allocator of torch_npu: real histories, real snapshots, a real out of memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.names import parse_name
from rankscope.artifacts.status import read_status

HERE = Path(__file__).parent
MEBI = 1 << 20


@dataclasses.dataclass
class Ended:
    """A scenario that is over."""

    path: Path
    result: dict[str, Any]
    told: str

    def files(self, *words: str, suffix: str = ".pickle") -> list[Path]:
        return sorted(
            path
            for path in self.path.iterdir()
            if path.suffix == suffix and all(f"{word}_" in path.name for word in words)
        )

    def snapshots(self, *words: str) -> list[dict[str, Any]]:
        from rankscope_torch_memory.reading import load

        return [load(path) for path in self.files(*words)]

    def shown(self, path: Path) -> dict[str, Any]:
        """What ``rankscope memory --json`` tells of a file, of its only device."""
        done = command("rankscope", "memory", str(path), "--json")
        (device,) = json.loads(done.stdout)["devices"]
        return device


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """Run a scenario to its end, once."""

    @functools.cache
    def run(name: str) -> Ended:
        path = tmp_path_factory.mktemp(name)
        done = subprocess.run(
            [sys.executable, str(HERE / "memory_scenarios.py"), name, str(path)],
            env={**os.environ, "RANKSCOPE_STRICT": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Ended(path, json.loads(done.stdout.splitlines()[-1]), done.stderr)

    return run


def actions(snapshot: dict[str, Any]) -> list[str]:
    return [event["action"] for event in snapshot["device_traces"][0] if not event["action"].startswith("segment")]


def test_history_files_and_untouched_statistics(ended: Callable[[str], Ended]) -> None:
    run = ended("steps")
    assert run.result["asleep"]
    assert run.result["on"] == [False, True, True, True, True, False]
    assert not run.result["after"]
    assert all(before == after for before, after in run.result["peaks"])
    assert [parse_name(path.name).step for path in run.files("train")] == [2, 3, 5]  # type: ignore[union-attr]
    for snapshot, step in zip(run.snapshots(), (2, 3, 5), strict=True):
        # Only this window's events, although the step in between was recorded too.
        assert actions(snapshot) == ["alloc", "alloc", "free_requested", "free_completed"]
        assert [e["size"] for e in snapshot["device_traces"][0] if e["action"] == "alloc"] == [MEBI, 4 * step * MEBI]
        assert "steps" in {frame["name"] for frame in snapshot["device_traces"][0][-1]["frames"]}
    assert read_status(run.path).complete


def test_the_command_and_torchs_own_reader(ended: Callable[[str], Ended]) -> None:
    run = ended("steps")
    *_, path = run.files()
    device = run.shown(path)
    assert device["allocated"] == 4 * MEBI
    assert device["peak"]["allocated"] == (4 + 20) * MEBI
    assert device["peak"]["stacks"][0]["bytes"] == 20 * MEBI
    assert "steps" in {frame["function"] for frame in device["peak"]["stacks"][0]["frames"]}
    assert device["reserved"] >= device["peak"]["allocated"]
    assert device["history_full"] is False
    page = command("rankscope", "memory", str(path)).stdout
    assert "24.0 MiB allocated, after event" in page
    assert "steps (" in page
    assert "total_reserved" in command("torch.cuda._memory_viz", "stats", str(path)).stdout
    assert "alloc(" in command("torch.cuda._memory_viz", "trace", str(path)).stdout


def test_one_file_for_two_steps_a_full_history_and_what_this_torch_cannot_do(ended: Callable[[str], Ended]) -> None:
    run = ended("several")
    assert [snapshot["rankscope"]["steps"] for snapshot in run.snapshots()] == [[2, 3], [5]]
    rows = {row.step: row for row in read_status(run.path).rows}
    assert {step: row.status for step, row in rows.items()} == {2: "joined", 3: "published", 5: "published"}
    assert "holds the last 6 events" in rows[3].reason
    assert all(len(snapshot["device_traces"][0]) == 6 for snapshot in run.snapshots())
    for option in ("stack_depth", "kw_args.no_such"):
        assert run.told.count(f"this torch cannot honour {option}") == 1


def test_from_the_first_use_of_the_device_on(ended: Callable[[str], Ended]) -> None:
    run = ended("early")
    assert (run.result["asleep"], run.result["on"], run.result["after"]) == (True, True, False)
    device = run.shown(run.files()[0])
    assert device["allocated"] == run.result["bytes"]
    assert all(stack["frames"] for stack in device["end"]["stacks"])


def test_without_events_there_are_stacks_of_what_is_allocated(ended: Callable[[str], Ended]) -> None:
    run = ended("state")
    device = run.shown(run.files()[0])
    assert device["allocated"] == 4 * MEBI
    assert device["events"] <= 1
    assert [(stack["bytes"], bool(stack["frames"])) for stack in device["end"]["stacks"]] == [
        (3 * MEBI, True),
        (MEBI, False),
    ]
    assert not run.result["after"]


def test_the_trainings_own_history_is_left_alone(ended: Callable[[str], Ended]) -> None:
    run = ended("theirs")
    assert run.result["on"]
    assert run.result["allocs"] == [MEBI, 2 * MEBI]
    (snapshot,) = run.snapshots()
    assert [e["size"] for e in snapshot["device_traces"][0] if e["action"] == "alloc"] == [MEBI, 2 * MEBI]
    assert run.told.count("somebody else records the memory history") == 1


def test_roles_of_a_process_share_a_snapshot(ended: Callable[[str], Ended]) -> None:
    run = ended("roles")
    assert [parse_name(path.name).step for path in run.files()] == [1, 2]  # type: ignore[union-attr]
    assert {row.status for row in read_status(run.path).rows} == {"published", "joined"}
    assert not run.result["after"]


def test_a_real_out_of_memory(ended: Callable[[str], Ended]) -> None:
    run = ended("oom")
    assert [kind for kind, _, _ in run.result["raised"]] == ["OutOfMemoryError"] * 4
    assert all("out of memory" in text and not changed for _, text, changed in run.result["raised"])
    assert len(run.files("oom_step2")) == len(run.files("oom_step2", suffix=".txt")) == 2
    assert len(run.files("train_step2")) == 1
    assert run.told.count("oom_max_dumps is reached") == 1
    device = run.shown(run.files("oom")[0])
    (failure,) = device["out_of_memory"]
    assert 0 <= failure["bytes"] - 600 * MEBI < 1024  # rounded up to blocks of 512 bytes
    assert device["allocated"] == (1 + 2 * 40) * MEBI
    text = run.files("oom", suffix=".txt")[0].read_text(encoding="utf-8")
    assert "Out of memory on npu" in text
    assert "it has 307.2 MiB (or may use so much), 1.0 GiB are free" in text
    where, holders = text.split("\n\n")[1:]
    assert where.splitlines()[1].split()[0] == "tensor"
    assert "greedy (" in where
    assert "40.0 MiB" in holders
    assert "greedy (" in holders


def test_a_real_out_of_memory_outside_of_windows(ended: Callable[[str], Ended]) -> None:
    run = ended("oom_outside")
    (path,) = run.files("oom")
    assert parse_name(path.name).step is None  # type: ignore[union-attr]
    device = run.shown(path)
    (stack,) = device["end"]["stacks"]
    assert stack["bytes"] == 30 * MEBI
    assert "oom_outside" in {frame["function"] for frame in stack["frames"]}
    assert run.result["on"]
