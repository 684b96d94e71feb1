"""What ``tool_config.npu`` may hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class NpuOptions:
    """Options of the npu backend.

    Attributes:
        discrete: a file for each stage instead of one for the whole step.
    """

    discrete: bool = False
