"""What the helper process does with a capture: complete it, analyse it if that is wanted, and let it appear.

Only the standard library is used here, and torch_npu only in a process of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope import NothingRecorded
from rankscope_npu import folders
from rankscope_npu.analysis import analyse


class CaptureIncomplete(Exception):  # noqa: N818 - it says what is missing
    """Torch_npu left nothing that can be used; the text says why."""


def finish(staged: Path, temporary: Path, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """Make the artifact out of what was staged: a directory with torch_npu's folder, and a file that says whose it is.

    Args:
        staged: the directory into which torch_npu wrote.
        temporary: becomes the artifact.
        name: of the artifact.
        arguments: ``about`` (facts for the file), ``device`` (whether the NPU was to be recorded), ``trouble``
            (what went wrong, in words), ``analysis`` (seconds that it may take, or None) and ``exports``.

    Returns:
        Facts for the ledger.

    Raises:
        CaptureIncomplete: torch_npu's folder is missing or unusable.
        NothingRecorded: it is whole, and nothing is in it.
    """
    about = dict(arguments["about"])
    folder, warnings = checked(staged, device=arguments["device"], trouble=arguments["trouble"])
    warnings += _with_rank(folder, about["rank"])
    facts: dict[str, Any] = {"folder": folder.name}
    if arguments["analysis"] is not None:
        outcome = analyse(folder, exports=tuple(arguments["exports"]), timeout=arguments["analysis"])
        facts["analysed"] = list(outcome.exports) if outcome.done else []
        facts["seconds_analysis"] = outcome.seconds
        if not outcome.done:
            warnings.append(f"the analysis failed, the raw data is kept; try 'rankscope analyse': {outcome.reason}")
    if warnings:
        facts["warnings"] = warnings
    (staged / folders.ABOUT).write_text(json.dumps({**about, **facts}, indent=2), encoding="utf-8")
    temporary.unlink(missing_ok=True)
    shutil.move(staged, temporary)
    return facts


def checked(staged: Path, *, device: bool, trouble: str) -> tuple[Path, list[str]]:
    """Torch_npu's folder, and what is missing in it: it reports no failure, so the folder itself is looked at.

    Raises:
        CaptureIncomplete, NothingRecorded: as of ``finish``.
    """
    folder = folders.inside(staged)
    because = f"; {trouble}" if trouble else ""
    if folder is None:
        raise CaptureIncomplete(f"torch_npu left no folder{because}")
    holds = folders.Holds.of(folder)
    if holds.info is None:
        raise CaptureIncomplete(f"torch_npu did not end the capture: there is no profiler_info.json{because}")
    if not holds.framework and not holds.device:
        reason = f"torch_npu recorded nothing: neither FRAMEWORK nor PROF_* holds anything{because}"
        raise CaptureIncomplete(reason) if trouble else NothingRecorded(reason)
    warnings = []
    if device and not holds.device:
        warnings.append("nothing of the device was recorded: torch_npu's folder has no PROF_* folder")
    if not holds.framework:
        warnings.append("no operators were recorded: torch_npu's FRAMEWORK folder is empty")
    if trouble:
        warnings.append(trouble)
    return folder, warnings


def _with_rank(folder: Path, rank: int) -> list[str]:
    """Let the folder say its rank, which torch_npu finds in ``RANK`` or torch.distributed only; tools ask for it."""
    info = folders.Holds.of(folder).info
    content = folders.read_info(folder)
    if info is None or not content:
        return []
    found = content.get("rank_id")
    if found is None:
        info.write_text(json.dumps({**content, "rank_id": rank}, indent=4), encoding="utf-8")
        info.rename(folder / f"profiler_info_{rank}.json")
    elif str(found) != str(rank):
        return [f"torch_npu's folder says rank {found}, by the variable RANK or torch.distributed, not {rank}"]
    return []
