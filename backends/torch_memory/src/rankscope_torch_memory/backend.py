"""TorchMemoryBackend: the hooks."""

from __future__ import annotations

from rankscope import Availability, Context
from rankscope_torch_memory.options import TorchMemoryOptions


class TorchMemoryBackend:
    """The torch_memory backend of rankscope."""

    Options = TorchMemoryOptions
    owns = frozenset()

    @staticmethod
    def available() -> Availability:
        """Whether it can work here."""
        return Availability(False, "not written yet")

    def __init__(self, context: Context, options: TorchMemoryOptions) -> None:
        self.context = context
        self.options = options
