from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.steps import parse_steps


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (None, ()),
        ([], ()),
        ("", ()),
        ("  ", ()),
        (3, (3,)),
        ("7", (7,)),
        ([5, 1, 5], (1, 5)),
        (("2-4", 3, "9"), (2, 3, 4, 9)),
        ("1-3,5,10-20:5", (1, 2, 3, 5, 10, 15, 20)),
        (" 1 - 2 , 4 ", (1, 2, 4)),
        ({"stop": 3}, (1, 2, 3)),
        ({"start": 100, "stop": 300, "every": 100}, (100, 200, 300)),
        ({"start": None, "stop": 2, "every": None}, (1, 2)),
    ],
)
def test_every_way_to_write_steps(value, steps):
    assert parse_steps(value) == steps


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        (True, "True"),
        ([True], "True"),
        (1.0, "1.0"),
        (0, "0"),
        (-1, "-1"),
        ("0-3", "0-3"),
        ("-1", "-1"),
        ("5-2", "5-2"),
        ("1-9:0", "1-9:0"),
        ("1,,2", "''"),
        ("one", "one"),
        ("1-3x", "1-3x"),
        ([[1]], "[1]"),
        ([None], "None"),
        (object(), "object"),
        ("1-9000000", "9000000"),
        ({"stop": 5, "step": 2}, "step"),
        ({"start": 5}, "stop"),
        ({"stop": "5"}, "'5'"),
        ({"stop": True}, "True"),
        ({"start": 5, "stop": 3}, "start: 5, stop: 3"),
        ({"stop": 3, "every": 0}, "every: 0"),
    ],
)
def test_what_is_wrong_is_quoted(value, quoted):
    with pytest.raises(ValueError) as caught:
        parse_steps(value)
    assert quoted in str(caught.value)


def test_many_pieces_that_together_are_too_many():
    with pytest.raises(ValueError, match="at most 1000000"):
        parse_steps("1-1000000,1000001-1999999")


@given(st.sets(st.integers(1, 10_000), max_size=30))
def test_a_list_and_its_text_mean_the_same(steps):
    text = ",".join(str(step) for step in steps)
    assert parse_steps(text) == parse_steps(list(steps)) == tuple(sorted(steps))


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_with_a_value_error(text):
    try:
        steps = parse_steps(text)
    except ValueError:
        return
    assert all(step >= 1 for step in steps)
