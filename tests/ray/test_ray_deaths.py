"""Actors and nodes that die or hang in a window: they are named, and the others and the training go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import ProfileController
from rankscope.artifacts.ledger import read_ledgers
from rankscope.artifacts.status import read_status

ray = pytest.importorskip("ray", reason="Ray is not installed; install it with: pip install ray")

import ray_workers  # noqa: E402
import recording  # noqa: E402
from ray_kit import processes_with  # noqa: E402

from rankscope.integrations.ray import Deadlines, RayGroup  # noqa: E402
from rankscope.testing import wait_for  # noqa: E402

Start = Callable[..., Any]
Make = Callable[..., RayGroup]


def config(save_path: Path, **facts: Any) -> dict[str, Any]:
    return recording.config(save_path, **{"steps": (1, 2), **facts})


def noting(path: Path) -> str:
    return f'echo "$RANKSCOPE_PROFILE_ROLE$RANKSCOPE_PROFILE_RANK $RANKSCOPE_PROFILE_ARTIFACTS" >> {path}'


def unanswered(save_path: Path) -> list[tuple[str, int, list[tuple[int, str]]]]:
    return [
        (record["phase"], record["step"], sorted((who["ranks"][0]["rank"], who["state"]) for who in record["actors"]))
        for record in read_ledgers(save_path)
        if record["kind"] == "unanswered"
    ]


def test_actors_killed_in_a_window(
    actors: Start, groups: Make, save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One by SIGKILL, one by ray.kill, and the latter is the only one of its node."""
    ran = save_path.parent / "ran"
    facts = config(save_path, finish_hook_cmd=noting(ran))
    workers = [actors(ray_workers.Worker, facts, "actor", rank, 4, on="aaab"[rank]) for rank in range(4)]
    pids = ray.get([worker.pid.remote() for worker in workers])
    done = []
    with groups(workers) as group:
        controller = ProfileController(facts, workers=[group], total_steps=4)
        for n in range(1, 5):
            with controller.step(n):
                if n == 2:
                    os.kill(pids[1], signal.SIGKILL)
                    ray.kill(workers[3])
                    wait_for(lambda: not any(Path(f"/proc/{pids[rank]}").exists() for rank in (1, 3)))
                ray.get([workers[rank].work.remote() for rank in (0, 2)])
                done.append(n)
        controller.close()
    assert done == [1, 2, 3, 4]
    said = [line for line in capsys.readouterr().err.splitlines() if "did not answer" in line]
    assert len(said) == 2  # two reasons
    assert any('actors="actor rank 1"' in line and "worker process has died" in line for line in said)
    assert any('actors="actor rank 3"' in line and "ray.kill" in line for line in said)
    assert unanswered(save_path) == [("stop_profile", 2, [(1, "dead"), (3, "dead")])]
    assert ran.read_text() == "actor0 6\n"  # of all four in step 1, and of two in step 2; once for the directory
    status = {(row.rank, row.step): row.status for row in read_status(save_path).rows}
    assert {pair for pair, word in status.items() if word == "died"} == {(1, 2), (3, 2)}
    assert {pair for pair, word in status.items() if word == "published"} == {
        *((rank, 1) for rank in range(4)),
        (0, 2),
        (2, 2),
    }


def test_the_files_of_a_node_whose_actors_are_all_dead(
    cluster: Any, actors: Start, groups: Make, tmp_path: Path
) -> None:
    if cluster.disk_of_c is None:
        pytest.skip("a node with a directory of its own needs the right to mount, which this user has not")
    save_path, ran = cluster.disk / "dead", tmp_path / "ran"
    facts = config(save_path, finish_hook_cmd=noting(ran))
    workers = [actors(ray_workers.Worker, facts, "actor", rank, 2, on="ac"[rank]) for rank in range(2)]
    with groups(workers) as group:
        controller = ProfileController(facts, workers=[group], total_steps=2)
        for n in (1, 2):
            with controller.step(n):
                if n == 2:
                    process = Path(f"/proc/{ray.get(workers[1].pid.remote())}")
                    ray.kill(workers[1])
                    wait_for(lambda process=process: not process.exists())
        controller.close()
    assert sorted(ran.read_text().splitlines()) == ["actor0 2", "actor1 1"]


def test_a_slow_actor_is_not_waited_for_beyond_the_deadline(
    actors: Start, groups: Make, save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = config(save_path)
    slow, quick = (actors(ray_workers.Worker, facts, "actor", rank, 2) for rank in range(2))
    go = save_path.parent / "go"
    group = groups([slow, quick], deadlines=Deadlines(start=20, stop=0.5, relocate=0.5, finish=0.5, late=0.1))
    controller = ProfileController(facts, workers=[group], total_steps=2)
    group.find()
    with controller.step(1):
        held = slow.wait_for_file.remote(go)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    with controller.step(2):
        ray.get(quick.work.remote())
    said = capsys.readouterr().err
    assert said.count("did not answer") == 1
    assert (
        'actors="actor rank 0" phase=stop_profile step=1 reason="late: no answer to stop_profile within 0.5 s"' in said
    )
    assert unanswered(save_path) == [("stop_profile", 1, [(0, "late")])]
    go.touch()
    ray.get(held)
    controller.close()
    group.close()
    assert read_status(save_path).complete  # what it was told it did, later
    assert group.members[0].state == "fine"


def test_an_actor_that_is_started_anew_is_profiled_again(actors: Start, groups: Make, save_path: Path) -> None:
    facts = config(save_path, steps=(1, 3))
    worker = actors(ray_workers.Worker, facts, "actor", 0, 1, max_restarts=1)
    with groups(worker) as group:
        controller = ProfileController(facts, workers=[group], total_steps=3)
        pids = []
        for n in (1, 2, 3):
            with controller.step(n):
                pids.append(ray.get(worker.pid.remote()))
                if n == 1:
                    os.kill(pids[0], signal.SIGKILL)
                    wait_for(lambda: running_again(worker))
        controller.close()
    assert pids[1] == pids[2] != pids[0]
    assert [path.name.partition("_pid")[0] for path in save_path.glob("*.txt")] == ["actor_train_step3_rank0-of-1"]
    assert group.members[0].state == "fine"
    assert group.members[0].place.pid == pids[2]


def running_again(worker: Any) -> bool:
    try:
        ray.get(worker.pid.remote(), timeout=10)
    except ray.exceptions.RayActorError:
        return False
    return True


def test_a_node_that_is_lost(
    cluster: Any, actors: Start, groups: Make, save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = cluster.start_node("d")
    cluster.wait_for_nodes("d")
    ran = save_path.parent / "ran"
    facts = config(save_path, finish_hook_cmd=noting(ran))
    workers = [actors(ray_workers.Worker, facts, "actor", rank, 2, on="ad"[rank]) for rank in range(2)]
    with groups(workers, deadlines=Deadlines(finish=5)) as group:
        controller = ProfileController(facts, workers=[group], total_steps=2)
        for n in (1, 2):
            with controller.step(n):
                if n == 2:
                    os.killpg(process.pid, signal.SIGKILL)
                    for pid in ray_processes_of(group.members[1].place.node):
                        os.kill(pid, signal.SIGKILL)
                    os.kill(group.members[1].place.pid, signal.SIGKILL)
                ray.get(workers[0].work.remote())
        controller.close()
    said = capsys.readouterr().err
    assert said.count("did not answer") == 1
    assert 'actors="actor rank 1"' in said
    assert group.members[1].state in {"dead", "unreachable"}
    assert ran.read_text().startswith("actor0 ")
    assert ran.read_text().count("\n") == 1


def ray_processes_of(node: str) -> list[int]:
    """The raylet and the agents of a node; they have its id in their command lines."""
    return processes_with(node)
