"""A capture of a moment with one tool, read back: does the whole way from a window to a file work on this machine?

``python -m rankscope.selftest TOOL OPTIONS SAVE_PATH`` runs it in a process of its own, as the doctor does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

STAGE = "selftest"
_SECONDS = 0.2


def config(tool: str, options: dict[str, Any], save_path: Path | str) -> dict[str, Any]:
    """A config that profiles one step of one role with the tool."""
    return {
        "global_profiler": {
            "tool": tool,
            "steps": [1],
            "save_path": str(save_path),
            "relocate_results": True,
            "global_tool_config": {tool: options},
        },
        STAGE: {"profiler": {"enable": True, "ranks": "all"}},
    }


def capture(tool: str, options: dict[str, Any], save_path: Path) -> None:
    """Capture one step with one stage."""
    from rankscope import DistProfiler, annotate

    with DistProfiler(config(tool, options, save_path), role=STAGE, rank=0, world_size=1) as profiler:
        profiler.start(step=1)
        with annotate(STAGE, scheduled=True):
            _work()
            profiler.step()
        profiler.stop()


def outcome(save_path: Path) -> tuple[bool, str]:
    """Whether the capture left a file that can be read, and which; or why not."""
    from rankscope.artifacts.status import read_status

    status = read_status(save_path)
    for row in status.rows:
        if row.status != "published":
            continue
        problem = _unreadable(Path(row.path))
        if not problem:
            return True, f"{Path(row.path).name} ({row.bytes} bytes)" + (f"; {row.reason}" if row.reason else "")
        return False, problem
    reasons = dict.fromkeys(f"{row.status}: {row.reason}" if row.reason else row.status for row in status.rows)
    return False, "; ".join(reasons) or status.error


def _work() -> None:
    """Something that a tool can see, on the device where torch has one."""
    end = time.monotonic() + _SECONDS
    torch = sys.modules.get("torch")
    if torch is None:
        while time.monotonic() < end:
            sum(range(1000))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(64, 64, device=device)
    for _ in range(50):
        matrix = (matrix @ matrix).clamp(-1, 1)
    matrix.sum().item()


def _unreadable(path: Path) -> str:
    """Why a file cannot be read back, or an empty text; JSON is parsed, anything else only has to be there."""
    import gzip

    try:
        if path.is_dir() or not path.name.endswith((".json", ".json.gz")):
            return ""
        text = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        json.loads(text)
    except (OSError, ValueError, EOFError) as error:
        return f"{path.name} cannot be read back: {type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    capture(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
