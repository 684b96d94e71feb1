"""Names for the stages of the critic, which verl does not annotate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rankscope import annotate
from rankscope_verl.changes import Changes

CRITIC = "value_model"
"""What verl calls the model of a critic's worker."""


def change(module: ModuleType, changes: Changes) -> None:
    """In ``verl.workers.engine_workers``.

    Without an update stage around them, the mini-batches of a critic would be stages of their own: in discrete mode a
    file each, and no schedule for them.
    """
    worker: Any = module.TrainingWorker
    changes.replace(worker, "train_mini_batch", "self, data", _of_critic("critic_update", scheduled=True))
    changes.replace(worker, "infer_batch", "self, data", _of_critic("compute_values", scheduled=False))


def _of_critic(stage: str, *, scheduled: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        shown = annotate(stage, scheduled=scheduled)(original)

        @functools.wraps(original)  # what verl's dispatch has noted on it comes along
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = getattr(self, "config", None)
            function = shown if getattr(config, "model_type", None) == CRITIC else original
            return function(self, *args, **kwargs)

        return call

    return make
