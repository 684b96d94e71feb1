"""Calls to many actors at once, with actors on paper: order, bounds, deadlines, and what is told of missing ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated import PaperTransport, facts, member

from rankscope.artifacts.ledger import read_ledgers
from rankscope.integrations.actors.calls import ActorCallError
from rankscope.integrations.actors.fanout import fan_out
from rankscope.integrations.actors.group import ActorGroup, Deadlines
from rankscope.integrations.actors.inside import Reply
from rankscope.integrations.actors.members import Member


class Line:
    """Calls that are answered when the test says so, or by themselves after some looks at them."""

    def __init__(self, answers_after: Callable[[int], int | None]) -> None:
        self.answers_after = answers_after
        self.looks = 0
        self.sent: list[int] = []
        self.flying: set[int] = set()
        self.most = 0
        self.due: dict[int, int] = {}
        self.looked_at = 0

    def send(self, item: int) -> int:
        after = self.answers_after(item)
        if after == -1:
            raise OSError(f"{item} cannot be sent")
        self.sent.append(item)
        self.flying.add(item)
        self.most = max(self.most, len(self.flying))
        if after is not None:
            self.due[item] = self.looks + after
        return item

    def wait(self, calls: list[int], seconds: float) -> list[int]:
        self.looks += 1
        self.looked_at += len(calls)
        done = [call for call in calls if self.due.get(call, self.looks + 1) <= self.looks]
        if not done:
            time.sleep(min(seconds, 0.01))
        self.flying.difference_update(done)
        return done

    def result(self, call: int) -> str:
        if call % 10 == 3:
            raise ValueError(f"{call} raised")
        return f"answer {call}"

    def run(self, count: int, *, seconds: float = 5.0, in_flight: int = 4) -> list[Any]:
        how = {"send": self.send, "wait": self.wait, "result": self.result}
        return fan_out(list(range(count)), seconds=seconds, in_flight=in_flight, **how)


def test_results_are_in_order_and_errors_stay_with_their_item() -> None:
    outcomes = Line(lambda item: -1 if item == 5 else 8 - item % 7).run(30)
    for number, outcome in enumerate(outcomes):
        assert outcome.pending is None
        if number == 5:
            assert str(outcome.error) == "5 cannot be sent"
        elif number % 10 == 3:
            assert str(outcome.error) == f"{number} raised"
        else:
            assert outcome.value == f"answer {number}"


def test_no_more_than_so_many_are_in_flight() -> None:
    line = Line(lambda item: 1)
    line.run(100, in_flight=7)
    assert line.most == 7
    assert line.sent == list(range(100))


def test_the_silent_keep_nobody_from_being_called() -> None:
    """All places are taken by calls that hang, and yet the others get their turn within half of the time."""
    line = Line(lambda item: None if item < 20 else 0)
    began = time.monotonic()
    outcomes = line.run(40, in_flight=4, seconds=0.6)
    assert time.monotonic() - began < 1.5
    assert [outcome.pending for outcome in outcomes[:20]] == list(range(20))
    assert all(outcome.value or outcome.error for outcome in outcomes[20:])


def test_all_are_called_even_if_nobody_answers() -> None:
    line = Line(lambda item: None)
    began = time.monotonic()
    outcomes = line.run(200, in_flight=5, seconds=0.6)
    assert time.monotonic() - began < 1.5
    assert line.sent == list(range(200))
    assert all(outcome.pending is not None for outcome in outcomes)


def test_an_answer_that_comes_after_its_place_was_given_away_counts() -> None:
    line = Line(lambda item: 40 if item < 2 else None)
    outcomes = line.run(6, in_flight=2, seconds=1.0)
    assert [outcome.value for outcome in outcomes[:2]] == ["answer 0", "answer 1"]


def test_work_is_in_proportion_to_the_number() -> None:
    looked = []
    for count in (500, 5000):
        line = Line(lambda item: 0)
        line.run(count, in_flight=64)
        looked.append(line.looked_at)
    assert looked[1] <= 11 * looked[0]


def test_nobody_to_call() -> None:
    assert Line(lambda item: 0).run(0) == []


# What is learned of actors.


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[ActorGroup, PaperTransport]]]:
    groups = []

    def group(members: list[Member], **more: Any) -> tuple[ActorGroup, PaperTransport]:
        transport = PaperTransport()
        deadlines = Deadlines(start=0.2, advance=0.2, stop=0.2, relocate=0.2, finish=0.2, close=0.2, late=0.05)
        groups.append(ActorGroup(members, transport, deadlines=deadlines, **{"strict": False, **more}))
        return groups[-1], transport

    yield group
    for one in groups:
        one.close()


def people(tmp_path: Path, count: int = 4, **behaviour: Any) -> list[Member]:
    """Four actors, of which the second behaves as given."""
    handles = [facts("actor", number, str(tmp_path / "out")) for number in range(count)]
    return [
        member(f"actor[{number}]", "a", handles[number], **(behaviour if number == 1 else {}))
        for number in range(count)
    ]


def unanswered(tmp_path: Path) -> list[dict[str, Any]]:
    return [record for record in read_ledgers(tmp_path / "out") if record["kind"] == "unanswered"]


def test_a_dead_actor_is_named_once_and_not_called_again(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = people(tmp_path, dies_at="stop_profile")
    group, transport = make(members)
    for step in (1, 2):
        group.start_profile(step=step)
        group.stop_profile()
        group.relocate_profile()
    said = [line for line in capsys.readouterr().err.splitlines() if "did not answer" in line]
    assert len(said) == 1
    assert 'actors="actor rank 1" phase=stop_profile step=1 reason="dead: DeadError: its process is gone"' in said[0]
    assert transport.log.count("stop_profile actor[1]") == 1
    assert transport.log.count("stop_profile actor[2]") == 2
    (record,) = unanswered(tmp_path)
    assert (record["phase"], record["step"]) == ("stop_profile", 1)
    (who,) = record["actors"]
    assert {key: who[key] for key in ("name", "node", "host", "pid", "state", "ranks")} == {
        "name": "actor[1]",
        "node": "a",
        "host": "host-a",
        "pid": 1,
        "state": "dead",
        "ranks": [{"role": "actor", "rank": 1}],
    }


def test_a_late_actor_costs_its_deadline_once(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = people(tmp_path, silent_at=frozenset({"stop_profile", "relocate_profile", "start_profile"}))
    group, transport = make(members)
    began = time.monotonic()
    for step in (1, 2, 3):
        group.start_profile(step=step)
        group.stop_profile()
        group.relocate_profile()
    assert time.monotonic() - began < 0.2 + 9 * 0.1 + 0.5
    said = [line for line in capsys.readouterr().err.splitlines() if "did not answer" in line]
    assert len(said) == 1
    assert "late: no answer to start_profile within 0.2 s" in said[0]
    assert transport.log.count("stop_profile actor[1]") == 3  # a window that opens late is closed, too
    assert members[1].state == "late"
    assert len(unanswered(tmp_path)) == 1
    members[1].target.silent_at = frozenset()
    transport.answer_late(Reply(members[1].target.place))
    group.start_profile(step=4)
    assert members[1].state == "fine"
    assert 'an actor answers again part=driver actor="actor rank 1"' in capsys.readouterr().err


def test_an_actor_that_cannot_be_reached_is_tried_again(make: Any, tmp_path: Path) -> None:
    members = people(tmp_path, lost_at="start_profile")
    group, transport = make(members)
    group.start_profile(step=1)
    assert members[1].state == "unreachable"
    group.stop_profile()
    assert members[1].state == "fine"
    assert transport.log.count("stop_profile actor[1]") == 1


def test_many_are_told_in_one_line(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = people(tmp_path, 50)
    for one in members[10:30]:
        one.target.dies_at = "start_profile"
    group, _ = make(members)
    group.start_profile(step=1)
    said = [line for line in capsys.readouterr().err.splitlines() if "did not answer" in line]
    assert len(said) == 1
    assert 'actors="actor rank 10-29"' in said[0]
    assert [len(record["actors"]) for record in unanswered(tmp_path)] == [20]


def test_actors_that_never_said_who_they_are_go_by_their_place_in_the_group(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, _ = make(people(tmp_path, silent_at=frozenset({"*"})))
    group.start_profile(step=1)
    assert "actors=actor[1]" in capsys.readouterr().err
    assert [record["actors"][0]["name"] for record in unanswered(tmp_path)] == ["actor[1]"]


def test_what_a_method_raises_is_an_error_and_the_actor_is_fine(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = people(tmp_path, raises_at="stop_profile")
    group, _ = make(members)
    group.start_profile(step=1)
    group.stop_profile()
    assert members[1].state == "fine"
    said = capsys.readouterr().err
    assert 'an actor raised; the others go on part=driver actor="actor rank 1" phase=stop_profile step=1' in said
    strict, _ = make(people(tmp_path, raises_at="start_profile"), strict=True)
    with pytest.raises(ActorCallError, match="start_profile of actor rank 1: ValueError: no start_profile"):
        strict.start_profile(step=1)


def test_after_the_end_of_the_framework_nothing_is_called(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, transport = make(people(tmp_path))
    group.start_profile(step=1)
    before = list(transport.log)
    transport.up = False
    group.stop_profile()
    group.relocate_profile()
    group.finish_profile()
    group.close()
    assert transport.log == before
    assert capsys.readouterr().err.count("was ray.shutdown() called before the group was closed?") == 1


def test_ranks_that_are_not_profiled_are_asked_once_and_left_alone(make: Any, tmp_path: Path) -> None:
    members = [
        member(f"actor[{rank}]", "a", facts("actor", rank, str(tmp_path / "out"), selected=rank == 1, command=None))
        for rank in range(3)
    ]
    group, transport = make(members)
    for step in (1, 2):
        group.start_profile(step=step)
        group.advance_profile(step=step)
        group.stop_profile()
    group.finish_profile()
    assert transport.count()["describe"] == 3
    methods = ("start_profile", "advance_profile", "stop_profile")
    assert [entry for entry in transport.log if "describe" not in entry] == [
        *(f"{method} actor[1]" for method in methods * 2),
        "finish_tools actor[1]",
    ]


def test_handles_of_one_process_are_called_once(make: Any, tmp_path: Path) -> None:
    members = people(tmp_path)
    again = Member(members[0].target, "again[0]", members[0].key)
    proxy = Member(members[1].target, "proxy[0]", "another actor in the same process")
    group, transport = make([*members, again, proxy])
    group.start_profile(step=1)
    group.stop_profile()
    assert transport.count() == {"describe": 5, "start_profile": 4, "stop_profile": 4}
    assert (again.alias_of, proxy.alias_of) == (members[0], members[1])


def test_files_come_in_the_order_of_the_actors(make: Any, tmp_path: Path) -> None:
    members = people(tmp_path, raises_at="relocate_profile")
    group, _ = make(members)
    group.start_profile(step=1)
    assert [file.rank for file in group.relocate_profile()] == [0, 2, 3]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="max_in_flight=0"):
        ActorGroup([], PaperTransport(), max_in_flight=0)
