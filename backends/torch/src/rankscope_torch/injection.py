"""CUPTI serves one subscriber in a process. Whoever else gets there first leaves torch's traces without device events.

Some images set ``NVTX_INJECTION64_PATH`` to a library that subscribes at the first NVTX range. Nothing can be done
about it from inside the process, so the variable is set before it starts: to a path that does not exist, because hooks
that only fill a gap would put it back if it were empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankscope import environment

BLOCKED = "/nonexistent/nvtx-injection-off-while-torch-records-the-device"

_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID"
_SUBSCRIBES = (environment.NVTX_INJECTION, "CUDA_INJECTION64_PATH")


def kept(environ: Mapping[str, str]) -> bool:
    """Whether the user wants the injection left as it is."""
    names = (environment.KEEP_NVTX_INJECTION, environment.VERL_KEEP_NVTX_INJECTION)
    return any(environment.flag(name, environ) for name in names)


def before_start(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """What a process needs so that torch is the one that gets CUPTI.

    Args:
        environ: of whoever starts the process.

    Returns:
        Variables to set, and a warning about what was found in ``environ``, or an empty text.
    """
    inherited = environ.get(environment.NVTX_INJECTION, "")
    if kept(environ):
        return {}, ""
    if _UNDER_NSYS in environ:
        return {}, (
            "this runs under nsys, which holds CUPTI: torch will record no device events. "
            "Use contents: [cpu], or start without nsys"
        )
    if not inherited or inherited == BLOCKED:
        return {environment.NVTX_INJECTION: BLOCKED}, ""
    return {environment.NVTX_INJECTION: BLOCKED}, (
        f"{environment.NVTX_INJECTION}={inherited} was set and is replaced in processes whose device torch records, "
        f"since it would take CUPTI from torch; {environment.KEEP_NVTX_INJECTION}=1 keeps it"
    )


def suspects(environ: Mapping[str, str]) -> list[str]:
    """What in the environment of this process may have taken CUPTI, each in words."""
    found = ["the process runs under nsys"] if _UNDER_NSYS in environ else []
    for name in _SUBSCRIBES:
        path = environ.get(name, "")
        if path and Path(path).exists():
            found.append(f"{name}={path}")
    return found
