"""SGLang: what a start is told, both generations of its interface, file names.

Read from the wheels of sglang 0.5.12 (``srt/managers/tokenizer_control_mixin.py``, ``scheduler_profiler_mixin.py``,
``io_struct.py``, ``entrypoints/http_server.py``) and 0.5.23 (there ``scheduler_components/profiler_manager.py``).
``SGLANG_PROFILE_V2=1`` refuses what is done here: windows that are started and stopped from outside.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from rankscope.rollout.engine import Engine, EngineFile, Place, Start, accepted, bound, sizes_of, within
from rankscope.rollout.replicas import Layout
from rankscope.rollout.wanted import Kind, Wanted, prefix_of

NEVER = 2**53
"""A forward pass that no engine reaches; a number that JSON and msgpack carry unchanged."""

KEYWORDS: frozenset[str] = frozenset(
    {
        "output_dir",
        "start_step",
        "num_steps",
        "activities",
        "with_stack",
        "record_shapes",
        "profile_by_stage",
        "merge_profiles",
        "profile_prefix",
        "profile_stages",
    }
)
"""What both generations take: keywords of 0.5.12, fields of ``ProfileReq`` in 0.5.23."""

_STAGE = r"(?:-(?P<stage>[A-Za-z_]+))?"
_TRACE = re.compile(
    rf"(?P<id>.+)-TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-(?P<ep>\d+))?{_STAGE}\.trace\.json(?:\.gz)?",
    re.ASCII,
)
_MEMORY = re.compile(rf"(?P<id>.+)-TP-(?P<tp>\d+)-memory{_STAGE}\.pickle", re.ASCII)
_ROCM = re.compile(r"rpd-(?P<id>[\d.]+)-TP-(?P<tp>\d+)\.trace\.json\.gz", re.ASCII)
_MERGED = re.compile(r"merged-.+\.trace\.json(?:\.gz)?", re.ASCII)
_TIME = re.compile(r"\d{9,}(?:\.\d+)?", re.ASCII)


class SglangEngine(Engine):
    """SGLang, by a ``TokenizerManager``, an ``Engine``, or the server's URL."""

    name = "sglang"
    title = "SGLang"
    numbers_copies = True
    kinds: ClassVar[Mapping[str, Kind]] = {"torch": "torch", "npu": "torch", "nsys": "cuda", "torch_memory": "memory"}
    counts = "forward passes of its scheduler over its whole life (prefill and decoding of all requests together)"

    def notes(self, wanted: Wanted) -> Iterable[str]:
        """As of `Engine.notes`, and what SGLang's profiler lacks."""
        yield from super().notes(wanted)
        missing = [name for name in ("memory", "flops") if getattr(wanted, name) and wanted.kind == "torch"]
        if missing:
            yield f"SGLang's profiler cannot record {' and '.join(missing)}: left out"

    def start_arguments(self, wanted: Wanted) -> Start:
        """Given at each start; nothing is needed when the engine is launched."""
        notes: list[str] = []
        start_step = None
        if wanted.start and wanted.forward_count is not None:
            start_step = wanted.forward_count + 1 + wanted.start
        elif wanted.start:
            notes.append(
                f"SGLang begins at once and not {wanted.start} forward passes later: it counts from its own start, and "
                "nobody told how far it is (Replica.forward_count)"
            )
        arguments: dict[str, Any] = {
            "output_dir": wanted.directory,
            "with_stack": wanted.stack,
            "record_shapes": wanted.shapes,
            "start_step": start_step,
            "num_steps": wanted.length,
            "activities": _activities(wanted),
        }
        if wanted.prefix:
            arguments["profile_prefix"] = wanted.prefix
        return Start({name: value for name, value in arguments.items() if value is not None}, tuple(notes))

    def start_call(self, handle: Any, wanted: Wanted) -> Callable[[], Any]:
        """Keywords for a TokenizerManager of 0.5.12, one request object for that of 0.5.23; an Engine takes keywords.

        Raises:
            TypeError: the method takes neither.
        """
        return _call(handle, self.start_arguments(wanted).arguments)

    def ended_already(self, error: str, wanted: Wanted) -> bool:
        """A window with a number of passes ends by itself; the stop then fails, over HTTP without a word.

        So it does when a window that was armed for a later pass was not reached.
        """
        armed = bool(wanted.start) and wanted.forward_count is not None
        return "not in progress" in error or ((wanted.limited or armed) and "HTTP 500" in error)

    def occupied(self, error: str) -> bool:
        """Where the engine says so. Without a first pass it would not, and start a second profiler over the first."""
        return "already in progress" in error

    def disarm(self, wanted: Wanted) -> Mapping[str, Any] | None:
        """A window that was armed for a later pass and not reached would begin in some later training step.

        SGLang has no way to take it back; it is armed for a pass that never comes.
        """
        if not wanted.start or wanted.forward_count is None:
            return None
        return {"output_dir": wanted.directory, "start_step": NEVER}

    def arm_call(self, handle: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """As `start_call`, with any arguments."""
        return _call(handle, arguments)

    def parse(self, name: str) -> EngineFile | None:
        """``[prefix-]{id}-TP-{t}[-DP-][-PP-][-EP-][-STAGE].trace.json.gz`` and its kin, read from the end."""
        if match := _ROCM.fullmatch(name):
            return EngineFile(name, "unknown", coordinates={"tp": int(match["tp"])})
        for pattern, kind in ((_TRACE, "trace"), (_MEMORY, "memory")):
            if match := pattern.fullmatch(name):
                found = match.groupdict()
                places = {key: int(found[key]) for key in ("tp", "dp", "pp", "ep") if found.get(key) is not None}
                prefix = prefix_of(name)
                return EngineFile(name, kind, coordinates=places, prefix=prefix, stamp=_stamp(found["id"], prefix))  # type: ignore[arg-type]
        return EngineFile(name, "unknown") if _MERGED.fullmatch(name) else None

    def place(self, file: EngineFile, width: int, layout: Layout | None, seen: Iterable[EngineFile]) -> Place:
        """From the coordinates. A trace names DP, PP and EP only where there is more than one; EP is within TP.

        A memory snapshot names TP alone, so the other sizes must be known.
        """
        tp, pp, dp = (file.coordinates.get(name) for name in ("tp", "pp", "dp"))
        if tp is None:
            return Place(None, "the name says no rank")
        if layout is not None:
            return _in_layout(layout, width, named=file.kind == "trace", tp=tp, pp=pp, dp=dp)
        traces = [one.coordinates for one in (*seen, file) if one.kind == "trace" and "tp" in one.coordinates]
        most = max([places["tp"] for places in traces] + [tp])
        if most >= width:
            return Place(None, f"rank {most} is beyond a replica of {width} GPUs")
        if (
            2 * (most + 1) > width and pp is None
        ):  # the tensor parallel group fills the replica: what else there is lies within it
            return within(tp, width)
        if file.kind == "trace" and pp is None and dp is None:
            return within(tp, width)
        if file.kind != "trace" and traces and not any({"dp", "pp"} & set(places) for places in traces):
            return within(tp, width)
        return Place(None, "the name does not say how the engine is laid out", settled=False)

    def agrees(self, file: EngineFile, local: int, width: int) -> bool:
        """Whether the tensor parallel rank can be that of the GPU."""
        tp = file.coordinates.get("tp")
        if tp is None:
            return True
        if file.kind == "trace" and not {"pp", "dp"} & set(file.coordinates):
            return local == tp
        return any(size > tp and local % size == tp for size in range(1, width + 1) if width % size == 0)

    def layout(self, handle: Any) -> Layout | None:
        """``server_args`` of a TokenizerManager or an Engine."""
        for holder in (handle, getattr(handle, "tokenizer_manager", None)):
            args = getattr(holder, "server_args", None)
            sizes = sizes_of(args, "{}_size", ("tp", "pp", "dp"))
            if sizes is not None:
                tp, pp, dp = sizes
                return Layout(tp, pp, dp, dp_attention=bool(getattr(args, "enable_dp_attention", False)))
        return None


def _activities(wanted: Wanted) -> list[str]:
    if wanted.kind == "cuda":
        return ["CUDA_PROFILER"]
    if wanted.kind == "memory":
        return ["MEM"]
    return ["CPU", "GPU"] if wanted.device else ["CPU"]


def _in_layout(layout: Layout, width: int, *, named: bool, tp: int, pp: int | None, dp: int | None) -> Place:
    """The GPU at some coordinates of a known layout; with ``named``, a coordinate is missing only if its size is 1."""
    copies = 1 if layout.dp_attention else layout.dp
    if (pp is None and layout.pp > 1) or (dp is None and copies > 1):
        return Place(None, "the name does not say all coordinates")
    contradicts = tp >= layout.tp or (pp or 0) >= layout.pp or (dp or 0) >= layout.dp
    if contradicts or (named and layout.dp > 1 and dp is None) or layout.gpus != width:
        return Place(None, "the name contradicts the layout of the engine")
    copy = 0 if layout.dp_attention else (dp or 0)
    return within(copy * layout.group + (pp or 0) * layout.tp + tp, width)


def _stamp(text: str, prefix: str) -> int | None:
    rest = text[len(prefix) :].lstrip("-")
    return int(float(rest) * 1e9) if _TIME.fullmatch(rest) else None


def _call(handle: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    function = handle.start_profile
    known = accepted(function)
    if known is None:  # an Engine; what its manager takes is what it takes
        manager = getattr(handle, "tokenizer_manager", None)
        inner = accepted(manager.start_profile) if manager is not None else None
        taken = inner if inner and "output_dir" in inner else KEYWORDS
        return bound(function, {name: value for name, value in arguments.items() if name in taken})
    if "output_dir" in known:
        return bound(function, {name: value for name, value in arguments.items() if name in known})
    request = _request_class(function)
    if request is None:
        raise TypeError(
            f"start_profile of {type(handle).__name__} takes {', '.join(sorted(known)) or 'nothing'}: neither the "
            "keywords of SGLang 0.5.12 nor the request of 0.5.23"
        )
    fields = _fields(request)
    return lambda: function(request(**{name: value for name, value in arguments.items() if name in fields}))


def _request_class(function: Any) -> Any:
    """The class of the one object that the method takes, from its annotation; else from SGLang's module, if loaded."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    annotation = parameters[0].annotation if parameters else None
    words = re.findall(r"[A-Za-z_]\w*", annotation if isinstance(annotation, str) else repr(annotation))
    choices = [getattr(plain, "__globals__", {}).get(word) for word in words]
    choices += [annotation, *getattr(annotation, "__args__", ())]
    choices.append(getattr(sys.modules.get("sglang.srt.managers.io_struct"), "ProfileReq", None))
    return next((one for one in choices if isinstance(one, type) and "output_dir" in _fields(one)), None)


def _fields(kind: type) -> frozenset[str]:
    if dataclasses.is_dataclass(kind):
        return frozenset(field.name for field in dataclasses.fields(kind))
    named = getattr(kind, "__struct_fields__", None)  # msgspec
    return frozenset(named) if named is not None else frozenset(getattr(kind, "__annotations__", {}))
