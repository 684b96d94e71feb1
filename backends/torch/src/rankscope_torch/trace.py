"""Make a raw trace of torch into the file that users open. Runs in the helper process; knows no torch.

The raw file is read once, in blocks that are cut between events, so that a trace of any size needs little memory. Each
block is checked as strict JSON; what is not valid is repaired event by event, or left out and counted. Rows, labels and
metadata of ours are put in, and the result is written as one gzip member.

Layout of the raw file: libkineto ``output_json.cpp`` as in torch 2.13.0: a header object, ``"traceEvents": [``, events
that begin with ``  {`` and end with ``  }`` on lines of their own, and a tail with ``traceName``.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Union

import msgspec
from zlib_ng import gzip_ng

from rankscope import NothingRecorded

BLOCK = 1 << 18
"""Bytes that are read and checked at once; larger blocks leave the processor's cache."""

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BORDER = b"\n  },"
_ROW = "user_annotation"
_NOT_RECORDED = frozenset({"", "Trace", "overhead"})
"""Categories that a trace has even when nothing ran."""


class TraceInvalid(Exception):  # noqa: N818
    """The raw file is no trace, or is cut off."""


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: Union[int, str] = 0  # noqa: UP007 - evaluated by msgspec on Python 3.10
    tid: Union[int, str] = 0  # noqa: UP007


_events = msgspec.json.Decoder(list[_Event])


def finish(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Write the finished trace.

    Args:
        staged: the raw trace.
        temporary: where the finished one goes.
        name: its final file name.
        arguments: ``metadata``, ``rows``, ``labels`` and ``compression``.

    Returns:
        ``events`` (of what was asked) and what was repaired, left out or added.

    Raises:
        NothingRecorded: the trace holds no event of what was asked.
        TraceInvalid: the raw file is not a whole trace.
    """
    work = _Work(arguments)
    with staged.open("rb") as raw, gzip_ng.open(temporary, "wb", compresslevel=arguments["compression"]) as out:
        work.run(raw, out, name)
    if not work.recorded:
        raise NothingRecorded("the window holds no operator, no range and no device event")
    return work.facts()


class _Work:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.metadata: dict[str, Any] = dict(arguments["metadata"])
        self.rows: list[list[Any]] = arguments.get("rows", [])
        self.labels = {
            b'"name": "' + safe.encode() + b'"': b'"name": ' + _json(_showable(exact))
            for safe, exact in arguments.get("labels", {}).items()
        }
        self.device_wanted: str = arguments.get("device", "")
        self.suspects: list[str] = arguments.get("suspects", [])
        self.recorded = 0
        self.device = 0
        self.written = 0
        self.repaired = 0
        self.dropped = 0
        self.added = 0
        self.turned_async = 0
        self._base_ns = 0
        self._stacks = "stack" in self.metadata.get("contents", ())
        threads = {row[3] for row in self.rows}
        self._spans: dict[int, list[tuple[float, float]]] = {thread: [] for thread in threads}
        self._known_threads: set[Any] = set()
        self._cut: list[tuple[str, int, float]] = []

    def facts(self) -> dict[str, Any]:
        found = {
            "events": self.recorded,
            "device_events": self.device,
            "repaired": self.repaired,
            "dropped": self.dropped,
            "rows_added": self.added,
            "rows_async": self.turned_async,
        }
        facts: dict[str, Any] = {key: value for key, value in found.items() if value or key == "events"}
        if self.device_wanted and not self.device:
            facts["warnings"] = [self._no_device_events()]
        return facts

    def _no_device_events(self) -> str:
        why = "either nothing ran on it in this window, or another tool has CUPTI, which serves one in a process"
        found = f" (found: {', '.join(self.suspects)})" if self.suspects else ""
        return f"no {self.device_wanted} event was recorded although the device was asked for: {why}{found}"

    def run(self, raw: BinaryIO, out: Any, name: str) -> None:
        header, rest = self._header(raw)
        out.write(self._new_header(header))
        tail = b""
        for block in _blocks(raw, rest):
            if isinstance(block, _Tail):
                tail = block.text
            else:
                out.write(self._checked(block))
        self._check_tail(tail)
        for event in self._own_events():
            self._write_event(out, _json(event))
        out.write(b'\n], "traceName": ' + _json(name) + b"}\n")

    def _write_event(self, out: Any, event: bytes) -> None:
        out.write((b",\n  " if self.written else b"\n  ") + event)
        self.written += 1

    # The header.

    def _header(self, raw: BinaryIO) -> tuple[dict[str, Any], bytes]:
        text = b""
        while (found := _EVENTS.search(text)) is None:
            more = raw.read(BLOCK)
            if not more or len(text) > 64 * BLOCK:
                raise TraceInvalid("the raw file has no traceEvents")
            text += more
        head = text[: found.start()].rstrip().rstrip(b",") + b"}"
        try:
            header = json.loads(head.decode("utf-8", "replace"))
        except ValueError:
            self.repaired += 1
            header = {}
            base = re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d+)', head)
            if base is not None:
                header["baseTimeNanoseconds"] = int(base[1])
        self._base_ns = int(header.get("baseTimeNanoseconds", 0))
        return header, text[found.end() :]

    def _new_header(self, header: dict[str, Any]) -> bytes:
        place = header.get("distributedInfo")
        place = dict(place) if isinstance(place, dict) else {"backend": "none"}
        rank, size = self.metadata["rank"], self.metadata["world_size"]
        if place.get("rank", rank) != rank:
            place["group_rank"] = place["rank"]
        place["rank"] = rank
        place.setdefault("world_size", size if size is not None else 1)
        header["distributedInfo"] = place
        labels = {safe.split(b'"')[3].decode(): json.loads(exact[8:]) for safe, exact in self.labels.items()}
        header["rankscope"] = {**self.metadata, **({"labels": labels} if labels else {})}
        header.pop("traceName", None)
        return _json(header)[:-1] + b',\n"traceEvents": ['

    # The events.

    def _checked(self, block: bytes) -> bytes:
        """A block of whole events, valid and with the user's labels; joined to what stands before."""
        if self._stacks and _MAY_BE_OURS.search(block):
            block = _without_our_frames(block)
        for safe, exact in self.labels.items():
            if safe in block:
                block = block.replace(safe, exact)
        try:
            block.decode()
            events = _events.decode(b"[" + block + b"]")
        except (UnicodeDecodeError, msgspec.DecodeError):
            block, events = self._repaired(block)
        if not events:
            return b""
        if _UNFINISHED in block:
            self._cut += _cut_off(block)
        self._count(events)
        joined = b"," + block if self.written else block
        self.written += len(events)
        return joined

    def _repaired(self, block: bytes) -> tuple[bytes, list[_Event]]:
        kept: list[bytes] = []
        events: list[_Event] = []
        for text in _single_events(block):
            for attempt in (lambda text=text: text, lambda text=text: _escaped(text), lambda text=text: _bare(text)):
                candidate = attempt()
                try:
                    candidate.decode()
                    found = _events.decode(b"[" + candidate + b"]")
                except (UnicodeDecodeError, msgspec.DecodeError):
                    continue
                self.repaired += candidate is not text
                kept.append(candidate)
                events += found
                break
            else:
                self.dropped += 1
        return b",".join(kept), events

    def _count(self, events: list[_Event]) -> None:
        spans = self._spans
        for event in events:
            if event.ph == "X":
                if event.cat not in _NOT_RECORDED:
                    self.recorded += 1
                    if event.cat in {"kernel", "gpu_memcpy", "gpu_memset"}:
                        self.device += 1
                    if spans and event.tid in spans:
                        spans[event.tid].append((event.ts, event.ts + event.dur))
            elif event.ph == "M":
                if event.name == "thread_name":
                    self._known_threads.add(event.tid)
            elif event.cat not in _NOT_RECORDED:
                self.recorded += 1

    def _check_tail(self, tail: bytes) -> None:
        if not tail.lstrip().startswith(b"]") or not tail.rstrip().endswith(b"}"):
            raise TraceInvalid("the raw trace is cut off: it has no end")

    # Rows that torch could not record.

    def _own_events(self) -> Iterator[dict[str, Any]]:
        pid = self.metadata["pid"]
        placed: dict[int, _Nesting] = {thread: _Nesting(spans) for thread, spans in self._spans.items()}
        named: set[int] = set()
        for number, row in enumerate(sorted(self.rows, key=lambda row: (row[1], -row[2]))):
            label, start_ns, end_ns, thread, thread_name, kind, cut = row
            start = (start_ns - self._base_ns) / 1000
            length = max(end_ns - start_ns, 0) / 1000
            if self._is_torch_s(_showable(label), thread, start, start + length):
                continue
            common = {"cat": _ROW, "name": _showable(label), "pid": pid, "tid": thread}
            details = {"rankscope": kind, **({"unfinished": True} if cut else {})}
            if thread not in self._known_threads and thread not in named and thread_name:
                named.add(thread)
                yield {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": pid,
                    "tid": thread,
                    "ts": start,
                    "args": {"name": thread_name},
                }
            self.added += 1
            self.recorded += 1
            if placed[thread].fits(start, start + length):
                yield {"ph": "X", **common, "ts": start, "dur": length, "args": details}
            else:
                # A complete event that overlaps another one of its thread in part would be thrown away by viewers.
                self.turned_async += 1
                yield {"ph": "b", **common, "id": f"rankscope-{number}", "ts": start, "args": details}
                yield {"ph": "e", **common, "id": f"rankscope-{number}", "ts": start + length}

    def _is_torch_s(self, label: str, thread: int, start: float, end: float) -> bool:
        """Whether torch shows a range that still ran at the end of its session: newer ones do, cut off there."""
        for found in self._cut:
            name, its_thread, begin = found
            if (name, its_thread) == (label, thread) and start - 1 <= begin <= end:
                self._cut.remove(found)
                return True
        return False


class _Nesting:
    """The intervals of one thread; says whether one more would nest with all of them."""

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        self._spans = sorted(spans)
        self._starts = [start for start, _ in self._spans]
        # For each interval the latest end of it and all before: few of those before a point can reach beyond it.
        self._reach: list[float] = []
        for _, end in self._spans:
            self._reach.append(max(end, self._reach[-1]) if self._reach else end)
        self._mine: list[tuple[float, float]] = []

    def fits(self, start: float, end: float) -> bool:
        """Whether it nests; if so it counts from now on."""
        for other_start, other_end in self._mine:
            if start < other_start < end < other_end or other_start < start < other_end < end:
                return False
        first = bisect.bisect_left(self._starts, start)
        last = bisect.bisect_left(self._starts, end)
        if any(other_end > end and other_start > start for other_start, other_end in self._spans[first:last]):
            return False
        index = first - 1
        while index >= 0 and self._reach[index] > start:
            if start < self._spans[index][1] < end:
                return False
            index -= 1
        self._mine.append((start, end))
        return True


class _Tail:
    def __init__(self, text: bytes) -> None:
        self.text = text


def _blocks(raw: BinaryIO, text: bytes) -> Iterator[bytes | _Tail]:
    """Whole events without the comma behind the last, then the tail."""
    while True:
        more = raw.read(BLOCK)
        if not more:
            break
        text += more
        cut = text.rfind(_BORDER)
        if cut >= 0:
            yield text[: cut + len(_BORDER) - 1]
            text = text[cut + len(_BORDER) :]
    end = text.rfind(b"\n  }\n  ]")
    if end >= 0:
        yield text[: end + 4]
        yield _Tail(text[end + 4 :])
        return
    end = text.rfind(b"]")
    yield _Tail(text[end:] if end >= 0 else b"")


def _single_events(block: bytes) -> Iterator[bytes]:
    start = 0
    while (cut := block.find(_BORDER, start)) >= 0:
        yield block[start : cut + len(_BORDER) - 1]
        start = cut + len(_BORDER)
    yield block[start:]


_UNFINISHED = b'"finished": false'


def _cut_off(block: bytes) -> Iterator[tuple[str, int, float]]:
    """Name, thread and begin of the ranges that torch cut off at the end of its session."""
    for text in _single_events(block):
        if _UNFINISHED in text and b'"user_annotation"' in text:
            event = json.loads(text)
            yield event["name"], event["tid"], event["ts"]


_MAY_BE_OURS = re.compile(rb"_record_function_with_args_|rankscope")
_OUR_FRAME = re.compile(
    rb'"name": "(?:<built-in method _record_function_with_args_'
    rb'|(?:[^"\n]*/)?rankscope(?:/(?:annotate|windows)|_torch/(?:ranges|recorder|backend))\.py\(\d+\): '
    rb"(?!wrapper|_resumed))"
)


def _without_our_frames(block: bytes) -> bytes:
    """A row begins and ends inside of the frames that record it: overlaps, for which viewers would drop the row."""
    kept = [
        event
        for event in _single_events(block)
        if b'"cat": "python_function"' not in event or not _OUR_FRAME.search(event)
    ]
    return b",".join(kept)


# Older versions of torch write ph, cat, name, pid and tid in one line, newer ones a line for each.
_NAME_LINE = re.compile(
    rb'^(\s*(?:"ph": "[^"]*", "cat": "[^"]*", )?"(?:name|cat)": )"(.*)"(,?|, "pid": .*)$', re.MULTILINE
)
_TEXT_VALUE = re.compile(rb'(": )"(.*?)"(?=(?:, ?"[^"]*": )|\s*$)', re.MULTILINE)
_ARGS = re.compile(rb'"args": \{.*\}\s*\}\s*$', re.DOTALL)


def _escaped(event: bytes) -> bytes:
    """An event whose texts are escaped as JSON wants it: torch writes names as they are."""

    def encode(text: bytes) -> bytes:
        return _json(text.decode("utf-8", "replace"))

    event = _NAME_LINE.sub(lambda m: m[1] + encode(m[2]) + m[3], event)
    head, marker, rest = event.partition(b'"args": {')
    if marker:
        rest = _TEXT_VALUE.sub(lambda m: m[1] + encode(m[2]), rest)
    return head + marker + rest


def _bare(event: bytes) -> bytes:
    """The last resort for an event: without its arguments."""
    return _ARGS.sub(b'"args": {"rankscope": "arguments were not valid JSON"}\n  }', _escaped(event))


def _showable(label: str) -> str:
    """Without lone surrogates, which no UTF-8 file can hold."""
    return label.encode("utf-8", "replace").decode()


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
