"""A driver and actors on three nodes: who is called, what comes of a run, and where the finish command runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope import ControllerError, ProfileController
from rankscope.artifacts.status import read_status

ray = pytest.importorskip("ray", reason="Ray is not installed; install it with: pip install ray")

import ray_workers  # noqa: E402
import recording  # noqa: E402

from rankscope.integrations.ray import ActorCallError, RayGroup  # noqa: E402

Start = Callable[..., Any]
Make = Callable[..., RayGroup]


def config(save_path: Path, **facts: Any) -> dict[str, Any]:
    return recording.config(save_path, **{"roles": ("actor", "critic"), "steps": (1, 2), **facts})


def noting(path: Path) -> str:
    """A finish command that notes who ran it, and what it was told."""
    return f'echo "$RANKSCOPE_PROFILE_ROLE$RANKSCOPE_PROFILE_RANK $RANKSCOPE_PROFILE_ARTIFACTS" >> {path}'


def train(group: RayGroup, facts: Any, steps: int, step: Callable[[int], object], **more: Any) -> ProfileController:
    controller = ProfileController(facts, workers=[group], total_steps=steps, **more)
    for n in range(1, steps + 1):
        with controller.step(n):
            step(n)
    controller.close()
    return controller


def names(folder: Path) -> Counter[str]:
    """Files by what their names begin with."""
    return Counter(path.name.partition("_pid")[0] for path in folder.iterdir() if path.is_file())


def test_a_run_over_three_nodes(cluster: Any, actors: Start, groups: Make, tmp_path: Path) -> None:
    """Roles share a directory on each node; nodes that share one have one finish command, with all of their files."""
    save_path, ran = cluster.disk / "run", tmp_path / "ran"
    facts = config(save_path, finish_hook_cmd=noting(ran))
    trained = [actors(ray_workers.Worker, facts, "actor", rank, 3, on="abc"[rank]) for rank in range(3)]
    critics = [actors(ray_workers.Worker, facts, "critic", rank, 2, on="ac"[rank]) for rank in range(2)]
    group = groups({"actor": trained, "critic": critics})
    train(group, facts, 3, lambda n: ray.get([handle.work.remote() for handle in [*trained, *critics]]))
    group.close()
    assert {str(member): member.state for member in group.members} == {
        **{f"actor rank {rank}": "fine" for rank in range(3)},
        **{f"critic rank {rank}": "fine" for rank in range(2)},
    }
    assert len({member.node for member in group.members}) == 3
    roles = [("actor", 0, 3), ("actor", 1, 3), ("actor", 2, 3), ("critic", 0, 2), ("critic", 1, 2)]
    everything = {f"{role}_train_step{step}_rank{rank}-of-{n}": 1 for role, rank, n in roles for step in (1, 2)}
    if cluster.disk_of_c is None:
        assert names(save_path) == everything
        assert ran.read_text() == "actor0 10\n"
    else:
        on_c = {name: 1 for name in everything if name.endswith(("rank2-of-3", "rank1-of-2"))}
        assert names(cluster.disk_of_c / "run") == on_c
        assert names(save_path) == {name: 1 for name in everything if name not in on_c}
        assert sorted(ran.read_text().splitlines()) == ["actor0 6", "actor2 4"]
    assert read_status(save_path).complete
    assert not list((save_path / ".rankscope").glob("finish-*"))
    manifest = next((save_path / ".rankscope").glob("manifest-*.json"))
    ranks = {(file["role"], file["rank"]) for file in json.loads(manifest.read_text())["artifacts"]}
    assert ranks >= {("actor", 0), ("actor", 1), ("critic", 0)}


def test_one_call_for_each_process_however_many_handles(actors: Start, groups: Make, save_path: Path) -> None:
    facts = config(save_path)
    worker = actors(ray_workers.Colocated, facts, 0, 1, name="colocated")
    same = ray.get_actor("colocated")
    group = groups({"actor": [worker, worker], "critic": same})
    assert [member.alias_of is not None for member in group.members] == [False, True, True]
    train(group, facts, 2, lambda n: ray.get(same.work.remote()))
    assert ray.get(worker.calls.remote("start", "stop", "finish")) == [
        *("rec start 1 train", "rec stop 1 train", "rec start 2 train", "rec stop 2 train", "rec finish 2"),
    ]
    group.close()
    rows = {(row.role, row.step): row.status for row in read_status(save_path).rows}
    assert rows == {
        ("actor", 1): "published",
        ("actor", 2): "published",
        ("critic", 1): "joined",
        ("critic", 2): "joined",
    }


def test_workers_without_the_mix_in_and_asynchronous_ones(actors: Start, groups: Make, save_path: Path) -> None:
    ran = save_path.parent / "ran"
    facts = config(save_path, finish_hook_cmd=noting(ran), steps=(1,), tool=["rec", "bound"])
    plain = actors(ray_workers.PlainWorker, facts, "actor", 0, 2)
    served = actors(ray_workers.Async, facts, "critic", 1, 2)
    with groups([plain, served]) as group:
        train(group, facts, 1, lambda n: ray.get([served.serve.remote(0.01) for _ in range(3)]))
        threads = ray.get(served.threads.remote())
        assert {thread for _, thread in threads} == {ray.get(served.serve.remote())}
        assert len(threads) == 4
    assert names(save_path) == {"actor_train_step1_rank0-of-2": 2, "critic_train_step1_rank1-of-2": 2}
    assert ran.read_text() == "actor0 4\n"


def test_start_and_stop_on_different_threads(actors: Start, groups: Make, save_path: Path) -> None:
    """A tool that is bound to its thread is stopped on it, whichever thread of the pool the stop arrives on."""
    facts = config(save_path, tool="bound", steps=(1, 2, 3, 4, 5, 6))
    worker = actors(ray_workers.Worker, facts, "actor", 0, 1, max_concurrency=3)
    with groups(worker) as group:
        settle, looked = group._calls.transport.settle, Counter[str]()

        def counted(member: Any, seconds: float) -> Any:
            looked[str(member)] += 1
            return settle(member, seconds)

        group._calls.transport.settle = counted
        train(group, facts, 6, lambda n: ray.get([worker.work.remote(0.01) for _ in range(3)]))
        assert looked["actor rank 0"]
        threads = ray.get(worker.threads.remote())
    assert [what for what, _ in threads] == ["bound start", "bound stop"] * 6
    assert all(threads[index][1] == threads[index + 1][1] for index in range(0, 12, 2))
    assert sum(names(save_path).values()) == 6
    assert read_status(save_path).complete


def test_what_actors_raise_stops_nobody(
    actors: Start, groups: Make, save_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And in strict mode the driver raises it, after all were called."""
    facts = config(save_path, options={"rec": {"fail": "stop"}})
    broken = actors(ray_workers.Broken, facts, "actor", 0, 2)
    strict = actors(ray_workers.Strict, facts, "actor", 1, 2)
    group = groups([broken, strict], strict=False)
    controller = ProfileController(facts, workers=[group], total_steps=2)
    with controller.step(1):
        assert ray.get(strict.calls.remote("start")) == ["rec start 1 train"]
    said = capsys.readouterr().err
    assert "no start in step 1" in said
    assert "rec.stop failed in step 1: ValueError: broken stop" in said
    assert [member.state for member in group.members] == ["fine", "fine"]
    raising = ProfileController(facts, workers=[groups([broken, strict])])  # RANKSCOPE_STRICT is set in our tests
    with pytest.raises(ControllerError) as caught:
        raising.begin_step(1)
    ((_, _, error),) = caught.value.errors
    assert isinstance(error, ActorCallError)
    assert [(method, who) for method, who, _ in error.errors] == [("start_profile", "actor rank 0")]
    raising.end_step(1)


def test_what_is_no_actor_is_refused(actors: Start, groups: Make, save_path: Path) -> None:
    worker = actors(ray_workers.Worker, config(save_path), "actor", 0, 1)
    with pytest.raises(TypeError, match=r"actors: critic\[1\] is 'text', not a Ray actor handle"):
        groups({"actor": worker, "critic": [worker, "text"]})
    with pytest.raises(TypeError, match=r"actors\[0\] .* has no start_profile\(\): let its class inherit"):
        groups(actors(ray_workers.NoWorker))

    assert len(groups({"actor": SimpleNamespace(workers=[worker]), "critic": [[worker]]}).members) == 2


def test_what_errors_of_ray_say_of_an_actor() -> None:
    from rankscope.integrations.ray import _RayTransport

    explain = _RayTransport().explain
    known = ray.exceptions
    task = known.RayTaskError("f", "the traceback", ValueError("mine"))
    assert explain(task) == ("fine", "ValueError: mine")
    odd = known.UnserializableException("Failed to deserialize. Original exception: \x1b[36mray::f()\x1b[39m\n  Bad")
    assert explain(odd) == ("fine", "ray::f() Bad")
    assert explain(known.ActorDiedError())[0] == "dead"
    assert explain(known.ActorUnavailableError("no way", None))[0] == "unreachable"
    state, text = explain(known.RaySystemError("lost " * 100))
    assert (state, len(text)) == ("unreachable", 301)
