"""DistProfiler: one role's handle in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from rankscope import environment, registry, shutdown, windows
from rankscope.annotate import Function, Label
from rankscope.annotate import annotate as annotate_function
from rankscope.artifacts.exports import exports
from rankscope.artifacts.ledger import Ledger
from rankscope.artifacts.places import beside, elsewhere, staging
from rankscope.artifacts.store import Store
from rankscope.config import CommonOptions, Config, ConfigError, RoleConfig, load_config, tool_options
from rankscope.dispatch import FaultLog, Tool, bind
from rankscope.errors import FaultError, Problem
from rankscope.host import host_name
from rankscope.log import get_logger, make_ready
from rankscope.randomness import unchanged
from rankscope.ranges import compact
from rankscope.topology import detect, dimensions_for_name, run_id
from rankscope.types import Artifact, Context, Fault, Window

if TYPE_CHECKING:
    from typing_extensions import Self


_told: set[str] = set()
"""What this process has said already of its tools: what will be missing, and what is good to know."""

_PATIENCE = 2.0
"""Seconds that the end of a handle waits for a thread that has to stop a window."""


class DistProfiler:
    """Profiles one role in one process, as the config says; a no-op where it says no.

    Several handles may live in one process (colocated roles): a tool is open there once, the first that starts it owns
    the window, the others join it. A run that is not profiled, or a rank that is not selected, imports no backend.

    Example::

        with DistProfiler("profile.yaml", role="actor", rank=rank, world_size=world_size) as profiler:
            profiler.start(step=3)
            train(3)
            profiler.stop(last=True)

    Which steps are profiled is the business of whoever calls start and stop: mostly a ProfileController.

    Args:
        config: a mapping, a path of a YAML file, an OmegaConf or Hydra-composed object, a Config, or None (off).
        role: what this worker is for; ``actor-rollout-ref`` for a colocated worker joins the sections of that name.
        rank: global rank; by default from torch.distributed or the launcher's environment.
        world_size: number of ranks; found likewise.
        topology: rank in each parallel dimension, e.g. ``{"tp": 0, "pp": 1}``; found from Megatron where it is in use.
        overrides: ``key=value`` texts on top of the config.
        total_steps: last step of the run, where it is known: later ones are then not expected.

    Attributes:
        role, rank, world_size: as resolved.
        enabled: whether the config turns this role on.
        selected: whether it selects this rank.

    Raises:
        ConfigError: everything that is wrong with the config, in one error.
    """

    def __init__(
        self,
        config: Any,
        *,
        role: str,
        rank: int | None = None,
        world_size: int | None = None,
        topology: Mapping[str, int] | None = None,
        overrides: Iterable[str] = (),
        total_steps: int | None = None,
    ) -> None:
        place = detect(rank, world_size, topology)
        self.role = role
        self.rank = place.rank
        self.world_size = place.world_size
        self.place = place
        self._dimensions = dict(place.dimensions)
        # An unselected rank imports no backend: names of tools are checked everywhere, options where they are used.
        self.config: Config = load_config(config, tuple(overrides), check_tools="names")
        self.section: RoleConfig = self.config.role(role)
        self.logger = get_logger(role=role, rank=self.rank)
        self.enabled = self.section.enable and bool(self.section.tools) and self.config.active
        selection = self.section.ranks.selects(
            self.rank,
            world_size=self.world_size,
            topology=place.dimensions,
            topology_sizes=place.sizes,
            local_rank=place.local_rank,
        )
        self.selected = self.enabled and selection.selected
        self.why = selection.reason if self.enabled else self.section.why_off or "global_profiler.steps is not set"
        self.save_path = Path(self.section.save_path)
        strict = environment.flag(environment.STRICT)
        self._faults = FaultLog(
            self.logger,
            strict=self.config.global_profiler.strict if strict is None else strict,
            record=self._record_fault,
        )
        self._pid = os.getpid()
        self._total_steps = total_steps
        self._steps = tuple(step for step in self.config.global_profiler.steps if step <= (total_steps or step))
        self.last_step: int | None = None
        self.joined = False
        self.closed = False
        self._asked = False
        self._finished: set[str] = set()
        self._to_relocate: list[tuple[Tool, Window]] = []
        self.ledger = Ledger(self.save_path, host=host_name(), run_id=run_id())
        self._stores: dict[str, Store] = {}
        stage_dir = self.config.global_profiler.stage_dir
        self._stage_dir = Path(stage_dir) if stage_dir else None
        self.tools: tuple[Tool, ...] = ()
        self._say_plan()
        if self.enabled:
            if self.selected:
                load_config(self.config)
                with unchanged():
                    self.tools = self._build()
                make_ready()
                for folder in dict.fromkeys(
                    [staging(self.save_path, self._stage_dir), beside(self.save_path), elsewhere(self.save_path)]
                ):
                    exports().look_after(folder)
            self._record_plan()
            shutdown.watch(self, flush_on_sigterm=self.config.global_profiler.flush_on_sigterm)

    # What a backend gets.

    def _build(self) -> tuple[Tool, ...]:
        """Import, validate, construct and bind the tools of this role; the only place where a backend is made."""
        built: list[tuple[str, object, CommonOptions, frozenset[str]]] = []
        for name in self.section.tools:
            factory = registry.load(name, self.section.tool_path)
            options, common = tool_options(factory, self.section, name)
            owned = self._check_place(name, factory, options)
            store = self._store(name)
            context = Context(
                tool=name,
                role=self.role,
                rank=self.rank,
                world_size=self.world_size,
                topology=self._dimensions,
                host=host_name(),
                pid=os.getpid(),
                save_path=self.save_path,
                run_id=run_id(),
                store=store,
                logger=get_logger(tool=name, role=self.role, rank=self.rank),
                clock=time.time_ns,
                steps=self._steps,
                continuous=self.config.global_profiler.profile_continuous_steps,
            )
            try:
                backend = factory(context, options)
            except Exception as error:
                raise ConfigError(
                    f"{self.section.tool_path}: tool {name!r} could not be set up: {type(error).__name__}: {error}"
                ) from error
            built.append((name, backend, common, owned))
        hooks = bind([(name, backend) for name, backend, *_ in built])
        return tuple(
            Tool(
                name,
                backend,
                hooks[name],
                self._faults,
                discrete=common.discrete,
                max_seconds=common.max_seconds,
                owned=owned,
            )
            for name, backend, common, owned in built
        )

    def _check_place(self, name: str, factory: Any, options: Any) -> frozenset[str]:
        """Refuse, before training, a tool that cannot work in this process; what it needs for itself here."""
        path = self.section.tool_path
        answer = registry.availability(factory)
        if not answer.available:
            raise ConfigError([Problem(path, f"tool {name!r} cannot work here: {answer.why}")])
        if answer.reason and name not in _told:
            _told.add(name)
            self.logger.warning(f"{name}: {answer.why}")
        for text in registry.advice(factory, options):
            if f"{name}: {text}" not in _told:
                _told.add(f"{name}: {text}")
                self.logger.info(f"{name}: {text}")
        owned = registry.owned(factory, options)
        for other in shutdown.handles():
            for tool in other.tools:
                both = sorted(tool.owned & owned)
                if tool.name != name and both:
                    raise ConfigError(
                        [
                            Problem(
                                path,
                                f"tool {name!r} needs {both[0]!r}, which tool {tool.name!r} of role {other.role!r} has "
                                "in this process; only one of them can have it: choose one",
                            )
                        ]
                    )
        return owned

    def _store(self, tool: str) -> Store:
        common = self.config.global_profiler
        store = Store(
            self.save_path,
            tool=tool,
            role=self.role,
            rank=self.rank,
            world_size=self.world_size,
            topology=dimensions_for_name(self.place),
            host=host_name(),
            ledger=self.ledger,
            logger=self.logger,
            stage_dir=self._stage_dir,
            max_exports=common.max_exports,
            wait_for_exports=common.close_timeout if common.exports_full == "wait" else 0.0,
        )
        self._stores[tool] = store
        return store

    # Questions.

    @property
    def recording(self) -> bool:
        """Whether this handle has a window open, its own or one that it joined."""
        return bool(self._opened())

    def _opened(self) -> tuple[windows.OpenTool, ...]:
        return tuple(
            current
            for current in windows.opened()
            if current.owner is self or any(handle is self for handle in current.joined)
        )

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What its backends raised and core contained."""
        return tuple(self._faults.faults)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """Files that its windows left behind, whole and under their final names; what is still written is not in."""
        exports().poll()
        return tuple(artifact for store in self._stores.values() for artifact in store.artifacts)

    @property
    def stores(self) -> tuple[Store, ...]:
        """Where its tools put their files."""
        return tuple(self._stores.values())

    # The window.

    def start(self, *, step: int | None = None, scope: str | None = None) -> bool:
        """Open a window: everything until ``stop`` is captured; discrete tools wait for a stage.

        Args:
            step: the training step, counted from 1; goes into names and metadata.
            scope: what the files cover; ``train`` unless given.

        Returns:
            Whether something is open now.
        """
        if not self.enabled or self.closed or self._in_child():
            return False
        with self.raised_at_end():
            if self._opened():
                if any(not current.stopping for current in self._opened()):
                    self.logger.warning(
                        "a window was still open when the next one began: saved as aborted", step=self.last_step
                    )
                self._stop(aborted=True)
            self._asked, self.last_step = True, step
            self._look_for_dimensions()
            exports().poll()  # what came of earlier windows: a backend may learn from it
            for tool in self.tools:
                window = windows.new_window(
                    self.role,
                    step=step,
                    steps=self._covered(step),
                    scope=scope or "train",
                    reason="manual" if step is None else "step",
                )
                current = windows.start(tool, self, window)
                self.joined = self.joined or (current is not None and current.owner is not self)
        return self.recording

    def _look_for_dimensions(self) -> None:
        """Megatron makes its groups with the model, which may be later than the handle: names shall have them."""
        if self._dimensions or not self.selected:
            return
        place = detect(self.rank, self.world_size)
        if place.dimensions:
            self.place = place
            self._dimensions.update(place.dimensions)
            for store in self.stores:
                store.topology = dimensions_for_name(place)

    def advance(self, *, step: int) -> None:
        """Inside a window over several steps: the next step begins. A controller calls it; calling it is optional."""
        opened = self._opened()
        if not opened or self._in_child():
            return
        self.last_step = step
        with self.raised_at_end():
            for current in opened:
                if current.owner is self:
                    current.advance(step)

    def step(self) -> None:
        """One update mini-batch is done: advances the schedules of all open windows of this process."""
        with self.raised_at_end():
            windows.step()

    def stop(self, *, last: bool = False, aborted: bool = False) -> None:
        """Close this handle's window; a window that it only joined stays open for its owner.

        Args:
            aborted: the step raised; the file's name says so.
            last: also relocate and finish. A controller does these for all workers in phases and leaves it False.
        """
        if not self.closed and not self._in_child():
            with self.raised_at_end():
                self._stop(aborted=aborted)
        if last:
            self.relocate()
            self.finish()

    def _stop(self, *, aborted: bool = False) -> None:
        for current in reversed(self._opened()):
            windows.stop(current.tool.name, self, aborted=aborted)

    def stop_open(self, reason: str) -> None:
        """At the end of the handle: save what is still open."""
        if self._opened():
            self.logger.info("a window is still open at the end: saving it", step=self.last_step, reason=reason)
            self._stop()
        for current in windows.close_all_of(self, timeout=_PATIENCE):
            self.logger.warning(
                "a window could not be saved: the thread that started it is busy, and no other can stop it",
                tool=current.tool.name,
                step=current.step,
                thread=current.thread_name,
            )

    def raised_at_end(self) -> AbstractContextManager[None]:
        """Around a call of the public API: in strict mode, raise what backends raised in it."""
        return self._faults.raised_at_end()

    def why_nothing(self) -> str:
        """Why this rank, though selected, has no file, in words."""
        if self.faults:
            return str(self.faults[0])
        if not self._asked:
            return "no configured step was reached: nothing called start()"
        if all(tool.discrete for tool in self.tools):
            return "discrete tools wait for annotated stages, and none ran while a window was open"
        reasons = dict.fromkeys(store.why_nothing for store in self.stores if store.why_nothing)
        return "; ".join(reasons) or "the windows held nothing, or their files failed; see the ledger"

    if TYPE_CHECKING:  # staticmethod() would keep only the first overload

        @overload
        @staticmethod
        def annotate(stage: Function) -> Function: ...

        @overload
        @staticmethod
        def annotate(
            stage: str | None = None,
            *,
            scheduled: bool = False,
            color: str | None = None,
            domain: str | None = None,
            category: str | None = None,
            message: str | None = None,
            role: str | None = None,
        ) -> Label: ...

        @staticmethod
        def annotate(stage: Any = None, **facts: Any) -> Any:
            """See `rankscope.annotate`."""

    else:
        annotate = staticmethod(annotate_function)

    def relocate(self) -> tuple[Artifact, ...]:
        """Bring files that a tool wrote to a place of its own to the save path, where ``relocate_results`` is set.

        Returns:
            The files that were moved by this call. May be repeated: a file that is not finished yet comes later.
        """
        with self.raised_at_end():
            return self.relocate_files()

    def relocate_files(self, *, last: bool = False) -> tuple[Artifact, ...]:
        """The same, raising nothing; ``last``: what is still being written may be waited for."""
        if self._in_child() or not self.section.relocate_results:
            return ()
        moved: list[Artifact] = []
        for tool, window in self._to_relocate:
            returned, paths = tool.call("relocate", window, last, step=window.step)
            if returned and paths is not None:
                moved += self._adopt(tool, window, paths)
        return tuple(moved)

    def _adopt(self, tool: Tool, window: Window, paths: Iterable[Path]) -> list[Artifact]:
        try:
            return [self._stores[tool.name].adopt(Path(path), window) for path in paths]
        except Exception as error:  # noqa: BLE001 - a file that cannot be moved must not end the training
            tool.fault("relocate", error, window.step)
            return []

    def finish(self) -> None:
        """The last window is over: backends finish, then the finish command runs, once per process and save path.

        Waits for exports and the command at most ``finish_hook_wait`` seconds; the rest goes on in the background and
        is awaited by ``close()``. While another role of this process still captures, it is left to that role's end.
        """
        if self._in_child() or not self.enabled:
            return
        with self.raised_at_end():
            shutdown.finish(self)

    def finish_backends(self) -> None:
        """Call ``finish`` of each backend that captured something, once."""
        for tool in reversed(self.tools):
            if tool.captured and tool.name not in self._finished:
                self._finished.add(tool.name)
                tool.call("finish", self._stores[tool.name].artifacts[:], step=self.last_step)

    def close(self, timeout: float | None = None) -> None:
        """End of this handle: open windows are saved, exports awaited, the finish command run if it is still due.

        Also called at exit for a handle that was never closed. Safe to repeat.

        Args:
            timeout: seconds to wait for exports; by default ``close_timeout`` of the config.
        """
        if self.closed or self._in_child():
            return
        if self.enabled:
            shutdown.close(self, timeout)
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except FaultError:  # strict mode: told already, and the block's own exception goes first
            if error is None:
                raise

    def __reduce__(self) -> Any:
        raise TypeError("a DistProfiler belongs to its process; send the config and make one there")

    # Bookkeeping.

    def record(self, kind: str, **facts: Any) -> None:
        """Write a ledger line with this handle's role and rank."""
        self.ledger.write(kind, role=self.role, rank=self.rank, **facts)

    def window_closed(self, tool: Tool, window: Window) -> None:
        """A window of one of its tools was stopped."""
        if tool.has("relocate"):
            self._to_relocate.append((tool, window))
        shutdown.window_closed()

    def window_missed(self, tool: Tool, window: Window, reason: str) -> None:
        """A window of one of its tools could not be opened."""
        self._stores[tool.name].missing(window, reason)

    def _say_plan(self) -> None:
        """One line at the start: what this process will do, or that the config does not know its role."""
        steps = list(self.config.global_profiler.steps)
        if self.selected:
            self.logger.info(
                "this rank is profiled",
                tools=",".join(self.section.tools),
                steps=compact(steps),
                reason=self.why,
                save_path=str(self.save_path),
            )
        elif self.config.active and not self.section.paths:
            self.logger.warning("nothing is profiled in this role", reason=self.why)

    def _record_plan(self) -> None:
        for name in self.section.tools:
            tool = next((tool for tool in self.tools if tool.name == name), None)
            self.record(
                "plan",
                world_size=self.world_size,
                tool=name,
                profiled=self.selected,
                reason=self.why,
                steps=self._steps,
                continuous=self.config.global_profiler.profile_continuous_steps,
                discrete=bool(tool and tool.discrete),
            )

    def _record_fault(self, fault: Fault) -> None:
        import traceback

        from rankscope.errors import error_text

        self.record(
            "fault",
            tool=fault.tool,
            hook=fault.hook,
            step=fault.step,
            error=error_text(fault.error),
            traceback="".join(traceback.format_exception(fault.error)),
        )

    def _covered(self, step: int | None) -> tuple[int, ...]:
        """The steps that a window opened in ``step`` is going to cover."""
        if step is None:
            return ()
        covered = [step]
        if self.config.global_profiler.profile_continuous_steps:
            configured = set(self.config.global_profiler.steps)
            while covered[-1] + 1 in configured and covered[-1] + 1 <= (self._total_steps or covered[-1] + 1):
                covered.append(covered[-1] + 1)
        return tuple(covered)

    def _in_child(self) -> bool:
        """Whether this process only inherited the handle: what it had open belongs to the parent."""
        return self._pid != os.getpid()
