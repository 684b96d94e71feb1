"""Call backends one by one: ordered, isolated, counted. A backend's fault never becomes the training's."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pluggy

from rankscope.errors import BackendError, FaultError, did_you_mean, listing
from rankscope.hookspecs import PROJECT, BackendSpecs
from rankscope.types import Fault, Logger, Window

HOOKS: tuple[str, ...] = ("start", "step", "stop", "annotate", "relocate", "finish")


class FaultLog:
    """The faults of one handle: kept, logged once each with traceback, raised at the end of a call in strict mode.

    Args:
        logger: where they are told.
        strict: whether they are raised.
        record: called with each fault (the ledger).
    """

    def __init__(self, logger: Logger, *, strict: bool, record: Callable[[Fault], None] = lambda _: None) -> None:
        self.strict = strict
        self.faults: list[Fault] = []
        self._logger = logger
        self._record = record
        self._raised = 0
        self._lock = threading.RLock()  # a signal handler may close a handle in the middle of this

    def add(self, fault: Fault) -> None:
        """Keep and tell a fault."""
        with self._lock:
            self.faults.append(fault)
        self._record(fault)
        self._logger.error(
            f"{fault}; this tool is off in this process from now on, training goes on", exc_info=fault.error
        )
        if not self.strict:
            _forget_frames(fault.error)

    def take(self) -> FaultError | None:
        """In strict mode: an error for the faults that were not raised yet."""
        if not self.strict:
            return None
        with self._lock:
            new = self.faults[self._raised :]
            self._raised = len(self.faults)
        return FaultError(new) if new else None

    @contextmanager
    def raised_at_end(self) -> Iterator[None]:
        """Around a call of the public API: strict mode raises what came up in it, all in one error, after the loop."""
        yield
        error = self.take()
        if error is not None:
            raise error


def _forget_frames(error: BaseException | None) -> None:
    """What a traceback refers to lives on with it: the batch in an argument, the model in a local variable."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Tool:
    """One backend in one handle, called through here only.

    Attributes:
        name: the tool.
        backend: the object that the entry point made.
        discrete: whether each stage gets a window of its own.
        max_seconds: how long a window may last.
        owned: what it needs for itself in a process.
        on: False after a fault.
        captured: whether a window of it was ever started.
    """

    def __init__(
        self,
        name: str,
        backend: object,
        hooks: Mapping[str, Callable[..., Any]],
        faults: FaultLog,
        *,
        discrete: bool = False,
        max_seconds: float | None = None,
        owned: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.backend = backend
        self.discrete = discrete
        self.max_seconds = max_seconds
        self.owned = owned
        self.on = True
        self.captured = False
        self.faults = faults
        self._hooks = dict(hooks)
        self.annotate: Callable[[Any], Any] | None = self._hooks.get("annotate")

    @property
    def thread_bound(self) -> bool:
        """Whether ``stop`` must run on the thread that ran ``start``; some backends know it only once they started."""
        return bool(getattr(self.backend, "thread_bound", False))

    def budget(self) -> Callable[[], str | None] | None:
        """For a window that begins now: what tells why it should end early; None where nothing limits it."""
        own = getattr(self.backend, "over_budget", None)
        limit = self.max_seconds
        if limit is None:
            return own
        end = time.monotonic() + limit

        def check() -> str | None:
            if time.monotonic() >= end:
                return f"max_seconds={limit:g} is reached"
            return own() if own is not None else None

        return check

    def has(self, hook: str) -> bool:
        """Whether the backend implements the hook."""
        return hook in self._hooks

    def call(self, hook: str, *args: Any, step: int | None = None) -> tuple[bool, Any]:
        """Call one hook in isolation.

        Returns:
            Whether it returned, and what. ``(True, None)`` where the backend has no such hook or is off.
        """
        function = self._hooks.get(hook)
        if function is None or not self.on:
            return True, None
        try:
            return True, function(*args)
        except Exception as error:  # noqa: BLE001 - containment is what this loop is for
            self.fault(hook, error, step)
            return False, None

    def fault(self, hook: str, error: Exception, step: int | None) -> None:
        """Switch the tool off and tell it."""
        self.on = False
        self.faults.add(Fault(self.name, hook, step, error))

    def last_stop(self, window: Window) -> None:
        """The one ``stop`` that a started backend gets after a fault, so that what it holds is let go or saved."""
        function = self._hooks.get("stop")
        if function is None:
            return
        try:
            function(window)
        except Exception as error:  # noqa: BLE001 - as above
            self.faults.add(Fault(self.name, "stop", window.step, error))


def bind(backends: Sequence[tuple[str, object]]) -> dict[str, dict[str, Callable[..., Any]]]:
    """Check backends against the hook specifications and bind their implementations.

    Args:
        backends: tool and backend object, in config order.

    Returns:
        For each tool its hooks, each called with the specification's arguments by position.

    Raises:
        BackendError: a class instead of an instance, an unknown hook or argument, or a wrapper.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(BackendSpecs)
    for tool, backend in backends:
        if inspect.isclass(backend):
            raise BackendError(
                f"backend {tool!r}: got the class {backend.__name__}, not an object; is a '()' missing in its factory?"
            )
        try:
            manager.register(backend, name=tool)
        except Exception as error:
            raise BackendError(f"backend {tool!r} does not fit the hooks: {error}") from error
        _refuse_unknown_hooks(tool, backend)
    bound: dict[str, dict[str, Callable[..., Any]]] = {tool: {} for tool, _ in backends}
    for hook in HOOKS:
        caller = getattr(manager.hook, hook)
        names = caller.spec.argnames
        for implementation in caller.get_hookimpls():
            tool = implementation.plugin_name
            if implementation.wrapper or implementation.hookwrapper:
                raise BackendError(
                    f"backend {tool!r}: {hook} is a hook wrapper; core calls each backend by itself, so a wrapper "
                    "would wrap nothing. Make it a plain hook."
                )
            bound[tool][hook] = _by_position(implementation.function, implementation.argnames, names)
    return bound


def _refuse_unknown_hooks(tool: str, backend: object) -> None:
    """A misspelt hook would be called never, in silence."""
    for name in dir(backend):
        marks = getattr(inspect.getattr_static(backend, name, None), f"{PROJECT}_impl", None)
        # optionalhook: a newer backend on an older core says by it that it can do without.
        if marks and name not in HOOKS and not marks.get("optionalhook"):
            raise BackendError(
                f"backend {tool!r} implements a hook that does not exist: {name!r}.{did_you_mean(name, HOOKS)} "
                f"Hooks: {listing(HOOKS)}"
            )


def _by_position(function: Callable[..., Any], wanted: Iterable[str], given: Sequence[str]) -> Callable[..., Any]:
    """An implementation may ask for fewer arguments, in any order; most ask for all, and are called directly."""
    positions = [given.index(name) for name in wanted]
    if positions == list(range(len(given))):
        return function
    return lambda *args: function(*(args[position] for position in positions))
