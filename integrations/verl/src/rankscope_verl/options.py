"""verl's classes of tool options, made to take the options that rankscope's tools have beyond them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rankscope_verl.changes import Changes

MORE = "_rankscope_more"
"""On such an object: the options that verl's class does not have."""

CLASSES = {
    "NsightToolConfig": "nsys",
    "TorchProfilerScheduleConfig": "torch",
    "TorchProfilerToolConfig": "torch",
    "TorchMemoryToolConfig": "torch_memory",
    "PrecisionDebuggerToolConfig": "precision_debugger",
    "NPUToolConfig": "npu",
}
"""Each class and the tool whose options it holds."""


def change(module: ModuleType, changes: Changes) -> None:
    """In ``verl.utils.profiler.config``."""
    for name, tool in CLASSES.items():
        kind = getattr(module, name)
        names = ", ".join(["self", *(field.name for field in dataclasses.fields(kind) if field.init)])
        changes.replace(kind, "__init__", names, functools.partial(_taking_more, kind))
        changes.replace(kind, "__post_init__", "self", functools.partial(_checked_by_us, tool))


def _taking_more(kind: type, original: Callable[..., None]) -> Callable[..., None]:
    known = {field.name for field in dataclasses.fields(kind)}

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        more = {key: kwargs.pop(key) for key in list(kwargs) if key not in known}
        original(self, *args, **kwargs)
        if more:
            object.__setattr__(self, MORE, more)

    return init


def _checked_by_us(tool: str, original: Callable[..., None]) -> Callable[..., None]:
    """A value that verl does not know may be one of ours, which are checked when the worker's profiler is made."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        try:
            original(self)
        except AssertionError:
            from rankscope import registry

            if tool not in registry.installed():
                raise

    return post_init
