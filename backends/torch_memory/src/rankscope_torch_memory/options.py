"""What ``tool_config.torch_memory`` may hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TorchMemoryOptions:
    """Options of the torch_memory backend.

    Attributes:
        discrete: a file for each stage instead of one for the whole step.
    """

    discrete: bool = False
