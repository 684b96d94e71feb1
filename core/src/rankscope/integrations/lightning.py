"""A callback for the Trainer of Lightning (``lightning`` or ``pytorch_lightning``)."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from typing import Any

from rankscope.integrations.loop import TrainerLoop


def _callback_class() -> Any:
    """``Callback`` of whichever of the two packages is installed; a Trainer accepts only its own."""
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
    name = next((name for name in names if importlib.util.find_spec(name.partition(".")[0])), None)
    if name is None:
        raise ImportError("neither lightning nor pytorch_lightning is installed; pip install lightning")
    return importlib.import_module(name).Callback


class RankscopeCallback(_callback_class()):  # type: ignore[misc]  # found at run time
    """Profiles a ``Trainer``: each optimizer step is a training step, counted from 1, with a stage ``train_step``.

    With gradient accumulation a step begins with its first batch. Validation inside a window is a stage ``validate``.

    Example::

        trainer = Trainer(max_steps=100, callbacks=[RankscopeCallback("profile.yaml")])

    Source of the events: lightning 2.6.6, ``pytorch/callbacks/callback.py``.

    Args:
        config: as of `DistProfiler`; ``profiler`` at its root, or the section of the role, says who and what.
        role: of the process.
    """

    def __init__(self, config: Any, *, role: str = "trainer") -> None:
        super().__init__()
        self._config = config
        self._role = role
        self._loop: TrainerLoop | None = None
        self._done = 0
        self._stepped = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Find rank and steps, and check the config before the first step."""
        self._close()
        self._done = self._stepped = trainer.global_step
        total = trainer.estimated_stepping_batches
        self._loop = TrainerLoop(
            self._config,
            role=self._role,
            total_steps=int(total) if math.isfinite(total) and total > 0 else None,
            done=self._done,
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """A batch begins: the first one of a step, unless gradients are still being accumulated."""
        if self._loop is not None and self._loop.current is None:
            self._stepped = trainer.global_step
            self._loop.begin(self._done + 1)

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """A batch is done; with it the step, if an optimizer stepped (several may, in one batch)."""
        if self._loop is not None and trainer.global_step != self._stepped:
            self._done += 1
            self._loop.end()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """A validation begins."""
        if self._loop is not None:
            self._loop.enter("validate")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """It is done."""
        if self._loop is not None:
            self._loop.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """The step raised: save what is open."""
        if self._loop is not None:
            self._loop.abort(exception)
        self._close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Save and finish."""
        self._close()

    def _close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
