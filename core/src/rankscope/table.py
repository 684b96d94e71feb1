"""Plain-text tables: columns padded with blanks, so that eyes, grep and awk can all read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

Cell = str | int | None


def render_table(headers: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Collection[str] = ()) -> str:
    """The table as text without a final newline.

    Args:
        headers: one a column.
        rows: cells by column; None and empty texts are shown as ``-``, line breaks as blanks, and what could steer a
            terminal as ``?``: names and reasons come from files that anybody may have written.
        right: headers of the columns that are aligned to the right.
    """
    lines = [list(headers), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    sides = [str.rjust if header in right else str.ljust for header in headers]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)).rstrip()
        for line in lines
    )


def human_size(count: int | None) -> str:
    """A number of bytes for people: ``873 B``, ``1.4 MiB``; empty for None."""
    if count is None:
        return ""
    if count < 1024:
        return f"{count} B"
    amount, unit = count / 1024, "KiB"
    for bigger in ("MiB", "GiB", "TiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, bigger
    return f"{amount:.1f} {unit}"


def _text(cell: Cell) -> str:
    text = "" if cell is None else re.sub(r"\s+", " ", str(cell)).strip()
    return "".join(sign if sign.isprintable() else "?" for sign in text) or "-"
