"""A callback for the Trainer of Hugging Face transformers (and of libraries on top of it, such as TRL)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from rankscope.integrations.loop import TrainerLoop


class RankscopeCallback(TrainerCallback):  # type: ignore[misc]  # transformers may have no types here
    """Profiles a ``Trainer``: each optimizer step is a training step, counted from 1, with a stage ``train_step``.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[RankscopeCallback("profile.yaml")])

    Source of the events: transformers 5.24.0, ``trainer_callback.py``. A Trainer calls nothing when a step raises: what
    is open then is saved when the process ends, or by ``close()``.

    Args:
        config: as of `DistProfiler`; ``profiler`` at its root, or the section of the role, says who and what.
        role: of the process.
    """

    def __init__(self, config: Any, *, role: str = "trainer") -> None:
        self._config = config
        self._role = role
        self._loop: TrainerLoop | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Find rank and steps, and check the config before the first step."""
        self.close()
        self._loop = TrainerLoop(
            self._config,
            role=self._role,
            total_steps=state.max_steps if state.max_steps > 0 else None,
            done=state.global_step,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """An optimizer step begins, with the first of its micro-batches."""
        if self._loop is not None:
            self._loop.begin(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The optimizer step is done."""
        if self._loop is not None:
            self._loop.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Save and finish."""
        self.close()

    def close(self) -> None:
        """Save and finish, where ``train()`` raised. Safe to repeat."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
