"""The rules of a backend, for torch_memory with a simulated device and on a torch without one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.testing import BackendConformance

STAND_IN = Path(__file__).with_name("stand_in.py")


class TestWithDevice(BackendConformance):
    tool = "torch_memory"
    must_capture = True
    device: Any = None

    def prepare(self) -> None:
        spec = importlib.util.spec_from_file_location("rankscope_torch_memory_stand_in", STAND_IN)
        assert spec is not None
        assert spec.loader is not None
        stand_in = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = stand_in
        spec.loader.exec_module(stand_in)
        type(self).device = stand_in.Device()
        sys.modules["torch"] = stand_in.torch_with(self.device)
        self.device.initialise()

    def exercise(self) -> None:
        self.device.alloc(512)


@pytest.mark.torch
class TestWithoutDevice(BackendConformance):
    tool = "torch_memory"
    preload = ("torch",)
