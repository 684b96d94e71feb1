"""The rules that hold for every backend, with MindStudio's msprobe."""

from __future__ import annotations

from typing import ClassVar

import pytest

from rankscope.testing import BackendConformance

pytestmark = pytest.mark.torch


STAGES = (
    *("actor_update", "generate", "outer", "inner", "only_a_span", "before", "around", "after", "carried_over"),
    *("in_a_with", "in_a_call", "in_a_generator", "in_a_coroutine", "rows", "same", "one", "two", "arguments"),
    *("on_a_thread", "coroutine", "turn", "async_rows"),
)
"""Labels that the rules use: each is dumped, where else only the first would be."""


class TestPrecisionDebuggerConformance(BackendConformance):
    tool = "precision_debugger"
    options: ClassVar = {"level": "L1", "stages": STAGES}
    preload = ("torch", "msprobe.pytorch")
    must_capture = True

    def exercise(self) -> None:
        import torch

        torch.add(torch.ones(8), 1)
