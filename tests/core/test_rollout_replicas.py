from __future__ import annotations

import pytest

from rankscope import ConfigError
from rankscope.ranks import RankSelector
from rankscope.rollout import Layout, Replica
from rankscope.rollout.replicas import Choice, choose, placed


def chosen(ranks: object, replicas: int, width: int, **facts: object) -> Choice:
    return choose(RankSelector.parse(ranks), placed([None] * replicas, width), **facts)  # type: ignore[arg-type]


def test_the_replica_that_owns_a_listed_rank_is_profiled_and_no_other() -> None:
    assert chosen([0, 8], 8, 2) == Choice({0: (0,), 4: (8,)})


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (None, {0: (0,)}),
        ("all", {0: (0, 1), 1: (2, 3), 2: (4, 5)}),
        ("1-2", {0: (1,), 1: (2,)}),
        ("none", {}),
    ],
)
def test_forms_of_ranks(ranks: object, expected: dict[int, tuple[int, ...]]) -> None:
    assert chosen(ranks, 3, 2).ranks == expected


def test_why_there_is_none() -> None:
    assert chosen("none", 3, 2).reason == "no rank is selected"
    assert "rank 0 is not rank 9" in chosen([9], 3, 2).reason


def test_the_first_of_each_node_where_nodes_are_known() -> None:
    assert chosen("per_node", 8, 2, gpus_per_node=8).ranks == {0: (0,), 4: (8,)}
    assert "local rank is unknown" in chosen("per_node", 8, 2).reason


def test_coordinates_where_the_layout_is_known() -> None:
    assert chosen("tp=1", 2, 2, layout=Layout(tp=2)).ranks == {0: (1,), 1: (3,)}
    assert chosen("tp=last,pp=0", 1, 4, layout=Layout(tp=2, pp=2)).ranks == {0: (1,)}
    assert chosen("dp=1", 1, 4, layout=Layout(tp=4, dp=2, dp_attention=True)).ranks == {0: (2, 3)}
    assert "dimension 'tp' is unknown" in chosen("tp=1", 2, 2).reason


def test_devices_that_a_replica_reports() -> None:
    replicas = placed([Replica(0, devices=(0, 4)), Replica(1, devices=(1, 5))], 2)
    assert choose(RankSelector.parse([4, 5]), replicas).ranks == {0: (4,), 1: (5,)}


def test_ranks_without_a_replica_are_named() -> None:
    found = chosen([0, 20, 21, 40], 8, 2)
    assert found.ranks == {0: (0,)}
    assert found.warnings == ("ranks 20-21,40 are on no rollout replica (8 replicas with ranks 0-15)",)
    assert chosen([3], 1, 2).warnings == ("rank 3 is on no rollout replica (1 replica with ranks 0-1)",)
    assert chosen([3], 1, 2, complete=False).warnings == ()


@pytest.mark.parametrize(
    ("replicas", "width", "world", "words"),
    [
        ([None, None], 2, 5, "5 GPUs cannot be divided into replicas of 2"),
        ([Replica(0), Replica(0)], 2, None, "two replicas have the number 0"),
        ([Replica(0, devices=(0, 1)), Replica(1, devices=(1, 2))], 2, None, "rank 1 is on replica 0 and on replica 1"),
        ([Replica(0, devices=(1, 1))], 2, None, "name a rank twice"),
        ([Replica(0, devices=(-1,))], 2, None, "are not global ranks"),
        ([None, None, None], 2, 4, "replica 2 spans ranks 4-5, but there are 4 rollout GPUs"),
        (["localhost:8000"], 1, None, "'localhost:8000' is no URL"),
        ([Replica(-1)], 1, None, "replicas count from 0"),
    ],
)
def test_replicas_that_do_not_fit(replicas: list[object], width: int, world: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placed(replicas, width, world)


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"tp": 0}, "tp=0 is not a size"), ({"tp": True}, "tp=True"), ({"tp": 4, "dp": 3, "dp_attention": True}, "dp=3")],
)
def test_layouts_that_cannot_be(facts: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Layout(**facts)  # type: ignore[arg-type]


def test_what_is_secret_in_a_url_is_not_shown() -> None:
    replica = Replica(3, "http://user:secret@10.0.0.1:8000/?key=secret", headers={"Authorization": "Bearer secret"})
    assert replica.shown == "replica 3 (http://10.0.0.1:8000/)"
    assert "secret" not in repr(replica)
