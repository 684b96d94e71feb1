"""The end of a run, inside of its processes: tools finish in each of them, the finish command runs once a directory.

The functions are run by a driver in its actors; they take the actor as their first argument and leave it alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from rankscope import shutdown, windows
from rankscope.artifacts.exports import exports
from rankscope.artifacts.ledger import FOLDER, Ledger, read_ledgers
from rankscope.artifacts.recover import recover
from rankscope.finish import FinishCommand, claim_once
from rankscope.host import host_name
from rankscope.integrations.actors.inside import HandleFacts, Reply, caught, light, reply
from rankscope.topology import run_id
from rankscope.types import Artifact

Process = tuple[str, int]
"""Host and pid."""


def finish_tools(actor: object, *, first: bool = True, give_up: bool = False) -> Reply:
    """Let the tools of this process finish, once its files are whole; the finish command is not run.

    Args:
        actor: the actor.
        first: the first call; a repeated one waits for nothing, and looks for no file that lies elsewhere.
        give_up: finish, whatever is still being exported.

    Returns:
        All files of the process, and how many are not whole yet: while there are some, nothing was finished.
    """
    del actor
    errors: list[Exception] = []
    handles = shutdown.handles()
    if first:
        for handle in handles:
            with caught(errors), handle.raised_at_end():
                handle.relocate_files(last=True)
    patience = max((handle.config.global_profiler.finish_hook_wait for handle in handles), default=0.0)
    whole = exports().drain(patience if first else 0.0) and not windows.opened()
    if whole or give_up:
        for handle in handles:
            with caught(errors), handle.raised_at_end():
                handle.finish_backends()
    files = tuple(light(artifact) for handle in handles for artifact in handle.artifacts)
    return reply(errors, artifacts=files, busy=0 if whole else max(1, exports().pending))


def claim_directory(actor: object, save_path: str, token: str, node: str) -> str:
    """The node that speaks for this directory: the first one that asks under this token, for all that share it.

    Where nothing can be written, the directory is taken for the node's own.
    """
    del actor
    path = _claim(save_path, token)
    own = path.with_name(f"{path.name}.{node}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(node, encoding="utf-8")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(own, path)  # appears whole, and once, also where the directory is on a network
        finally:
            own.unlink()
        return path.read_text(encoding="utf-8")
    except OSError:
        return node


def run_command(
    actor: object, save_path: str, token: str, others: Sequence[Artifact], gone: Sequence[Process]
) -> Reply:
    """Run the finish command in this process, for all that share the directory; it goes on in the background.

    Args:
        actor: the actor.
        save_path: the directory.
        token: as of `claim_directory`.
        others: files of the other processes, for the manifest.
        gone: processes that died: what they left is read from their ledgers.
    """
    del actor
    errors: list[Exception] = []
    with caught(errors):
        _unclaim(save_path, token)
        files = [*others, *_left_by(save_path, gone)]
        for handle in shutdown.handles():
            if str(handle.save_path) == save_path and shutdown.command_due(handle):
                shutdown.run_command(handle, files)
                break
    return reply(errors)


def leave_command(actor: object, save_paths: Sequence[str]) -> Reply:
    """Another process speaks for these directories: the finish command will not run in this one any more."""
    del actor
    for save_path in save_paths:
        claim_once(save_path)
    return reply()


def run_for_the_dead(facts: HandleFacts, token: str, gone: Sequence[Process]) -> str:
    """On a node whose actors are all dead: run the finish command for what they left.

    Args:
        facts: of the profiler of one of them.
        token: as of `claim_directory`.
        gone: the processes.

    Returns:
        What was done, in words.
    """
    save_path = facts.save_path
    _unclaim(save_path, token)
    recover(Path(save_path))
    files = _left_by(save_path, gone)
    if not files or facts.command is None:
        return "they left no file"
    result = FinishCommand(
        facts.command,
        save_path=save_path,
        tool=",".join(facts.tools),
        role=facts.role,
        rank=facts.rank,
        step=facts.last_step,
        steps=facts.steps,
        world_size=facts.world_size,
        host=host_name(),
        run_id=run_id(),
        artifacts=files,
        timeout=facts.timeout,
        ledger=Ledger(save_path, host=host_name(), run_id=run_id()),
    ).run()
    return result.error or f"the finish command ended with {result.exit_code}"


def _claim(save_path: str, token: str) -> Path:
    return Path(save_path) / FOLDER / f"finish-{token}"


def _unclaim(save_path: str, token: str) -> None:
    """Whoever had to ask has asked."""
    with contextlib.suppress(OSError):
        _claim(save_path, token).unlink(missing_ok=True)


def _left_by(save_path: str, gone: Sequence[Process]) -> list[Artifact]:
    """The files of processes of this run that cannot be asked any more."""
    found: dict[str, Artifact] = {}
    wanted = {(host, pid, run_id()) for host, pid in gone}
    for record in read_ledgers(save_path) if wanted else ():
        if record["kind"] != "artifact" or (record["host"], record["pid"], record["run_id"]) not in wanted:
            continue
        path = Path(str(record.get("path") or ""))
        if record.get("status") == "published" and path.exists():
            found[str(path)] = Artifact(
                path,
                tool=str(record.get("tool") or ""),
                role=str(record.get("role") or ""),
                rank=int(record.get("rank") or 0),
                step=record.get("step"),
                scope=str(record.get("scope") or ""),
                bytes=int(record.get("bytes") or 0),
                checksum=str(record.get("checksum") or ""),
            )
    return list(found.values())
