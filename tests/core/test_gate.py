from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.gate import Closing, Opening, StepGate


def run(gate: StepGate, steps: range | list[int], *, fail_at: int | None = None) -> list[tuple[Any, ...]]:
    """Drive a loop as a controller would and write down what the gate said."""
    said: list[tuple[Any, ...]] = []
    for step in steps:
        opening = gate.begin(step)
        if opening is not None:
            said.append(("open", opening.step, opening.steps))
        closing = gate.abort(step) if step == fail_at else gate.end(step)
        if closing is not None:
            said.append(("close", closing.step, step, closing.last))
        if step == fail_at:
            break
    final = gate.close()
    if final is not None:
        said.append(("close" if final.stop else "finish", final.step, None, final.last))
    return said


def test_separate_steps_have_separate_windows() -> None:
    assert run(StepGate((1, 2, 5)), range(1, 7)) == [
        ("open", 1, (1,)),
        ("close", 1, 1, False),
        ("open", 2, (2,)),
        ("close", 2, 2, False),
        ("open", 5, (5,)),
        ("close", 5, 5, True),
    ]


def test_adjacent_steps_share_a_window_when_continuous() -> None:
    assert run(StepGate((1, 2, 5), continuous=True), range(1, 7)) == [
        ("open", 1, (1, 2)),
        ("close", 1, 2, False),
        ("open", 5, (5,)),
        ("close", 5, 5, True),
    ]


def test_steps_beyond_the_end_do_not_keep_a_window_open() -> None:
    gate = StepGate((9, 10, 11), continuous=True, total_steps=10)
    assert gate.effective_steps == (9, 10)
    assert run(gate, range(1, 11)) == [("open", 9, (9, 10)), ("close", 9, 10, True)]


def test_last_is_given_although_the_highest_step_is_out_of_reach() -> None:
    assert run(StepGate((1, 2, 50), total_steps=10), range(1, 11))[-1] == ("close", 2, 2, True)


def test_last_is_given_at_the_end_of_a_loop_of_unknown_length() -> None:
    assert run(StepGate((1, 2, 50)), range(1, 11))[-2:] == [("close", 2, 2, False), ("finish", 2, None, True)]


def test_resume_inside_a_stretch_opens_a_shorter_window() -> None:
    gate = StepGate("1-4", continuous=True, first_step=3)
    assert run(gate, range(3, 7)) == [("open", 3, (3, 4)), ("close", 3, 4, True)]
    assert gate.warnings() == ["some configured steps are in the past (1, 2): this run begins with step 3"]


def test_resume_behind_all_steps_opens_nothing_and_says_so() -> None:
    gate = StepGate([1, 2], first_step=5)
    assert run(gate, range(5, 9)) == []
    assert gate.warnings() == ["all configured steps are in the past (1, 2): this run begins with step 5"]


def test_steps_beyond_the_end_are_told() -> None:
    assert StepGate([11, 12], total_steps=10).warnings() == [
        "all configured steps are beyond the end (11, 12): this run ends with step 10"
    ]
    assert StepGate([1, 12], total_steps=10).warnings() == [
        "some configured steps are beyond the end (12): this run ends with step 10"
    ]
    assert StepGate([1, 2], total_steps=10).warnings() == []


def test_a_step_that_raises_closes_a_stretch_in_its_middle() -> None:
    gate = StepGate("1-5", continuous=True)
    gate.begin(1)
    gate.end(1)
    gate.begin(2)
    assert gate.abort(2) == Closing(1, last=False, aborted=True)
    assert not gate.open
    assert gate.begin(3) == Opening(3, (3, 4, 5))


def test_the_last_step_that_raises_is_still_the_last() -> None:
    assert run(StepGate([3], total_steps=9), range(1, 10), fail_at=3)[-1] == ("close", 3, 3, True)


def test_an_early_end_closes_inside_a_stretch() -> None:
    gate = StepGate("1-5", continuous=True, total_steps=9)
    gate.begin(1)
    gate.end(1)
    assert gate.open
    assert gate.close() == Closing(1, last=True, aborted=False)
    assert gate.close() is None
    assert gate.begin(2) is None


def test_an_end_inside_a_step_counts_as_aborted() -> None:
    gate = StepGate([1])
    gate.begin(1)
    assert gate.close() == Closing(1, last=True, aborted=True)


def test_a_window_that_was_never_ended_is_closed_by_the_next_one() -> None:
    gate = StepGate([1, 2])
    gate.begin(1)
    assert gate.begin(1) is None
    assert gate.begin(2) == Opening(2, (2,), close_first=True)
    assert gate.end(1) is None  # late news of a step that has no window any more
    assert gate.end(2) == Closing(2, last=True)


def test_a_window_that_was_never_ended_is_closed_by_the_next_unprofiled_step() -> None:
    gate = StepGate([1, 9])
    gate.begin(1)
    assert gate.begin(2) is None
    assert gate.end(2) == Closing(1, last=False)


def test_nothing_opens_after_the_last_close() -> None:
    gate = StepGate([2])
    gate.begin(2)
    assert gate.end(2) == Closing(2, last=True)
    assert gate.begin(2) is None


def test_a_retried_step_opens_again() -> None:
    gate = StepGate([2, 3])
    gate.begin(2)
    gate.abort(2)
    assert gate.begin(2) == Opening(2, (2,))


@pytest.mark.parametrize("steps", [None, (), [], ""])
def test_no_steps_no_windows(steps: Any) -> None:
    assert run(StepGate(steps), range(1, 5)) == []


def test_steps_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match="zwei"):
        StepGate("zwei")


configured = st.lists(st.integers(1, 14), max_size=8).map(tuple)


@given(configured, st.booleans(), st.integers(1, 14), st.integers(1, 6), st.one_of(st.none(), st.integers(1, 14)))
def test_orderly_loops(steps: tuple[int, ...], continuous: bool, total: int, first: int, fail_at: int | None) -> None:
    gate = StepGate(steps, continuous=continuous, total_steps=total, first_step=first)
    said = run(gate, range(first, total + 1), fail_at=fail_at)
    done = [step for step in range(first, total + 1) if fail_at is None or fail_at < first or step <= fail_at]
    wanted = [step for step in done if step in steps]

    assert [kind for kind, *_ in said if kind != "finish"] == ["open", "close"] * (len(said) // 2)
    assert not gate.open
    assert sum(entry[-1] is True for entry in said) == (1 if wanted else 0)
    opened = [entry[1] for entry in said if entry[0] == "open"]
    if continuous:
        assert opened == [step for step in wanted if step - 1 not in wanted]
    else:
        assert opened == wanted
    if wanted and done == list(range(first, total + 1)) and (fail_at is None or fail_at not in done):
        assert said[-1][0] == "close"
        assert said[-1][-1] is True


calls: st.SearchStrategy[list[tuple[str, Any]]] = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "abort", "close"]),
        st.one_of(st.integers(-2, 12), st.sampled_from([None, "3"])),
    ),
    max_size=30,
)


@given(configured, st.booleans(), st.one_of(st.none(), st.integers(1, 12)), calls)
def test_odd_loops(steps: tuple[int, ...], continuous: bool, total: int | None, calls: list[tuple[str, Any]]) -> None:
    gate = StepGate(steps, continuous=continuous, total_steps=total)
    is_open = False
    lasts = windows = 0
    for call, step in [*calls, ("close", None)]:
        method: Callable[..., Opening | Closing | None] = getattr(gate, call)
        answer = method() if call == "close" else method(step)
        if isinstance(answer, Opening):
            assert answer.close_first == is_open
            assert lasts == 0
            assert answer.step == answer.steps[0] == step
            is_open, windows = True, windows + 1
        elif isinstance(answer, Closing):
            assert answer.stop == is_open
            assert answer.stop or answer.last
            is_open, lasts = False, lasts + answer.last
        assert gate.open == is_open
    assert not is_open
    assert lasts == (1 if windows else 0)
