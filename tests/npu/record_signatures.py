"""Write down what the installed torch_npu offers, for the stand-in that the tests without it use.

``python tests/npu/record_signatures.py`` rewrites ``tests/backends/npu/signatures.json``; a test compares the two.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parents[1] / "backends" / "npu" / "signatures.json"


def offered(torch_npu: Any) -> dict[str, Any]:
    """Arguments with their defaults, and the names and values of the constants."""
    profiler, mstx = torch_npu.profiler, torch_npu.npu.mstx
    functions = {
        "profile": profiler.profile,
        "tensorboard_trace_handler": profiler.tensorboard_trace_handler,
        "_ExperimentalConfig": profiler._ExperimentalConfig,
        "mstx.range_start": mstx.range_start,
        "mstx.range_end": mstx.range_end,
    }
    groups = ("ProfilerLevel", "AiCMetrics", "ExportType", "HostSystem")
    return {
        "version": torch_npu.__version__,
        "functions": {
            name: {
                parameter.name: None if parameter.default is inspect.Parameter.empty else parameter.default
                for parameter in inspect.signature(function).parameters.values()
            }
            for name, function in functions.items()
        },
        "constants": {
            group: {name: value for name, value in vars(getattr(profiler, group)).items() if not name.startswith("_")}
            for group in groups
        },
        "actions": [action.name for action in profiler.ProfilerAction],
        "activities": sorted(profiler.ProfilerActivity.__members__),
    }


if __name__ == "__main__":
    import torch_npu

    RECORDED.write_text(json.dumps(offered(torch_npu), indent=2) + "\n", encoding="utf-8")
    print(RECORDED)
