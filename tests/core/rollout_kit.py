"""What the tests of rollout engines share: servers in processes of their own, configs, what was said."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import recording

from rankscope.artifacts.ledger import read_ledgers
from rankscope.artifacts.status import read_status

SERVER = Path(__file__).with_name("rollout_server.py")


class Server:
    """One engine's server."""

    def __init__(self, folder: Path, number: int, **config: Any) -> None:
        self.log = folder / f"server{number}.log"
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), json.dumps({"engine": "vllm", **config, "log": str(self.log)})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        self.url = f"http://127.0.0.1:{port}"

    def forward(self, n: int) -> int:
        from rankscope.rollout.calls import post

        return int(json.loads(post(f"{self.url}/forward", {"n": n}, {}, 30))["passes"])

    @property
    def calls(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def paths(self) -> list[str]:
        return [call["path"].removeprefix("/").removesuffix("_profile") for call in self.calls]

    def body(self, path: str, number: int = 0) -> dict[str, Any]:
        found = [call["body"] for call in self.calls if call["path"] == path]
        return found[number]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def servers(folder: Path, *configs: dict[str, Any], **common: Any) -> Iterator[list[Server]]:
    """A server for each config; vLLM's write where rankscope looks."""
    started: list[Server] = []
    try:
        for number, config in enumerate(configs):
            place = {"directory": str(folder / "out" / f"agent_loop_rollout_replica_{number}")}
            started.append(Server(folder, number, **{**place, **common, **config}))
        yield started
    finally:
        for server in started:
            server.close()


def config(save_path: Path, *, section: dict[str, Any] | None = None, options: Any = None, **common: Any) -> Any:
    """A rollout section with all ranks, the tool torch and relocation."""
    return {
        "global_profiler": {
            "steps": [1, 2, 3],
            "tool": "torch",
            "save_path": str(save_path),
            "relocate_results": True,
            "global_tool_config": {"torch": {} if options is None else options},
            **common,
        },
        "rollout": {"profiler": {"enable": True, "ranks": "all", **(section or {})}},
    }


def names(folder: Path) -> list[str]:
    """Files of a folder, without those in sub-folders."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def records(save_path: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_ledgers(save_path) if record["kind"] == kind]


def rows(save_path: Path) -> list[tuple[int, int | None, str]]:
    """Rank, step and status of all that was expected or came."""
    return [(row.rank, row.step, row.status) for row in read_status(save_path).rows]


wait_for = recording.wait_for
