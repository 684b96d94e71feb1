"""Rows of the trace: torch's own ranges where torch can record them, ours where it cannot.

Torch records a range only on the thread that started it, only while it records, and only if ranges nest. What falls
outside (other threads, coroutines and generators, stages around the scheduled mini-batches, a stage that is still
running when the file ends) is written down here and put into the file by the helper process.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import zlib
from types import TracebackType
from typing import Any


@dataclasses.dataclass(eq=False)
class Range:
    """One row that torch does not have.

    Attributes:
        label: exactly as the user wrote it.
        start_ns: nanoseconds since the epoch; so is end_ns, 0 while it runs.
        thread: native id of the thread, as in the trace.
        thread_name: for threads that the trace does not know.
        kind: of the span.
    """

    label: str
    start_ns: int
    thread: int
    thread_name: str
    kind: str
    end_ns: int = 0

    def plain(self, until_ns: int) -> list[Any]:
        """As plain data; a range that still runs is cut off at ``until_ns``."""
        end = self.end_ns or until_ns
        return [self.label, self.start_ns, end, self.thread, self.thread_name, self.kind, self.end_ns == 0]


class OwnRange:
    """Context manager of a row that torch cannot record."""

    __slots__ = ("_range", "_ranges")

    def __init__(self, ranges: list[Range], label: str, kind: str) -> None:
        thread = threading.current_thread()
        self._ranges = ranges
        self._range = Range(label, 0, threading.get_native_id(), thread.name, kind)

    def __enter__(self) -> None:
        self._range.start_ns = time.time_ns()
        self._ranges.append(self._range)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._range.end_ns = time.time_ns()


class TorchRange:
    """Context manager of a row that torch records; it also remembers its time, for when the file ends inside of it."""

    __slots__ = ("_enter", "_handle", "_label", "_leave", "_row", "_running", "_start_ns", "_what")

    def __init__(
        self,
        functions: tuple[Any, Any],
        running: dict[TorchRange, None],
        label: str,
        what: tuple[str, int, str],
    ) -> None:
        self._enter, self._leave = functions
        self._running = running
        self._label = label
        self._what = what

    def __enter__(self) -> None:
        self._start_ns = time.time_ns()
        self._running[self] = None
        self._handle = self._enter(self._label)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self._handle)
        if self in self._running:
            del self._running[self]
        else:
            self._row.end_ns = time.time_ns()

    def as_row(self) -> Range:
        """The file ends while it runs, so torch's data does not have it: from now on it is a row of ours."""
        exact, thread, kind = self._what
        self._row = Range(exact, self._start_ns, thread, "", kind)
        return self._row


class Labels:
    """Labels as torch can write them: it turns other characters into broken JSON or into ``unknown``.

    Attributes:
        changed: what stands in the raw trace -> the exact label, which the helper process puts back.
    """

    def __init__(self) -> None:
        self._safe: dict[str, str] = {}
        self.changed: dict[str, str] = {}

    def safe(self, label: str) -> str:
        """The label to give to torch."""
        found = self._safe.get(label)
        if found is None:
            found = label
            if not label.isascii() or not label.isprintable() or '"' in label or "\\" in label or not label:
                clean = "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "_" for c in label[:200])
                found = f"{clean}#{zlib.crc32(label.encode('utf-8', 'surrogatepass')):08x}"
                self.changed[found] = label
            if len(self._safe) < 65_536:  # labels with a counter in them must not grow without bound
                self._safe[label] = found
        return found


def range_functions(torch: Any) -> tuple[Any, Any]:
    """Enter and exit of a range that torch shows as a user annotation with its device-side twin.

    ``torch.autograd._record_function_with_args_enter`` (torch 2.13.0, ``torch/csrc/autograd/init.cpp``) makes the same
    row as ``record_function`` for a third of its cost.
    """
    enter = getattr(torch.autograd, "_record_function_with_args_enter", None)
    leave = getattr(torch.autograd, "_record_function_with_args_exit", None)
    if enter is not None and leave is not None:
        return enter, leave
    record_function = torch.profiler.record_function

    def enter_slowly(label: str) -> Any:
        context = record_function(label)
        context.__enter__()
        return context

    return enter_slowly, lambda context: context.__exit__(None, None, None)
