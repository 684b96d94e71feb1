"""What the whole job's config says, brought to the workers.

A worker of verl gets its role's ``profiler`` section alone. rankscope also wants to know which steps are profiled, and
the common options; they are found at the root of the tree that the section comes from.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rankscope_verl.changes import Changes

ATTRIBUTE = "_rankscope_job"
"""On a ProfilerConfig: plain data, so that it can be sent to a process without this package."""

_OF_SECTIONS = frozenset(
    {"tool", "save_path", "relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"}
)
"""Keys of ``global_profiler`` that verl's files hand down to every section by interpolation."""


def change(module: ModuleType, changes: Changes) -> None:
    """In ``verl.utils.config``: what is made of a config remembers where it came from."""
    changes.replace(module, "omega_conf_to_dataclass", "config, dataclass_type", _remembering)
    # The package took the name over before any plugin was loaded.
    package = sys.modules[module.__name__.rpartition(".")[0]]
    if "omega_conf_to_dataclass" in vars(package):
        changes.put(package, "omega_conf_to_dataclass", module.omega_conf_to_dataclass)


def job_of(thing: Any) -> dict[str, Any] | None:
    """The job's facts that a ProfilerConfig carries, or that a config tree has at its root; None where nobody knows.

    Returns:
        ``path``: dotted key of the section; ``common``: what ``global_profiler`` says, without what sections have.
    """
    carried = getattr(thing, "__dict__", {}).get(ATTRIBUTE)
    if isinstance(carried, dict):
        return carried
    return facts(thing)


def facts(section: Any) -> dict[str, Any] | None:
    """The job's facts from the root of the tree that a section is part of."""
    from omegaconf import DictConfig, OmegaConf

    if not isinstance(section, DictConfig):
        return None
    root = section._get_root()  # noqa: SLF001 - omegaconf has no public way up
    if root is section or not isinstance(root, DictConfig):
        return None
    path = str(section._get_full_key(None))  # noqa: SLF001
    common = root.get("global_profiler") if "global_profiler" in root else None
    if isinstance(common, DictConfig):
        plain = OmegaConf.to_container(common, resolve=True)
        values = {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}
        return {"path": path, "common": {key: value for key, value in values.items() if key not in _OF_SECTIONS}}
    interval = OmegaConf.select(root, "trainer.profile_interval")
    if interval is None or len(interval) != 2:
        return None
    first, last = (int(step) for step in interval)  # the trainers of supervised fine-tuning profile one stretch
    steps = list(range(first, last + 1)) if first >= 0 else []
    return {"path": path, "common": {"steps": steps, "profile_continuous_steps": True}}


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def omega_conf_to_dataclass(config: Any, dataclass_type: Any = None) -> Any:
        made = original(config, dataclass_type)
        try:
            _remember(config, made)
        except Exception as error:  # noqa: BLE001 - it only makes names and ledgers better
            from rankscope_verl.install import tell

            tell("the job's config was not understood; workers do not know its steps", reason=repr(error))
        return made

    return omega_conf_to_dataclass


def _remember(config: Any, made: Any) -> None:
    """On a ProfilerConfig, and on the one inside of a role's config."""
    for section, target in ((config, made), (_profiler_of(config), _profiler_of(made))):
        if type(target).__name__ != "ProfilerConfig" or ATTRIBUTE in target.__dict__:
            continue
        found = facts(section)
        if found is not None:
            object.__setattr__(target, ATTRIBUTE, found)


def _profiler_of(thing: Any) -> Any:
    try:
        return thing.get("profiler") if isinstance(thing, Mapping) else getattr(thing, "profiler", None)
    except Exception:  # noqa: BLE001 - omegaconf has many errors, and only a config with a section is of interest
        return None
