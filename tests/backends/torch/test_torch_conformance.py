"""The rules that hold for every backend, with PyTorch's profiler."""

from __future__ import annotations

from typing import ClassVar

import pytest

from rankscope.testing import BackendConformance

pytestmark = pytest.mark.torch


class TestTorchConformance(BackendConformance):
    tool = "torch"
    options: ClassVar = {"contents": ["cpu"]}
    preload = ("torch", "torch._inductor.config")  # the second one: torch imports it when a profiler starts
    must_capture = True

    def exercise(self) -> None:
        import torch

        torch.ones(8).sum()
