from __future__ import annotations

import inspect
from typing import Any

import pytest

from rankscope import ProfiledWorker

CALLS = {
    "start_profile": ("start", {"step": 3, "scope": "train"}, {"step": 3, "scope": "train"}),
    "stop_profile": ("stop", {"last": True}, {}),
    "advance_profile": ("advance", {"step": 4}, {"step": 4}),
    "step_profile": ("step", {}, {}),
    "relocate_profile": ("relocate", {}, {}),
    "finish_profile": ("finish", {}, {}),
}


class Profiler:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda **arguments: self.calls.append((name, arguments))


@pytest.mark.parametrize("method", CALLS)
def test_each_method_acts_on_the_profiler(method: str) -> None:
    name, given, expected = CALLS[method]
    worker = ProfiledWorker()
    worker.profiler = Profiler()  # type: ignore[assignment]
    getattr(worker, method)(**given)
    assert worker.profiler.calls == [(name, expected)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", CALLS)
def test_a_worker_without_a_profiler_does_nothing(method: str) -> None:
    assert getattr(ProfiledWorker(), method)(**CALLS[method][1]) in (None, ())


def test_last_belongs_to_the_next_phases() -> None:
    """A worker that finished in its stop would run the command before the other workers' files are there."""
    assert inspect.signature(ProfiledWorker.stop_profile).parameters["last"].default is False
