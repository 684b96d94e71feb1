"""Two stages in two steps, with a stand-in for msprobe that fails to order.

``python debugger_faulty.py SAVE_PATH MODE``. No torch: the backend needs none to go wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from debugger_kit import config

from rankscope import DistProfiler, annotate


class Module:
    """What the backend asks of a model."""

    def forward(self) -> None:
        """Compute nothing."""

    def modules(self) -> list[Module]:
        return [self]

    named_modules = modules


class Worker:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.profiler = DistProfiler(settings, role="actor", rank=0, world_size=1)
        self.actor_module = Module()

    @annotate("actor_compute_log_prob")
    def log_prob(self) -> None:
        self.actor_module.forward()

    @annotate("actor_update", scheduled=True)
    def update(self) -> None:
        self.actor_module.forward()


def main(path: str, mode: str) -> None:
    raised: list[str] = []
    worker = Worker(config(path, strict=mode == "strict", level="L0"))
    with worker.profiler as profiler:
        for step in (1, 2):
            profiler.start(step=step)
            for stage in (worker.log_prob, worker.update):
                try:
                    stage()
                except Exception as error:
                    raised.append(f"{type(error).__name__}: {error}")
            profiler.stop()
    print(json.dumps({"raised": raised, "faults": [str(fault) for fault in profiler.faults]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
