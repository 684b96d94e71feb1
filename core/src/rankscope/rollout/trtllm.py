"""TensorRT-LLM: what can be asked of it, and what cannot.

Read from its repository: ``tensorrt_llm/_torch/pyexecutor/profiling.py`` (a runtime start and stop, since 2026; only in
the PyTorch backend), ``py_executor.py`` (the environment, older and newer), ``executor/ray_gpu_worker.py``. None of it
was run here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from rankscope.rollout.engine import Engine, EngineFile, EngineLaunch, Start, accepted, bound, positional, sizes_of
from rankscope.rollout.replicas import Layout
from rankscope.rollout.wanted import Kind, Wanted

_RUNTIME = re.compile(r"trtllm-trace-.+-rank-(?P<rank>\d+)\.json(?:\.gz)?", re.ASCII)
_ENVIRONMENT = re.compile(r"trace-rank-(?P<rank>\d+)\.json(?:\.gz)?", re.ASCII)
_ALONE = "trace.json"


@dataclasses.dataclass(frozen=True)
class TrtllmOptions:
    """Options of the TensorRT-LLM adapter.

    Attributes:
        by_environment: for versions without ``start_profile``: record once, in a window of iterations counted over the
            engine's life, set by the environment at launch. Start and stop then call nothing. Never use both: a version
            that has ``start_profile`` fails where the two windows meet.
    """

    by_environment: bool = False


class TrtllmEngine(Engine):
    """TensorRT-LLM by ``LLM.start_profile`` or its server; older ones by ``collective_rpc`` or the environment."""

    name = "trtllm"
    title = "TensorRT-LLM"
    Options = TrtllmOptions
    no_route = "this trtllm-serve cannot be profiled at run time; see the option by_environment"
    kinds: ClassVar[Mapping[str, Kind]] = {"torch": "torch", "nsys": "cuda"}

    @property
    def counts(self) -> str:  # type: ignore[override]
        """The two ways to set a window count differently."""
        if self.options.by_environment:
            return "iterations of its executor over the engine's whole life"
        return "iterations of its executor after the start"

    @property
    def passive(self) -> bool:
        """The environment's window opens and closes by itself."""
        return bool(self.options.by_environment)

    def notes(self, wanted: Wanted) -> Iterable[str]:
        """As of `Engine.notes`, and what its profiler lacks."""
        yield from super().notes(wanted)
        if wanted.kind != "torch":
            return
        missing = [name for name in ("stack", "memory", "flops") if getattr(wanted, name)]
        if missing:
            yield f"TensorRT-LLM's profiler cannot record {', '.join(missing)}: left out; shapes are always recorded"
        if self.options.by_environment and not wanted.limited:
            yield "by_environment needs profile_token_start and profile_token_end; without them nothing is recorded"

    def launch(self, wanted: Wanted) -> EngineLaunch:
        """Nothing for versions with ``start_profile``; with ``by_environment`` the two variables of the others."""
        env: dict[str, str] = {}
        if self.options.by_environment and wanted.limited:
            env["TLLM_PROFILE_START_STOP"] = f"{wanted.start}-{wanted.token_end}"
            if wanted.kind == "torch":
                env["TLLM_TORCH_PROFILE_TRACE"] = f"{wanted.directory}/{_ALONE}"
        return EngineLaunch(env=env, notes=tuple(self.notes(wanted)))

    def start_arguments(self, wanted: Wanted) -> Start:
        """``start_step`` is counted from the start here."""
        arguments: dict[str, Any] = {"output_dir": wanted.directory, "activities": _activities(wanted)}
        if wanted.start:
            arguments["start_step"] = wanted.start
        if wanted.length is not None:
            arguments["num_steps"] = wanted.length
        return Start(arguments)

    def start_call(self, handle: Any, wanted: Wanted) -> Callable[[], Any]:
        """``LLM.start_profile`` where there is one, else the method of that name of a worker extension.

        A worker extension gets no arguments, so it cannot be told where to write.

        Raises:
            AttributeError: the object has neither.
        """
        function = getattr(handle, "start_profile", None)
        if function is None:
            return positional(handle.collective_rpc, "start_profile")
        known = accepted(function)
        arguments = self.start_arguments(wanted).arguments
        return bound(function, {key: arguments[key] for key in arguments if known is None or key in known})

    def stop_call(self, handle: Any) -> Callable[[], Any]:
        """As `start_call`."""
        if getattr(handle, "stop_profile", None) is None:
            return positional(handle.collective_rpc, "stop_profile")
        return super().stop_call(handle)

    def occupied(self, error: str) -> bool:
        """``RequestError`` of a start while a window is open or armed."""
        return "already in progress" in error

    def parse(self, name: str) -> EngineFile | None:
        """``trtllm-trace-{id}-rank-{r}.json`` of a runtime window, ``trace[-rank-{r}].json`` of the environment's."""
        for pattern in (_RUNTIME, _ENVIRONMENT):
            if match := pattern.fullmatch(name):
                return EngineFile(name, rank=int(match["rank"]))
        return EngineFile(name) if name in {_ALONE, f"{_ALONE}.gz"} else None

    def layout(self, handle: Any) -> Layout | None:
        """``args.parallel_config`` of an LLM."""
        parallel = getattr(getattr(handle, "args", None), "parallel_config", None)
        sizes = sizes_of(parallel, "{}_size", ("tp", "pp"))
        return None if sizes is None else Layout(tp=sizes[0], pp=sizes[1])


def _activities(wanted: Wanted) -> list[str]:
    if wanted.kind == "cuda":
        return ["CUDA_PROFILER"]
    return ["CPU", "GPU"] if wanted.device else ["CPU"]
