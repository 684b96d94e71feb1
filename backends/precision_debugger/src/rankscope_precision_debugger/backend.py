"""PrecisionDebuggerBackend: the hooks."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from rankscope import Availability, Context, OptionError, Span, Window, hookimpl
from rankscope.errors import error_text, listing
from rankscope.ranges import compact
from rankscope_precision_debugger import stages
from rankscope_precision_debugger.dumps import Place, claim, look
from rankscope_precision_debugger.installed import COST, availability
from rankscope_precision_debugger.options import PrecisionDebuggerOptions
from rankscope_precision_debugger.probe import ProbeError, probe
from rankscope_precision_debugger.settings import Settings, plain_path

_by_role: weakref.WeakValueDictionary[str, PrecisionDebuggerBackend] = weakref.WeakValueDictionary()
"""The backends of this process: a window belongs to the role that opened it, a stage to the role that runs it."""


_said: set[tuple[str, str]] = set()
"""What this process was told already."""

_MOST_TOLD = 20
"""Stages that a window remembers in order to say why it is empty."""


class PrecisionDebuggerBackend:
    """Dumps what the model of a stage computes, with msprobe's PrecisionDebugger (mindstudio-probe 26.0 or newer)."""

    Options = PrecisionDebuggerOptions
    owns = frozenset({"msprobe"})
    viewer = "dump.json in the folder, or msprobe compare with the dump of another run"

    @staticmethod
    def planned(step: int, rank: int) -> str:
        """Where the dumps of a step will lie."""
        return f"step_{step}/*/step{step}/rank{rank}"

    @staticmethod
    def available() -> Availability:
        """Whether MindStudio's msprobe is installed; it is not imported."""
        return availability()

    @staticmethod
    def advice(options: PrecisionDebuggerOptions) -> list[str]:  # noqa: ARG004
        """What it costs."""
        return [COST]

    def __init__(self, context: Context, options: PrecisionDebuggerOptions) -> None:
        self.context = context
        self.options = options
        self.settings = options.settings()
        self._check()
        self._resolver = stages.load_resolver(options.resolve_model) if options.resolve_model else None
        self._window: Window | None = None
        self._step: int | None = None
        self._stage: _Stage | None = None
        self._thread = 0
        self._dumps = 0
        self._without: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()
        self._say_once()
        _by_role[context.role] = self

    @hookimpl
    def start(self, window: Window) -> None:
        """Get msprobe ready; stages start it."""
        self._window, self._step = window, window.step
        self._stage, self._dumps, self._without = None, 0, {}
        try:
            probe.load(self.context.logger)  # now: it takes seconds, which no stage should be charged with
        except ProbeError:
            if self.options.strict:
                raise
            # Each stage that should have been dumped says so.

    @hookimpl
    def annotate(self, span: Span) -> AbstractContextManager[object] | None:
        """Dump a stage that is wanted. A stage inside a dumped stage is part of that dump."""
        if span.step is not None:
            self._step = span.step
            return None
        if span.is_batch or probe.busy or self._window is None:
            return None
        backend = self._of(span)
        if backend is not None and backend.wants(span.stage):
            return self._open(backend, span)
        if len(self._without) < _MOST_TOLD:
            why = "is not one of them" if backend is not None else "belongs to a role that is not profiled here"
            self._without.setdefault(span.stage, why)
        return None

    @hookimpl
    def stop(self, window: Window) -> None:
        """See to it that msprobe is stopped, and say why there is no dump where there is none."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.end("" if window.ended else "the window was closed inside of the stage", ended=window.ended)
        self._window = None
        if self._dumps == 0:
            self.context.store.missing(window, self._why_nothing(), status="empty")

    # Stages.

    def wants(self, stage: str) -> bool:
        """Whether the options choose the stage; says once why one that could be meant is not chosen.

        Raises:
            ProbeError: strict, and nobody knows the stage.
        """
        if stage in stages.GENERATION:
            return False
        chosen = self.options.stages
        if chosen is not None:
            return stage in chosen
        if stage in stages.STAGES or stage in self.options.models:
            return True
        if stages.known(stage):
            self._once("a stage is not dumped unless stages names it", info=True, stage=stage)
            return False
        reason = "nobody knows this stage; name it in stages, and its model in models or by resolve_model"
        if self.options.strict:
            raise ProbeError(f"stage {stage!r}: {reason}")
        self._once("a stage is not dumped", stage=stage, reason=reason)
        return False

    def _of(self, span: Span) -> PrecisionDebuggerBackend | None:
        """The backend of the role whose worker runs the stage; None where this role is not profiled here."""
        try:
            handle = getattr(span.instance, "profiler", None)
            role, selected = getattr(handle, "role", None), getattr(handle, "selected", True)
        except Exception:  # noqa: BLE001 - a property of the user's object
            return self
        if selected is False:
            return None
        if role == self.context.role:
            return self
        return _by_role.get(role, self) if isinstance(role, str) else self

    def _open(self, backend: PrecisionDebuggerBackend, span: Span) -> _Stage | None:
        assert self._window is not None  # noqa: S101 - for the type checker
        window = dataclasses.replace(
            self._window,
            role=backend.context.role,
            step=self._step,
            steps=(self._step,) if self._step is not None else (),
            scope=span.stage,
        )
        try:
            model = stages.find_model(
                span.instance,
                span.stage,
                backend.context.role,
                resolver=backend._resolver,
                chosen=backend.options.attributes(span.stage),
            )
        except stages.NoModelError as error:
            if backend.settings.needs_model:
                self.failed(backend, window, "no model", f"no model was found: {error}", error)
                return None
            model = None
        return _Stage(self, backend, window, model)

    def opened(self, stage: _Stage) -> None:
        """A stage is being dumped."""
        self._stage = stage

    def closed(self, stage: _Stage, *, dumped: bool) -> None:
        """It no longer is."""
        if self._stage is stage:
            self._stage = None
        self._dumps += dumped

    def failed(
        self, backend: PrecisionDebuggerBackend, window: Window, cause: str, reason: str, error: Exception | None = None
    ) -> None:
        """A stage that was wanted is not dumped.

        Raises:
            ProbeError: strict.
        """
        self._without[window.scope] = reason
        self._dumps += 1  # what is to be said of the window is said here
        first = (window.scope, cause) not in backend._told
        backend._told.add((window.scope, cause))
        # The store logs what failed or was empty; the same cause again is written down only.
        status = "empty" if cause == "empty" else "failed"
        backend.context.store.missing(window, reason, status=status if first else "missing")
        if backend.options.strict:
            raise ProbeError(f"stage {window.scope!r}: {reason}") from error

    def _why_nothing(self) -> str:
        if not self._without:
            return "no stage ran while the window was open, so there was nothing to dump"
        seen = "; ".join(f"{stage} {reason}" for stage, reason in self._without.items())
        return f"none of the stages that are to be dumped ran while the window was open ({seen})"

    # What is said and checked before training.

    def _check(self) -> None:
        """Refuse what msprobe's own filters would silently leave out.

        Raises:
            OptionError: everything that contradicts the config.
        """
        settings, context = self.settings, self.context
        wrong: list[tuple[str, str]] = []
        if settings.ranks and context.rank not in settings.ranks:
            message = (
                f"ranks selects rank {context.rank} of {context.role}, yet {settings.file} excludes it: its rank is "
                f"{compact(settings.ranks)}. Empty that list, or let both select the same"
            )
            wrong.append(("config_path", message))
        left_out = [step for step in context.steps if step not in settings.steps]
        if settings.steps and left_out:
            message = (
                f"global_profiler.steps has {compact(left_out)}, yet {settings.file} excludes them: its step is "
                f"{compact(settings.steps)}. Empty that list, or let both name the same"
            )
            wrong.append(("config_path", message))
        if not plain_path(context.save_path):
            message = (
                "msprobe writes only to paths of letters, digits and _ . : / -, and save_path is "
                f"{str(context.save_path)!r}"
            )
            wrong.append(("", message))
        if wrong:
            raise OptionError(wrong)

    def _say_once(self) -> None:
        options, settings = self.options, self.settings
        if options.steps is not None:
            self._once("steps of precision_debugger has no effect; global_profiler.steps says which are profiled")
        never = [stage for stage in options.stages or () if stage in stages.GENERATION]
        if never:
            self._once("stages of rollout generation are never dumped", stages=listing(never))
        for stage, hint in options.unknown_stages.items():
            self._once(f"nobody knows the stage {stage!r}; it is dumped if one of that name runs.{hint}")
        if not settings.file:
            self._once("msprobe's own config file is used", info=True, task=settings.task, msprobe_level=settings.level)
        elif settings.dump_path:
            self._once(
                "dump_path of msprobe's config file is not used: dumps go below the save path",
                info=True,
                dump_path=settings.dump_path,
                save_path=str(self.context.save_path),
            )

    def _once(self, event: str, *, info: bool = False, **facts: Any) -> None:
        """Say it once in this process, which may hold many roles with the same options."""
        said = (event, repr(facts))
        if said not in _said:
            _said.add(said)
            (self.context.logger.info if info else self.context.logger.warning)(event, **facts)


class _Stage:
    """Context manager around one stage that is dumped.

    Args:
        owner: the backend whose window is open.
        backend: the one whose role runs the stage: its options count.
        window: the stretch that the dump covers.
        model: what msprobe gets; let go as soon as it has it.
    """

    def __init__(self, owner: PrecisionDebuggerBackend, backend: PrecisionDebuggerBackend, window: Window, model: Any):
        self.owner = owner
        self.backend = backend
        self.window = window
        self._model = model
        self._chunks = len(model) if isinstance(model, list) else int(model is not None)
        self._place: Place | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        model, self._model = self._model, None
        if not probe.claim(self):
            return  # another thread was faster: part of its dump
        context = self.backend.context
        try:
            place = claim(context.save_path, self.window.step, self.window.scope, context.rank)
            self._place = place
            self.owner.opened(self)  # before it starts: a Ctrl-C in between must not leave it running
            probe.start(self.backend.settings, place, model, context.rank, context.logger)
        except Exception as error:  # noqa: BLE001 - told, and raised where that is asked for
            self._give_up()
            self.owner.failed(self.backend, self.window, "start", _text(error), error)
        except BaseException:
            self._give_up()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(f"the stage raised {type(error).__name__}" if error is not None else "")

    def end(self, why_early: str, *, ended: str = "") -> None:
        """Stop msprobe and hand over the dump; once.

        Args:
            why_early: why the dump ends before the stage does, or empty.
            ended: why core ended the window early, or empty.
        """
        with self._lock:
            self.window = dataclasses.replace(self.window, ended=ended)
            place, self._place = self._place, None
            if place is None:
                return
            try:
                self._finish(place, why_early)
            finally:
                probe.release(self)

    def _finish(self, place: Place, why_early: str) -> None:
        backend, window, settings = self.backend, self.window, self.backend.settings
        try:
            probe.stop()
            found = look(place, settings)
        except (ProbeError, OSError) as error:
            self.owner.closed(self, dumped=False)
            reason = f"{_text(error)}; what came of it lies in {place.set_aside()}"
            self.owner.failed(backend, window, "stop", reason, error)
            return
        if found.entries == 0:
            place.drop()
            self.owner.closed(self, dumped=False)
            self.owner.failed(backend, window, "empty", _why_empty(settings, why_early))
            return
        self.owner.closed(self, dumped=True)
        backend.context.store.keep(
            place.folder,
            window,
            events=found.entries,
            task=settings.task,
            level=settings.level,
            files=found.files,
            tensors=found.tensors,
            run=place.run,
            chunks=self._chunks,
            **({"warnings": [f"{why_early}: the dump ends there"]} if why_early else {}),
        )

    def _give_up(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.drop()
        self.owner.closed(self, dumped=False)
        probe.release(self)


def _why_empty(settings: Settings, why_early: str) -> str:
    if why_early:
        return f"the dump is empty: {why_early}"
    if settings.level == "debug":
        return "the dump is empty: the stage saved nothing with PrecisionDebugger.save"
    what = {"L0": "no layer of its model", "mix": "neither a layer of its model nor an operator"}
    return (
        f"the dump is empty: the stage ran {what.get(settings.level, 'no operator')} that msprobe's config lets through"
    )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ProbeError) else error_text(error)
