from __future__ import annotations

import pytest

from rankscope import check_choices, check_token_window


def test_each_unknown_choice_is_a_problem_of_its_own() -> None:
    assert check_choices("contents", ("cpu", "gpuu", "x"), ("cpu", "gpu"), also=" (or all)") == [
        ("contents", "has no choice 'gpuu'; choices: cpu, gpu (or all). Did you mean 'gpu'?"),
        ("contents", "has no choice 'x'; choices: cpu, gpu (or all)."),
    ]
    assert check_choices("contents", (), ("cpu",)) == []


@pytest.mark.parametrize(
    ("start", "end", "fields"),
    [
        (None, None, []),
        (0, None, []),
        (3, 4, []),
        (4, 4, ["profile_token_end"]),
        (-1, None, ["profile_token_start"]),
        (-2, -1, ["profile_token_start", "profile_token_end"]),
        (None, 0, []),
    ],
)
def test_a_token_window(start: int | None, end: int | None, fields: list[str]) -> None:
    assert [field for field, _ in check_token_window(start, end)] == fields
