"""The nsys backend of rankscope: windows become reports of NVIDIA Nsight Systems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope_nsys.backend import NsysBackend
    from rankscope_nsys.options import NsysOptions

__all__ = ["NsysBackend", "NsysOptions"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    if name == "NsysBackend":
        from rankscope_nsys.backend import NsysBackend

        return NsysBackend
    if name == "NsysOptions":
        from rankscope_nsys.options import NsysOptions

        return NsysOptions
    raise AttributeError(f"module 'rankscope_nsys' has no attribute {name!r}")
