"""What a process has imported, and a machine on which nothing is installed but rankscope and the tool itself."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_OF_CORE = frozenset({"rankscope", "antlr4", "omegaconf", "pluggy", "structlog", "typing_extensions", "yaml"})


def packages(names: Iterable[str]) -> set[str]:
    """Top-level packages of modules, without those of Python itself, of rankscope and of installers."""
    found = {name.partition(".")[0] for name in names}
    return {name for name in found - sys.stdlib_module_names - _OF_CORE if not name.startswith("_")}


class OnlyThese:
    """From now on no other third-party package can be found or imported in this process.

    Args:
        allowed: top-level packages that are there all the same.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = set(allowed)
        for name in [name for name in sys.modules if packages([name]) - self._allowed]:
            del sys.modules[name]
        sys.meta_path[:] = [_Filter(finder, self) for finder in sys.meta_path]

    def hides(self, name: str) -> bool:
        """Whether a module or distribution of this name is not there."""
        return bool(packages([name.replace("-", "_").lower()]) - self._allowed)


class _Filter:
    """A finder that does not know what is hidden."""

    def __init__(self, finder: Any, world: OnlyThese) -> None:
        self._finder = finder
        self._world = world

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As of any finder."""
        ask = getattr(self._finder, "find_spec", None)
        return None if ask is None or self._world.hides(name) else ask(name, path, target)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """As of any finder that knows distributions."""
        ask = getattr(self._finder, "find_distributions", None)
        name = getattr(context, "name", None)
        if ask is not None and not (name and self._world.hides(name)):
            yield from ask(context) if context is not None else ask()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)
