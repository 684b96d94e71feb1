"""How long each stage took, read from a captured trace; the standard library is enough for files of a few MB."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20
"""Compressed traces beyond this size are left to real readers."""

OUTSIDE = ""
"""Name of the stage that stands for mini- and micro-batches outside of any (a schedule left its beginning out)."""

_BATCH = re.compile(r"(mini|micro)_batch")
_STEP = re.compile(r"step\d+|ProfilerStep#\d+")
_OF_TORCH = re.compile(r"[#:]|^DistributedDataParallel\.")  # Optimizer.step#Adam.step, gloo:all_reduce


class NotATraceError(ValueError):
    """It is JSON, and no trace."""


@dataclasses.dataclass
class StageTime:
    """All runs of one stage in one trace.

    Attributes:
        name: the stage.
        seconds: their durations added up.
        runs: how many.
        mini_batches, micro_batches: how many of them lie inside.
    """

    name: str
    seconds: float = 0.0
    runs: int = 0
    mini_batches: int = 0
    micro_batches: int = 0


def read_stages(path: Path) -> list[StageTime]:
    """Stages of a Chrome trace (``.json`` or ``.json.gz``), the longest first.

    Raises:
        ValueError: the file is no trace, is damaged, or is too large to be read here.
        OSError: it cannot be read.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        trace = json.loads(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile, RecursionError) as error:
        raise ValueError(f"damaged: {error}") from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise NotATraceError("not a trace: no traceEvents")
    return stage_times(events)


def stage_times(events: Iterable[Any]) -> list[StageTime]:
    """Add up the outermost annotations of each thread; steps, batches and the profiled program's own are no stages."""
    threads: dict[tuple[Any, Any], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if isinstance(event, dict) and event.get("cat") == "user_annotation" and event.get("ph") == "X":
            began, lasted = _number(event.get("ts")), _number(event.get("dur"))
            # Of two that begin together, the longer one is outside.
            threads[event.get("pid"), event.get("tid")].append((began, -lasted, str(event.get("name"))))
    found: dict[str, StageTime] = {}
    for rows in threads.values():
        end, inside = float("-inf"), OUTSIDE
        for began, minus, name in sorted(rows):
            if began >= end:
                inside = OUTSIDE
            batch = _BATCH.match(name)
            if batch is not None:
                stage = found.setdefault(inside, StageTime(inside))
                stage.mini_batches += batch[1] == "mini"
                stage.micro_batches += batch[1] == "micro"
            elif began >= end and not _STEP.fullmatch(name) and not _OF_TORCH.search(name):
                end, inside = began - minus, name
                stage = found.setdefault(name, StageTime(name))
                stage.seconds += -minus / 1e6
                stage.runs += 1
    return sorted(found.values(), key=lambda stage: (-stage.seconds, stage.name))


def of_role(stages: Iterable[StageTime], role: str, others: Iterable[str], *, owner: bool) -> list[StageTime]:
    """The stages of one role in a file that several roles share.

    Args:
        stages: all stages of the file.
        role: whose are wanted: those whose name begins with the role, or with a part of a joined role.
        others: the other roles of the file.
        owner: whether the file is this role's own: then stages named after none of the roles are its, too.
    """
    own = _words(role)
    foreign = {word for other in others for word in _words(other)} - own
    return [stage for stage in stages if _named_after(stage, own) or (owner and not _named_after(stage, foreign))]


def describe(stages: Sequence[StageTime], most: int = 4) -> str:
    """The longest stages in words: ``actor_update 0.41 s (4 mini, 8 micro), ...``."""
    pieces = []
    for stage in stages[:most]:
        counts = [f"{stage.mini_batches} mini"] * bool(stage.mini_batches)
        counts += [f"{stage.micro_batches} micro"] * bool(stage.micro_batches)
        batches = ", ".join(counts)
        if stage.name == OUTSIDE:
            pieces.append(f"outside of stages {batches}")
        else:
            pieces.append(f"{stage.name} {stage.seconds:.3f} s" + (f" ({batches})" if batches else ""))
    if len(stages) > most:
        pieces.append(f"{len(stages) - most} more")
    return ", ".join(pieces)


def as_data(stages: Iterable[StageTime]) -> list[Mapping[str, Any]]:
    """The stages for JSON."""
    return [{**dataclasses.asdict(stage), "seconds": round(stage.seconds, 6)} for stage in stages]


def _words(role: str) -> set[str]:
    return {word for word in re.split(r"[-_.]", role) if word}


def _named_after(stage: StageTime, words: Iterable[str]) -> bool:
    return any(stage.name == word or stage.name.startswith(f"{word}_") for word in words)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
