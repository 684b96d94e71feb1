from __future__ import annotations

import pytest

from rankscope import OptionError, Schedule, ScheduleOptions, ScheduleWalk, Span, Window


def window(reason: str = "step", *, scheduled: bool = True) -> Window:
    return Window(id=1, role="actor", step=1, steps=(1,), scope="train", reason=reason, scheduled=scheduled)


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"wait": -1, "active": 1}, "wait"),
        ({"wait": 1}, "active"),
        ({"repeat": 2}, "active"),
        ({"active": -1}, "active"),
    ],
)
def test_numbers_that_cannot_be(numbers: dict[str, int], field: str) -> None:
    with pytest.raises(OptionError) as caught:
        ScheduleOptions(**numbers)
    assert [name for name, _ in caught.value.problems] == [field]


def test_windows_without_a_schedule() -> None:
    assert Schedule.of(ScheduleOptions(), window()) is None
    assert Schedule.of(ScheduleOptions(active=1), window(scheduled=False)) is None


def test_a_whole_step_has_one_cycle_and_a_stage_as_many_as_fit() -> None:
    options = ScheduleOptions(wait=1, active=1)
    for reason, cycles, recorded in (("step", 1, [1]), ("manual", 1, [1]), ("stage", 0, [1, 3, 5])):
        schedule = Schedule.of(options, window(reason))
        assert schedule is not None
        assert schedule.cycles == cycles
        assert [index for index in range(6) if schedule.phase(index) == "record"] == recorded
    repeated = Schedule.of(ScheduleOptions(wait=1, active=1, repeat=2), window("stage"))
    assert repeated is not None
    assert [index for index in range(9) if repeated.phase(index) == "record"] == [1, 3]


def test_the_first_stage_that_reports_is_the_one_that_counts() -> None:
    walk = ScheduleWalk(Schedule(ScheduleOptions(active=1)))
    assert walk.advance(Span(stage="update"))
    assert not walk.advance(Span(stage="critic"))
    assert not walk.advance(None)
    assert (walk.stage, walk.seen) == ("update", 1)


def test_a_stage_by_name() -> None:
    walk = ScheduleWalk(Schedule(ScheduleOptions(active=1, stage="critic")))
    assert not walk.advance(Span(stage="update"))
    assert walk.advance(Span(stage="critic"))


def test_why_nothing_was_recorded() -> None:
    walk = ScheduleWalk(Schedule(ScheduleOptions(skip_first=1, active=1)))
    assert walk.never_began == "the schedule records from mini-batch 1 on, so it needs at least 2; 0 ran"
    walk.advance(Span(stage="update"))
    assert walk.never_began.endswith("1 ran in stage 'update'")
    walk.advance(Span(stage="update"))
    assert walk.never_began == ""
