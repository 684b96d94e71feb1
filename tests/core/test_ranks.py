from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.ranks import DEFAULT, EVERY_RANK, NO_RANK, RankSelector

parse = RankSelector.parse


def chosen(selector, world_size=20, **facts):
    return [rank for rank in range(world_size) if selector.selects(rank, world_size=world_size, **facts).selected]


@pytest.mark.parametrize(
    ("ranks", "members"),
    [
        (3, [3]),
        ([3, 1, 3], [1, 3]),
        (["0", "4-6"], [0, 4, 5, 6]),
        ("0-7,16", [0, 1, 2, 3, 4, 5, 6, 7, 16]),
        ("0-19:8", [0, 8, 16]),
        ("all", list(range(20))),
        (["ALL", 3], list(range(20))),
        ("none", []),
        (["none"], []),
    ],
)
def test_members(ranks, members):
    assert chosen(parse(ranks)) == members


@pytest.mark.parametrize("ranks", [None, [], (), "", " "])
def test_no_choice_means_rank_0_and_says_so(ranks):
    selector = parse(ranks)
    assert selector == DEFAULT
    assert chosen(selector) == [0]
    assert selector.selects(0).reason == "rank 0 is the default"
    assert "default" in selector.selects(2).reason


def test_none_is_not_the_default():
    assert parse("none") != parse(None)
    assert parse("none").selects(0).reason == "no rank is selected"


def test_all_ranks_wins_but_ranks_are_still_checked():
    assert parse([1], all_ranks=True) == EVERY_RANK
    assert parse("none", all_ranks=True).all
    with pytest.raises(ValueError):
        parse([-1], all_ranks=True)


@pytest.mark.parametrize(
    ("ranks", "quoted"),
    [
        (-1, "-1"),
        ([0, -3], "-3"),
        ("-1", "-1"),
        (True, "True"),
        ([False], "False"),
        (0.0, "0.0"),
        ([1.5], "1.5"),
        ("first", "first"),
        (["x"], "'x'"),
        ([None], "None"),
        ([""], "''"),
        ([[1]], "[1]"),
        ({"tp": 0}, "tp"),
        (b"0", "b'0'"),
        (object(), "object"),
        ("3-1", "3-1"),
        ("0-99999999", "100000000"),
        ("0,,1", "''"),
        ("tp=-1", "tp=-1"),
        ("tp=first", "tp=first"),
        ("tp=0,tp=1", "tp"),
        ("0,tp=0", "'0'"),
        ("0&1", "twice"),
        ("&0", "''"),
        (["none", 1], "none"),
    ],
)
def test_what_is_wrong_is_quoted(ranks, quoted):
    with pytest.raises(ValueError) as caught:
        parse(ranks)
    assert quoted in str(caught.value)


def test_reasons_are_words_for_people():
    assert parse("0-1").selects(3).reason == "rank 3 is not in ranks 0-1"
    assert parse("0-1").selects(1).reason == "rank 1 is in ranks 0-1"
    assert parse(5).selects(3).reason == "rank 3 is not rank 5"
    assert parse(5).selects(5).reason == "rank 5 is listed"
    assert parse("all").selects(5).reason == "all ranks are selected"
    assert "world size is 4" in parse("all").selects(4, world_size=4).reason


def test_many_ranks_give_a_short_reason():
    reason = parse("0-9998:2").selects(1).reason
    assert "5000 in all" in reason
    assert len(reason) < 100


def test_per_node():
    selector = parse("per_node")
    assert selector.selects(8, local_rank=0).selected
    refused = selector.selects(9, local_rank=1)
    assert not refused.selected
    assert "local rank 1" in refused.reason
    assert "unknown" in selector.selects(8).reason


def test_coordinates_must_all_fit():
    selector = parse("tp=0, pp=last")
    sizes = {"tp": 2, "pp": 3}
    assert selector.selects(0, topology={"tp": 0, "pp": 2}, topology_sizes=sizes).selected
    assert selector.selects(0, topology={"tp": 1, "pp": 2}, topology_sizes=sizes).reason == "tp=1 is not tp=0"
    assert selector.selects(0, topology={"tp": 0, "pp": 1}, topology_sizes=sizes).reason == "pp=1 is not pp=last"


def test_coordinates_of_unknown_dimensions_select_nobody_and_say_why():
    assert "'cp' is unknown" in parse("cp=0").selects(0, topology={"tp": 0}).reason
    assert "'tp' is unknown" in parse("tp=*").selects(0).reason
    assert parse("tp=*").selects(0, topology={"tp": 7}).selected
    assert "size of dimension 'pp' is unknown" in parse("pp=last").selects(0, topology={"pp": 0}).reason


def test_a_list_is_a_choice_and_an_ampersand_a_condition():
    either = parse([3, "tp=1"])
    assert either.selects(3).selected
    assert either.selects(9, topology={"tp": 1}).selected
    assert not either.selects(9, topology={"tp": 0}).selected
    both = parse("0-3 & tp=1")
    assert both.selects(2, topology={"tp": 1}).selected
    assert not both.selects(9, topology={"tp": 1}).selected
    assert not both.selects(2, topology={"tp": 0}).selected


def test_union_takes_the_default_as_rank_0():
    assert parse(None).union(parse([3])).listed() == (0, 3)
    assert parse([3]).union(parse([])).listed() == (0, 3)
    assert parse("none").union(parse([3])).listed() == (3,)
    assert parse([3]).union(EVERY_RANK) == EVERY_RANK
    assert DEFAULT.union(DEFAULT) == DEFAULT


def test_intersection_of_disjoint_ranks_is_nobody():
    nobody = parse([0]).intersection(parse([1]))
    assert nobody == NO_RANK
    assert nobody.nobody
    assert chosen(nobody) == []
    assert EVERY_RANK.intersection(parse([1, 2])).listed() == (1, 2)
    assert parse(None).intersection(parse([3])).nobody


def test_intersection_of_coordinates():
    both = parse("tp=0").intersection(parse("pp=1"))
    assert both.selects(0, topology={"tp": 0, "pp": 1}).selected
    assert not both.selects(0, topology={"tp": 0, "pp": 0}).selected
    assert parse("tp=0").intersection(parse("tp=1")).nobody
    first_of_few = parse("per_node").intersection(parse("0-8"))
    assert first_of_few.selects(8, local_rank=0).selected
    assert not first_of_few.selects(9, local_rank=0).selected


def test_listed_only_where_all_are_numbers():
    assert parse("none").listed() == ()
    assert parse("all").listed() is None
    assert parse([1, "per_node"]).listed() is None


def test_ranks_outside_the_world():
    assert parse("6-9").warnings(8) == ["ranks 8-9 do not exist: the world size is 8 (ranks 0-7)"]
    assert parse(8).warnings(8) == ["rank 8 does not exist: the world size is 8 (ranks 0-7)"]
    assert parse("all").warnings(8) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (None, "rank 0 (the default)"),
        ("all", "all ranks"),
        ("none", "no rank"),
        (3, "rank 3"),
        ("0-7,16", "ranks 0-7,16"),
        (["per_node", 5], "rank 5 or local rank 0 of each node"),
        ("tp=0,pp=last", "ranks with tp=0,pp=last"),
    ],
)
def test_explain(ranks, words):
    assert parse(ranks).explain() == words


@pytest.mark.parametrize(
    "ranks", ["all", "none", "0-3,9", "per_node", "tp=0,pp=last", [1, "per_node&tp=*"], "0-1&tp=0"]
)
def test_written_reads_back_to_the_same_ranks(ranks):
    selector = parse(ranks)
    again = parse(selector.written())
    for rank in range(12):
        for tp in (0, 1):
            facts = {"topology": {"tp": tp, "pp": 1}, "topology_sizes": {"pp": 2}, "local_rank": rank % 4}
            assert selector.selects(rank, **facts).selected == again.selects(rank, **facts).selected


def test_a_selector_can_be_sent_to_workers():
    selector = parse(["0-3", "tp=0,pp=last"])
    selector.selects(1)
    assert pickle.loads(pickle.dumps(selector)) == selector


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_union_and_intersection_are_those_of_sets(left, right):
    one, two = parse(sorted(left) or "none"), parse(sorted(right) or "none")
    assert set(one.union(two).listed() or ()) == left | right
    assert set(one.intersection(two).listed() or ()) == left & right


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_with_a_value_error(text):
    try:
        selector = parse(text)
    except ValueError:
        return
    assert selector.explain()
