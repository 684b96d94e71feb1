"""The precision_debugger backend of rankscope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope_precision_debugger.backend import PrecisionDebuggerBackend
    from rankscope_precision_debugger.options import PrecisionDebuggerOptions

__all__ = ["PrecisionDebuggerBackend", "PrecisionDebuggerOptions"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    if name == "PrecisionDebuggerBackend":
        from rankscope_precision_debugger.backend import PrecisionDebuggerBackend

        return PrecisionDebuggerBackend
    if name == "PrecisionDebuggerOptions":
        from rankscope_precision_debugger.options import PrecisionDebuggerOptions

        return PrecisionDebuggerOptions
    raise AttributeError(f"module 'rankscope_precision_debugger' has no attribute {name!r}")
