"""rankscope inside an unmodified verl.

When verl is imported, it imports `rankscope_verl.plugin` (entry-point group ``verl.plugins``). Importing this package
alone changes nothing.

Source of the interfaces: verl 0.9.1, ``verl/__init__.py`` (plugins), ``verl/utils/profiler/``,
``verl/utils/config.py``, ``verl/workers/engine_workers.py``, ``verl/trainer/ppo/``, ``verl/trainer/constants_ppo.py``,
``verl/single_controller/ray/base.py`` and ``verl/workers/rollout/``.
"""

from __future__ import annotations

TESTED = ("0.9.1",)
"""The versions of verl that the tests run with. With any other, verl keeps its own profiler."""

SWITCH = "RANKSCOPE_VERL"
"""Environment variable: ``0`` leaves verl alone; ``force`` is for a verl of another version."""

__all__ = ["SWITCH", "TESTED"]
