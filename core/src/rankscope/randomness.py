"""Imports that draw random numbers (rich does, for one) must not change those that the training draws."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Python's generator goes on after the block as if the block had not run.

    Only for imports and set-up: in a block that other threads run beside, their numbers would come twice.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
