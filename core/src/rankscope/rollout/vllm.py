"""vLLM: launch arguments, start and stop, file names.

Read from the wheels of vllm 0.33.0 (``vllm/config/profiler.py``, ``vllm/profiler/wrapper.py``,
``v1/worker/gpu_worker.py``, ``v1/engine/async_llm.py``, ``entrypoints/serve/profile/api_router.py``,
``distributed/utils.py``), 0.13.0 and 0.12.0 (``vllm/envs.py``, ``vllm/profiler/gpu_profiler.py``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from rankscope.rollout.engine import (
    Engine,
    EngineFile,
    EngineLaunch,
    Place,
    Start,
    accepted,
    bound,
    installed_version,
    sizes_of,
    version_of,
    within,
)
from rankscope.rollout.replicas import Layout
from rankscope.rollout.wanted import Kind, Wanted, prefix_of

FIELDS_0_13: frozenset[str] = frozenset(
    {
        "profiler",
        "torch_profiler_dir",
        "torch_profiler_with_stack",
        "torch_profiler_with_flops",
        "torch_profiler_use_gzip",
        "torch_profiler_dump_cuda_time_total",
        "torch_profiler_record_shapes",
        "torch_profiler_with_memory",
        "ignore_frontend",
        "delay_iterations",
        "max_iterations",
    }
)
"""What ``ProfilerConfig`` has held since it exists; it refuses unknown names."""

_ACTIVITIES = "torch_profiler_activities"
_ACTIVITIES_SINCE = (0, 33)
_CONFIG_SINCE = (0, 13)

_TRACE = r"(?:\.(?P<stamp>\d{6,}))?\.pt\.trace\.json(?:\.gz)?"
_WORKER = re.compile(
    rf"(?:(?P<prefix>.*)_)?(?P<places>dp\d+(?:_[a-z]+\d+)*)(?:{_TRACE}|(?P<table>\.profiler_out\.txt))", re.ASCII
)
_BARE = re.compile(rf"(?:(?P<prefix>.*)_)?rank(?P<rank>\d+)(?:{_TRACE}|(?P<table>\.profiler_out\.txt))", re.ASCII)
_OLD = re.compile(rf".+-rank-(?P<rank>\d+){_TRACE}", re.ASCII)
_FRONTEND = re.compile(rf".+\.async_llm{_TRACE}", re.ASCII)
_FRONTEND_TABLE = re.compile(r".+\.async_llm\.profiler_out\.txt", re.ASCII)
_OLDEST = re.compile(rf".+{_TRACE}", re.ASCII)
_TABLE = re.compile(r"profiler_out_\d+\.txt", re.ASCII)


@dataclasses.dataclass(frozen=True)
class VllmOptions:
    """Options of the vLLM adapter.

    Attributes:
        frontend: also record the front end (the AsyncLLM scheduler's Python) in a file of its own. It does not follow
            the token window.
    """

    frontend: bool = False


class VllmEngine(Engine):
    """vLLM 0.13 and newer by its ``profiler_config``, older ones by the environment."""

    name = "vllm"
    title = "vLLM"
    Options = VllmOptions
    no_route = "the server was started without --profiler-config (below 0.13: without VLLM_TORCH_PROFILER_DIR)"
    kinds: ClassVar[Mapping[str, Kind]] = {"torch": "torch", "npu": "torch", "nsys": "cuda"}
    counts = (
        "iterations of a worker after the start (prefill, chunks and decoding of all requests together); the window "
        "begins with iteration profile_token_start itself"
    )

    @property
    def _version(self) -> tuple[int, ...]:
        return version_of(self.version or installed_version("vllm"))

    def launch(self, wanted: Wanted, fields: Iterable[str] | None = None) -> EngineLaunch:
        """``profiler_config`` for ``AsyncEngineArgs``, ``LLM`` or ``vllm serve``; the environment for vLLM below 0.13.

        Args:
            wanted: what shall be recorded.
            fields: what the installed ``ProfilerConfig`` holds, where somebody could ask it. Others are left out and
                named.
        """
        notes = list(self.notes(wanted))
        version = self._version
        if version and version < _CONFIG_SINCE:
            return EngineLaunch(env=_environment(wanted, frontend=self.options.frontend), notes=tuple(notes))
        config = self._profiler_config(wanted)
        known = frozenset(fields) if fields is not None else FIELDS_0_13
        if fields is None and version >= _ACTIVITIES_SINCE:
            known |= {_ACTIVITIES}
        refused = sorted(set(config) - known)
        if refused == [_ACTIVITIES] and fields is None:
            notes.append("vLLM records CPU and device; one of them alone needs vLLM 0.33 or newer")
        elif refused:
            notes.append(f"this vLLM's ProfilerConfig does not know {', '.join(refused)}: left out")
        return EngineLaunch(
            {"profiler_config": {key: config[key] for key in config if key in known}}, notes=tuple(notes)
        )

    def _profiler_config(self, wanted: Wanted) -> dict[str, Any]:
        window = {"delay_iterations": wanted.start, "max_iterations": wanted.length or 0}
        if wanted.kind == "cuda":
            return {"profiler": "cuda", **window}
        config: dict[str, Any] = {
            "profiler": "torch",
            "torch_profiler_dir": wanted.directory,
            "torch_profiler_with_stack": wanted.stack,
            "torch_profiler_record_shapes": wanted.shapes,
            "torch_profiler_with_memory": wanted.memory,
            "torch_profiler_with_flops": wanted.flops,
            "ignore_frontend": not self.options.frontend,
            **window,
        }
        if not wanted.device:
            config[_ACTIVITIES] = ["CPU"]
        return config

    def start_arguments(self, wanted: Wanted) -> Start:
        """The window's prefix, and the token window for an engine that was started without it.

        A server that does not know them ignores them, or refuses the request, which is then sent without.
        """
        arguments: dict[str, Any] = {}
        if wanted.prefix and wanted.kind == "torch":
            arguments["profile_prefix"] = wanted.prefix
        if wanted.token_start is not None or wanted.limited:
            arguments |= {"delay_iterations": wanted.start, "max_iterations": wanted.length or 0}
        return Start(arguments)

    def start_call(self, handle: Any, wanted: Wanted) -> Callable[[], Any]:
        """``AsyncLLM.start_profile`` or ``LLM.start_profile`` with what it takes: nothing before 0.1x, all in 0.33.

        A method that takes anything passes it on to an engine that may not: it gets nothing.
        """
        known = accepted(handle.start_profile) or frozenset()
        arguments = self.start_arguments(wanted).arguments
        return bound(handle.start_profile, {name: value for name, value in arguments.items() if name in known})

    def retry_body(self, status: int, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Servers between 0.13 and 0.33 refuse some of the keys, or a body."""
        return {} if status in {400, 422} and body else None

    def occupied(self, error: str) -> bool:
        """``ProfilerAlreadyActiveError``, over HTTP 409."""
        return "already active" in error or "HTTP 409" in error

    def parse(self, name: str) -> EngineFile | None:
        """The styles of all versions; the newest first, each read from its end, since prefixes may hold anything."""
        for pattern in (_FRONTEND, _FRONTEND_TABLE):
            if match := pattern.fullmatch(name):
                return EngineFile(name, "frontend", prefix=prefix_of(name), stamp=_stamp(match))
        if match := _WORKER.fullmatch(name):
            places = {key: int(at) for key, at in re.findall(r"([a-z]+)(\d+)", match["places"])}
            rank = places.pop("rank", None)
            return EngineFile(name, _kind(match), rank, places, prefix_of(name), _stamp(match))
        if match := _BARE.fullmatch(name):
            return EngineFile(name, _kind(match), int(match["rank"]), prefix=prefix_of(name), stamp=_stamp(match))
        if match := _OLD.fullmatch(name):
            return EngineFile(name, rank=int(match["rank"]), stamp=_stamp(match))
        if match := _OLDEST.fullmatch(name):
            return EngineFile(name, stamp=_stamp(match))
        return EngineFile(name, "table") if _TABLE.fullmatch(name) else None

    def place(self, file: EngineFile, width: int, layout: Layout | None, seen: Iterable[EngineFile]) -> Place:
        """The rank in the name counts within one copy of the model; which copy it is, ``dp`` says, but not always.

        vLLM runs the copies of a dense model as engines of their own, all of which call themselves ``dp0``, and names
        before 0.1x do not say it at all. So a rank is believed only where the layout or the files beside it leave one
        possibility.
        """
        if file.rank is None:
            return Place(None, "the name says no rank")
        if file.rank >= width:
            return within(file.rank, width)
        group = [one for one in (*seen, file) if one.rank is not None]
        most = max(one.rank or 0 for one in group)
        copies = max(one.coordinates.get("dp", 0) for one in group)
        dp = file.coordinates.get("dp", 0)
        sizes = [size for size in _divisors(width) if size > most and (copies + 1) * size <= width]
        if layout is not None:
            sizes = [size for size in sizes if size == layout.group]
        if not sizes:
            return Place(None, "the names contradict the layout of the engine")
        if len(sizes) > 1:
            return Place(None, "the names do not say how many copies of the model there are", settled=False)
        if sizes[0] < width and not copies:
            return Place(None, "the name does not say which copy of the model it is", settled=False)
        return within(dp * sizes[0] + file.rank, width)

    def agrees(self, file: EngineFile, local: int, width: int) -> bool:
        """Whether some number of copies explains the name."""
        if file.rank is None:
            return True
        copy = file.coordinates.get("dp", 0)
        return any(
            size > file.rank and (local - file.rank) % size == 0 and (not copy or local - file.rank == copy * size)
            for size in _divisors(width)
        )

    def layout(self, handle: Any) -> Layout | None:
        """``vllm_config.parallel_config`` of an AsyncLLM, or of an LLM's engine."""
        for holder in (handle, getattr(handle, "llm_engine", None)):
            parallel = getattr(getattr(holder, "vllm_config", None), "parallel_config", None)
            sizes = sizes_of(parallel, "{}_parallel_size", ("tensor", "pipeline", "data"))
            if sizes is not None:
                return Layout(tp=sizes[0], pp=sizes[1], dp=sizes[2])
        return None


def _environment(wanted: Wanted, *, frontend: bool) -> dict[str, str]:
    """The variables of vLLM 0.12 (``vllm/envs.py``); older ones know fewer and ignore the rest."""
    window = {
        "VLLM_PROFILER_DELAY_ITERS": str(wanted.start),
        "VLLM_PROFILER_MAX_ITERS": str(wanted.length or 0),
    }
    if wanted.kind == "cuda":
        return {"VLLM_TORCH_CUDA_PROFILE": "1", **window}
    return {
        "VLLM_TORCH_PROFILER_DIR": wanted.directory,
        "VLLM_TORCH_PROFILER_WITH_STACK": str(int(wanted.stack)),
        "VLLM_TORCH_PROFILER_RECORD_SHAPES": str(int(wanted.shapes)),
        "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": str(int(wanted.memory)),
        "VLLM_TORCH_PROFILER_WITH_FLOPS": str(int(wanted.flops)),
        "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM": str(int(not frontend)),
        **window,
    }


def _kind(match: re.Match[str]) -> Any:
    return "table" if match.groupdict().get("table") else "trace"


def _stamp(match: re.Match[str]) -> int | None:
    stamp = match.groupdict().get("stamp")
    return int(stamp) if stamp else None


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
