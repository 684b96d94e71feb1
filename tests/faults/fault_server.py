"""A process that has imported torch, never profiled, and forks a child for each cell: importing torch takes seconds.

It reads one request a line from its standard input, answers with the child's pid and, when that has ended, its wait
status. A child leaves this module's code and runs its program where a script would: its end is that of any process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from typing import Any


def serve() -> dict[str, Any] | None:
    """Answer requests; returns twice or more: in each child with its request, in the server with None at the end."""
    import omegaconf  # noqa: F401
    import structlog  # noqa: F401
    import torch
    import torch._dynamo
    import torch._inductor  # what torch's profiler imports when it is first used
    import torch.utils.data

    import rankscope.config  # noqa: F401
    import rankscope_torch.backend  # noqa: F401

    assert not torch.autograd.profiler._is_profiler_enabled
    assert len(os.listdir("/proc/self/task")) == 1, "a child would lack the other threads"
    gc.collect()
    gc.freeze()
    os.write(1, b"ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return request
        os.write(1, f"{pid}\n".encode())
        os.write(1, f"{os.waitpid(pid, 0)[1]}\n".encode())
    return None


def become(request: dict[str, Any]) -> None:
    """In a child: a session, streams and an environment of its own."""
    os.setsid()
    for number, (name, flags) in enumerate((("", os.O_RDONLY), ("out", os.O_WRONLY), ("err", os.O_WRONLY))):
        path = os.path.join(request["folder"], name) if name else os.devnull
        file = os.open(path, flags | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it was looked up with another environment


if __name__ == "__main__":
    import fault_programs

    wanted = serve()
    if wanted is not None:
        become(wanted)
        fault_programs.run(wanted)
