"""verl's trainers: the order in which roles are stopped and finished, and how a run ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rankscope_verl import step, trainers

CALLS: list[str] = []


class Group:
    """A worker group as a trainer sees it."""

    def __init__(self, name: str, fails: str = "", hangs: str = "") -> None:
        self.name, self.fails, self.hangs = name, fails, hangs
        self.released = threading.Event()

    def note(self, call: str, text: str = "") -> None:
        CALLS.append(f"{self.name} {call}{text}")
        if call == self.fails:
            raise ConnectionError("the actor died")
        if call == self.hangs:
            self.released.wait(60)

    def start_profile(self, **facts: Any) -> None:
        self.note("start", f" {facts}")

    def stop_profile(self, run_command: bool = True) -> None:
        self.note("stop", f" {run_command}")

    def end_profile(self, aborted: bool = False) -> None:
        self.note("end", f" {aborted}")

    def finish_profile(self) -> None:
        self.note("finish")


class OldGroup(Group):
    """Of workers in whose process this package is not installed."""

    end_profile = finish_profile = property()  # type: ignore[assignment]


class V1(PPOTrainer):
    def on_step_end(self) -> None:
        pass

    def on_sample_end(self) -> None:
        pass


def make(kind: type, *, steps: Any = (1, 3), groups: dict[str, Any] | None = None, **facts: Any) -> Any:
    """A trainer without everything that its constructor needs."""
    CALLS.clear()
    trainer = kind.__new__(kind)
    trainer.config = OmegaConf.create(
        {"global_profiler": {"steps": None if steps is None else list(steps), "profile_continuous_steps": False}}
    )
    found = {"actor_rollout_wg": Group("actor"), "ref_policy_wg": Group("ref"), "critic_wg": Group("critic")}
    for name, group in {**found, **(groups or {})}.items():
        setattr(trainer, name, group)
    trainer.use_reference_policy = trainer.use_critic = True
    trainer.prev_step_profile, trainer.curr_step_profile, trainer.next_step_profile = False, True, False
    trainer.global_steps, trainer.total_training_steps = 3, 10
    for name, value in facts.items():
        setattr(trainer, name, value)
    return trainer


def drive(trainer: Any, *, last: bool) -> None:
    """One profiled step, by the trainer's own methods."""
    if isinstance(trainer, RayPPOTrainer):
        trainer._start_profiling(True)
        trainer._stop_profiling(True, run_command=last)
    else:
        trainer.global_steps = 3 if last else 1
        trainer._start_profiling()
        trainer._stop_profiling()


KINDS = [RayPPOTrainer, V1]


@pytest.mark.parametrize("kind", KINDS)
def test_all_roles_are_stopped_before_the_first_one_finishes(kind: type) -> None:
    drive(make(kind), last=True)
    started = ["actor start {'role': 'train', 'profile_step': 3}"]
    started += ["ref start {'profile_step': 3}", "critic start {'profile_step': 3}"]
    stopped = ["actor stop False", "ref stop False", "critic stop False"]
    assert [*started, *stopped, "actor finish", "ref finish", "critic finish"] == CALLS


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_the_last_finishes_nothing(kind: type) -> None:
    trainer = make(kind)
    drive(trainer, last=False)
    assert [call for call in CALLS if "start" not in call] == [
        "actor stop False",
        "ref stop False",
        "critic stop False",
    ]
    for group in (trainer.actor_rollout_wg, trainer.critic_wg):
        group.stop_profile()
    assert CALLS[-2:] == ["actor stop True", "critic stop True"]  # its own method is back in place


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_with_several_names_is_driven_once(kind: type) -> None:
    one = Group("all")
    drive(make(kind, groups={"actor_rollout_wg": one, "ref_policy_wg": one, "critic_wg": one}), last=True)
    assert [call for call in CALLS if "start" not in call] == ["all stop False", "all finish"]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_without_this_package_finish_as_in_verl(kind: type) -> None:
    trainer = make(kind, groups={"critic_wg": OldGroup("old")})
    drive(trainer, last=True)
    assert CALLS[-3:] == ["actor finish", "ref finish", "old stop True"]


def test_a_trainer_that_stops_its_engines_last_finishes_after_them() -> None:
    from verl.trainer.ppo.v1 import trainer_separate_async as separate

    engine = SimpleNamespace(
        start_profile=lambda: CALLS.append("engine start"), stop_profile=lambda: CALLS.append("engine stop")
    )
    trainer = make(
        separate.PPOTrainerSeparateAsync,
        llm_server_manager=engine,
        standalone_server_manager=None,
        hybrid_rollout_config=SimpleNamespace(enable_switch=False),
        standalone_checkpoint_manager=SimpleNamespace(update_weights=lambda step: {}),
        timing_raw={},
    )
    drive(trainer, last=True)
    assert CALLS[-1] == "critic stop False"
    trainer.on_step_end()
    assert CALLS[-5:] == ["critic stop False", "engine stop", "actor finish", "ref finish", "critic finish"]
    trainer.on_step_end()
    assert CALLS.count("critic finish") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_that_fails_is_the_trainers_own_business(kind: type) -> None:
    trainer = make(kind, groups={"actor_rollout_wg": Group("actor", fails="stop")})
    with pytest.raises(ConnectionError):
        drive(trainer, last=True)
    assert not [call for call in CALLS if "finish" in call]


# The end of a run.


def run(trainer: Any, body: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``fit`` with another body: what verl does in it needs GPUs."""
    fit = trainers._with_an_end(lambda self, *args: body())
    return fit(trainer, "agent loop manager")


@pytest.mark.parametrize("kind", KINDS)
def test_fit_is_the_trainers_own_with_an_end(kind: type) -> None:
    fit = next(vars(base)["fit"] for base in kind.__mro__ if "fit" in vars(base))
    assert fit.__wrapped__.__module__.startswith("verl.trainer.ppo")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_ends_tells_all_workers(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(make(kind), lambda: "done", monkeypatch) == "done"
    assert sorted(CALLS[:3]) == ["actor end False", "critic end False", "ref end False"]
    assert sorted(CALLS[3:]) == ["actor finish", "critic finish", "ref finish"]


def test_a_run_that_raises_saves_its_windows_as_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        raise FloatingPointError("loss is nan")

    with pytest.raises(FloatingPointError, match="loss is nan"):
        run(make(V1), body, monkeypatch)
    assert sorted(CALLS[:3]) == ["actor end True", "critic end True", "ref end True"]


def test_a_dead_worker_and_one_that_hangs_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    monkeypatch.setattr(trainers, "PATIENCE", 0.3)
    hanging = Group("critic", hangs="end")
    groups = {"actor_rollout_wg": Group("actor", fails="end"), "critic_wg": hanging}
    try:
        assert run(make(V1, groups=groups), lambda: "done", monkeypatch) == "done"
    finally:
        hanging.released.set()
    text = said()
    assert "ConnectionError: the actor died" in text
    assert "1 of 3 worker groups did not answer in 0.3 s" in text
    assert "ref finish" in CALLS


@pytest.mark.parametrize("steps", [None, []])
def test_a_run_that_is_not_profiled_is_left_alone(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(make(V1, steps=steps), lambda: "done", monkeypatch) == "done"
    assert CALLS == []


def test_steps_that_the_run_cannot_reach_are_told_at_its_start(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    trainer = make(V1, steps=[2, 500])
    run(trainer, lambda: None, monkeypatch)
    assert "some configured steps are beyond the end (500): this run ends with step 10" in said()


# The number of the step, for rollout servers.


def test_the_step_goes_through_rays_store(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, bytes] = {}

    class Store:
        def _internal_kv_put(self, key: bytes, value: bytes, *, overwrite: bool, namespace: str) -> None:
            kept[namespace, key] = value

        def _internal_kv_get(self, key: bytes, *, namespace: str) -> bytes | None:
            return kept.get((namespace, key))

    assert step.announced() is None  # no cluster
    step.announce(1)
    monkeypatch.setattr(step, "_place", lambda: (Store(), b"step:01"))
    assert step.announced() is None
    drive(make(V1), last=True)
    assert step.announced() == 3
    drive(make(RayPPOTrainer, global_steps=4), last=False)
    assert step.announced() == 4
    drive(make(V1, steps=None, curr_step_profile=False), last=True)
    assert step.announced() == 4
