"""The number of the training step, from verl's driver to its rollout servers, which it does not tell.

It goes through the key-value store of the Ray cluster: a server of whatever version finds it there or does without.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_SPACE = "rankscope_verl"


def announce(step: Any) -> None:
    """In the driver, before the engines are started."""
    store, key = _place()
    if store is not None:
        with contextlib.suppress(Exception):  # a label is not worth an error
            store._internal_kv_put(key, str(int(step)).encode(), overwrite=True, namespace=_SPACE)  # noqa: SLF001


def announced() -> int | None:
    """In a server: the step that the driver is in, or None."""
    store, key = _place()
    if store is None:
        return None
    try:
        value = store._internal_kv_get(key, namespace=_SPACE)  # noqa: SLF001
        return None if value is None else int(value)
    except Exception:  # noqa: BLE001 - as above
        return None


def _place() -> tuple[Any, bytes]:
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return None, b""
        from ray.experimental import internal_kv

        return internal_kv, f"step:{ray.get_runtime_context().get_job_id()}".encode()
    except Exception:  # noqa: BLE001 - another Ray
        return None, b""
