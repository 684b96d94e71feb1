"""What happens inside of an actor's process, without Ray: calls for all profilers of it, and its share of the end."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import recording

from rankscope import Artifact, DistProfiler, FaultError, shutdown, windows
from rankscope.artifacts.exports import exports
from rankscope.artifacts.ledger import Ledger
from rankscope.integrations.actors import ending
from rankscope.integrations.actors.inside import ProfiledRayActor, describe
from rankscope.testing import wait_for
from rankscope.topology import run_id

Make = Callable[..., DistProfiler]


@pytest.fixture(autouse=True)
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(recording.install(tmp_path / "site")))
    recording.clear()
    yield
    for handle in list(shutdown._handles.values()):
        with suppress(FaultError):
            handle.close()
    exports().end()
    assert windows.opened() == ()
    recording.clear()


@pytest.fixture
def profiler(save_path: Path) -> Make:
    def make(role: str = "actor", rank: int = 0, **facts: Any) -> DistProfiler:
        config = recording.config(save_path, roles=("actor", "critic"), **facts)
        return DistProfiler(config, role=role, rank=rank, world_size=2)

    return make


class Actor(ProfiledRayActor):
    def __init__(self, profiler: Any = None) -> None:
        self.profiler = profiler


def ran(save_path: Path) -> list[str]:
    path = save_path.parent / "ran"
    return path.read_text().splitlines() if path.exists() else []


def noting(save_path: Path) -> str:
    return f"echo $RANKSCOPE_PROFILE_ARTIFACTS >> {save_path.parent}/ran"


def test_one_call_drives_all_profilers_of_the_process(profiler: Make) -> None:
    actor = Actor(profiler())
    second = profiler("critic", tool="rec2")
    for method, arguments in (("start_profile", {"step": 1, "scope": "train"}), ("stop_profile", {"last": False})):
        reply = actor.profile_call(method, arguments)
        assert (reply.error, reply.stopping) == ("", ())
    assert recording.calls("start", "stop") == [
        *("rec start 1 train", "rec2 start 1 train", "rec stop 1 train", "rec2 stop 1 train"),
    ]
    handles = reply.place.handles
    assert [(facts.role, facts.rank, facts.selected, facts.captured) for facts in handles] == [
        ("actor", 0, True, True),
        ("critic", 0, True, True),
    ]
    assert reply.place.pid == os.getpid()
    second.close()
    assert [facts.role for facts in describe(actor).place.handles] == ["actor"]


def test_a_worker_that_drives_its_own_profilers_is_not_disturbed(profiler: Make) -> None:
    class Both(Actor):
        def __init__(self) -> None:
            super().__init__(profiler())
            self.critic = profiler("critic", tool="rec2")

        def start_profile(self, *, step: int | None = None, scope: str | None = None) -> None:
            self.profiler.start(step=step, scope=scope)
            self.critic.start(step=step, scope=scope)

    actor = Both()
    for step in (1, 2):
        actor.profile_call("start_profile", {"step": step, "scope": "train"})
        actor.profile_call("stop_profile", {"last": False})
    assert recording.calls("start") == [
        *("rec start 1 train", "rec2 start 1 train", "rec start 2 train", "rec2 start 2 train"),
    ]
    assert not any("aborted" in call for call in recording.calls("stop"))


def test_what_a_method_raises_is_told_and_the_others_go_on(profiler: Make, save_path: Path) -> None:
    class Raises(Actor):
        def start_profile(self, *, step: int | None = None, scope: str | None = None) -> None:
            raise OSError("no space")

    class Waits(Actor):
        async def start_profile(self, *, step: int | None = None, scope: str | None = None) -> None:  # type: ignore[override]
            raise AssertionError("it is never run")

    profiler("critic", tool="rec2")
    reply = Raises().profile_call("start_profile", {"step": 1, "scope": "train"})
    assert reply.error == "OSError: no space"
    assert "start_profile" in reply.trace
    reply = Waits().profile_call("start_profile", {"step": 1, "scope": "train"})
    assert reply.error == "TypeError: Waits.start_profile is a coroutine function; it has to be a plain one"
    assert recording.calls("start") == ["rec2 start 1 train"]
    assert Actor().profile_call("no_such_method", {}).error == ""


def test_a_stop_on_another_thread_is_settled_by_the_right_one(profiler: Make) -> None:
    actor = Actor(profiler(tool="bound"))
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def pool_thread() -> None:
        actor.profile_call("start_profile", {"step": 1, "scope": "train"})
        begun.set()
        go.wait(20)
        assert actor.profile_settle(20)
        done.set()

    thread = threading.Thread(target=pool_thread, name="of the pool")
    thread.start()
    assert begun.wait(20)
    assert actor.profile_call("stop_profile", {"last": False}).stopping == ("of the pool",)
    assert not actor.profile_settle(0.05)
    go.set()
    assert done.wait(20)
    assert actor.profile_settle(0)
    thread.join()
    assert recording.THREADS == [("bound start", "of the pool"), ("bound stop", "of the pool")]


def test_tools_finish_when_the_files_are_whole_and_no_command_runs(profiler: Make, save_path: Path) -> None:
    go = save_path.parent / "go"
    options = {"rec": {"write": "later", "job": "finish_file", "seconds": 0.3}}
    handle = profiler(options=options, finish_hook_cmd=noting(save_path), finish_hook_wait=0)
    actor = Actor(handle)
    actor.profile_call("start_profile", {"step": 1, "scope": "train"})
    actor.profile_call("stop_profile", {"last": False})
    first = ending.finish_tools(actor)
    assert first.busy == 1
    assert recording.calls("finish") == []
    wait_for(lambda: ending.finish_tools(actor, first=False).busy == 0)
    files = ending.finish_tools(actor, first=False).artifacts
    assert [(file.rank, file.step, dict(file.facts)) for file in files] == [(0, 1, {})]
    assert recording.calls("finish") == ["rec finish 1"]
    assert ran(save_path) == []
    assert not go.exists()


def test_one_gives_up_waiting(profiler: Make) -> None:
    options = {"rec": {"write": "later", "seconds": 2.0}}
    actor = Actor(profiler(options=options, finish_hook_wait=0))
    actor.profile_call("start_profile", {"step": 1, "scope": "train"})
    actor.profile_call("stop_profile", {"last": False})
    assert ending.finish_tools(actor, give_up=True).busy == 1
    assert recording.calls("finish") == ["rec finish 0"]


def test_a_directory_has_one_speaker(tmp_path: Path) -> None:
    shared, own = str(tmp_path / "shared"), str(tmp_path / "own")
    assert ending.claim_directory(None, shared, "token", "a") == "a"
    assert ending.claim_directory(None, shared, "token", "b") == "a"
    assert ending.claim_directory(None, own, "token", "b") == "b"
    assert ending.claim_directory(None, shared, "another", "b") == "b"
    (tmp_path / "file").touch()
    assert ending.claim_directory(None, str(tmp_path / "file"), "token", "b") == "b"  # nothing can be written there
    left = sorted(path.name for path in (tmp_path / "shared" / ".rankscope").iterdir())
    assert left == ["finish-another", "finish-token"]


def of_another(save_path: Path, name: str, pid: int, *, run: str = "", status: str = "published") -> Path:
    """A file that another process has left, with its ledger."""
    path = save_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
    ledger = Ledger(save_path, host="elsewhere", run_id=run or run_id(), pid=pid)
    facts = {"tool": "rec", "role": "actor", "rank": 1, "step": 1, "scope": "train", "bytes": 4}
    ledger.write("artifact", status=status, path=str(path), **facts)
    return path


def test_the_command_is_run_for_all_that_share_the_directory(profiler: Make, save_path: Path) -> None:
    actor = Actor(profiler(finish_hook_cmd=noting(save_path)))
    actor.profile_call("start_profile", {"step": 1, "scope": "train"})
    actor.profile_call("stop_profile", {"last": False})
    of_another(save_path, "of the dead", 7)
    of_another(save_path, "of an earlier run", 7, run="earlier")
    of_another(save_path, "failed", 7, status="failed")
    of_another(save_path, "of one that lives", 8)
    assert ending.claim_directory(actor, str(save_path), "token", "a") == "a"
    other = Artifact(save_path / "of the other", "rec", "critic", 0, 1, "train", 4)
    reply = ending.run_command(actor, str(save_path), "token", [other], [("elsewhere", 7)])
    assert reply.error == ""
    wait_for(lambda: ran(save_path))
    assert ran(save_path) == ["3"]
    (manifest,) = (save_path / ".rankscope").glob("manifest-*")
    names = [Path(file["path"]).name for file in json.loads(manifest.read_text())["artifacts"]]
    assert names[1:] == ["of the other", "of the dead"]
    assert not list((save_path / ".rankscope").glob("finish-*"))
    actor.profile_call("close_profile", {"timeout": 10})
    assert ran(save_path) == ["3"]


def test_who_leaves_the_command_to_another_does_not_run_it_at_its_end(profiler: Make, save_path: Path) -> None:
    actor = Actor(profiler(finish_hook_cmd=noting(save_path)))
    actor.profile_call("start_profile", {"step": 1, "scope": "train"})
    actor.profile_call("stop_profile", {"last": False})
    ending.leave_command(actor, [str(save_path)])
    actor.profile_call("close_profile", {"timeout": 10})
    assert ran(save_path) == []
    assert recording.calls("finish") == ["rec finish 1"]


def test_the_command_for_those_who_are_all_dead(profiler: Make, save_path: Path) -> None:
    actor = Actor(profiler(finish_hook_cmd=noting(save_path)))
    actor.profile_call("start_profile", {"step": 1, "scope": "train"})
    (facts,) = actor.profile_call("stop_profile", {"last": False}).place.handles
    assert ending.run_for_the_dead(facts, "token", [("elsewhere", 7)]) == "they left no file"
    of_another(save_path, "of the dead", 7)
    assert ending.run_for_the_dead(facts, "token", [("elsewhere", 7)]) == "the finish command ended with 0"
    assert ran(save_path) == ["1"]
    ending.leave_command(actor, [str(save_path)])


def test_nothing_of_ray_is_imported() -> None:
    import subprocess

    names = "rankscope.integrations.actors.group, rankscope.integrations.ray_env, sys"
    program = f"import {names}; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
