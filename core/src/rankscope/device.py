"""Facts about the device, from a torch that somebody else imported. Nothing here imports torch or wakes a device."""

from __future__ import annotations

import sys
from typing import Any

_ACCELERATORS = ("npu", "cuda", "xpu", "mps")
# npu first: torch_npu can present itself as cuda too (its transfer_to_npu mode), never the other way round.


def device_type() -> str | None:
    """The kind of device that this process computes on: ``cuda``, ``npu``, ``xpu``, ``mps`` or ``cpu``.

    Returns:
        The kind, or None while torch has not been imported (nobody can know yet). Reading it creates no device context
        and does not freeze the set of visible devices where the driver can be asked another way.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return next((kind for kind in _ACCELERATORS if usable(kind)), "cpu")


def usable(kind: str) -> bool:
    """Whether this process can use a device of that kind (``cuda``, ``npu``, …)."""
    module = getattr(sys.modules.get("torch"), kind, None)
    if module is None or (kind == "npu" and "torch_npu" not in sys.modules):
        return False
    # device_count asks NVML where it can; is_available would start the driver, which forked children do not survive.
    return _says(module, "is_initialized") or _says(module, "device_count")


def device_module() -> Any | None:
    """``torch.cuda``, ``torch.npu``, … of a usable device, or None."""
    kind = device_type()
    return None if kind in (None, "cpu") else getattr(sys.modules.get("torch"), str(kind), None)


def initialised_device_module() -> Any | None:
    """The same, but only when this process already uses the device: asking it for more then costs no context."""
    module = device_module()
    if module is None or not hasattr(module, "is_initialized"):  # mps has one context, made by torch itself
        return module
    return module if _says(module, "is_initialized") else None


def synchronize() -> bool:
    """Wait until the device has done what was asked of it.

    Returns:
        Whether there was a device in use to wait for. An error of the device itself is not raised here: it is not the
        timer's to report, and the next use of the device raises it again.
    """
    module = initialised_device_module()
    if module is None:
        return False
    try:
        module.synchronize()
    except Exception:  # noqa: BLE001
        return False
    return True


def _says(module: Any, question: str) -> bool:
    try:
        return bool(getattr(module, question)())
    except Exception:  # noqa: BLE001  # half-imported torch, broken driver, no such function: not usable
        return False
