"""NVTX ranges: one for each span, by start and end handles, so that threads and coroutines may interleave."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rankscope import Span
from rankscope.types import Logger
from rankscope_nsys.attached import DOMAIN

COLORS = {
    "black": 0x000000,
    "blue": 0x0000FF,
    "brown": 0xA52A2A,
    "cyan": 0x00FFFF,
    "darkblue": 0x00008B,
    "darkgreen": 0x006400,
    "darkred": 0x8B0000,
    "gold": 0xFFD700,
    "gray": 0x808080,
    "green": 0x008000,
    "grey": 0x808080,
    "lime": 0x00FF00,
    "magenta": 0xFF00FF,
    "maroon": 0x800000,
    "navy": 0x000080,
    "olive": 0x808000,
    "orange": 0xFFA500,
    "pink": 0xFFC0CB,
    "purple": 0x800080,
    "rapids": 0x7400FF,
    "red": 0xFF0000,
    "salmon": 0xFA8072,
    "teal": 0x008080,
    "turquoise": 0x40E0D0,
    "violet": 0xEE82EE,
    "white": 0xFFFFFF,
    "yellow": 0xFFFF00,
}
"""Names that work without matplotlib, which nvtx would import for most of them: in the middle of a training step."""

_DEFAULT = COLORS["blue"]
_MOST_COLORS = 1024


class Ranges:
    """Makes the ranges of one process.

    Args:
        nvtx: the module (PyPI ``nvtx`` 0.2.8 or newer); without a tool that listens its functions do nothing.
        logger: is told once of each colour that nobody knows.
    """

    def __init__(self, nvtx: Any, logger: Logger) -> None:
        self.start = nvtx.start_range
        self.end = nvtx.end_range
        self._logger = logger
        self._colors: dict[str | None, int] = {None: _DEFAULT}

    def row(self, span: Span) -> Range:
        """The range of a span, not begun yet."""
        color = self._colors.get(span.color)
        if color is None:
            color = self._new_color(str(span.color))
        return Range(self, _encodable(span.stage), color, _text(span.domain) or DOMAIN, _text(span.category))

    def _new_color(self, name: str) -> int:
        color = color_value(name)
        if color is None:
            self._logger.warning("a colour is not known: blue is used", color=name, known=",".join(COLORS))
            color = _DEFAULT
        if len(self._colors) < _MOST_COLORS:
            self._colors[name] = color
        return color


class Range:
    """Context manager of one range."""

    __slots__ = ("_handle", "_ranges", "_what")

    def __init__(self, ranges: Ranges, label: str, color: int, domain: str, category: str | None) -> None:
        self._ranges = ranges
        self._what = (label, color, domain, category)

    def __enter__(self) -> None:
        self._handle = self._ranges.start(*self._what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranges.end(self._handle)


def color_value(name: str) -> int | None:
    """``0xRRGGBB`` for a name, ``#rgb`` or ``#rrggbb``; None for anything else."""
    name = name.strip().lower()
    if name in COLORS:
        return COLORS[name]
    digits = name.removeprefix("#")
    if len(digits) == len(name) or len(digits) not in {3, 6}:
        return None
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    try:
        return int(digits, 16)
    except ValueError:
        return None


def _text(value: object) -> str | None:
    return _encodable(str(value)) if value is not None and value != "" else None


def _encodable(label: str) -> str:
    """NVTX takes UTF-8 up to the first zero; a label that is neither must not end the tool."""
    if label.isascii() and "\0" not in label:
        return label
    return label.replace("\0", " ").encode("utf-8", "backslashreplace").decode("utf-8")
