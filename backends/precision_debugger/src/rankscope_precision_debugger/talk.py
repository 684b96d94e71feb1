"""What msprobe says goes to rankscope's log; msprobe itself prints it to the standard output of the training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rankscope.types import Logger

_MODULES = ("msprobe.core.common.log", "msprobe.pytorch.common.log")
"""Where msprobe keeps its two loggers (26.2.0); ``_print_log`` is what each of them prints with."""


class Talk:
    """Takes msprobe's messages over.

    Attributes:
        logger: where they go; may be replaced.
    """

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self._told: set[str] = set()
        self._errors: list[str] = []

    def take_over(self) -> None:
        """Let msprobe's loggers talk to us, once they are there."""
        for name in _MODULES:
            theirs = getattr(sys.modules.get(name), "logger", None)
            if callable(getattr(theirs, "_print_log", None)):
                theirs._print_log = self._print_log  # type: ignore[union-attr]  # noqa: SLF001

    @contextmanager
    def errors(self) -> Iterator[Callable[[], str]]:
        """Collect what msprobe calls errors meanwhile: its exceptions often leave the reason to them."""
        collected: list[str] = []
        self._errors = collected
        yield lambda: "; ".join(dict.fromkeys(collected))

    def _print_log(self, level: str, msg: Any, end: str = "\n", show_rank: bool = True) -> None:  # noqa: ARG002
        text = " ".join(str(msg).split())
        if level == "ERROR":
            self._errors.append(text)
        if level in {"WARNING", "ERROR"} and text not in self._told:
            self._told.add(text)
            self.logger.warning(f"msprobe: {text}")
        else:
            self.logger.debug(f"msprobe: {text}")
