"""TorchMemoryBackend: the hooks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from rankscope import Artifact, Availability, Context, Span, Window, hookimpl
from rankscope.errors import error_text
from rankscope.log import first_time
from rankscope_torch_memory.allocator import Allocator, find
from rankscope_torch_memory.finishing import EMPTY, described, is_empty
from rankscope_torch_memory.oom import Guard, guard
from rankscope_torch_memory.options import TorchMemoryOptions
from rankscope_torch_memory.recording import NO_DEVICE, Recording, recording
from rankscope_torch_memory.writing import write

SUFFIX = ".pickle"

_NOT_USED = "this process does not use the device yet: there is nothing to show"


class TorchMemoryBackend:
    """Records the history of the device's memory allocator; leaves a snapshot for each window (torch 2.4 or newer)."""

    Options = TorchMemoryOptions
    owns = frozenset({"allocator_history"})
    suffix = SUFFIX
    viewer = "rankscope memory FILE, or drop it on https://pytorch.org/memory_viz"

    @staticmethod
    def available() -> Availability:
        """Whether torch is installed, and whether it has a device to show; imports nothing and wakes no device."""
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "torch is not installed", "pip install torch")
        version = importlib.metadata.version("torch")
        if tuple(int(word) for word in version.split(".")[:2]) < (2, 4):
            return Availability(False, f"torch {version} is too old", "pip install 'torch>=2.4'")
        if _surely_without_device(version):
            first_time(_NO_DEVICE_TOLD)
            return Availability(True, NO_DEVICE)
        return Availability(True)

    def __init__(self, context: Context, options: TorchMemoryOptions) -> None:
        self.context = context
        self.options = options
        self._window: Window | None = None
        self._watch = _Watch(self)
        if options.discrete and options.memory_snapshot_num_steps > 1:
            context.logger.warning("memory_snapshot_num_steps has no effect: with discrete each stage has its file")
        if options.from_init or options.oom_outside_steps:
            self._begin_early()

    # The hooks.

    @hookimpl
    def start(self, window: Window) -> None:
        """Record from now on, or from the moment at which the process uses its device."""
        self._window = window
        state = recording()
        state.search_again()
        allocator = state.allocator()
        if allocator is None:
            if first_time(_NO_DEVICE_TOLD):
                self.context.logger.warning(NO_DEVICE)
            return
        if self.options.oom:
            self._guard.begin(self)
        mode = self._mode_in_window
        if mode == state.mode == "all" and not state.kept and (state.saved or not self.options.from_init):
            state.clear(self.options, self.context.logger)
        state.switch(mode, self.options, self.context.logger)
        self._attach(allocator)

    @hookimpl
    def annotate(self, span: Span) -> AbstractContextManager[object] | None:
        """Watch for an exception that says that memory ran out; name the stage in the events where that was asked."""
        state = recording()
        if state.waiting:
            state.settle()
        allocator = state.allocator()
        if allocator is None:
            return None
        if self.options.stages and not span.is_batch and span.step is None and state.ready:
            if allocator.offers_labels:
                return _Stage(self, allocator, span.stage)
            if first_time(("torch_memory", "stages")):
                self.context.logger.warning("this torch cannot honour stages: events carry no text of ours")
        return self._watch if self.options.oom else None

    @hookimpl
    def stop(self, window: Window) -> None:
        """Save a snapshot, once enough steps are in it; switch off after the last profiled step."""
        self.look(sys.exc_info()[1])
        self._window = None
        self._guard.inside = None
        state = recording()
        allocator = state.allocator()
        if allocator is None or not allocator.initialised:
            self._nothing(window, NO_DEVICE if allocator is None else _NOT_USED)
            return
        state.settle()
        if self._is_due(state, window):
            self._save(state, allocator, window)
        else:
            state.kept.append(window)
            self._kept(window, "exporting", "is kept for the file of a later step")
            return
        if self._is_last(window):
            state.switch(self._mode_outside, self.options, self.context.logger)
        else:
            state.clear(self.options, self.context.logger)

    @hookimpl
    def finish(self, artifacts: Sequence[Artifact]) -> None:  # noqa: ARG002
        """Save what was kept for a later step that never came, and record windows no more."""
        state = recording()
        allocator = state.allocator()
        if allocator is None:
            return
        if state.kept and allocator.initialised:
            self._save(state, allocator, state.kept.pop(), at_once=True)
        state.switch(self._mode_outside, self.options, self.context.logger)

    # When.

    @property
    def _mode_in_window(self) -> str:
        if self.options.history:
            return "all"
        return "off" if self.options.context == "none" else "state"

    @property
    def _mode_outside(self) -> str:
        return "state" if self.options.oom_outside_steps and self.options.context != "none" else "off"

    def _is_last(self, window: Window) -> bool:
        """Whether no profiled step comes after it, as far as the config knows."""
        step = max(window.steps, default=window.step)
        return step is None or not any(later > step for later in self.context.steps)

    def _is_due(self, state: Recording, window: Window) -> bool:
        wanted = self.options.memory_snapshot_num_steps
        if window.reason == "stage" or wanted == 1 or window.scope.endswith("-aborted"):
            return True
        if self.context.steps and window.step is not None and self._is_last(window):
            return True
        windows = (*state.kept, window)
        return len(_covered(windows)) + sum(known.step is None for known in windows) >= wanted

    def _begin_early(self) -> None:
        """Record before the first window: from the moment at which the process uses its device."""
        state = recording()
        allocator = state.allocator()
        if allocator is None:
            return
        mode = self._mode_in_window if self.options.from_init else self._mode_outside
        state.switch(mode, self.options, self.context.logger)
        if state.waiting:
            self.context.logger.warning(
                "this torch does not tell when the process begins to use the device: recording begins with the first "
                "profiled step"
            )
        if self.options.oom_outside_steps:
            self._guard.outside = self
            self._attach(allocator)

    # Files.

    def _save(self, state: Recording, allocator: Allocator, window: Window, *, at_once: bool = False) -> None:
        """Write the snapshot; the helper process checks and publishes it."""
        began = time.monotonic()
        kept, state.kept = state.kept, []
        covered = _covered((*kept, window))
        held = self.options.trace_alloc_max_entries if state.mode == "all" else None
        facts: dict[str, Any] = {"steps": covered} if len(covered) > 1 else {}
        warnings = [state.why_not] if state.why_not else []
        store = self.context.store
        if not at_once and not store.admit(window):
            self._lost(kept, "the file of a later step was given up")
            return
        try:
            with store.reserve(window, suffix=SUFFIX) as file:
                snapshot = dict(allocator.snapshot(events=self.options.history))
                state.saved += 1
                snapshot["rankscope"] = {**self.facts(window, covered), **allocator.facts()}
                if at_once:
                    if is_empty(snapshot):
                        file.empty(EMPTY)
                    else:
                        write(snapshot, file.temporary)
                        facts.update(described(snapshot, held, warnings))
                        file.publish(**facts)
                else:
                    write(snapshot, file.staged)
                    facts["seconds_blocked"] = round(time.monotonic() - began, 4)
                    arguments = {"max_entries": held, "warnings": warnings}
                    file.finish_later("rankscope_torch_memory.finishing:finish", arguments, **facts)
                for known in kept:
                    self._kept(known, "joined", f"is in the file of step {window.step}: {file.final.name}")
        except Exception as error:  # noqa: BLE001 - the store has told it; the next window may well succeed
            self._lost(kept, f"the file of a later step failed: {error_text(error)}")

    def facts(self, window: Window, covered: Sequence[int]) -> dict[str, Any]:
        """What the file says about itself; plain containers only."""
        context = self.context
        return {
            "tool": context.tool,
            "role": window.role,
            "rank": context.rank,
            "world_size": context.world_size,
            "topology": dict(context.topology),
            "step": window.step,
            "steps": list(covered),
            "scope": window.scope,
            "host": context.host,
            "pid": context.pid,
            "run_id": context.run_id,
            "time_ns": context.clock(),
            "max_entries": self.options.trace_alloc_max_entries if recording().mode == "all" else None,
            "foreign_history": recording().foreign,
            "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
        }

    def _nothing(self, window: Window, reason: str) -> None:
        """The ledger hears of every window; the log of each reason once."""
        self._note(window, "empty", reason)
        if reason != NO_DEVICE and first_time(("torch_memory", reason)):
            self.context.logger.warning("a window left no snapshot", step=window.step, reason=reason)

    def _kept(self, window: Window, status: str, reason: str) -> None:
        self._note(window, status, reason, reserved=f"kept for later {window.id}")

    def _lost(self, windows: Sequence[Window], reason: str) -> None:
        for window in windows:
            self._kept(window, "failed", reason)

    def _note(self, window: Window, status: str, reason: str, **facts: Any) -> None:
        context = self.context
        context.store.ledger.write(
            "artifact",
            tool=context.tool,
            role=window.role,
            rank=context.rank,
            step=window.step,
            scope=window.scope,
            window=window.id,
            status=status,
            path=None,
            reason=reason,
            **facts,
        )

    def label(self, allocator: Allocator, text: str) -> str:
        """Let events carry this text from now on; the one that they carried before."""
        try:
            return allocator.label(text)
        except Exception as error:  # noqa: BLE001 - an allocator that was put in place of torch's may refuse
            if first_time(("torch_memory", "label")):
                self.context.logger.warning("stages: events cannot carry a text", reason=error_text(error))
            return ""

    # Out of memory.

    @property
    def _guard(self) -> Guard:
        return guard()

    def _attach(self, allocator: Allocator) -> None:
        if not self.options.oom:
            return
        if allocator.initialised:
            self._guard.attach(allocator, self.context)
        else:
            allocator.when_initialised(lambda: self._guard.attach(allocator, self.context))

    def look(self, error: BaseException | None) -> None:
        """An exception leaves a stage or a step of this process."""
        if error is not None and self.options.oom:
            self._guard.look(error, recording().allocator())

    def window_for_oom(self) -> Window:
        """The open window, or one that stands for none."""
        if self._window is not None:
            return self._window
        return Window(id=0, role=self.context.role, step=None, steps=(), scope="oom", reason="manual")

    def facts_for_oom(self, window: Window) -> dict[str, Any]:
        """What the file says about itself."""
        return self.facts(window, window.steps)


def _covered(windows: Sequence[Window]) -> list[int]:
    """The training steps that these windows cover."""
    return sorted({step for window in windows for step in (*window.steps, window.step) if step is not None})


class _Watch:
    """Around every span; one object for all of them, since it keeps nothing."""

    __slots__ = ("_backend",)

    def __init__(self, backend: TorchMemoryBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._backend.look(error)


class _Stage(_Watch):
    """Around a stage whose name the events shall carry."""

    __slots__ = ("_allocator", "_before", "_name")

    def __init__(self, backend: TorchMemoryBackend, allocator: Allocator, name: str) -> None:
        super().__init__(backend)
        self._allocator = allocator
        self._name = name
        self._before = ""

    def __enter__(self) -> None:
        self._before = self._backend.label(self._allocator, self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.label(self._allocator, self._before)
        super().__exit__(kind, error, trace)


_NO_DEVICE_TOLD = ("torch_memory", "no device")


def _surely_without_device(version: str) -> bool:
    """Whether torch has no device, as far as that can be known without importing it or waking a device."""
    if "torch" in sys.modules:
        return find(sys.modules["torch"]) is None
    return version.endswith("+cpu") and not importlib.metadata.entry_points(group="torch.backends")
