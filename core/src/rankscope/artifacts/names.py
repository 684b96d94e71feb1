"""Names of artifacts: written by one function, read back by another, and short enough for every file system.

``[role_][scope_][step<S>_]rank<r>[-of-<world>][_tp<i>-pp<i>…]_pid<pid>_<time>[-<n>][_mb<a>[-<b>]|_part<k>]<suffix>``

``time`` is UTC to the millisecond, ``YYYYMMDDhhmmssmmm``; ``-<n>`` tells names of one millisecond apart.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import re
import time as _time
from collections.abc import Mapping

MAX_BYTES = 200
"""Longest name. File systems allow 255; the rest is for ``.part`` and for what uploaders append."""

MAX_LABEL = 48
"""Longest role or scope; a longer one is cut and gets a hash of its whole text."""

_BAD = re.compile(r"[^0-9A-Za-z.=+-]+")
_FOREIGN_LETTERS = re.compile(r"[^\W_]")
_STEP_LIKE = re.compile(r"step-?\d+")
_PART = re.compile(r"mb\d+(?:-\d+)?|part\d+")
_TIME = re.compile(r"\d{17}")
_SUFFIX = re.compile(r"(?:\.[^/\0]*)?")
_NAME = re.compile(
    r"(?:(?P<role>[0-9A-Za-z.=+-]*)_(?:(?P<scope>[0-9A-Za-z.=+-]*)_)??)??"  # lazy: step3 is no label
    r"(?:step(?P<step>-?\d+)_)?"
    r"rank(?P<rank>\d+)(?:-of-(?P<world>\d+))?"
    r"(?:_(?P<dims>[A-Za-z]+\d+(?:-[A-Za-z]+\d+)*))?"
    r"_pid(?P<pid>\d+)_(?P<time>\d{17})(?:-(?P<counter>\d+))?"
    r"(?:_(?P<part>mb\d+(?:-\d+)?|part\d+))?"
    r"(?P<suffix>\.[^/\0]*)?",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class NameFields:
    """What the name of an artifact says.

    Attributes:
        rank: global rank.
        pid: process id.
        time: ``YYYYMMDDhhmmssmmm``; see `time_text`. UTC, but local time in verl's names.
        role, scope: labels; empty ones are left out. A scope without a role is read back as a role.
        step: the step, or None.
        world_size: number of ranks, or None.
        topology: rank in each parallel dimension, written in this order.
        counter: tells names of one millisecond apart; 0 is not written.
        part: ``mb3``, ``mb3-4`` or ``part2``; empty for a file that holds the whole window.
        suffix: from the first dot on, e.g. ``.json.gz``.
    """

    rank: int
    pid: int
    time: str
    role: str = ""
    scope: str = ""
    step: int | None = None
    world_size: int | None = None
    topology: Mapping[str, int] = dataclasses.field(default_factory=dict)
    counter: int = 0
    part: str = ""
    suffix: str = ""


def time_text(nanoseconds: int) -> str:
    """A time since the epoch as it stands in a name: UTC, ``YYYYMMDDhhmmssmmm``."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return _time.strftime("%Y%m%d%H%M%S", _time.gmtime(seconds)) + f"{rest // 1_000_000:03d}"


def clean_label(text: str, limit: int = MAX_LABEL) -> str:
    """A label as it may stand in a name.

    A run of characters outside letters, digits, ``. = + -`` becomes one hyphen, outer hyphens go. Where the text would
    be lost or misread (letters of other scripts, nothing left, ``step3``, more than ``limit`` characters) a short hash
    of the original stays in. Cleaning twice changes nothing. Blank text gives an empty label.
    """
    text = str(text)
    label = _BAD.sub("-", text).lstrip(".-").rstrip("-")
    if not text.strip():
        return ""
    lost = any(_FOREIGN_LETTERS.search(run) for run in _BAD.findall(text))
    if not label or lost or _STEP_LIKE.fullmatch(label):
        label = f"{label}-{_hash(text)}" if label else f"x{_hash(text)}"
    return label if len(label) <= limit else _cut(label, limit, text)


def format_name(fields: NameFields) -> str:
    """The file name for these fields, at most `MAX_BYTES` long.

    Labels are cleaned. When the name would still be too long, scope and role shrink (with a hash), then dimensions are
    left out from the end.

    Raises:
        ValueError: a number is negative, ``time``, ``part`` or ``suffix`` breaks the grammar, or nothing helps.
    """
    _check(fields)
    role, scope = clean_label(fields.role), clean_label(fields.scope)
    dims = [f"{re.sub('[^A-Za-z]', '', dim) or 'dim'}{at}" for dim, at in fields.topology.items()]
    name = _joined(fields, role, scope, dims)
    if len(name.encode()) > MAX_BYTES:
        for limit in (32, 20, 12):
            role, scope = clean_label(fields.role, limit), clean_label(fields.scope, limit)
            name = _joined(fields, role, scope, dims)
            if len(name.encode()) <= MAX_BYTES:
                return name
    while len(name.encode()) > MAX_BYTES and dims:
        dims.pop()
        name = _joined(fields, role, scope, dims)
    if len(name.encode()) > MAX_BYTES:
        raise ValueError(f"no name of at most {MAX_BYTES} bytes can hold {fields}")
    return name


def parse_name(name: str) -> NameFields | None:
    """The fields of a name that `format_name` or verl wrote; None for any other name.

    Whatever uploaders appended to the suffix stays in ``suffix``.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = match.groupdict()
    dims = re.findall(r"([A-Za-z]+)(\d+)", found["dims"] or "", re.ASCII)
    return NameFields(
        role=found["role"] or "",
        scope=found["scope"] or "",
        step=None if found["step"] is None else int(found["step"]),
        rank=int(found["rank"]),
        world_size=None if found["world"] is None else int(found["world"]),
        topology={dim: int(at) for dim, at in dims},
        pid=int(found["pid"]),
        time=found["time"],
        counter=int(found["counter"] or 0),
        part=found["part"] or "",
        suffix=found["suffix"] or "",
    )


def file_pattern(  # noqa: PLR0917  # the order of the name itself
    role: str, scope: str, step: int | None, rank: int, world_size: int | None, suffix: str = ""
) -> str:
    """What the names of a planned capture will look like; ``*`` for what only the process will know."""
    labels = [label for label in (clean_label(role), clean_label(scope)) if label]
    when = [] if step is None else [f"step{step}"]
    ranks = f"rank{rank}" + (f"-of-{world_size}" if world_size else "")
    return "_".join([*labels, *when, ranks, f"*{suffix}"])


def matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern of `file_pattern`."""
    return fnmatch.fnmatchcase(name, pattern)


def numbered(name: str, number: int) -> str:
    """Alternative of a name: a counter in a name of ours, else ``stem-<number>.suffix``; 0 is the name itself."""
    if number == 0:
        return name
    fields = parse_name(name)
    if fields is not None:
        # Put in by hand: formatting anew could change a name that verl or an older version wrote.
        at = re.compile(rf"(_pid{fields.pid}_{fields.time})(?:-\d+)?", re.ASCII)
        return at.sub(rf"\g<1>-{fields.counter + number}", name, count=1)
    stem, dot, rest = name[1:].partition(".")
    return f"{name[:1]}{stem}-{number}{dot}{rest}"


def fit(name: str, limit: int = MAX_BYTES) -> str:
    """Any file name, cut in its middle to ``limit`` bytes, with a hash of the whole in place of what went."""
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) <= limit:
        return name
    mark = f"-{_hash(name)}-"
    tail = min(40, limit // 4)
    head = raw[: limit - tail - len(mark)].decode("utf-8", "ignore")
    return head + mark + raw[-tail:].decode("utf-8", "ignore")


def _check(fields: NameFields) -> None:
    numbers = {"rank": fields.rank, "pid": fields.pid, "counter": fields.counter, **fields.topology}
    for key, number in numbers.items():
        if number < 0:
            raise ValueError(f"{key} of a name must not be negative: {number}")
    if not _TIME.fullmatch(fields.time):
        raise ValueError(f"time of a name must be YYYYMMDDhhmmssmmm: {fields.time!r}")
    if fields.part and not _PART.fullmatch(fields.part):
        raise ValueError(f"part of a name must be like mb3, mb3-4 or part2: {fields.part!r}")
    if not _SUFFIX.fullmatch(fields.suffix):
        raise ValueError(f"suffix of a name must begin with a dot and hold no slash: {fields.suffix!r}")


def _joined(fields: NameFields, role: str, scope: str, dims: list[str]) -> str:
    parts = [label for label in (role, scope) if label]
    if fields.step is not None:
        parts.append(f"step{fields.step}")
    parts.append(f"rank{fields.rank}" + (f"-of-{fields.world_size}" if fields.world_size else ""))
    if dims:
        parts.append("-".join(dims))
    parts.append(f"pid{fields.pid}")
    parts.append(fields.time + (f"-{fields.counter}" if fields.counter else ""))
    if fields.part:
        parts.append(fields.part)
    return "_".join(parts) + fields.suffix


def _cut(label: str, limit: int, text: str) -> str:
    mark = _hash(text)
    return f"{label[: limit - len(mark) - 1].rstrip('-')}-{mark}"


def _hash(text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
