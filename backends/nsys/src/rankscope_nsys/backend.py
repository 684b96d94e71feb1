"""NsysBackend: the hooks."""

from __future__ import annotations

from rankscope import Availability, Context
from rankscope_nsys.options import NsysOptions


class NsysBackend:
    """The nsys backend of rankscope."""

    Options = NsysOptions
    owns = frozenset()

    @staticmethod
    def available() -> Availability:
        """Whether it can work here."""
        return Availability(False, "not written yet")

    def __init__(self, context: Context, options: NsysOptions) -> None:
        self.context = context
        self.options = options
