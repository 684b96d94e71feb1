from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import calls, config

from rankscope import ControllerError, DistProfiler, ProfileController, ProfiledWorker

LOG: list[str] = []


class Worker:
    """Notes how it is driven."""

    def __init__(self, name: str, *, fail: str = "") -> None:
        self.name, self.fail = name, fail

    def note(self, text: str) -> None:
        LOG.append(f"{self.name} {text}")
        if self.fail and text.startswith(self.fail):
            raise ConnectionError(f"{self.name} is gone")

    def start_profile(self, *, step: int, scope: str) -> None:
        self.note(f"start {step} {scope}")

    def stop_profile(self, *, last: bool) -> None:
        self.note(f"stop {'last' if last else 'not last'}")

    def relocate_profile(self) -> None:
        self.note("relocate")

    def finish_profile(self) -> None:
        self.note("finish")

    def advance_profile(self, *, step: int) -> None:
        self.note(f"advance {step}")


class Bare:
    """Only what has to be there."""

    def start_profile(self, *, step: int, scope: str) -> None:
        LOG.append(f"bare start {step}")

    def stop_profile(self, *, last: bool) -> None:
        LOG.append(f"bare stop {last}")


@pytest.fixture(autouse=True)
def log(site: Path) -> list[str]:
    LOG.clear()
    return LOG


Make = Callable[..., ProfileController]


@pytest.fixture
def controller(save_path: Path) -> Make:
    def make(*workers: Any, steps: Any = (1, 3), **facts: Any) -> ProfileController:
        more = {key: facts.pop(key) for key in ("total_steps", "first_step", "overrides") if key in facts}
        return ProfileController(config(save_path, steps=steps, **facts), workers=workers, **more)

    return make


def loop(driven: ProfileController, steps: range) -> None:
    for n in steps:
        with driven.step(n):
            LOG.append(f"train {n}")


# Phases.


def test_stop_all_then_relocate_all_then_finish_all_once(controller: Make) -> None:
    driven = controller(Worker("a"), Worker("b"), total_steps=4)
    loop(driven, range(1, 5))
    driven.close()
    assert [
        *("a start 1 train", "b start 1 train", "train 1"),
        *("a stop not last", "b stop not last", "a relocate", "b relocate"),
        "train 2",
        *("a start 3 train", "b start 3 train", "train 3"),
        *("a stop last", "b stop last", "a relocate", "b relocate", "a finish", "b finish"),
        "train 4",
    ] == LOG


def test_one_window_over_adjacent_steps(controller: Make) -> None:
    driven = controller(Worker("a"), steps=(2, 3), profile_continuous_steps=True)
    loop(driven, range(1, 5))
    assert [
        *("train 1", "a start 2 train", "train 2", "a advance 3", "train 3"),
        *("a stop last", "a relocate", "a finish", "train 4"),
    ] == LOG


def test_the_two_halves_do_the_same(controller: Make) -> None:
    driven = controller(Worker("a"), steps=(1,))
    driven.begin_step(1)
    driven.end_step(1)
    driven.close()
    assert LOG == ["a start 1 train", "a stop last", "a relocate", "a finish"]


def test_a_step_that_was_never_ended_is_closed_before_the_next(controller: Make) -> None:
    driven = controller(Worker("a"), steps=(1, 2))
    driven.begin_step(1)
    driven.begin_step(2)
    driven.end_step(2)
    assert [
        *("a start 1 train", "a stop not last", "a relocate"),
        *("a start 2 train", "a stop last", "a relocate", "a finish"),
    ] == LOG


# Ends that nobody planned.


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_in_a_step_closes_the_window_and_passes(controller: Make, error: BaseException) -> None:
    driven = controller(Worker("a"))
    with pytest.raises(type(error)) as caught, driven.step(1):
        raise error
    assert caught.value is error
    assert LOG == ["a start 1 train", "a stop not last", "a relocate"]
    with pytest.raises(type(error)), driven, driven.step(2):
        raise error
    assert LOG[3:] == ["a relocate", "a finish"]


def test_an_exception_in_the_last_step_finishes(controller: Make) -> None:
    driven = controller(Worker("a"), steps=(1,))
    with pytest.raises(KeyError), driven.step(1):
        raise KeyError
    driven.close()
    assert LOG == ["a start 1 train", "a stop last", "a relocate", "a finish"]


def test_the_steps_exception_wins_over_a_workers_in_strict_mode(controller: Make) -> None:
    driven = controller(Worker("a", fail="stop"))
    with pytest.raises(KeyError), driven.step(1):
        raise KeyError


def test_a_loop_that_ends_early_is_finished_by_close(controller: Make) -> None:
    with controller(Worker("a"), steps=(1, 50), total_steps=100) as driven:
        loop(driven, range(1, 4))
        assert "a finish" not in LOG
    assert LOG[-2:] == ["a relocate", "a finish"]
    driven.close()
    driven.close()
    assert LOG.count("a finish") == 1


def test_steps_beyond_the_end_keep_nothing_open(controller: Make, capsys: pytest.CaptureFixture[str]) -> None:
    driven = controller(Worker("a"), steps=(9, 10, 11), total_steps=10, profile_continuous_steps=True)
    assert "beyond the end (11)" in capsys.readouterr().err
    loop(driven, range(9, 11))
    assert [
        *("a start 9 train", "train 9", "a advance 10", "train 10"),
        *("a stop last", "a relocate", "a finish"),
    ] == LOG


def test_after_a_resume(controller: Make, capsys: pytest.CaptureFixture[str]) -> None:
    driven = controller(Worker("a"), steps=(1, 2, 3), first_step=3, profile_continuous_steps=True)
    assert "in the past (1, 2)" in capsys.readouterr().err
    loop(driven, range(3, 5))
    assert LOG == ["a start 3 train", "train 3", "a stop last", "a relocate", "a finish", "train 4"]
    LOG.clear()
    driven = controller(Worker("a"), steps=(1, 2), first_step=7)
    assert "all configured steps are in the past" in capsys.readouterr().err
    loop(driven, range(7, 9))
    driven.close()
    assert LOG == ["train 7", "train 8"]


def test_nothing_configured_nothing_driven(controller: Make) -> None:
    with controller(Worker("a"), steps=None) as driven:
        loop(driven, range(1, 3))
    assert LOG == ["train 1", "train 2"]


# Workers.


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("method", ["start", "stop", "relocate", "finish", "advance"])
def test_a_worker_that_raises_does_not_keep_the_others_from_being_driven(controller: Make, method: str) -> None:
    class Nameless(Worker):
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    broken, fine = Nameless("broken", fail=method), Worker("fine")
    driven = controller(broken, fine, steps=(1, 2), profile_continuous_steps=True)
    loop(driven, range(1, 4))
    seen = [entry.split(" ", 1)[1] for entry in LOG if entry.startswith("fine")]
    assert seen == ["start 1 train", "advance 2", "stop last", "relocate", "finish"]
    assert [entry for entry in LOG if entry.startswith("train")] == ["train 1", "train 2", "train 3"]


def test_strict_mode_raises_what_workers_raised_after_all_were_driven(controller: Make) -> None:
    driven = controller(Worker("a", fail="start"), Worker("b", fail="start"), Worker("c"))
    with pytest.raises(ControllerError) as caught:
        driven.begin_step(1)
    assert LOG == ["a start 1 train", "b start 1 train", "c start 1 train"]
    assert [(method, worker.name) for method, worker, _ in caught.value.errors] == [  # type: ignore[attr-defined]
        ("start_profile", "a"),
        ("start_profile", "b"),
    ]


def test_one_object_under_several_names_is_driven_once(controller: Make) -> None:
    worker = Worker("a")
    driven = controller(worker, Worker("b"), worker, worker, steps=(1,))
    driven.begin_step(1)
    assert LOG == ["a start 1 train", "b start 1 train"]


def test_optional_methods_may_be_missing(controller: Make) -> None:
    driven = controller(Bare(), steps=(1, 2), profile_continuous_steps=True)
    loop(driven, range(1, 4))
    assert LOG == ["bare start 1", "train 1", "train 2", "bare stop True", "train 3"]


@pytest.mark.parametrize("wrong", [object(), "actor", type("Half", (), {"start_profile": lambda self: None})()])
def test_what_cannot_be_driven_is_refused_at_once(controller: Make, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"workers: .* has no (start|stop)_profile"):
        controller(Worker("a"), wrong)


def test_profilers_and_workers_with_one(controller: Make, save_path: Path) -> None:
    class Actor(ProfiledWorker):
        def __init__(self, handle: Any) -> None:
            self.profiler = handle

    class Without(ProfiledWorker):
        pass

    facts = config(save_path, tool="rec", roles=("actor", "critic"))
    facts["critic"]["profiler"]["tool"] = "rec2"
    actor = Actor(DistProfiler(facts, role="actor", rank=0, world_size=1))
    critic = DistProfiler(facts, role="critic", rank=0, world_size=1)
    driven = controller(actor, critic, critic, Without(), steps=(1, 2))
    for n in (1, 2):
        with driven.step(n):
            actor.step_profile()
            Without().step_profile()
    driven.close()
    assert calls("start", "step", "stop", "finish") == [
        *("rec start 1 train", "rec2 start 1 train", "rec step None", "rec2 step None"),
        *("rec stop 1 train", "rec2 stop 1 train"),
        *("rec start 2 train", "rec2 start 2 train", "rec step None", "rec2 step None"),
        *("rec stop 2 train", "rec2 stop 2 train", "rec finish 2", "rec2 finish 2"),
    ]
    actor.close_profile()
    Without().close_profile()
    assert Without().relocate_profile() == ()
    assert actor.profiler.closed


def test_at_exit_the_controller_closes_what_is_open(site: Path, save_path: Path) -> None:
    program = """
import json, sys
from rankscope import DistProfiler, ProfileController
config = json.loads(sys.argv[1])
handle = DistProfiler(config, role="actor", rank=0, world_size=1)
controller = ProfileController(config, workers=[handle], total_steps=9)
controller.begin_step(1)
raise SystemExit(5)
"""
    command = f"echo run >> {save_path.parent}/ran"
    result = recording.run_python(site, program, json.dumps(config(save_path, finish_hook_cmd=command)))
    assert result.returncode == 5, result.stderr
    assert recording.files(save_path) == ["step 1"]
    assert (save_path.parent / "ran").read_text() == "run\n"
