"""What ``tool_config.nsys`` may hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Optional

from rankscope import OptionError
from rankscope.errors import did_you_mean
from rankscope_nsys.ends import parse_end
from rankscope_nsys.flags import LONG, SHORT, full_name, known_to_binary

CAPTURES = ("auto", "cuda", "nvtx")

PRESETS: Mapping[str, Mapping[str, str]] = {
    "light": {"trace": "cuda,nvtx"},
    "comm": {"trace": "cuda,nvtx,ucx,mpi"},
    "full": {
        "trace": "cuda,nvtx,osrt,cublas,cudnn,ucx",
        "cuda-memory-usage": "true",
        "cuda-graph-trace": "node",
    },
}

BASE: Mapping[str, str] = {"sample": "none", "cpuctxsw": "none", "wait": "primary", "kill": "none"}
"""Of every preset: no CPU sampling, which is dear and hangs on some virtual machines; nothing of ours is killed."""

CAPTURE_RANGES = ("cudaProfilerApi", "nvtx", "none")

_BLOCKS = ("controller_nsight_options", "worker_nsight_options")


@dataclasses.dataclass(frozen=True)
class NsysOptions:
    """Options of the nsys backend.

    Attributes:
        discrete: a report for each stage instead of one for the whole step.
        preset: what is traced: ``light`` (CUDA and ranges), ``comm`` (also UCX and MPI) or ``full``
            (also operating system calls, cuBLAS, cuDNN, GPU memory, CUDA graphs node by node).
        worker_nsight_options: options of ``nsys profile`` for the workers, on top of the preset: name without dashes
            -> value, e.g. ``{trace: "cuda,nvtx", gpu-metrics-devices: all}``. A value of null leaves the default.
        controller_nsight_options: the same for the process of the controller (role ``controller``), which is captured
            from start to end unless ``capture-range`` is set.
        capture: how a window switches the capture on: ``cuda`` (cudaProfilerStart), ``nvtx`` (a range), or ``auto``:
            ``cuda`` where there is a CUDA device.
        stages_per_step: in discrete mode, how many stages a step has: then nsys is told how many reports to expect, and
            writes them as soon as it has the last one.
        report_wait: seconds that the end of the run waits for reports that nsys still writes.
        reports: folder for the reports until they are whole; relative to ``save_path``. By default a hidden one there.
        nsys: the program, a name on ``PATH`` or a path.
    """

    discrete: bool = False
    preset: str = "light"
    worker_nsight_options: dict = field(default_factory=dict)  # type: ignore[type-arg] # OmegaConf reads this
    controller_nsight_options: dict = field(default_factory=dict)  # type: ignore[type-arg] # as above
    capture: str = "auto"
    stages_per_step: Optional[int] = None  # noqa: UP045 - OmegaConf reads this annotation on Python 3.10
    report_wait: float = 60.0
    reports: Optional[str] = None  # noqa: UP045 - as above
    nsys: str = "nsys"

    def __post_init__(self) -> None:
        wrong: list[tuple[str, str]] = []
        for name, choices in (("preset", tuple(PRESETS)), ("capture", CAPTURES)):
            value = getattr(self, name)
            if value not in choices:
                wrong.append(
                    (name, f"must be one of {', '.join(choices)}; got {value!r}.{did_you_mean(value, choices)}")
                )
        if self.stages_per_step is not None and self.stages_per_step < 1:
            wrong.append(("stages_per_step", f"must be 1 or more, or null; got {self.stages_per_step}"))
        if self.report_wait < 0:
            wrong.append(("report_wait", f"must be 0 or more seconds, got {self.report_wait:g}"))
        if not self.nsys.strip():
            wrong.append(("nsys", "must name a program"))
        for block in _BLOCKS:
            wrong += [(f"{block}.{key}", text) for key, text in _wrong_in(getattr(self, block), self.nsys)]
        if wrong:
            raise OptionError(wrong)

    def nsight_options(self, *, controller: bool) -> dict[str, str]:
        """The options of ``nsys profile`` by full name: the preset, and what was set on top of it."""
        given = self.controller_nsight_options if controller else self.worker_nsight_options
        set_by_user = {full_name(key): as_text(value) for key, value in given.items() if value is not None}
        return {**BASE, **PRESETS[self.preset], **set_by_user}


def as_text(value: Any) -> str:
    """A value as nsys reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wrong_in(block: Mapping[Any, Any], nsys: str) -> Iterator[tuple[str, str]]:
    seen: dict[str, str] = {}
    for key, value in block.items():
        name = full_name(str(key))
        text = _wrong_name(str(key), name, nsys) or _wrong_value(name, value)
        if text:
            yield str(key), text
        elif seen.setdefault(name, str(key)) != key:
            yield str(key), f"is given twice: {seen[name]!r} is the same option"


def _wrong_name(key: str, name: str, nsys: str) -> str:
    if key.startswith("-"):
        return f"write the name without dashes: {key.lstrip('-')!r}"
    if name in LONG or known_to_binary(name, nsys):
        return ""
    hint = did_you_mean(key, sorted({*LONG, *SHORT}))
    return f"`nsys profile` has no option {key!r}.{hint}"


def _wrong_value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        return f"must be a text, got {value!r}"
    text = as_text(value)
    if name == "capture-range" and text not in CAPTURE_RANGES:
        return f"must be one of {', '.join(CAPTURE_RANGES)}; got {text!r}.{did_you_mean(text, CAPTURE_RANGES)}"
    if name == "nvtx-capture":
        return "is set by rankscope, whose windows open that range; leave it out"
    if name == "capture-range-end" and parse_end(text) is None:
        return f"must be none, stop, stop-shutdown, repeat[:N] or repeat-shutdown:N; got {text!r}"
    return ""
