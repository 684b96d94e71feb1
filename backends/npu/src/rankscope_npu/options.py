"""What ``tool_config.npu`` may hold."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Optional

from rankscope import OptionError, ScheduleOptions, check_choices, check_token_window

CONTENTS: tuple[str, ...] = ("npu", "cpu", "memory", "shapes", "module", "stack", "flops")
"""What can be recorded."""

LEVELS: dict[str, str] = {
    "none": "Level_none",
    "level0": "Level0",
    "level1": "Level1",
    "level2": "Level2",
}
"""Each level and what ``torch_npu.profiler.ProfilerLevel`` calls it."""

_LEVEL_ALIASES = {"0": "level0", "1": "level1", "2": "level2", "level_none": "none"}

METRICS: tuple[str, ...] = (
    "AiCoreNone",
    "PipeUtilization",
    "ArithmeticUtilization",
    "Memory",
    "MemoryL0",
    "MemoryUB",
    "ResourceConflictRatio",
    "L2Cache",
    "MemoryAccess",
)
"""Names of ``torch_npu.profiler.AiCMetrics``."""

EXPORTS: tuple[str, ...] = ("db", "text")

HOST_SYSTEM: tuple[str, ...] = ("cpu", "mem", "disk", "network", "osrt", "numa")
"""Values of ``torch_npu.profiler.HostSystem``."""


@dataclasses.dataclass(frozen=True)
class NpuOptions:
    """Options of the npu backend; most are those of ``torch_npu.profiler`` (torch_npu 2.13.0).

    Attributes:
        contents: any of npu, cpu, memory, shapes, module, stack, flops, or all; empty means npu and cpu. The CPU is
            always recorded, since operators are found through it. ``all`` leaves out flops, for which torch_npu patches
            functions of other modules while it records.
        level: how much the device tells: none (only mstx ranges), level0, level1 or level2; also 0, 1, 2.
        discrete: a folder for each stage instead of one for the whole step.
        analysis: also parse each capture, in a process of its own after it was saved; without it ``rankscope analyse``
            does that later.
        analysis_timeout: seconds after which the analysis of one capture is given up; the raw data is kept.
        export_type: what the analysis writes: db, text, or both.
        schedule: record only some mini-batches of the update stage.
        step_rows: also write one ``ProfilerStep#<step>`` row per training step, by which MindStudio splits a capture.
        aic_metrics: what the AI cores count, by its name in ``AiCMetrics``; by default PipeUtilization at level1 and
            level2. The lower levels have none.
        mstx: show annotated stages as mstx ranges.
        mstx_domain_include: record only mstx ranges of these domains; ranges without a domain have ``default``.
        mstx_domain_exclude: record no mstx ranges of these domains; no effect beside ``mstx_domain_include``.
        data_simplification: let the analysis remove intermediate data.
        l2_cache: count hits of the L2 cache.
        record_op_args: record the arguments of operators.
        op_attr: record the attributes of operators; needs export_type db.
        gc_detect_threshold: record runs of Python's garbage collector that take at least so many milliseconds; null
            records none.
        host_sys: what the host tells of itself: any of cpu, mem, disk, network, osrt, numa.
        sys_io: record network and RoCE traffic.
        sys_interconnection: record PCIe and HCCS traffic.
        profile_token_start, profile_token_end: token window of a rollout engine; no effect in a training process.
    """

    contents: tuple[str, ...] = ()
    level: str = "level0"
    discrete: bool = False
    analysis: bool = False
    analysis_timeout: float = 1800.0
    export_type: tuple[str, ...] = ("db",)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    step_rows: bool = False
    aic_metrics: Optional[str] = None  # noqa: UP045 - OmegaConf reads this annotation on Python 3.10
    mstx: bool = True
    mstx_domain_include: tuple[str, ...] = ()
    mstx_domain_exclude: tuple[str, ...] = ("communication",)
    data_simplification: bool = True
    l2_cache: bool = False
    record_op_args: bool = False
    op_attr: bool = False
    gc_detect_threshold: Optional[float] = None  # noqa: UP045 - as above
    host_sys: tuple[str, ...] = ()
    sys_io: bool = False
    sys_interconnection: bool = False
    profile_token_start: Optional[int] = None  # noqa: UP045 - as above
    profile_token_end: Optional[int] = None  # noqa: UP045 - as above

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", _LEVEL_ALIASES.get(self.level, self.level))
        # torch_npu replaces a value that it does not like by a default, so everything is checked here.
        wrong = [
            *check_choices("contents", self.contents, (*CONTENTS, "all")),
            *check_choices("level", (self.level,), LEVELS, also=" (or 0, 1, 2)"),
            *check_choices("export_type", self.export_type, EXPORTS),
            *check_choices("host_sys", self.host_sys, HOST_SYSTEM),
            *check_choices("aic_metrics", () if self.aic_metrics is None else (self.aic_metrics,), METRICS),
            *check_token_window(self.profile_token_start, self.profile_token_end),
        ]
        if not self.export_type:
            wrong.append(("export_type", f"is empty; choices: {', '.join(EXPORTS)}"))
        if self.aic_metrics not in {None, "AiCoreNone"} and self.level in {"none", "level0"}:
            wrong.append(("aic_metrics", f"needs level level1 or level2; the level is {self.level!r}"))
        if self.op_attr and "db" not in self.export_type:
            wrong.append(("op_attr", "needs export_type db"))
        if self.level == "none" and not self.mstx:
            wrong.append(("mstx", "must be true with level none, which records nothing but mstx ranges"))
        if self.analysis_timeout <= 0:
            wrong.append(("analysis_timeout", f"must be greater than 0, got {self.analysis_timeout}"))
        if self.gc_detect_threshold is not None and self.gc_detect_threshold < 0:
            wrong.append(("gc_detect_threshold", f"must be 0 or more, or null; got {self.gc_detect_threshold}"))
        if wrong:
            raise OptionError(wrong)

    def wants(self, name: str) -> bool:
        """Whether a content is asked for by name or by ``all``."""
        return name in self.contents or ("all" in self.contents and name != "flops")

    @property
    def wants_device(self) -> bool:
        """Whether the NPU is to be recorded."""
        return not self.contents or self.wants("npu")

    @property
    def metrics(self) -> str:
        """The name of the metrics in ``AiCMetrics``, whether asked for or by default."""
        if self.level in {"none", "level0"}:
            return "AiCoreNone"
        return self.aic_metrics or "PipeUtilization"

    @property
    def domains(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Domains to include and to exclude: torch_npu takes one of them."""
        return self.mstx_domain_include, () if self.mstx_domain_include else self.mstx_domain_exclude
