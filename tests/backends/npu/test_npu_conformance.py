"""The rules of a backend, for the npu tool on a stand-in for torch_npu. ``tests/npu`` does it with the real one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from rankscope.testing import BackendConformance

HERE = Path(__file__).parent


@pytest.mark.torch
class TestNpuConformance(BackendConformance):
    tool = "npu"
    preload = ("torch",)
    must_capture = True

    def prepare(self) -> None:
        spec = importlib.util.spec_from_file_location("rankscope_npu_stand_in", HERE / "conftest.py")
        assert spec is not None
        assert spec.loader is not None
        kit = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kit)
        sys.modules.update(kit.StandIn().modules())
        known = importlib.metadata.version
        importlib.metadata.version = lambda name: kit.SIGNATURES["version"] if name == "torch-npu" else known(name)
