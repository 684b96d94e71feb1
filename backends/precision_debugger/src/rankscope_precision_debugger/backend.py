"""PrecisionDebuggerBackend: the hooks."""

from __future__ import annotations

from rankscope import Availability, Context
from rankscope_precision_debugger.options import PrecisionDebuggerOptions


class PrecisionDebuggerBackend:
    """The precision_debugger backend of rankscope."""

    Options = PrecisionDebuggerOptions
    owns = frozenset()

    @staticmethod
    def available() -> Availability:
        """Whether it can work here."""
        return Availability(False, "not written yet")

    def __init__(self, context: Context, options: PrecisionDebuggerOptions) -> None:
        self.context = context
        self.options = options
