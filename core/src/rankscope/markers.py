"""Ranges in the timeline of whatever tool watches from outside: NVTX for nsys, mstx for msprof.

Which markers there are follows from the device, not from the packages that happen to be installed. Without one every
call here costs a comparison of two modules. For rankscope's own tools use `rankscope.annotate`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload

from rankscope import device
from rankscope.log import first_time, get_logger, warn_once

_F = TypeVar("_F", bound=Callable[..., Any])

_log = get_logger()


class Marker(Protocol):
    """A way to show ranges. What it returns at the start is handed back at the end, perhaps in another thread."""

    name: str

    def start(self, message: str, color: str | None, domain: str | None, category: str | None) -> object:
        """Open a range."""

    def end(self, token: Any) -> None:
        """Close it."""


class NvtxMarker:
    """Ranges of the ``nvtx`` package."""

    name = "nvtx"

    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx

    def start(self, message: str, color: str | None, domain: str | None, category: str | None) -> object:
        """Open a range."""
        return self._nvtx.start_range(message=message, color=color, domain=domain, category=category)

    def end(self, token: Any) -> None:
        """Close it."""
        self._nvtx.end_range(token)


class MstxMarker:
    """Ranges of ``torch_npu.npu.mstx``, which knows domains but neither colours nor categories."""

    name = "mstx"

    def __init__(self, mstx: Any) -> None:
        self._mstx = mstx

    def start(self, message: str, color: str | None, domain: str | None, category: str | None) -> object:
        """Open a range."""
        if color is not None or category is not None:
            warn_once(_log, "mstx options", "mstx has no color and no category: they are ignored on this device")
        options = {} if domain is None else {"domain": domain}
        return self._mstx.range_start(message, **options), options

    def end(self, token: Any) -> None:
        """Close it."""
        number, options = token
        self._mstx.range_end(number, **options)


class RangeHandle:
    """An open range; closing it a second time does nothing."""

    __slots__ = ("_open",)

    def __init__(self, started: list[tuple[Marker, object]]) -> None:
        self._open = started

    def close(self) -> None:
        """Close the range in every marker, in reverse order."""
        while self._open:
            try:
                marker, token = self._open.pop()
            except IndexError:  # another thread was faster
                return
            try:
                marker.end(token)
            except Exception as error:  # noqa: BLE001
                _switch_off(marker, error)


def mark_start_range(
    message: str | None = None,
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> RangeHandle | None:
    """Open a range; what a marker does not know of color, domain and category it ignores.

    Returns:
        What `mark_end_range` takes, in this or another thread; None when there is no marker.
    """
    markers = active_markers()
    if not markers:
        return None
    text = "" if message is None else str(message)
    started: list[tuple[Marker, object]] = []
    for marker in markers:
        try:
            started.append((marker, marker.start(text, color, domain, category)))
        except Exception as error:  # noqa: BLE001, PERF203
            _switch_off(marker, error)
    return RangeHandle(started)


def mark_end_range(handle: object) -> None:
    """Close a range. None, and anything that `mark_start_range` has not returned, is ignored."""
    if isinstance(handle, RangeHandle):
        handle.close()


class mark_range:  # noqa: N801  # used like a function
    """``with mark_range("load"): …``: a range around a block. The block's exception passes unchanged."""

    __slots__ = ("_arguments", "_handle")

    def __init__(
        self,
        message: str | None = None,
        color: str | None = None,
        domain: str | None = None,
        category: str | None = None,
    ) -> None:
        self._arguments = (message, color, domain, category)
        self._handle: RangeHandle | None = None

    def __enter__(self) -> None:
        self._handle = mark_start_range(*self._arguments)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.close()


@overload
def mark_annotate(message: _F) -> _F: ...
@overload
def mark_annotate(
    message: str | None = None,
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Callable[[_F], _F]: ...
def mark_annotate(
    message: Any = None,
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Any:
    """A range around every call of a function; also as a bare ``@mark_annotate``.

    Coroutine functions are covered until they return, generator functions until they are exhausted or closed. An async
    generator function is returned as it is, after a warning: `rankscope.annotate` covers those.

    Args:
        message: the range's text; the function's name by default.
        color: for markers that show one.
        domain: group of ranges.
        category: kind of range, for markers that have it.
    """
    if callable(message):
        return _annotated(message, (_name(message), color, domain, category))
    return lambda function: _annotated(function, (message or _name(function), color, domain, category))


def _annotated(function: Any, arguments: tuple[str | None, ...]) -> Any:
    if inspect.isasyncgenfunction(function):
        _log.warning("mark_annotate does not cover async generators; use rankscope.annotate", function=_name(function))
        return function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            with mark_range(*arguments):
                return await function(*args, **kwargs)

        return asynchronous
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with mark_range(*arguments):
                return (yield from function(*args, **kwargs))

        return generator

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        if not active_markers():
            return function(*args, **kwargs)
        with mark_range(*arguments):
            return function(*args, **kwargs)

    return synchronous


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


_Modules = tuple[Any, Any]
_NOTHING: _Modules = (None, None)
_decided: tuple[_Modules, tuple[Marker, ...]] = (_NOTHING, ())
_off: set[str] = set()


def active_markers() -> tuple[Marker, ...]:
    """The markers that fit this process's device; looked for again when torch or torch_npu was imported since."""
    modules = (sys.modules.get("torch"), sys.modules.get("torch_npu"))
    for_modules, markers = _decided
    if modules[0] is for_modules[0] and modules[1] is for_modules[1]:
        return markers
    return _decide(modules)


def _decide(modules: _Modules) -> tuple[Marker, ...]:
    global _decided
    found = tuple(marker for marker in (_nvtx(), _mstx()) if marker is not None and marker.name not in _off)
    if modules[0] is None or hasattr(modules[0], "cuda"):  # else torch is still being imported: ask again later
        _decided = (modules, found)
    return found


def _nvtx() -> Marker | None:
    if not device.usable("cuda"):
        return None
    try:
        return NvtxMarker(importlib.import_module("nvtx"))
    except Exception as error:  # noqa: BLE001  # not installed, or built for another system
        if first_time("nvtx import"):
            _log.debug("no NVTX ranges: the nvtx package cannot be imported", hint="pip install nvtx", error=str(error))
        return None


def _mstx() -> Marker | None:
    if not device.usable("npu"):
        return None
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    mstx = getattr(npu, "mstx", None)
    return None if mstx is None else MstxMarker(mstx)


def _switch_off(marker: Marker, error: Exception) -> None:
    global _decided
    _off.add(marker.name)
    modules, markers = _decided
    _decided = (modules, tuple(other for other in markers if other.name != marker.name))
    warn_once(
        _log,
        ("marker", marker.name),
        f"{marker.name} ranges are off from here on: the marker failed",
        marker=marker.name,
        error=f"{type(error).__name__}: {error}",
    )
