"""The part of ``msprobe.pytorch`` (mindstudio-probe 26.2.0) that is used, with faults to order.

``STANDIN`` holds words like ``start`` or ``stop@2:actor_update``: what fails, in which step and stage only.
"""

from __future__ import annotations

import json
import os
import types
from pathlib import Path
from typing import Any

FAULTS = os.environ.get("STANDIN", "").split(",")
if "import" in FAULTS:
    raise ImportError("No module named 'pkg_resources' (stand-in)")
if "exit" in FAULTS:
    raise SystemExit("torch_npu is not for this machine (stand-in)")


class PrecisionDebugger:
    _instance: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.initialized = False
        return cls._instance

    def __init__(
        self,
        config_path: str | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        step: list[int] | None = None,
    ) -> None:
        if self.initialized:
            return
        self.initialized = True
        self.calls: list[str] = []
        print("stand-in: made")
        if "make" in FAULTS:
            raise ValueError("no debugger today (stand-in)")
        self.config = types.SimpleNamespace(dump_path=dump_path, dump_enable=None)
        self.service = types.SimpleNamespace(
            config=types.SimpleNamespace(dump_path=dump_path, dump_enable=None), init_step=0, born_with=dump_path
        )

    @classmethod
    def set_init_step(cls, step: int) -> None:
        cls._instance.service.init_step = step

    @classmethod
    def _fails(cls, what: str) -> None:
        service = cls._instance.service
        stage = Path(service.config.dump_path).name
        if {what, f"{what}@{service.init_step}", f"{what}@{service.init_step}:{stage}"} & set(FAULTS):
            raise RuntimeError(f"{what} failed (stand-in)")

    @classmethod
    def start(
        cls, model: Any = None, token_range: Any = None, rank_id: int | None = None, scheduled_tokens: Any = None
    ) -> None:
        cls._fails("start")
        service = cls._instance.service
        root = service.born_with if "stuck" in FAULTS else service.config.dump_path
        root = "elsewhere" if "lost" in FAULTS else root
        service.dump_iter_dir = os.path.join(root, f"step{service.init_step}")
        service.folder = Path(service.dump_iter_dir, f"rank{rank_id}")
        if "lost" not in FAULTS:
            cls._write({})

    @classmethod
    def _write(cls, entries: dict[str, Any]) -> None:
        folder = cls._instance.service.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dump.json").write_text(json.dumps({"task": "statistics", "data": entries}, indent=1))

    @classmethod
    def stop(cls) -> None:
        cls._fails("stop")
        if "empty" not in FAULTS and "lost" not in FAULTS:
            cls._write({"Module.layer.forward.0": {}})

    @classmethod
    def step(cls) -> None:
        cls._fails("step")


if "old" in FAULTS:
    del PrecisionDebugger.set_init_step
