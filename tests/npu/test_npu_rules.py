"""The rules of a backend, on the real torch_npu over stand-ins for CANN."""

from __future__ import annotations

from rankscope.testing import BackendConformance

LIBRARIES = ("torch", "torch_npu", "torch._inductor.config")
"""The last one: torch imports its compiler when a profiler starts, torch_npu when a tensor is made on the device."""


class TestNpuRules(BackendConformance):
    tool = "npu"
    preload = LIBRARIES
    must_capture = True

    def exercise(self) -> None:
        import torch

        torch.ones(8).sum()


class TestTorchMemoryRules(BackendConformance):
    tool = "torch_memory"
    preload = LIBRARIES
    must_capture = True

    def exercise(self) -> None:
        import torch
        import torch_npu  # noqa: F401

        torch.empty(1024, device="npu")
