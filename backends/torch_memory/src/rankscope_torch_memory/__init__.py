"""The torch_memory backend of rankscope: windows become snapshots of the device's memory allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope_torch_memory.backend import TorchMemoryBackend
    from rankscope_torch_memory.options import TorchMemoryOptions

__all__ = ["TorchMemoryBackend", "TorchMemoryOptions"]


def __getattr__(name: str) -> Any:
    """The helper process and the command import only what reads snapshots, so nothing is imported before it is used."""
    if name == "TorchMemoryBackend":
        from rankscope_torch_memory.backend import TorchMemoryBackend

        return TorchMemoryBackend
    if name == "TorchMemoryOptions":
        from rankscope_torch_memory.options import TorchMemoryOptions

        return TorchMemoryOptions
    raise AttributeError(f"module 'rankscope_torch_memory' has no attribute {name!r}")
