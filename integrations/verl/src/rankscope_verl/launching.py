"""What the tools of a worker's process need before it starts: variables, nsys, entries of a Ray ``runtime_env``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rankscope.errors import ConfigError
from rankscope_verl.changes import Changes
from rankscope_verl.install import tell
from rankscope_verl.settings import LeaveToVerlError, Setting, read

NEEDS = "_rankscope_needs"
"""On a class with its arguments, as verl hands it to a worker group: the workers that will live in one process."""


def change_nvtx(module: ModuleType, changes: Changes) -> None:
    """In ``verl.trainer.constants_ppo``: torch may be the tool of one role only."""
    changes.replace(module, "_uses_torch_profiler", "config", _any_role_uses_torch)


def change_workers(module: ModuleType, changes: Changes) -> None:
    """In ``verl.single_controller.ray.base``."""
    group: Any = module.RayWorkerGroup
    for name in ("create_colocated_worker_cls", "create_colocated_worker_cls_fused"):
        changes.replace(module, name, "class_dict", _remembering_workers)
    changes.replace(
        group,
        "_create_worker",
        "self, rank, pg_idx, pg, local_rank, resource_pool, ray_cls_with_init, worker_env, detached",
        _with_needs,
    )


def _any_role_uses_torch(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def _uses_torch_profiler(config: Any) -> bool:
        if original(config):
            return True
        try:
            from rankscope import load_config

            loaded = load_config(config, check_tools=False)
            return loaded.active and any(role.enable and "torch" in role.tools for role in loaded.roles())
        except Exception:  # noqa: BLE001 - what is wrong with the config is told where it is used
            return False

    return _uses_torch_profiler


def _remembering_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(class_dict: dict[str, Any]) -> Any:
        made = original(class_dict)
        made.__dict__[NEEDS] = tuple(class_dict.values())
        return made

    return create


def _with_needs(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _create_worker(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        worker = given["ray_cls_with_init"]
        settings = _settings(worker)
        if not settings:
            return original(*args, **kwargs)
        place = {
            "rank": given["rank"],
            "world_size": given["resource_pool"].world_size,
            "local_rank": given["local_rank"],
        }
        update = worker.update_options

        def update_options(options: dict[str, Any]) -> None:
            base = options.get("runtime_env")
            if base is not None:
                options = {**options, "runtime_env": _runtime_env(settings, base, place)}
            update(options)

        worker.update_options = update_options
        try:
            return original(*args, **kwargs)
        finally:
            del worker.update_options

    return _create_worker


def _runtime_env(settings: list[Setting], base: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """The entries of verl itself, and those of the tools that this rank is profiled with.

    Raises:
        ConfigError: two tools that cannot share a process, as the worker itself would say later.
    """
    from rankscope.integrations.ray_env import runtime_env

    first = settings[0].config
    config = dataclasses.replace(first, sections=tuple(part for one in settings for part in one.config.sections))
    if any("nsys" in one.tools for one in settings):
        base = {key: value for key, value in base.items() if key != "nsight"}  # verl puts all ranks under nsys
    return runtime_env(config, roles=[one.role for one in settings], base=base, **place)


def _settings(ray_cls_with_init: Any) -> list[Setting]:
    """What the workers of one process are profiled with; none where it is all left to verl."""
    found: dict[str, Setting] = {}
    for worker in vars(ray_cls_with_init).get(NEEDS, (ray_cls_with_init,)):
        try:
            section, prefix = _section(worker)
            setting = None if section is None else read(section, None, prefix)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the worker starts without, and its tool says what is missing
            if not isinstance(error, LeaveToVerlError):
                tell("what a worker's process needs is not known", reason=f"{type(error).__name__}: {error}")
            return []
        if setting is not None:
            found.setdefault(setting.role, setting)
    return list(found.values())


def _section(worker: Any) -> tuple[Any, str | None]:
    """The ``profiler`` section that a worker will use, and the name that verl gives it, from its arguments."""
    arguments = {**worker.kwargs}
    config = arguments.get("config", worker.args[0] if worker.args else None)
    inner = getattr(config, "profiler_config", None)
    if inner is not None:
        return inner, getattr(config, "model_type", None)
    role = arguments.get("role")
    if not isinstance(role, str) or config is None:
        return None, None
    # As ActorRolloutRefWorker chooses.
    part = "actor" if "actor" in role else "rollout" if "rollout" in role else "ref"
    own = config.get(part) if hasattr(config, "get") else None
    return (None, role) if own is None else (own.get("profiler"), role)
