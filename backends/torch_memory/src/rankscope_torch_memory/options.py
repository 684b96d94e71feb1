"""What ``tool_config.torch_memory`` may hold."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Optional

from rankscope import OptionError

CONTEXTS = ("all", "alloc", "state", "none")
STACKS = ("python", "all")

_OWN = {
    "enabled": "history",
    "max_entries": "trace_alloc_max_entries",
    "trace_alloc_max_entries": "trace_alloc_max_entries",
    "clear_history": "",
}
"""Arguments of torch that another option sets, or that the backend needs for itself."""


@dataclasses.dataclass(frozen=True)
class TorchMemoryOptions:
    """Options of the torch_memory backend.

    Attributes:
        trace_alloc_max_entries: how many events the history of a device holds; older ones are dropped.
        context: which events get a stack: ``all``, ``alloc`` (not those that free), ``state`` (only what is allocated),
            or ``none``.
        stacks: ``python``, or ``all`` for C++ frames too, which can make a snapshot take minutes.
        stack_depth: frames of a stack. torch 2.13 and 2.14 do not take it; it is passed on where one does, else
            reported.
        memory_snapshot_num_steps: one file for so many profiled steps; the rest at the end makes a file of its own.
        history: false leaves out the events: the file holds what is allocated at the end of the window, with stacks.
        from_init: record from the moment the process uses the device, not from the first profiled step, so that the
            model's own memory has stacks too.
        discrete: a file for each stage instead of one for the whole step.
        stages: note the running stage in each event, where this torch can (``_set_memory_metadata``).
        oom: when the device runs out of memory in a window, save a snapshot and a table of what took it.
        oom_max_dumps: at most so many of them in a process.
        oom_outside_steps: save them outside of windows too. Stacks of live memory are then recorded in the whole run.
        oom_top: stacks in that table.
        kw_args: further arguments for torch's ``_record_memory_history``; those that it does not take are reported.
    """

    trace_alloc_max_entries: int = 100_000
    context: str = "all"
    stacks: str = "python"
    stack_depth: Optional[int] = None  # noqa: UP045 - OmegaConf reads this annotation on Python 3.10
    memory_snapshot_num_steps: int = 1
    history: bool = True
    from_init: bool = False
    discrete: bool = False
    stages: bool = False
    oom: bool = True
    oom_max_dumps: int = 2
    oom_outside_steps: bool = False
    oom_top: int = 20
    kw_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from rankscope.errors import did_you_mean

        wrong: list[tuple[str, str]] = []
        for name, choices in (("context", CONTEXTS), ("stacks", STACKS)):
            value = getattr(self, name)
            if value not in choices:
                hint = did_you_mean(value, choices)
                wrong.append((name, f"has no choice {value!r}; choices: {', '.join(choices)}.{hint}"))
        for name in (
            "trace_alloc_max_entries",
            "stack_depth",
            "memory_snapshot_num_steps",
            "oom_max_dumps",
            "oom_top",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                wrong.append((name, f"must be 1 or more, got {value}"))
        for name in self.kw_args:
            if name in _OWN:
                way = f"set {_OWN[name]} instead" if _OWN[name] else "it is the backend's own"
                wrong.append(("kw_args", f"must not hold {name!r}: {way}"))
        if self.oom_outside_steps and not self.oom:
            wrong.append(("oom_outside_steps", "needs oom: true"))
        if wrong:
            raise OptionError(wrong)
