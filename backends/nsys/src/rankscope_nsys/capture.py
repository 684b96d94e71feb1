"""What switches the capture of nsys on and off: the CUDA profiler range and an NVTX range around each window."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from rankscope_nsys.attached import DOMAIN, RANGE
from rankscope_nsys.ranges import COLORS


class CudaProfiler:
    """``torch.cuda.profiler.start`` and ``stop``, counted: only the first start and the last stop reach CUDA.

    Attributes:
        depth: starts that wait for their stop.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._lock = threading.Lock()

    def start(self) -> str:
        """Switch it on. Returns why that was not possible, or an empty text."""
        with self._lock:
            if self.depth == 0:
                profiler, reason = _torch_profiler()
                if profiler is None:
                    return reason
                try:
                    profiler.start()
                except Exception as error:  # noqa: BLE001 - of CUDA: it must not end the tool
                    return f"cudaProfilerStart failed: {type(error).__name__}: {error}"
            self.depth += 1
            return ""

    def stop(self) -> str:
        """Take back one start. Returns what went wrong, or an empty text."""
        with self._lock:
            if self.depth == 0:
                return ""
            self.depth -= 1
            if self.depth:
                return ""
            profiler, reason = _torch_profiler()
            if profiler is None:
                return reason
            try:
                profiler.stop()
            except Exception as error:  # noqa: BLE001 - as above
                return f"cudaProfilerStop failed: {type(error).__name__}: {error}"
            return ""


cuda_profiler = CudaProfiler()
"""Of this process."""


class CaptureSwitch:
    """On while a window is open.

    nsys looks at one of the two ranges, as it was told. The CUDA range is the outer one, so that a report which it
    begins holds the NVTX range as a row.
    """

    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx
        self._handle: Any = None
        self._cuda = False

    def on(self) -> str:
        """Open both ranges. Returns why the CUDA range is not open, or an empty text."""
        reason = cuda_profiler.start()
        self._cuda = not reason
        try:
            self._handle = self._nvtx.start_range(RANGE, COLORS["gray"], DOMAIN)
        except BaseException:
            self.off()
            raise
        return reason

    def off(self) -> str:
        """Close what is open. Returns what went wrong."""
        handle, self._handle = self._handle, None
        cuda, self._cuda = self._cuda, False
        try:
            if handle is not None:
                self._nvtx.end_range(handle)
        finally:
            reason = cuda_profiler.stop() if cuda else ""
        return reason


def range_problem(nvtx: Any) -> str:
    """Why ranges of the nvtx package do not reach the nsys that traces this process, or an empty text."""
    with contextlib.suppress(AttributeError):
        if not nvtx.enabled():
            return "NVTX_DISABLE is set, so the nvtx package makes no ranges; unset it"
    get_domain = getattr(nvtx, "get_domain", None)
    if get_domain is not None and type(get_domain(DOMAIN)).__name__ == "DummyDomain":
        return (
            "nvtx 0.2.12 and newer asks nsys whether ranges are wanted, and this nsys says no, as nsys 2023.4 does to "
            "every such question; install 'nvtx<0.2.12' or a newer nsys"
        )
    return ""


def _torch_profiler() -> tuple[Any, str]:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None:
        return None, "torch is not imported in this process"
    try:
        if not cuda.is_initialized():  # starting the profiler would make a CUDA context where nobody wants one
            return None, "CUDA was not in use in this process when the window began"
    except Exception as error:  # noqa: BLE001 - a torch that is just being imported
        return None, f"torch.cuda cannot be asked: {type(error).__name__}: {error}"
    return cuda.profiler, ""
