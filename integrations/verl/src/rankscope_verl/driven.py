"""A config whose steps somebody else knows."""

from __future__ import annotations

import dataclasses

from rankscope import Config


@dataclasses.dataclass(frozen=True)
class DrivenConfig(Config):
    """For a section that came without its ``global_profiler``: verl's trainer starts and stops, and knows when."""

    @property
    def active(self) -> bool:
        """Whoever calls start decides."""
        return True
