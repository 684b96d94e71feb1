"""The torch_memory backend of rankscope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope_torch_memory.backend import TorchMemoryBackend
    from rankscope_torch_memory.options import TorchMemoryOptions

__all__ = ["TorchMemoryBackend", "TorchMemoryOptions"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    if name == "TorchMemoryBackend":
        from rankscope_torch_memory.backend import TorchMemoryBackend

        return TorchMemoryBackend
    if name == "TorchMemoryOptions":
        from rankscope_torch_memory.options import TorchMemoryOptions

        return TorchMemoryOptions
    raise AttributeError(f"module 'rankscope_torch_memory' has no attribute {name!r}")
