"""What an engine is asked to record, worked out from the rollout section's tool options."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Kind = Literal["torch", "cuda", "memory"]
"""What the engine does: run its torch profiler (on an NPU: torch_npu's), switch the CUDA profiler API on and off for
nsys, or record the allocator's history."""

PREFIX = re.compile(r"rankscope-(?:step(?P<step>-?\d+)|window)-[0-9a-f]{8}(?=[-_.])", re.ASCII)
"""What the names of a window's files begin with, where the engine takes a prefix."""

_CPU = frozenset({"cpu"})
_DEVICES = frozenset({"cuda", "device", "npu"})
_UNDERSTOOD = frozenset({"contents", "discrete", "name", "profile_token_start", "profile_token_end"})


def make_prefix(step: int | None) -> str:
    """A prefix that no other window has, in this run or another."""
    return f"rankscope-{'window' if step is None else f'step{step}'}-{secrets.token_hex(4)}"


def prefix_of(name: str) -> str:
    """The prefix that a file name begins with, or an empty text."""
    match = PREFIX.match(name)
    return match[0] if match else ""


def prefix_step(prefix: str) -> int | None:
    """The training step that a prefix names."""
    match = PREFIX.match(f"{prefix}-")
    return int(match["step"]) if match and match["step"] else None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What one replica shall record in one window.

    Attributes:
        tool: the tool of the config.
        kind: what it means for an engine.
        directory: where the engine writes.
        cpu, device: what is recorded; both unless the contents name only one. The CPU is always recorded.
        stack, shapes, memory, flops: more of it.
        token_start, token_end: the token window, or None.
        prefix: begins the names of this window's files, where the engine can do that; empty before a window.
        forward_count: forward passes that the engine has made in its life, or None.
        ignored: options of the rollout section that no engine knows.
    """

    tool: str
    kind: Kind
    directory: str
    cpu: bool = True
    device: bool = True
    stack: bool = False
    shapes: bool = False
    memory: bool = False
    flops: bool = False
    token_start: int | None = None
    token_end: int | None = None
    prefix: str = ""
    forward_count: int | None = None
    ignored: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """The first counted iteration; 0 when none was given."""
        return self.token_start or 0

    @property
    def length(self) -> int | None:
        """How many iterations are counted from there; None for no end."""
        return None if self.token_end is None else self.token_end - self.start

    @property
    def limited(self) -> bool:
        """Whether the engine ends the window by itself."""
        return self.token_end is not None


def wanted(tool: str, kind: Kind, options: Mapping[str, Any], own: Iterable[str], directory: str) -> Wanted:
    """Read a tool's options for an engine.

    Args:
        tool: its name.
        kind: what it means for an engine.
        options: all options of the role, also inherited ones.
        own: names of the options that the rollout section sets itself: those of them that no engine knows are named.
        directory: where the engine shall write.
    """
    contents = frozenset(options.get("contents") or ())
    every = "all" in contents
    return Wanted(
        tool=tool,
        kind=kind,
        directory=directory,
        device=not contents or every or bool(contents & _DEVICES) or not contents & _CPU,
        stack=every or bool(contents & {"stack", "module"}),
        shapes=every or "shapes" in contents,
        memory=every or "memory" in contents,
        flops="flops" in contents or (every and tool != "npu"),
        token_start=options.get("profile_token_start"),
        token_end=options.get("profile_token_end"),
        ignored=tuple(sorted(set(own) - _UNDERSTOOD)),
    )
