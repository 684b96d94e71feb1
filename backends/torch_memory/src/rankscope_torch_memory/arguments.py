"""Which arguments a function of the installed torch takes, asked from its signature and not from a list of versions."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


class Probed:
    """A function, and the names of the arguments that it takes.

    A wrapper that passes everything on tells nothing by its own signature. By the habit of torch and torch_npu the
    function behind it stands beside it as ``<name>_impl``, and is asked instead (torch 2.13 ``torch/cuda/memory.py``,
    torch_npu 2.13 ``torch_npu/npu/memory.py``). Where nobody tells, arguments are tried, and left out one by one.

    Attributes:
        names: arguments that it takes by name; None when only a call can tell.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.names = _names(function)

    def takes(self, name: str) -> bool:
        """Whether it takes this argument, as far as it says so; False where only a call can tell."""
        return self.names is not None and name in self.names

    def call(self, wanted: Mapping[str, Any]) -> tuple[Any, set[str]]:
        """Call it with what it takes of these arguments.

        Returns:
            What it returned, and the names of the arguments that it does not take.
        """
        given = {name: value for name, value in wanted.items() if self.names is None or name in self.names}
        refused = set(wanted) - set(given)
        while True:
            try:
                return self._function(**given), refused
            except TypeError as error:  # noqa: PERF203 - once for each argument, at most
                found = _UNEXPECTED.search(str(error))
                if found is None or found[1] not in given:
                    raise
                refused.add(found[1])
                del given[found[1]]


def _names(function: Callable[..., Any]) -> frozenset[str] | None:
    names, everything = _of_signature(function)
    if not everything:
        return names
    module = sys.modules.get(getattr(function, "__module__", ""))
    behind = getattr(module, f"{getattr(function, '__name__', '')}_impl", None)
    if behind is None:
        return None
    more, everything = _of_signature(behind)
    return None if everything else names | more


def _of_signature(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of its arguments, and whether it takes any other too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return frozenset(), True
    names = frozenset(p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY})
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)
