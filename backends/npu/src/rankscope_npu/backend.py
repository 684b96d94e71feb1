"""NpuBackend: the hooks."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rankscope import Availability, Context, Span, Window, hookimpl
from rankscope_npu import vendor
from rankscope_npu.folders import SUFFIX
from rankscope_npu.marks import DEFAULT_DOMAIN, Labels, Marks, MstxTracks, OperatorTracks, Tracks
from rankscope_npu.options import NpuOptions
from rankscope_npu.recorder import Recorder
from rankscope_npu.session import Capture

_INSTALL = (
    "pip install torch-npu in the version of your torch, and a CANN toolkit that fits (torch_npu has wheels for Python "
    "up to 3.11). Without CANN's libraries, set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or 'import torch' fails"
)


class NpuBackend:
    """Records windows with the Ascend profiler and leaves one folder each (torch_npu 2.1 or newer)."""

    Options = NpuOptions
    owns: frozenset[str] = frozenset({"ascend_profiler"})
    suffix = SUFFIX
    viewer = "rankscope analyse DIR, then MindStudio Insight"
    thread_bound = True
    """On another thread torch_npu ends the device's capture without its data, and finds no operators."""

    @staticmethod
    def available() -> Availability:
        """Whether torch_npu is installed, and whether there is a device; neither is touched."""
        if importlib.util.find_spec("torch_npu") is None:
            return Availability(False, "torch_npu is not installed", _INSTALL)
        ours, torchs = _version("torch-npu"), _version("torch")
        if _numbers(ours) < (2, 1):
            return Availability(False, f"torch_npu {ours} is too old: it lacks mstx domains", "torch_npu 2.1 or newer")
        missing = []
        if _numbers(ours) != _numbers(torchs):
            missing.append(f"torch_npu {ours} is made for another torch than {torchs or 'none'}")
        if not any(Path("/dev").glob("*davinci[0-9]*")):
            missing.append("no NPU device was found (/dev/davinci*), and without one torch_npu profiles nothing")
        return Availability(True, "; ".join(missing))

    def __init__(self, context: Context, options: NpuOptions) -> None:
        self.context = context
        self.options = options
        self._labels = Labels()
        self._recorder: Recorder | None = None
        self._torch_npu: Any = None
        self._offer: vendor.Offer | None = None
        self._place: vendor.HandlerPlace | None = None
        self._latest: Path | None = None

    @hookimpl
    def start(self, window: Window) -> None:
        """Begin a capture, unless somebody else's torch_npu profiler runs, or none can."""
        offer, place = self._load()
        reason = vendor.out_of_order(self._torch_npu) or self._running(place)
        if reason:
            self.context.store.missing(window, reason)
            return
        recorder = Recorder(
            window,
            self.context,
            self.options,
            new_capture=self._new_capture,
            marks=Marks(self._tracks(offer), self._labels),
            describe=self._describe,
            records_device=offer.records_device,
        )
        self._recorder = recorder
        recorder.start()

    @hookimpl
    def step(self, window: Window, span: Span | None) -> None:  # noqa: ARG002
        """Walk the schedule."""
        if self._recorder is not None:
            self._recorder.step(span)

    @hookimpl
    def annotate(self, span: Span) -> AbstractContextManager[object] | None:
        """The range of a span."""
        return None if self._recorder is None else self._recorder.row(span)

    @hookimpl
    def stop(self, window: Window) -> None:
        """End the capture; the rest happens in the helper process."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.window = window
            recorder.stop()

    def _load(self) -> tuple[vendor.Offer, vendor.HandlerPlace]:
        if self._offer is None or self._place is None:
            self._torch_npu = vendor.load()
            self._offer = vendor.Offer(self._torch_npu, self.options)
            self._place = vendor.HandlerPlace()
            if self._offer.missing:
                self.context.logger.warning(
                    f"this torch_npu cannot do all that is asked for; left out: {', '.join(self._offer.missing)}",
                    torch_npu=_version("torch-npu"),
                )
            include = self.options.mstx_domain_include
            if self._offer.has_mstx and include and DEFAULT_DOMAIN not in include:
                self.context.logger.info(
                    "annotated stages without a domain are not recorded: 'default' is not in mstx_domain_include"
                )
        return self._offer, self._place

    def _new_capture(self, folder: Path) -> Capture:
        offer, place = self._load()
        self._latest = folder.resolve()
        return Capture(offer, place, folder, self._torch_npu.profiler.ProfilerAction)

    def _running(self, place: vendor.HandlerPlace) -> str:
        """Why no capture can begin now: there is one such profiler a process."""
        running = place.running
        if running is None:
            return ""
        if running.parent == self._latest:
            return "torch_npu could not end the capture before this one, which still runs"
        return f"another torch_npu profiler is already running in this process; it is left alone ({running})"

    def _tracks(self, offer: vendor.Offer) -> Tracks:
        if offer.has_mstx:
            return MstxTracks(self._torch_npu)
        import torch

        return OperatorTracks(torch)

    def _describe(self, window: Window) -> dict[str, Any]:
        return {
            **self.context.about(window),
            "contents": list(self._offer.contents) if self._offer is not None else [],
            "options": dataclasses.asdict(self.options),
            "versions": {name: _version(name) for name in ("torch", "torch-npu", "rankscope", "rankscope-npu")},
        }


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
