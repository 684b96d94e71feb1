"""The process in which torch_npu analyses one folder: it may crash or hang here without harm to anybody.

``python -c <boot> <folder> <export>…``; see ``analysis``. Source: torch_npu 2.13.0, ``torch_npu/profiler/profiler.py``
(``analyse``).
"""

from __future__ import annotations

import sys


def main(folder: str, *exports: str) -> int:
    """Analyse; torch_npu prints what goes wrong, and returns all the same.

    Returns:
        0, or 3 when torch_npu cannot be imported.
    """
    try:
        import torch
        import torch_npu
        from torch_npu.profiler.profiler import analyse
    except Exception as error:  # noqa: BLE001 - an ImportError, or whatever a broken installation raises
        print(f"torch_npu cannot be imported here: {error}")  # noqa: T201 - the parent reads it
        return 3
    print(f"torch {torch.__version__}, torch_npu {torch_npu.__version__}")  # noqa: T201 - as above
    analyse(folder, max_process_number=1, export_type=list(exports) or None)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
