"""NpuBackend: the hooks."""

from __future__ import annotations

from rankscope import Availability, Context
from rankscope_npu.options import NpuOptions


class NpuBackend:
    """The npu backend of rankscope."""

    Options = NpuOptions
    owns = frozenset()

    @staticmethod
    def available() -> Availability:
        """Whether it can work here."""
        return Availability(False, "not written yet")

    def __init__(self, context: Context, options: NpuOptions) -> None:
        self.context = context
        self.options = options
