"""What this process records. The history of an allocator is one for the whole process, so this is too."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

from rankscope import Window
from rankscope.errors import error_text
from rankscope.log import first_time
from rankscope.types import Logger
from rankscope_torch_memory.allocator import Allocator, find
from rankscope_torch_memory.options import TorchMemoryOptions

Mode = str
"""``off``, ``state`` (stacks of what is allocated) or ``all`` (events too)."""

NO_DEVICE = "torch has no device here whose memory it can show: no snapshot is written, training is not affected"


@dataclasses.dataclass(frozen=True)
class _Wish:
    mode: Mode
    options: TorchMemoryOptions
    logger: Logger


class Recording:
    """The history of the process's device.

    Attributes:
        saved: how many snapshots were taken.
        kept: windows that wait for the file of a later one, with ``memory_snapshot_num_steps`` above 1.
        foreign: somebody else records: his history is read, and never cleared or switched off.
        why_not: why it cannot record, in words; empty when it can.
    """

    def __init__(self) -> None:
        self.saved = 0
        self.kept: list[Window] = []
        self.foreign = False
        self.why_not = ""
        self._allocator: Allocator | None = None
        self._searched = False
        self._mode: Mode = "off"
        self._wish: _Wish | None = None
        self._queued = False
        self._lock = threading.RLock()

    def allocator(self) -> Allocator | None:
        """The device's allocator; imports torch, which a training process has done long before."""
        if self._allocator is None and not self._searched:
            import torch

            self._allocator = find(torch)
            self._searched = True
        return self._allocator

    def search_again(self) -> None:
        """A device may have come since (``import torch_npu``)."""
        self._searched = self._allocator is not None

    @property
    def ready(self) -> bool:
        """Whether there is a device in use."""
        return self._allocator is not None and self._allocator.initialised

    @property
    def mode(self) -> Mode:
        """What is recorded by us now."""
        return self._mode

    # On and off.

    def switch(self, mode: Mode, options: TorchMemoryOptions, logger: Logger) -> None:
        """Record this from now on, or from the moment at which the process uses the device; never wakes it."""
        with self._lock:
            self._wish = None if mode == self._mode == "off" else _Wish(mode, options, logger)
            self.settle()
            if self._wish is None or self._queued or self._allocator is None:
                return
            self._queued = True
        # Without the lock: torch holds one of its own here, and in the call that may come of it.
        if not self._allocator.when_initialised(self._when_initialised):
            self._queued = False

    def _when_initialised(self) -> None:
        """Called by torch in the middle of waking the device, where no error may come up."""
        self._queued = False
        self._follow()

    @property
    def waiting(self) -> bool:
        """Whether it has to be switched once the device is in use, and torch will not say when that is."""
        return self._wish is not None and not self._queued

    def settle(self) -> None:
        """Do what was asked for, if the device is in use by now."""
        if self._wish is not None and self.ready:
            self._follow()

    def _follow(self) -> None:
        with self._lock:
            wish, self._wish = self._wish, None
            if wish is None or self._allocator is None:
                return
            try:
                self._change(self._allocator, wish)
            except Exception as error:  # noqa: BLE001 - torch's trouble with its allocator is not the training's
                self.why_not = f"torch could not switch the memory history: {error_text(error)}"
                if first_time(("torch_memory", "switch", self.why_not)):
                    wish.logger.warning("the memory history could not be switched", mode=wish.mode, reason=self.why_not)

    def _change(self, allocator: Allocator, wish: _Wish) -> None:
        if wish.mode == self._mode:
            return
        if self._mode == "off":
            self.foreign = allocator.recording() is True
            if self.foreign:
                if first_time(("torch_memory", "foreign")):
                    wish.logger.warning(
                        "somebody else records the memory history of this process: it is used as it is, and neither "
                        "cleared nor switched off; options of torch_memory about the history have no effect"
                    )
                return
        if wish.mode == "off":
            self._mode = "off"
            allocator.stop_recording()
            return
        if not allocator.offers_history:
            self.why_not = f"this torch cannot record the memory history of {allocator.name}"
            if first_time(("torch_memory", "no history")):
                wish.logger.warning(f"{self.why_not}; snapshots hold the state alone")
            return
        refused, _ = allocator.record(wish.mode, wish.options, clear=False)
        self._mode, self.why_not = wish.mode, ""
        self._tell(refused, wish)

    def _tell(self, refused: set[str], wish: _Wish) -> None:
        for option in sorted(refused):
            if first_time(("torch_memory", "refused", option)):
                wish.logger.warning(f"this torch cannot honour {option}: it has no effect", torch=_torch_version())
        if wish.options.stacks == "all" and first_time(("torch_memory", "stacks")):
            wish.logger.info("stacks: all records C++ frames too; a snapshot may then take minutes")

    def clear(self, options: TorchMemoryOptions, logger: Logger) -> None:
        """Drop the events so far; stacks of what is allocated stay."""
        with self._lock:
            if self._mode != "all" or self.foreign or self._allocator is None or not self.ready:
                return
            try:
                _, cleared = self._allocator.record(self._mode, options, clear=True)
                if not cleared:
                    self._allocator.stop_recording()
                    self._allocator.record(self._mode, options, clear=False)
            except Exception as error:  # noqa: BLE001 - as in _follow
                if first_time(("torch_memory", "clear")):
                    logger.warning("the memory history could not be cleared", reason=error_text(error))


def _torch_version() -> str:
    import sys

    return str(getattr(sys.modules.get("torch"), "__version__", "?"))


_recording = Recording()


def recording() -> Recording:
    """The recording of this process."""
    return _recording


def _forget(*_: Any) -> None:
    """A forked child cannot use the parent's device, and has no window of it."""
    global _recording
    _recording = Recording()


os.register_at_fork(after_in_child=_forget)
