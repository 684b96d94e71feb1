"""Ranges for annotated stages: mstx where the device is recorded, else rows among the operators.

Sources: torch_npu 2.13.0, ``torch_npu/npu/mstx.py`` (``range_start`` answers 0 when a range is not taken; the domain of
``range_end`` must be the same), and torch 2.13.0, ``torch.autograd.profiler.record_function``.
"""

from __future__ import annotations

import threading
import zlib
from types import TracebackType
from typing import Any, Protocol

DEFAULT_DOMAIN = "default"

MOST_BYTES = 156
"""Longest text of a range; CANN documents this limit for its profiler."""


class Tracks(Protocol):
    """Where ranges are shown."""

    any_thread: bool

    def begin(self, label: str, domain: str) -> Any:
        """Begin a range; what comes back is false when it is not taken."""

    def end(self, handle: Any, domain: str) -> None:
        """End it."""


class MstxTracks:
    """Ranges of mstx, which may begin and end on any thread."""

    any_thread = True

    def __init__(self, torch_npu: Any) -> None:
        self._start = torch_npu.npu.mstx.range_start
        self._end = torch_npu.npu.mstx.range_end

    def begin(self, label: str, domain: str) -> Any:
        """As in `Tracks`."""
        return self._start(label, None, domain)

    def end(self, handle: Any, domain: str) -> None:
        """As in `Tracks`."""
        self._end(handle, domain)


class OperatorTracks:
    """Rows among the operators, on the thread that is profiled."""

    any_thread = False

    def __init__(self, torch: Any) -> None:
        self._record_function = torch.autograd.profiler.record_function

    def begin(self, label: str, domain: str) -> Any:  # noqa: ARG002 - operators have no domains
        """As in `Tracks`."""
        row = self._record_function(label)
        row.__enter__()
        return row

    def end(self, handle: Any, domain: str) -> None:  # noqa: ARG002 - as above
        """As in `Tracks`."""
        handle.__exit__(None, None, None)


class Labels:
    """Labels as torch_npu can write them: its JSON is put together from texts, so quotes would break it.

    Attributes:
        changed: what is shown -> the exact label.
    """

    def __init__(self) -> None:
        self._safe: dict[str, str] = {}
        self.changed: dict[str, str] = {}

    def safe(self, label: str) -> str:
        """The label to show."""
        found = self._safe.get(label)
        if found is None:
            found = label
            if not label or not label.isprintable() or '"' in label or "\\" in label or _size(label) > MOST_BYTES:
                found = self._clean(label)
            if len(self._safe) < 65_536:  # labels with a counter in them must not grow without bound
                self._safe[label] = found
                if found != label:
                    self.changed[found] = label
        return found

    @staticmethod
    def _clean(label: str) -> str:
        mark = f"#{zlib.crc32(label.encode('utf-8', 'surrogatepass')):08x}"
        clean = "".join(c if c.isprintable() and c not in '"\\' else "_" for c in label)
        return clean.encode("utf-8", "replace")[: MOST_BYTES - len(mark)].decode("utf-8", "ignore") + mark


def _size(label: str) -> int:
    return len(label.encode("utf-8", "surrogatepass"))


class Marks:
    """The ranges of one window.

    Attributes:
        refused: ranges that were not taken.
        elsewhere: ranges on threads on which nothing can be shown.
    """

    def __init__(self, tracks: Tracks, labels: Labels) -> None:
        self.tracks = tracks
        self.labels = labels
        self.refused = 0
        self.elsewhere = 0
        self._thread = threading.get_ident()
        self._running: dict[Mark, None] = {}
        self._recording = False

    def mark(self, label: str, domain: str | None) -> Mark | None:
        """A context manager for one range."""
        if not self.tracks.any_thread and threading.get_ident() != self._thread:
            self.elsewhere += 1
            return None
        return Mark(self, self.labels.safe(label), domain or DEFAULT_DOMAIN)

    def resume(self) -> None:
        """A capture has begun: what runs already is shown in it from here on."""
        self._recording = True
        for mark in list(self._running):
            mark.show()

    def pause(self) -> None:
        """A capture is about to end: what still runs ends in it, or torch_npu would not show it."""
        self._recording = False
        for mark in list(self._running):
            mark.hide()

    @property
    def recording(self) -> bool:
        """Whether a capture is under way."""
        return self._recording


class Mark:
    """One range. It ends with its body, also when that raises."""

    __slots__ = ("_domain", "_handle", "_label", "_marks")

    def __init__(self, marks: Marks, label: str, domain: str) -> None:
        self._marks = marks
        self._label = label
        self._domain = domain
        self._handle: Any = None

    def __enter__(self) -> None:
        self._marks._running[self] = None  # noqa: SLF001 - two halves of one thing
        if self._marks.recording:
            self.show()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._marks._running.pop(self, None)  # noqa: SLF001 - as above
        self.hide()

    def show(self) -> None:
        """Begin the range in the capture that is under way."""
        self._handle = self._marks.tracks.begin(self._label, self._domain)
        if not self._handle:
            self._marks.refused += 1

    def hide(self) -> None:
        """End it there."""
        handle, self._handle = self._handle, None
        if handle:
            self._marks.tracks.end(handle, self._domain)
