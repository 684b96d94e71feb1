"""When the device runs out of memory: a snapshot and a table of what took it, and the error passes unchanged.

torch tells of a failed allocation twice: to an observer, at the moment of the failure and before anything is freed, and
as an exception. The observer comes first, where this torch has one; what it has saved is not saved again when the
exception comes by.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

from rankscope import Context, Window, human_size
from rankscope.errors import error_text
from rankscope.log import first_time
from rankscope_torch_memory.allocator import Allocator
from rankscope_torch_memory.analysis import DeviceMemory, by_stack, devices
from rankscope_torch_memory.finishing import described
from rankscope_torch_memory.options import TorchMemoryOptions
from rankscope_torch_memory.text import indented, shown, stack_lines
from rankscope_torch_memory.writing import write

SCOPE = "oom"
_FRAMES = 8
_ARGUMENTS = 4


class Victim(Protocol):
    """Who saves what: a backend with a window open, or one that looks outside of windows too."""

    context: Context
    options: TorchMemoryOptions

    def window_for_oom(self) -> Window:
        """The open window, or one that stands for none."""

    def facts_for_oom(self, window: Window) -> dict[str, Any]:
        """What the file says about itself."""


class Guard:
    """Watches for failed allocations in this process; there is one for all roles.

    Attributes:
        inside: the backend whose window is open.
        outside: the backend that also looks outside of windows.
        files: how many failures were saved.
    """

    def __init__(self) -> None:
        self.inside: Victim | None = None
        self.outside: Victim | None = None
        self.files = 0
        self._allocator: Allocator | None = None
        self._attached = False
        self._observed = False
        self._seen: list[weakref.ref[BaseException] | int] = []
        self._lock = threading.Lock()

    def begin(self, victim: Victim) -> None:
        """A window of this backend is open from now on."""
        self.inside, self._observed = victim, False

    @property
    def victim(self) -> Victim | None:
        """Who has to save a failure that happens now."""
        return self.inside or self.outside

    def attach(self, allocator: Allocator, context: Context) -> None:
        """Have the allocator tell of failures; only once the device is in use. Never raises."""
        if self._attached:
            return
        self._attached = True  # also where it fails: it would fail again
        try:
            offered = allocator.attach_oom(self._observe)
        except Exception as error:  # noqa: BLE001 - the exception path is still there
            context.logger.warning("no observer for failed allocations could be attached", reason=error_text(error))
            return
        if not offered:
            context.logger.info(
                f"this torch offers no observer for failed allocations of {allocator.name}; out of memory is seen as "
                "an exception that leaves a stage or a step"
            )
        self._allocator = allocator

    def _observe(self, *numbers: int) -> None:
        """Called by the allocator, on whichever thread it failed; an exception here would replace torch's own."""
        try:
            victim = self.victim
            if victim is None or os.getpid() != victim.context.pid or self._allocator is None:
                return
            device, wanted, total, free = (*numbers, *[0] * _ARGUMENTS)[:_ARGUMENTS]
            where = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - our own frame has no place in the table
            self._observed = True
            self._save(
                victim,
                self._allocator,
                {"device": device, "wanted": wanted, "total": total, "free": free},
                _places(where),
            )
        except BaseException as error:  # noqa: BLE001
            _whisper(self.victim, error)

    def look(self, error: BaseException | None, allocator: Allocator | None) -> None:
        """An exception leaves a stage or a step: if memory ran out, save, unless that was done. Never raises."""
        try:
            failure = None if error is None else out_of_memory(error)
            if failure is None or not self._is_new(failure):
                return
            if self._observed:
                self._observed = False
                return
            victim = self.victim
            if victim is not None and allocator is not None and allocator.initialised:
                places = _places(reversed(list(traceback.walk_tb(failure.__traceback__))))
                self._save(victim, allocator, {}, places, said=str(failure))
        except Exception as fault:  # noqa: BLE001 - the training's own error is on its way
            _whisper(self.victim, fault)

    def _is_new(self, error: BaseException) -> bool:
        """One failure passes many stages on its way out. The exception must not be kept alive for that."""
        known = [key() if isinstance(key, weakref.ref) else key for key in self._seen]
        if any(key is error or key == id(error) for key in known):
            return False
        try:
            mark: weakref.ref[BaseException] | int = weakref.ref(error)
        except TypeError:
            mark = id(error)
        self._seen = [*self._seen[-9:], mark]
        return True

    def _save(
        self, victim: Victim, allocator: Allocator, failure: Mapping[str, int], where: list[str], said: str = ""
    ) -> None:
        if not self._lock.acquire(blocking=False):  # another thread failed meanwhile; its memory is in this snapshot
            return
        try:
            if self.files >= victim.options.oom_max_dumps:
                if first_time(("torch_memory", "oom limit")):
                    victim.context.logger.warning(
                        "out of memory again: not saved, oom_max_dumps is reached", oom_max_dumps=self.files
                    )
                return
            self.files += 1
            _Report(victim, allocator, failure, where, said).save()
        finally:
            self._lock.release()


class _Report:
    """One failure: its snapshot and its table."""

    def __init__(
        self, victim: Victim, allocator: Allocator, failure: Mapping[str, int], where: list[str], said: str
    ) -> None:
        self._context = victim.context
        self._options = victim.options
        self._window = victim.window_for_oom()
        self._allocator = allocator
        self._failure = failure
        self._where = where
        self._said = said
        self._facts = {**victim.facts_for_oom(self._window), "scope": SCOPE, "failure": dict(failure), "error": said}

    def save(self) -> None:
        """Both files, and a message that names them. The one does not need the other."""
        began = time.monotonic()
        try:
            snapshot: dict[str, Any] = dict(self._allocator.snapshot())
        except Exception as error:  # noqa: BLE001 - torch in trouble is what this is about
            self._context.store.missing(self._window, f"out of memory, and no snapshot: {error_text(error)}")
            return
        snapshot["rankscope"] = self._facts | self._allocator.facts()
        found = devices(snapshot)
        table = picture = ""
        try:
            # Published here and not by the helper process: the training may be about to end.
            with self._context.store.reserve(self._window, suffix=".pickle", scope=SCOPE) as file:
                table = self._save_table(self._lines(found, file.final.name))
                write(snapshot, file.temporary)
                picture = str(file.publish(**described(snapshot, None)).path)
        except Exception as error:  # noqa: BLE001 - the store has told it already
            self._context.logger.debug("an oom snapshot failed", reason=error_text(error))
        biggest = next((group for device in found for group in by_stack(device.live_at_end())), None)
        self._context.logger.error(
            "the device is out of memory",
            step=self._window.step,
            wanted=human_size(self._failure.get("wanted")),
            largest="" if biggest is None else human_size(biggest.bytes),
            by="" if biggest is None else shown(biggest.frames, 1)[0],
            table=table,
            snapshot=picture,
            seconds=round(time.monotonic() - began, 3),
        )

    def _save_table(self, lines: Iterable[str]) -> str:
        try:
            with self._context.store.reserve(self._window, suffix=".txt", scope=SCOPE) as file:
                file.temporary.write_text("\n".join([*lines, ""]), encoding="utf-8", errors="replace")
                return str(file.publish().path)
        except Exception as error:  # noqa: BLE001 - as above
            self._context.logger.debug("an oom table failed", reason=error_text(error))
            return ""

    def _lines(self, found: list[DeviceMemory], picture: str) -> Iterator[str]:
        context, window = self._context, self._window
        yield f"Out of memory on {self._allocator.name}, {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}"
        step = "outside of profiled steps" if window.step is None else f"step {window.step}"
        world = f" of {context.world_size}" if context.world_size else ""
        yield f"role {window.role}, rank {context.rank}{world}, {step}, host {context.host}, pid {context.pid}"
        if self._failure:
            failure = self._failure
            yield (
                f"device {failure['device']}: {human_size(failure['wanted'])} were asked for; it has "
                f"{human_size(failure['total'])} (or may use so much), {human_size(failure['free'])} are free"
            )
        if self._said:
            yield f"the error says: {' '.join(self._said.split())}"
        yield f"snapshot: {picture}"
        yield ""
        yield "Where it failed, innermost first"
        yield from indented(self._where[: 2 * _FRAMES] or ["(unknown)"])
        for device in found:
            groups = by_stack(device.live_at_end())
            yield ""
            yield (
                f"Device {device.index}: {human_size(device.allocated)} allocated in "
                f"{sum(group.blocks for group in groups)} blocks, {human_size(device.reserved)} reserved, "
                f"{human_size(device.unused)} of that free (largest piece {human_size(device.largest_unused)})"
            )
            yield from indented(stack_lines(groups, device.allocated, top=self._options.oom_top, frames=_FRAMES))


def out_of_memory(error: BaseException) -> BaseException | None:
    """The exception, or the one that caused it, if it says that a device ran out of memory.

    torch raises ``torch.OutOfMemoryError`` (``torch.cuda.OutOfMemoryError`` is the same class); libraries below it
    raise a RuntimeError that says so.
    """
    found: BaseException | None = error
    for _ in range(8):
        if found is None:
            return None
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(found).__mro__):
            return found
        if isinstance(found, RuntimeError) and "out of memory" in str(found):
            return found
        found = found.__cause__
    return None


def _places(frames: Iterable[tuple[FrameType, int]]) -> list[str]:
    return [f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line})" for frame, line in frames]


def _whisper(victim: Victim | None, error: BaseException) -> None:
    if victim is not None:
        with contextlib.suppress(Exception):
            victim.context.logger.warning("out of memory could not be looked into", reason=error_text(error))


_guard = Guard()


def guard() -> Guard:
    """The guard of this process."""
    return _guard


def _forget() -> None:
    """A forked child has no window of its parent."""
    global _guard
    _guard = Guard()


os.register_at_fork(after_in_child=_forget)
