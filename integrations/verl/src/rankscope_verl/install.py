"""Which parts of verl are replaced, when, and what happens where one does not fit."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rankscope_verl import SWITCH, TESTED
from rankscope_verl.after_import import after_import, forget
from rankscope_verl.changes import Changes

Change = Callable[[ModuleType, Changes], None]


@dataclasses.dataclass(frozen=True)
class Part:
    """What is replaced in one module of verl.

    Attributes:
        module: of verl; it is left alone until somebody imports it.
        change: ``module:function`` of ours, imported only then.
        loss: what verl does by itself where this part does not fit.
    """

    module: str
    change: str
    loss: str


PROFILER = Part("verl.utils.profiler", "rankscope_verl.profiler:change", "verl's own profiler is used")
"""The part without which the others have no meaning."""

PARTS: tuple[Part, ...] = (
    PROFILER,
    Part("verl.utils.config", "rankscope_verl.job:change", "workers do not know global_profiler"),
    Part("verl.workers.engine_workers", "rankscope_verl.stages:change", "the critic's stages have no names"),
    Part("verl.trainer.constants_ppo", "rankscope_verl.launching:change_nvtx", "only global_profiler.tool counts"),
    Part("verl.single_controller.ray.base", "rankscope_verl.launching:change_workers", "workers start as verl says"),
    Part("verl.trainer.ppo.ray_trainer", "rankscope_verl.trainers:change_v0", "roles finish one by one"),
    Part("verl.trainer.ppo.v1.trainer_base", "rankscope_verl.trainers:change_v1", "roles finish one by one"),
    Part(
        "verl.trainer.ppo.v1.trainer_separate_async",
        "rankscope_verl.trainers:change_separate",
        "the finish command may miss traces of engines",
    ),
    Part(
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
        "rankscope_verl.engines:change_vllm",
        "verl drives the engine's profiler",
    ),
    Part(
        "verl.workers.rollout.sglang_rollout.async_sglang_server",
        "rankscope_verl.engines:change_sglang",
        "verl drives the engine's profiler",
    ),
)

_made: dict[str, Changes] = {}
_failed: set[str] = set()


def install() -> bool:
    """Put rankscope in the place of verl's profiler, now and as verl's modules are imported.

    Returns:
        Whether it was done. Where not, a warning has said why, unless the user switched it off.
    """
    try:
        if _off() or not _fits():
            return False
        for part in PARTS:
            after_import(part.module, _action(part))
    except Exception as error:  # noqa: BLE001 - a plugin must not keep verl from being imported
        uninstall()
        tell(f"rankscope could not be put into verl, which keeps its own profiler: {type(error).__name__}: {error}")
        return False
    return True


def uninstall() -> None:
    """Everything as verl made it."""
    forget([part.module for part in PARTS])
    for changes in reversed(list(_made.values())):
        changes.undo()
    _made.clear()
    _failed.clear()


def in_place(part: Part = PROFILER) -> bool:
    """Whether a part was replaced, in this process and until now."""
    return part.module in _made


def tell(text: str, **facts: Any) -> None:
    """One clear warning."""
    try:
        from rankscope.log import get_logger

        get_logger(part="verl").warning(text, **facts)
    except Exception:  # noqa: BLE001 - half an installation of rankscope
        import logging

        logging.getLogger("rankscope_verl").warning("%s", text)


def _off() -> bool:
    return os.environ.get(SWITCH, "").strip().lower() in {"0", "false", "no", "off"}


def _fits() -> bool:
    version = str(getattr(sys.modules.get("verl"), "__version__", "")) or _installed_version()
    if version in TESTED or os.environ.get(SWITCH, "").strip().lower() == "force":
        return True
    tell(
        f"rankscope-verl was not tested with verl {version or 'of an unknown version'}, which keeps its own profiler",
        tested=", ".join(TESTED),
        help=f"{SWITCH}=force tries it all the same; {SWITCH}=0 says nothing",
    )
    return False


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("verl")
    except PackageNotFoundError:
        return ""


def _action(part: Part) -> Callable[[ModuleType], None]:
    def act(module: ModuleType) -> None:
        if part is not PROFILER and PROFILER.module in _failed:
            return
        changes = Changes()
        try:
            where, _, name = part.change.partition(":")
            change: Change = getattr(importlib.import_module(where), name)
            change(module, changes)
        except Exception as error:  # noqa: BLE001 - it runs inside of an import statement of verl
            changes.undo()
            _failed.add(part.module)
            if part is PROFILER:
                uninstall()
                _failed.add(part.module)
            tell(f"rankscope does not fit {part.module}; {part.loss}", reason=f"{type(error).__name__}: {error}")
        else:
            _made[part.module] = changes

    return act
