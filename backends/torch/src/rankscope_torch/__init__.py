"""The torch backend of rankscope: windows become traces of the PyTorch profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope import ScheduleOptions
    from rankscope_torch.backend import TorchBackend
    from rankscope_torch.options import TorchOptions

__all__ = ["ScheduleOptions", "TorchBackend", "TorchOptions"]


def __getattr__(name: str) -> Any:
    """The helper process imports only ``rankscope_torch.trace``, so nothing else is imported before it is asked for."""
    if name == "TorchBackend":
        from rankscope_torch.backend import TorchBackend

        return TorchBackend
    if name == "TorchOptions":
        from rankscope_torch.options import TorchOptions

        return TorchOptions
    if name == "ScheduleOptions":
        from rankscope import ScheduleOptions

        return ScheduleOptions
    raise AttributeError(f"module 'rankscope_torch' has no attribute {name!r}")
