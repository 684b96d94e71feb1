"""The npu backend of rankscope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope_npu.backend import NpuBackend
    from rankscope_npu.options import NpuOptions

__all__ = ["NpuBackend", "NpuOptions"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    if name == "NpuBackend":
        from rankscope_npu.backend import NpuBackend

        return NpuBackend
    if name == "NpuOptions":
        from rankscope_npu.options import NpuOptions

        return NpuOptions
    raise AttributeError(f"module 'rankscope_npu' has no attribute {name!r}")
