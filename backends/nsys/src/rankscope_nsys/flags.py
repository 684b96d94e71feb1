"""The options of ``nsys profile``: which exist, what they are called in full, and what a given binary knows.

Names are those of nsys 2023.4.4 (``nsys profile --help``), plus those that the user guide of 2026 added for Linux. A
name that is in neither is looked up in the binary, where there is one: nsys gets new options with every release.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess

SHORT = {
    "b": "backtrace",
    "c": "capture-range",
    "d": "duration",
    "e": "env-var",
    "f": "force-overwrite",
    "n": "inherit-environment",
    "o": "output",
    "p": "nvtx-capture",
    "s": "sample",
    "t": "trace",
    "w": "show-output",
    "x": "stop-on-exit",
    "Y": "start-later",
    "y": "delay",
}

_OF_2023_4 = """
    backtrace capture-range capture-range-end command-file cpu-core-events cpuctxsw cuda-flush-interval
    cuda-graph-trace cuda-memory-usage cuda-um-cpu-page-faults cuda-um-gpu-page-faults cudabacktrace delay duration
    duration-frames env-var event-sample event-sampling-frequency event-sampling-interval export
    flush-on-cudaprofilerstop force-overwrite ftrace ftrace-keep-user-config gpu-metrics-device gpu-metrics-frequency
    gpu-metrics-set gpu-video-device gpuctxsw hotkey-capture ib-switch-congestion-device
    ib-switch-congestion-nic-device ib-switch-congestion-percent ib-switch-congestion-threshold-high
    ib-switch-metrics-device inherit-environment kill mpi-impl nic-metrics nvtx-capture nvtx-domain-exclude
    nvtx-domain-include opengl-gpu-workload os-events osrt-backtrace-stack-size osrt-backtrace-threshold
    osrt-threshold output python-backtrace python-nvtx-annotations python-sampling python-sampling-frequency
    resolve-symbols run-as sample samples-per-backtrace sampling-period session-new show-output start-frame-index
    start-later stats stop-on-exit trace trace-fork-before-exec vulkan-gpu-workload wait
"""

_ADDED_BY_2026 = """
    after-collection-start after-report-ready cpu-core-metrics cpu-metrics cpu-socket-events cpu-socket-metrics
    cuda-event-trace cuda-trace-all-apis cuda-trace-scope dask debug-symbols discard-environment dts-api-port enable
    event-sampling-multiplex-interval gds-libs-path gds-metrics gpu-metrics-devices gpu-video-devices
    ib-net-info-devices ib-net-info-files ib-net-info-output ib-switch-congestion-devices ib-switch-metrics-devices
    ib-switch-metrics-nic-device nccl-trace osrt-backtrace-depth osrt-file-access python-functions-trace pytorch
    show-source-info storage-metrics syscall
"""

LONG = frozenset(_OF_2023_4.split()) | frozenset(_ADDED_BY_2026.split())
"""Full names of the options that are known without asking a binary."""

_HELP_LINE = re.compile(r"^\t(?:\(\w+\) )?(?:-\w, )?--([a-z0-9-]+)(?:\[([a-z|]+)\])?(?:=|\s|$)", re.MULTILINE)
_VERSION = re.compile(r"version (\d[\w.]*)")
_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Binary:
    """What an nsys on this machine says of itself.

    Attributes:
        path: where it lies.
        version: ``2023.4.4.54``, or empty where it does not say.
        options: full names of the options of its ``nsys profile``; empty where its help could not be read.
        writes_early: whether it can write the report of a range while the application goes on (``repeat:N:async``).
    """

    path: str
    version: str
    options: frozenset[str]
    writes_early: bool


def full_name(name: str) -> str:
    """The full name of an option that may be given by its letter."""
    return SHORT.get(name, name)


@functools.lru_cache(maxsize=8)
def binary(path: str) -> Binary:
    """Ask a binary for its version and its options; about 50 ms, once a process."""
    text = _output(path, "profile", "--help")
    options: set[str] = set()
    for name, variants in _HELP_LINE.findall(text):
        options.update([name + variant for variant in variants.split("|")] if variants else [name])
    version = _VERSION.search(_output(path, "--version"))
    return Binary(path, version.group(1) if version else "", frozenset(options), "[:mode]" in text)


def known_to_binary(name: str, nsys: str) -> bool:
    """Whether the nsys of this machine has an option that the table lacks."""
    path = shutil.which(nsys)
    return path is not None and name in binary(path).options


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout
