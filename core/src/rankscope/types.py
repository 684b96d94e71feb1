"""The facts that core hands to backends. All are made by core only, so a new field breaks nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rankscope.errors import error_text

if TYPE_CHECKING:
    from rankscope.artifacts.store import Store

SpanKind = Literal["sync", "async", "generator", "async_generator", "with"]
"""How a span came about: a call of a decorated function of that sort, or a ``with annotate(...)``."""

WindowReason = Literal["step", "stage", "manual"]
"""Why a window exists: the controller's step, a stage in discrete mode, or a ``start()`` without a step."""


class Logger(Protocol):
    """What a backend may log with: an event in words, facts as keywords."""

    def debug(self, event: str, **facts: Any) -> Any:
        """Log at this level."""

    def info(self, event: str, **facts: Any) -> Any:
        """Log at this level."""

    def warning(self, event: str, **facts: Any) -> Any:
        """Log at this level."""

    def error(self, event: str, **facts: Any) -> Any:
        """Log at this level."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What never changes for one tool of one role in one process, and the services a backend may use.

    Attributes:
        tool: name of the backend, as in the config.
        role: what this worker is for; ``actor-rollout-ref`` for a colocated worker.
        rank: global rank of this process.
        world_size: number of ranks, or None when nobody knows it.
        topology: rank in each parallel dimension of this process, e.g. ``{"tp": 0, "pp": 1}``; only known ones.
        host: host name.
        pid: process id.
        save_path: absolute directory where this tool's artifacts end up.
        run_id: the same for all processes of one run where a launcher says so, else unique to this process.
        store: reserves names and publishes files.
        logger: rankscope's logger with tool, role and rank bound to it.
        clock: nanoseconds since the epoch; replaced by tests.
        steps: the training steps that the config profiles, ascending, as far as the run's last step is known.
        continuous: whether neighbouring steps share a window (``profile_continuous_steps``).
    """

    tool: str
    role: str
    rank: int
    world_size: int | None
    topology: Mapping[str, int]
    host: str
    pid: int
    save_path: Path
    run_id: str
    store: Store
    logger: Logger
    clock: Callable[[], int]
    steps: tuple[int, ...] = ()
    continuous: bool = False

    def about(self, window: Window) -> dict[str, Any]:
        """What a file should say of where it comes from, as plain data."""
        return {
            **({"ended_early": window.ended} if window.ended else {}),
            "tool": self.tool,
            "role": window.role,
            "rank": self.rank,
            "world_size": self.world_size,
            "topology": dict(self.topology),
            "step": window.step,
            "steps": list(window.steps),
            "scope": window.scope,
            "window": window.id,
            "reason": window.reason,
            "host": self.host,
            "pid": self.pid,
            "run_id": self.run_id,
        }


@dataclasses.dataclass(frozen=True)
class Window:
    """From ``start`` to ``stop`` in one process: the stretch that is captured.

    Attributes:
        id: unique in this process, counted from 1.
        role: role of the handle that opened it.
        step: the training step in which it was opened; None when nobody said.
        steps: all steps that it may cover (more than one only with ``profile_continuous_steps``).
        scope: ``train`` for a worker's whole step, else the stage that it covers.
        reason: why it exists.
        scheduled: whether a schedule over mini-batches applies: False in a stage that is not an update stage.
        started_ns: nanoseconds since the epoch.
        ended: why it ended before its stop, or empty; set in ``stop`` only.
    """

    id: int
    role: str
    step: int | None
    steps: tuple[int, ...]
    scope: str
    reason: WindowReason
    scheduled: bool = True
    started_ns: int = 0
    ended: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """One run of an annotated stage, or of a mini- or micro-batch.

    Attributes:
        stage: the label, exactly as the user wrote it.
        scheduled: whether a mini-batch schedule applies to this stage (the update stage of a role).
        kind: how the span came about.
        color, domain, category: for tools that show them (NVTX, mstx); others ignore them.
        instance: the object whose method runs, or None. A backend must not keep it.
        args, kwargs: the call's arguments (without the bound object). A backend must not keep them.
        parent: the span around this one in the same thread or task, or None.
        step: set only on the span that stands for a whole training step; core opens it in every window.
    """

    stage: str
    scheduled: bool = False
    kind: SpanKind = "with"
    color: str | None = None
    domain: str | None = None
    category: str | None = None
    instance: object | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parent: Span | None = None
    step: int | None = None

    @property
    def is_batch(self) -> bool:
        """Whether it is a mini- or micro-batch: a part of a stage, never a stage of its own."""
        return self.stage.startswith(("mini_batch", "micro_batch"))


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether a tool can work here.

    Attributes:
        available: yes or no.
        reason: why not, in words; or what will be missing although it works.
        hint: the command or setting that helps.
    """

    available: bool
    reason: str = ""
    hint: str = ""

    @property
    def why(self) -> str:
        """Reason and hint as one text."""
        return "; ".join(text for text in (self.reason, self.hint) if text)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a process needs before it starts, so that a tool can work in it.

    Attributes:
        env: environment variables to set.
        runtime_env: entries of a Ray ``runtime_env``.
        command_prefix: words to put before the command (``nsys profile …``).
    """

    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    command_prefix: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fault:
    """An exception of a backend that core contained.

    Attributes:
        tool: the backend that raised; from then on it is off in this process.
        hook: the hook in which it happened.
        step: the training step, or None.
        error: the exception itself. Its traceback is in log and ledger; only in strict mode it stays on the exception
            too, since it keeps alive all that the failing frames held.
    """

    tool: str
    hook: str
    step: int | None
    error: Exception

    def __str__(self) -> str:
        where = f" in step {self.step}" if self.step is not None else ""
        return f"{self.tool}.{self.hook} failed{where}: {error_text(self.error)}"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A file that a window left behind, whole and under its final name.

    Attributes:
        path: where it lies.
        tool, role, rank, step, scope: what it holds.
        bytes: its size.
        checksum: ``crc32:…`` or ``sha256:…`` of the file.
        events: number of events of what was asked, or None where the tool has no such count.
        facts: further facts of the tool (mini-batches, repairs, seconds blocked, seconds in background …).
    """

    path: Path
    tool: str
    role: str
    rank: int
    step: int | None
    scope: str
    bytes: int
    checksum: str = ""
    events: int | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
