"""What ``tool_config.nsys`` may hold."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class NsysOptions:
    """Options of the nsys backend.

    Attributes:
        discrete: a file for each stage instead of one for the whole step.
    """

    discrete: bool = False
