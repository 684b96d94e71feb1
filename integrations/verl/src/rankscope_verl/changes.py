"""Replace what verl has by ours, all or nothing, after looking whether it is what we know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_MISSING: Any = object()


class MisfitError(Exception):
    """verl is not as it was read: a name is missing, or a function takes other arguments."""


class Changes:
    """Attributes that were set on classes and modules of verl, and what was there before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, parameters: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(old)`` in the place of a function.

        Args:
            owner: a class or module.
            name: of the function or class in it.
            parameters: the names of its parameters as they were read, ``self, rank, config``.
            make: gets the old one and returns the new one; a class method is handed over as such.

        Raises:
            MisfitError: it is not there, or has other parameters.
        """
        old = vars(owner).get(name, _MISSING)
        where = f"{getattr(owner, '__module__', None) or owner.__name__}.{getattr(owner, '__name__', '')}.{name}"
        if old is _MISSING:
            raise MisfitError(f"{where} is not there")
        found = ", ".join(inspect.signature(getattr(old, "__func__", old)).parameters)
        if found != parameters:
            raise MisfitError(f"{where} takes ({found}), not ({parameters})")
        self.put(owner, name, make(old))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, which may be new."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Everything as before."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
