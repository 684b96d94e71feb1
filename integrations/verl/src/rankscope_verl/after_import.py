"""Do something to a module right after it was imported, without importing it oneself.

``import verl`` runs the plugin before most of verl is there. What is patched must be patched before other modules take
names out of it by ``from … import …``, so it happens the moment the module's own code has run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]

_actions: dict[str, Action] = {}


def after_import(name: str, action: Action) -> None:
    """Call ``action`` with the module once it is imported; at once where it is already.

    The action must not raise: it runs inside of somebody else's import statement.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    _actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(names: Sequence[str]) -> None:
    """Take back what was asked for and has not happened yet."""
    for name in names:
        _actions.pop(name, None)
    if not _actions and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module by all other finders, and puts the action behind its loader."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _actions or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = self._by_others(name, path, target)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, name)
        return spec

    def _by_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


class _Loader(importlib.abc.Loader):
    """The module's own loader, and then the action. Afterwards the module knows its own loader only."""

    def __init__(self, own: importlib.abc.Loader, name: str) -> None:
        self._own = own
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Whatever else a loader can do (``python -m`` asks for ``get_code``)."""
        return getattr(self._own, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        action = _actions.get(self._name)
        forget([self._name])
        if action is not None:
            action(module)


_finder = _Finder()
