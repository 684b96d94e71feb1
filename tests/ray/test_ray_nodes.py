"""The end of a run over many nodes, with actors on paper: who runs the finish command, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulated import PaperTransport, facts, member

from rankscope.integrations.actors import nodes
from rankscope.integrations.actors.group import ActorGroup, Deadlines
from rankscope.integrations.actors.members import Member
from rankscope.testing import wait_for

LOCAL = {"a": "disk a", "b": "disk b", "c": "disk c", "d": "disk d"}
TWO = {"a": "ab", "b": "ab", "c": "cd", "d": "cd"}

Finish = Callable[..., PaperTransport]


@pytest.fixture
def finish() -> Iterator[Finish]:
    """Run one step and the end of it: ``finish(members, directory_of)``."""
    groups: list[ActorGroup] = []

    def run(members: list[Member], directory_of: Any = LOCAL, *, dead: tuple[str, ...] = (), **more: Any) -> Any:
        transport = PaperTransport(directory_of)
        transport.lost_nodes = more.pop("lost_nodes", set())
        deadlines = Deadlines(start=0.3, stop=0.3, relocate=0.3, finish=0.3, close=1, late=0.05)
        group = ActorGroup(members, transport, deadlines=deadlines, strict=False, **more)
        groups.append(group)
        group.start_profile(step=1)
        for one in members:
            one.target.dead = one.name in dead
        group.stop_profile()
        group.relocate_profile()
        group.finish_profile()
        return transport

    yield run
    for group in groups:
        group.close(timeout=1)


def test_each_node_with_a_disk_of_its_own(finish: Finish) -> None:
    transport = finish([member(f"actor[{number}]", "aabb"[number]) for number in range(4)])
    assert transport.commands == {
        "actor[0] /out": {"others": ["actor1"], "gone": []},
        "actor[2] /out": {"others": ["actor3"], "gone": []},
    }
    assert transport.left == {"actor[1] /out", "actor[3] /out"}


def test_nodes_that_share_a_directory_have_one_speaker(finish: Finish) -> None:
    transport = finish([member(f"actor[{number}]", "abcd"[number]) for number in range(4)], TWO)
    assert transport.commands == {
        "actor[0] /out": {"others": ["actor1"], "gone": []},
        "actor[2] /out": {"others": ["actor3"], "gone": []},
    }
    assert transport.left == {"actor[1] /out", "actor[3] /out"}


def test_one_node_needs_no_claims(finish: Finish) -> None:
    transport = finish([member(f"actor[{number}]", "a") for number in range(3)])
    assert transport.count()["claim_directory"] == 0
    assert list(transport.commands) == ["actor[0] /out"]


def test_per_node_asks_nobody_who_shares_what(finish: Finish) -> None:
    transport = finish([member(f"actor[{number}]", "abc"[number]) for number in range(3)], TWO, finish_per_node=True)
    assert len(transport.commands) == 3
    assert transport.count()["claim_directory"] == 0


def test_ranks_that_the_user_chose(finish: Finish) -> None:
    members = [member(f"actor[{number}]", "ab"[number % 2], facts("actor", number, named=True)) for number in range(3)]
    members.append(member("actor[3]", "a", facts("actor", 3, command=None)))
    transport = finish(members, TWO)
    assert transport.commands.keys() == {"actor[0] /out", "actor[1] /out", "actor[2] /out"}
    assert all(told == {"others": [], "gone": []} for told in transport.commands.values())
    assert transport.left == set()


def test_roles_with_directories_of_their_own(finish: Finish) -> None:
    both = facts("actor", 0, "/out/actor"), facts("critic", 0, "/out/critic")
    transport = finish([member("worker[0]", "a", *both), member("critic[1]", "a", facts("critic", 1, "/out/critic"))])
    assert transport.commands == {
        "worker[0] /out/actor": {"others": [], "gone": []},
        "worker[0] /out/critic": {"others": ["critic1"], "gone": []},
    }
    assert transport.left == {"critic[1] /out/critic"}


@pytest.mark.parametrize("when", ["run_command", "claim_directory", "finish_tools"])
def test_a_speaker_that_dies_is_replaced(finish: Finish, when: str) -> None:
    members = [member("actor[0]", "a", dies_at=when), member("actor[1]", "a"), member("actor[2]", "b")]
    transport = finish(members)
    assert transport.commands.keys() == {"actor[1] /out", "actor[2] /out"}
    assert transport.commands["actor[1] /out"]["gone"] == [0]


def test_another_node_takes_over_where_the_directory_is_shared(finish: Finish) -> None:
    transport = finish([member("actor[0]", "a", dies_at="run_command"), member("actor[1]", "b")], TWO)
    assert transport.commands == {"actor[1] /out": {"others": [], "gone": [0]}}


def test_files_of_the_dead_are_spoken_for(finish: Finish) -> None:
    transport = finish([member("actor[0]", "a"), member("actor[1]", "a")], dead=("actor[0]",))
    assert transport.commands == {"actor[1] /out": {"others": [], "gone": [0]}}
    assert transport.errands == []


def test_a_node_on_which_all_are_dead_gets_a_task(finish: Finish, capsys: pytest.CaptureFixture[str]) -> None:
    transport = finish([member("actor[0]", "a"), member("actor[1]", "b")], dead=("actor[1]",))
    assert list(transport.commands) == ["actor[0] /out"]
    assert transport.errands == [("claim_directory", "b"), ("run_for_the_dead", "b")]


def test_no_task_runs_the_command_where_the_directory_is_shared(finish: Finish) -> None:
    transport = finish([member("actor[0]", "a"), member("actor[1]", "b")], TWO, dead=("actor[1]",))
    assert transport.commands == {"actor[0] /out": {"others": [], "gone": [1]}}
    assert transport.errands == [("claim_directory", "b")]


def test_a_lost_node_is_told(finish: Finish, capsys: pytest.CaptureFixture[str]) -> None:
    members = [member("actor[0]", "a"), member("actor[1]", "b")]
    transport = finish(members, dead=("actor[1]",), lost_nodes={"b"})
    assert list(transport.commands) == ["actor[0] /out"]
    transport_errands = [name for name, _ in transport.errands]
    assert transport_errands == ["claim_directory", "run_for_the_dead"]


def test_late_ones_are_told_to_leave_it(finish: Finish) -> None:
    members = [member("actor[0]", "a", silent_at=frozenset({"stop_profile", "finish_tools", "leave_command"}))]
    members += [member("actor[1]", "a"), member("actor[2]", "b", silent_at=frozenset({"stop_profile", "finish_tools"}))]
    transport = finish(members)
    assert list(transport.commands) == ["actor[1] /out"]
    assert {"leave_command actor[0]", "leave_command actor[2]"} <= set(transport.log)


def test_exports_are_waited_for_in_the_background(finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PACE", 0.05)
    members = [member("actor[0]", "a", busy=3), member("actor[1]", "a")]
    transport = finish(members)
    assert transport.commands == {}
    wait_for(lambda: transport.commands)
    assert transport.commands == {"actor[0] /out": {"others": ["actor1"], "gone": []}}
    assert transport.count()["finish_tools"] == 5  # both, and the busy one three times more


def test_a_second_run_with_the_same_actors_ends_like_the_first(finish: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "PACE", 0.05)
    members = [member("actor[0]", "a", busy=2)]
    transport = PaperTransport(LOCAL)
    with ActorGroup(members, transport, strict=False) as group:
        for step in (1, 2):
            group.start_profile(step=step)
            group.stop_profile()
            group.finish_profile()
    assert transport.log.count("run_command actor[0]") == 2
    assert transport.log[-1] == "close_profile actor[0]"


def test_the_end_of_the_group_does_not_wait_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    transport = PaperTransport(LOCAL)
    group = ActorGroup([member("actor[0]", "a", busy=1_000_000)], transport, strict=False)
    group.start_profile(step=1)
    group.stop_profile()
    group.finish_profile()
    group.close(timeout=0.2)
    assert list(transport.commands) == ["actor[0] /out"]
    assert "exports are not finished yet" in capsys.readouterr().err
    assert transport.log[-1] == "close_profile actor[0]"


def test_a_group_that_is_only_closed_finishes_too(capsys: pytest.CaptureFixture[str]) -> None:
    transport = PaperTransport(LOCAL)
    with ActorGroup([member("actor[0]", "a"), member("actor[1]", "b")], transport, strict=False) as group:
        group.start_profile(step=7)
    assert len(transport.commands) == 2
    assert "a window is still open when the group is closed" in capsys.readouterr().err
    before = list(transport.log)
    group.close()
    group.start_profile(step=8)
    assert transport.log == before
    assert "the group is closed: this step is not profiled" in capsys.readouterr().err


def test_nothing_captured_nothing_finished() -> None:
    transport = PaperTransport(LOCAL)
    with ActorGroup([member("actor[0]", "a")], transport) as group:
        group.stop_profile()
        group.relocate_profile()
        group.finish_profile()
    assert transport.log == []
