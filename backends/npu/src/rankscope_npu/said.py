"""What torch_npu prints: it catches its own errors and prints them, so this is where they can be seen.

Source: torch_npu 2.13.0, ``torch_npu/profiler/analysis/prof_common_func/_utils.py`` (``no_exception_func``) and
``_constant.py`` (``print_error_msg`` and its siblings).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \[(ERROR|WARNING|INFO)\] \[\d+\] profiler\.py: ")
_CURSOR = "|/-\\\b\r\n\t "
"""What its progress display leaves between two messages."""

_EXPECTED = ("Incorrect schedule: Stop profiler", "Profiler won't be using warmup")
"""Said of every capture that is stopped by hand, as ours are, whether or not anything is wrong."""


@dataclasses.dataclass
class Said:
    """What was said, by how bad it is; each message without time and process.

    Attributes:
        errors: what went wrong.
        warnings: what was asked for and is done otherwise.
    """

    errors: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def add(self, text: str) -> None:
        """Take in printed text."""
        parts = _LINE.split(text)
        for level, words in zip(parts[1::2], parts[2::2], strict=True):
            message = words.rstrip(_CURSOR)
            if level == "ERROR":
                self.errors.append(message)
            elif level == "WARNING" and not message.startswith(_EXPECTED):
                self.warnings.append(message)

    @property
    def words(self) -> str:
        """The errors as one text; empty when there are none."""
        return shortened(self.errors)


def shortened(messages: Iterable[str], most: int = 600) -> str:
    """Several messages as one text on one line, each once."""
    text = "; ".join(dict.fromkeys(" ".join(message.split()) for message in messages))
    return text if len(text) <= most else f"{text[: most - 1]}…"


class _Ear:
    """Stands in for ``sys.stdout``: keeps what one thread prints, and lets pass what the others print."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind
        self._thread: int | None = threading.get_ident()
        self.heard: list[str] = []

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            self.heard.append(text)
            return len(text)
        return len(text) if self._behind is None else self._behind.write(text)

    def flush(self) -> None:
        if self._behind is not None:
            self._behind.flush()

    def close_ear(self) -> None:
        """From now on everything passes: somebody may have kept this object."""
        self._thread = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


@contextlib.contextmanager
def listening() -> Iterator[Said]:
    """Around calls of torch_npu: what this thread prints meanwhile ends up in the result, not in the training's log."""
    said = Said()
    before = sys.stdout
    ear = _Ear(before)
    sys.stdout = ear
    try:
        yield said
    finally:
        ear.close_ear()
        if sys.stdout is ear:
            sys.stdout = before
        said.add("".join(ear.heard))
