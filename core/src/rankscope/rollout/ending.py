"""The finish command on a node where engines left files: run once, and not where a training process runs it anyway."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rankscope import shutdown
from rankscope.artifacts.ledger import FOLDER, Ledger
from rankscope.artifacts.names import clean_label
from rankscope.config import Config, RoleConfig
from rankscope.finish import FinishCommand, claim_once
from rankscope.host import born, host_name
from rankscope.topology import run_id
from rankscope.types import Artifact

_HEAD = 1 << 20
"""Bytes of a ledger in which its plan is looked for."""


class Ending:
    """Runs the finish command for engines' files, if it is due here.

    Args:
        config: the whole config.
        section: the rollout role's.
        tool: the tool that the engines record with.
        ranks: global ranks whose files are wanted.
        world_size: number of rollout GPUs, or None.
        ledger: of this process.
    """

    def __init__(
        self,
        config: Config,
        section: RoleConfig,
        *,
        tool: str,
        ranks: Sequence[int],
        world_size: int | None,
        ledger: Ledger,
    ) -> None:
        self.config = config
        self.section = section
        self.command: FinishCommand | None = None
        self._tool = tool
        self._ranks = ranks
        self._world_size = world_size
        self._ledger = ledger
        self._save_path = Path(section.save_path)

    def why_not(self) -> str:
        """Why the command is not run here, in words; empty when it is due."""
        if not self.section.finish_hook_cmd:
            return "there is none"
        if not _selected(self.section, self._ranks, self._world_size):
            return "finish_hook_ranks names none of these ranks"
        others = [*self._handles(), *self._processes()]
        return f"a process of role {others[0]!r} on this host runs it" if others else ""

    def run(self, *, step: int | None, artifacts: Sequence[Artifact], wait: float) -> None:
        """Run it, once per process and save path, and wait for it so many seconds; the rest goes on behind."""
        command = self.section.finish_hook_cmd
        if command is None or self.why_not() or not claim_once(self._save_path):
            return
        common = self.config.global_profiler
        self.command = FinishCommand(
            command,
            save_path=self._save_path,
            tool=self._tool,
            role=self.section.role,
            rank=self._ranks[0],
            step=step,
            steps=common.steps,
            world_size=self._world_size,
            host=host_name(),
            run_id=run_id(),
            artifacts=artifacts,
            timeout=common.finish_hook_timeout,
            ledger=self._ledger,
        )
        self.command.start()
        self.command.wait(wait)

    def wait(self) -> None:
        """For the command that was started, if any; it has a time limit of its own."""
        if self.command is not None:
            self.command.wait()

    def _handles(self) -> Iterator[str]:
        """Roles of this process that capture into the same place and run a command of their own."""
        for handle in shutdown.handles():
            if handle.selected and handle.save_path == self._save_path and handle.section.finish_hook_cmd:
                yield handle.role

    def _processes(self) -> Iterator[str]:
        """Roles of other processes on this host that do."""
        prefix = f"{clean_label(host_name()) or 'host'}-"
        folder = self._save_path / FOLDER
        try:
            paths = [path for path in folder.iterdir() if path.name.startswith(prefix) and path.suffix == ".jsonl"]
        except OSError:
            return
        for path in sorted(paths):
            pid = path.stem.removeprefix(prefix)
            if not pid.isdigit() or int(pid) == os.getpid():
                continue
            for plan in _plans(path):
                same_run = plan.get("run_id") == run_id() or born(int(pid)) is not None
                if plan.get("profiled") and same_run and self._runs_one(str(plan.get("role")), plan.get("rank")):
                    yield str(plan["role"])

    def _runs_one(self, role: str, rank: Any) -> bool:
        section = self.config.role(role)
        return bool(section.finish_hook_cmd) and isinstance(rank, int) and section.finish_ranks.selects(rank).selected


def _selected(section: RoleConfig, ranks: Iterable[int], world_size: int | None) -> bool:
    return any(section.finish_ranks.selects(rank, world_size=world_size).selected for rank in ranks)


def _plans(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            lines = file.read(_HEAD).split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("kind") == "plan":
            yield record
