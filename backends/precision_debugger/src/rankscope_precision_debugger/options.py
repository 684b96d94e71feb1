"""What ``tool_config.precision_debugger`` may hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PrecisionDebuggerOptions:
    """Options of the precision_debugger backend.

    Attributes:
        discrete: a file for each stage instead of one for the whole step.
    """

    discrete: bool = False
