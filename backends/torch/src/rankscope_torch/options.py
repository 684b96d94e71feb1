"""What ``tool_config.torch`` may hold."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Optional

from rankscope import OptionError, ScheduleOptions, check_choices, check_token_window

CONTENTS: tuple[str, ...] = ("cpu", "cuda", "device", "memory", "shapes", "stack", "flops")
"""What can be recorded; ``cuda`` and ``device`` both mean the accelerator that torch reports."""

ON_SWAP = ("drop", "keep")


@dataclasses.dataclass(frozen=True)
class TorchOptions:
    """Options of the torch backend.

    Attributes:
        contents: any of cpu, cuda (or device), memory, shapes, stack, flops, or all; empty means cpu and the device
            that is present. The CPU is always recorded, since the stage rows live there.
        discrete: a file for each stage instead of one for the whole step.
        schedule: record only some mini-batches of the update stage.
        step_rows: also write one ``ProfilerStep#<step>`` row per training step, which HTA and TensorBoard look for.
        keep_stages: with a schedule, show the stages outside of the recorded mini-batches as rows too.
        all_threads: record operators and ranges of all threads, and allow a stop from any thread (an experimental
            option of torch; allocator events are then not recorded).
        on_swap_tensors: with shapes or stack, torch cannot swap tensors (FSDP2 offload, ``module.to`` by swapping):
            ``drop`` these contents where that is in use, or ``keep`` them.
        max_events: end a window early when it holds about so many events; the file is saved and says so.
        max_trace_mb: the same for the size of the uncompressed trace in MiB.
        max_host_mb: the same for the host memory in MiB that torch needs to stop the capture, many times what it needs
            to record it.
        compression: gzip level of the file, 1 (fast) to 9 (small).
        profile_token_start, profile_token_end: token window of a rollout engine; no effect in a training process.
    """

    contents: tuple[str, ...] = ()
    discrete: bool = False
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    step_rows: bool = False
    keep_stages: bool = True
    all_threads: bool = False
    on_swap_tensors: str = "drop"
    max_events: Optional[int] = None  # noqa: UP045 - OmegaConf reads this annotation on Python 3.10
    max_trace_mb: Optional[float] = None  # noqa: UP045 - as above
    max_host_mb: Optional[float] = None  # noqa: UP045 - as above
    compression: int = 8
    profile_token_start: Optional[int] = None  # noqa: UP045 - as above
    profile_token_end: Optional[int] = None  # noqa: UP045 - as above

    def __post_init__(self) -> None:
        wrong = check_choices("contents", self.contents, (*CONTENTS, "all"))
        wrong += check_choices("on_swap_tensors", (self.on_swap_tensors,), ON_SWAP)
        if not 1 <= self.compression <= 9:
            wrong.append(("compression", f"must be 1 to 9, got {self.compression}"))
        for name in ("max_events", "max_trace_mb", "max_host_mb"):
            limit = getattr(self, name)
            if limit is not None and limit <= 0:
                wrong.append((name, f"must be greater than 0, or null for no limit; got {limit}"))
        wrong += check_token_window(self.profile_token_start, self.profile_token_end)
        if wrong:
            raise OptionError(wrong)

    def wants(self, name: str) -> bool:
        """Whether a content is asked for by name or by ``all``."""
        return name in self.contents or "all" in self.contents

    @property
    def wants_device(self) -> bool:
        """Whether the accelerator is to be recorded where there is one."""
        return not self.contents or self.wants("cuda") or self.wants("device")
