"""TorchBackend: the hooks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
from contextlib import AbstractContextManager
from typing import Any

from rankscope import Availability, Context, Launch, Span, Window, hookimpl
from rankscope_torch.budget import Budget
from rankscope_torch.injection import before_start, suspects
from rankscope_torch.options import TorchOptions
from rankscope_torch.ranges import Labels, range_functions
from rankscope_torch.recorder import SUFFIX, Recorder
from rankscope_torch.session import Capture, experimental_config, foreign_active, warm_up

_DEVICES = (("CUDA", "cuda"), ("XPU", "xpu"), ("MTIA", "mtia"), ("HPU", "hpu"))
"""Activity of ``torch.profiler.ProfilerActivity`` and the module of torch that says whether the device is there."""


class TorchBackend:
    """Records windows with the PyTorch profiler and leaves one Chrome trace each (torch 2.4 or newer)."""

    Options = TorchOptions
    suffix = SUFFIX
    viewer = 'https://ui.perfetto.dev -> "Open trace file"; everything stays in the browser'

    @staticmethod
    def owns(options: TorchOptions) -> frozenset[str]:
        """Torch's profiler, and the device's tracing where the device is recorded."""
        return frozenset({"kineto", "cupti"} if options.wants_device else {"kineto"})

    @staticmethod
    def available() -> Availability:
        """Whether torch is installed; it is not imported."""
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "torch is not installed", "pip install torch")
        version = importlib.metadata.version("torch")
        if tuple(int(word) for word in version.split(".")[:2]) < (2, 4):
            return Availability(False, f"torch {version} is too old", "pip install 'torch>=2.4'")
        return Availability(True)

    @staticmethod
    def advice(options: TorchOptions) -> list[str]:
        """What is known to surprise users of these options."""
        found = []
        if options.on_swap_tensors == "drop" and (options.wants("shapes") or options.wants("stack")):
            found.append("shapes and stack are dropped where tensors are swapped (FSDP2, offload); see on_swap_tensors")
        return found

    @staticmethod
    def launch(options: TorchOptions, context: Context) -> Launch:
        """Keep CUPTI free for torch where the device is recorded."""
        if not options.wants_device:
            return Launch()
        env, warning = before_start(os.environ)
        if warning:
            context.logger.warning(warning)
        return Launch(env=env)

    def __init__(self, context: Context, options: TorchOptions) -> None:
        self.context = context
        self.options = options
        # Torch binds its callbacks to the thread that starts it; a stop elsewhere would lose all, or the process.
        self.thread_bound = not options.all_threads
        self._labels = Labels()
        self._budget = Budget(options)
        self._learned = 0
        self.over_budget = self._spent if self._budget else None
        self._recorder: Recorder | None = None
        self._profile_arguments: dict[str, Any] = {}
        self._contents: tuple[str, ...] = ()
        self._torch: Any = None
        self._device = ""

    @hookimpl
    def start(self, window: Window) -> None:
        """Begin a capture, unless somebody else's torch profiler runs."""
        torch = self._import()
        if foreign_active(torch):
            reason = "another torch profiler is already running in this process; it is left alone"
            self.context.store.missing(window, reason)
            self.context.logger.warning("this window is not captured", step=window.step, reason=reason)
            return
        self._without_swapping(torch)
        for artifact in self.context.store.artifacts[self._learned :]:
            self._budget.learn(dict(artifact.facts) | {"events": artifact.events})
            self._learned += 1
        recorder = Recorder(
            window,
            self.context,
            self.options,
            new_capture=self._new_capture,
            functions=range_functions(torch),
            labels=self._labels,
            describe=self._describe,
            device=(self._device, suspects(os.environ) if self._device == "cuda" else []),
            budget=self._budget,
        )
        recorder.start()
        self._recorder = recorder

    @hookimpl
    def step(self, window: Window, span: Span | None) -> None:  # noqa: ARG002
        """Walk the schedule."""
        if self._recorder is not None:
            self._recorder.step(span)

    @hookimpl
    def annotate(self, span: Span) -> AbstractContextManager[object] | None:
        """The row of a span."""
        return None if self._recorder is None else self._recorder.row(span)

    @hookimpl
    def stop(self, window: Window) -> None:
        """Save the raw trace; the rest happens in the helper process."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.window = window
            recorder.stop()

    def _spent(self) -> str | None:
        """Core asks at span and step boundaries whether the window should end, and why."""
        return self._recorder.spent() if self._recorder is not None else None

    def _import(self) -> Any:
        if self._torch is None:
            import torch

            self._torch = torch
            self._profile_arguments = self._arguments(torch)
            found = suspects(os.environ) if self._device == "cuda" else []
            if found:
                self.context.logger.warning(
                    "device events may be missing: another tool may have CUPTI, which serves one in a process",
                    found=found,
                    way_out="start with `rankscope launch`, or unset it",
                )
            if not foreign_active(torch):
                warm_up(torch)
        return self._torch

    def _new_capture(self) -> Capture:
        profile = self._torch.profiler._KinetoProfile(**self._profile_arguments)  # noqa: SLF001 - documented by torch
        return Capture(profile, self._torch, all_threads=self.options.all_threads)

    def _arguments(self, torch: Any) -> dict[str, Any]:
        options = self.options
        activities = [torch.profiler.ProfilerActivity.CPU]
        contents = ["cpu"]
        device = _device_activity(torch)
        if options.wants_device and device is not None:
            activities.append(device[0])
            contents.append(device[1])
            self._device = device[1]
        elif options.wants("cuda") or options.wants("device"):
            self.context.logger.info("no accelerator is present: only the CPU is recorded")
        # trace_only: torch makes no Python events, which nobody looks at here; stacks cannot do without them.
        experimental, unknown = experimental_config(
            torch, profile_all_threads=options.all_threads, trace_only=not options.wants("stack")
        )
        if "profile_all_threads" in unknown:
            self.context.logger.warning("this torch has no all_threads: it is off", torch=str(torch.__version__))
            self.options = dataclasses.replace(options, all_threads=False)
            self.thread_bound = True
        if options.all_threads and options.wants("memory"):
            self.context.logger.warning("with all_threads torch records no allocator events: memory will be empty")
        contents += [name for name in ("memory", "shapes", "stack", "flops") if options.wants(name)]
        self._contents = tuple(contents)
        arguments: dict[str, Any] = {
            "activities": activities,
            "record_shapes": options.wants("shapes"),
            "profile_memory": options.wants("memory"),
            "with_stack": options.wants("stack"),
            "with_flops": options.wants("flops"),
        }
        if experimental is not None:
            arguments["experimental_config"] = experimental
        return arguments

    def _without_swapping(self, torch: Any) -> None:
        """Shapes and stacks hold references to tensors, and tensors that are referred to cannot be swapped."""
        arguments = self._profile_arguments
        asked = [name for name in ("record_shapes", "with_stack") if arguments.get(name)]
        if not asked or self.options.on_swap_tensors == "keep":
            return
        why = _swapping(torch)
        if why:
            for name in asked:
                arguments[name] = False
            self._contents = tuple(name for name in self._contents if name not in {"shapes", "stack"})
            self.context.logger.warning(
                "shapes and stack are not recorded: they would make a swap of tensors fail; "
                "on_swap_tensors: keep records them all the same",
                reason=why,
            )

    def _describe(self, window: Window) -> dict[str, Any]:
        return {
            **self.context.about(window),
            "contents": list(self._contents),
            "options": dataclasses.asdict(self.options),
            "versions": {
                "torch": str(self._torch.__version__),
                "rankscope": _version("rankscope"),
                "rankscope-torch": _version("rankscope-torch"),
            },
        }


@functools.cache
def _version(distribution: str) -> str:
    """Reading it costs a millisecond or two, in which the training waits."""
    return importlib.metadata.version(distribution)


def _device_activity(torch: Any) -> tuple[Any, str] | None:
    """The activity of the accelerator that is present, and its name; asks torch and makes no device context."""
    activity = torch.profiler.ProfilerActivity
    supported = torch.profiler.supported_activities()
    for name, module in _DEVICES:
        kind = getattr(activity, name, None)
        if kind in supported and _present(getattr(torch, module, None)):
            return kind, module
    kind = getattr(activity, "PrivateUse1", None)
    if kind is not None and kind in supported:
        module = torch._C._get_privateuse1_backend_name()  # noqa: SLF001
        if _present(getattr(torch, module, None)):
            return kind, module
    return None


def _present(module: Any) -> bool:
    is_available = getattr(module, "is_available", None)
    return bool(is_available is not None and is_available())


def _swapping(torch: Any) -> str:
    """Why tensors may be swapped in this process, or an empty text."""
    future = getattr(torch, "__future__", None)
    swap = getattr(future, "get_swap_module_params_on_conversion", None)
    if swap is not None and swap():
        return "torch.__future__.set_swap_module_params_on_conversion(True) is in effect"
    import sys

    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if sharded is not None and sharded.__subclasses__():
        return "FSDP2 (fully_shard) is in use, whose offload swaps tensors"
    return ""
