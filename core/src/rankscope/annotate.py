"""The hot path: spans. While no window is open, an annotated call costs one look at a tuple.

This module knows neither pluggy nor the registry nor any backend. What is open in this process puts its sinks into
``open_sinks`` (see windows.py); everything here works on that tuple.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, overload

from rankscope.errors import FaultError
from rankscope.types import Span, SpanKind

if TYPE_CHECKING:
    from typing_extensions import Self

Function = TypeVar("Function", bound=Callable[..., Any])
ExcInfo = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]

_NO_ERROR: ExcInfo = (None, None, None)
_CACHE_LIMIT = 4096


class SpanSink(Protocol):
    """One tool that is open in this process. Neither method ever raises an ``Exception``."""

    def enter(self, span: Span) -> object:
        """Show the span; the result is given back to ``leave``."""

    def leave(self, span: Span, token: object, error: ExcInfo) -> FaultError | None:
        """End the span; in strict mode returns what the backend raised meanwhile."""


open_sinks: tuple[SpanSink, ...] = ()
_running: ContextVar[tuple[_Run, ...]] = ContextVar("rankscope_running", default=())
_begun: dict[_Run, None] = {}
"""Each ``with`` that a window saw begin and that has not ended. While there is none, the end of one costs one look."""
_here = cast("Any", sys.modules[__name__])
"""For the wrappers: where a class is sent to another process by value (cloudpickle, as Ray does with what the driver's
script defines), the globals of a function are copied. A module is not: it is imported there."""
_new_span = functools.partial(object.__new__, Span)


def set_sinks(sinks: tuple[SpanSink, ...]) -> None:
    """Replace what is open in this process; called when a window opens or closes."""
    global open_sinks
    open_sinks = sinks


def current_stage() -> Span | None:
    """The span that a finished mini-batch belongs to: innermost scheduled, else innermost stage, else None."""
    innermost = None
    for run in reversed(_running.get()):
        if run.span.scheduled:
            return run.span
        if innermost is None and not run.span.is_batch:
            innermost = run.span
    return innermost


class _Run:
    """One span under way: who shows it, and what they gave back."""

    __slots__ = ("label", "sinks", "span", "tokens")

    def __init__(self, label: Label, span: Span) -> None:
        self.label = label
        self.span = span
        self.sinks = sinks = open_sinks
        self.tokens: tuple[object, ...] = ()
        if len(sinks) == 1:
            self.tokens = (sinks[0].enter(span),)
            return
        try:
            for sink in sinks:
                self.tokens = (*self.tokens, sink.enter(span))
        except BaseException:  # a KeyboardInterrupt: those that show it already must not go on doing so
            self.leave(sys.exc_info())
            raise

    def leave(self, error: ExcInfo) -> None:
        """End the span everywhere, in reverse, once. Raises only in strict mode, never over the body's exception."""
        tokens, self.tokens = self.tokens, ()
        if len(tokens) == 1:
            fault = self.sinks[0].leave(self.span, tokens[0], error)
            if fault is not None and error[1] is None:
                raise fault
            return
        raised = []
        for sink, token in reversed(tuple(zip(self.sinks, tokens, strict=False))):
            fault = sink.leave(self.span, token, error)
            if fault is not None:
                raised.append(fault)
        if raised and error[1] is None:
            raise raised[0] if len(raised) == 1 else FaultError([fault for one in raised for fault in one.faults])

    def push(self) -> None:
        """Make this the current span of the running thread or task."""
        _running.set((*_running.get(), self))

    def pop(self) -> None:
        """Take it off again, wherever it stands: interleaved tasks and generators need not be nested."""
        running = _running.get()
        if running and running[-1] is self:
            _running.set(running[:-1])
        else:
            _running.set(tuple(run for run in running if run is not self))


class Label:
    """What ``annotate(...)`` returns: a decorator and a context manager. Stateless, so it is made once per label."""

    __slots__ = ("facts", "named")

    def __init__(
        self, stage: str | None, scheduled: bool, color: str | None, domain: str | None, category: str | None
    ) -> None:
        self.named = stage is not None
        self.facts: dict[str, Any] = {
            "stage": stage or "",
            "scheduled": scheduled,
            "color": color,
            "domain": domain,
            "category": category,
            "kind": "with",
            "instance": None,
            "args": (),
            "kwargs": {},
            "parent": None,
        }

    def __enter__(self) -> Self:
        if open_sinks:
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A window that closed meanwhile took its sinks away, yet the span that it saw begin must still end.
        if _begun:
            self._end((kind, error, trace))

    def _begin(self) -> None:
        outer = _running.get()
        # A frozen dataclass pays for every field; a filled dictionary does not, and nobody can tell the difference.
        span = _new_span()
        facts = span.__dict__
        facts.update(self.facts)
        if outer:
            facts["parent"] = outer[-1].span
        run = _Run(self, span)
        _running.set((*outer, run))
        _begun[run] = None

    def _end(self, error: ExcInfo) -> None:
        for run in reversed(_running.get()):
            if run.label is self:
                run.pop()
                _begun.pop(run, None)
                run.leave(error)
                return

    def __call__(self, function: Function) -> Function:
        """As a decorator."""
        return cast("Function", self.decorate(function))

    def decorate(self, function: Any) -> Any:
        """Wrap a function, method, coroutine function, generator or async generator function."""
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self.decorate(function.__func__))
        if inspect.isclass(function) or not callable(function):
            raise TypeError(f"annotate() decorates functions and methods, not {function!r}")
        target = function
        while isinstance(target, functools.partial):
            target = target.func
        label = self
        if not self.named:
            stage = getattr(target, "__name__", type(target).__name__)
            label = Label(stage, *(self.facts[key] for key in ("scheduled", "color", "domain", "category")))
        if inspect.iscoroutinefunction(target):
            wrapper = _wrap_async(label, function)
        elif inspect.isasyncgenfunction(target):
            wrapper = _wrap_async_generator(label, function)
        elif inspect.isgeneratorfunction(target):
            wrapper = _wrap_generator(label, function)
        else:
            wrapper = _wrap_sync(label, function)
        return functools.update_wrapper(wrapper, function)


class _Unnamed(Label):
    """A label that waits for the name of the function which it decorates."""

    __slots__ = ()

    def __enter__(self) -> Self:
        # Also while nothing is open: a mistake must not wait for the first profiled step to come out.
        raise TypeError('annotate() needs a stage when it is used with "with": with annotate("my_stage"): ...')


def _takes_instance(function: Any) -> bool:
    """Whether the first argument is the bound object (decided once, by the name that Python code uses for it)."""
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return False
    return first in {"self", "cls"}


def _start(label: Label, kind: SpanKind, bound: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    outer = _running.get()
    span = _new_span()
    facts = span.__dict__
    facts.update(label.facts)
    facts["kind"] = kind
    facts["kwargs"] = kwargs
    if bound and args:
        facts["instance"] = args[0]
        facts["args"] = args[1:]
    else:
        facts["args"] = args
    if outer:
        facts["parent"] = outer[-1].span
    return _Run(label, span)


def _wrap_sync(label: Label, function: Callable[..., Any]) -> Callable[..., Any]:
    bound = _takes_instance(function)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _here.open_sinks:
            return function(*args, **kwargs)
        run = _start(label, "sync", bound, args, kwargs)
        run.push()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            run.pop()
            run.leave(sys.exc_info())
            raise
        run.pop()
        run.leave(_NO_ERROR)
        return result

    return wrapper


def _wrap_async(label: Label, function: Callable[..., Any]) -> Callable[..., Any]:
    bound = _takes_instance(function)

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _here.open_sinks:
            return await function(*args, **kwargs)
        run = _start(label, "async", bound, args, kwargs)
        run.push()
        try:
            result = await function(*args, **kwargs)
        except BaseException:
            run.pop()
            run.leave(sys.exc_info())
            raise
        run.pop()
        run.leave(_NO_ERROR)
        return result

    return wrapper


def _wrap_generator(label: Label, function: Callable[..., Any]) -> Callable[..., Any]:
    bound = _takes_instance(function)

    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if not _here.open_sinks:
            return (yield from function(*args, **kwargs))
        run = _start(label, "generator", bound, args, kwargs)
        try:
            body = function(*args, **kwargs)
            resume: Callable[..., Any] = body.send
            sent: tuple[Any, ...] = (None,)
            while True:
                run.push()  # it is the current span only while its own code runs
                try:
                    value = resume(*sent)
                except StopIteration as stop:
                    result = stop.value
                    break
                finally:
                    run.pop()
                    sent = ()  # what was thrown in must not live on in this frame, which its traceback refers to
                try:
                    resume, sent = body.send, ((yield value),)
                except BaseException as error:  # noqa: BLE001 - from the consumer: the body decides what becomes of it
                    resume, sent = body.throw, (error,)
        except BaseException:
            run.leave(sys.exc_info())
            raise
        run.leave(_NO_ERROR)
        return result

    return wrapper


def _wrap_async_generator(label: Label, function: Callable[..., Any]) -> Callable[..., Any]:
    bound = _takes_instance(function)

    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        run = _start(label, "async_generator", bound, args, kwargs) if _here.open_sinks else None
        try:
            body = function(*args, **kwargs)
            waiting = _first(body)
            while True:
                if run is not None:
                    run.push()
                try:
                    value = await waiting
                except StopAsyncIteration:
                    break
                finally:
                    if run is not None:
                        run.pop()
                    del waiting  # as in a generator
                try:
                    waiting = body.asend((yield value))
                except GeneratorExit:
                    await body.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001 - as in a generator
                    waiting = body.athrow(error)
        except BaseException:
            if run is not None:
                run.leave(sys.exc_info())
            raise
        if run is not None:
            run.leave(_NO_ERROR)

    return wrapper


def _first(body: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """Begin an async generator without telling the event loop: it knows the wrapper, and would close both at once."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return body.asend(None)
    finally:
        sys.set_asyncgen_hooks(*hooks)


_labels: dict[tuple[Any, ...], Label] = {}
_plain: dict[str | None, Label] = {}
"""Those that are asked for by their stage alone."""
_PLAIN = (False, None, None, None, None, None)


@overload
def annotate(stage: Function) -> Function: ...


@overload
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


def annotate(stage: Any = None, **options: Any) -> Any:  # noqa: D417 - the options are those of the overload
    """Name a stage, once, for every tool: as a decorator or in a ``with``.

    Works on functions, methods, coroutine functions, generators and async generators, with any number of windows open
    in this process, from any handle or none. The body runs exactly once and its exception passes unchanged, whatever a
    backend does::

        @annotate("actor_update", scheduled=True)
        def update(self, batches):
            for i, batch in enumerate(batches):
                with annotate(f"mini_batch{i}"):
                    ...

    Args:
        stage: the label; without one, the name of the decorated function. Labels that begin with ``mini_batch`` or
            ``micro_batch`` are parts of a stage: in discrete mode they get no file of their own.
        scheduled: a schedule over mini-batches applies to this stage (the update stage of a role).
        color: for tools that colour ranges (NVTX); a name or ``#rrggbb``.
        domain: for tools that group ranges by domain (NVTX, mstx).
        category: for tools that know categories (NVTX).
        message: synonym of ``stage``.
        role: synonym of ``stage``, weaker than ``message``.

    Raises:
        TypeError: when it decorates something that cannot be called, or a ``with`` has no stage.
    """
    if not options:
        # What loops ask for. Defaults of keywords are looked up one by one, and a key of them all is made each time.
        try:
            return _plain[stage]
        except (KeyError, TypeError):
            pass
    return _label(stage, **options)


def _label(
    stage: Any = None,
    *,
    scheduled: bool = False,
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
    message: str | None = None,
    role: str | None = None,
) -> Any:
    key = (stage, scheduled, color, domain, category, message, role)
    try:
        label = _labels[key]
    except (KeyError, TypeError):
        label = _new_label(key)
    if isinstance(label, Label) and key[1:] == _PLAIN and len(_plain) < _CACHE_LIMIT:
        _plain[stage] = label
    return label


# What help() and editors show; at run time a loop's label must not pay for the options that it does not use.
annotate.__signature__ = inspect.signature(_label)  # type: ignore[attr-defined]


def _new_label(key: tuple[Any, ...]) -> Any:
    stage, scheduled, color, domain, category, message, role = key
    if stage is not None and not isinstance(stage, str):
        if not callable(stage) and not isinstance(stage, (staticmethod, classmethod)):
            raise TypeError(f"annotate() takes the name of a stage, not {stage!r}")
        return Label(message or role, scheduled, color, domain, category).decorate(stage)
    name = cast("str | None", stage or message or role)
    label = (Label if name else _Unnamed)(name or None, scheduled, color, domain, category)
    if len(_labels) < _CACHE_LIMIT:  # labels with a counter in them must not grow without bound
        _labels[key] = label
    return label


def forget_running() -> None:
    """After fork: the spans under way belong to the parent."""
    _running.set(())
    _begun.clear()
