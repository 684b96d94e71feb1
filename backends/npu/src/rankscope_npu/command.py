"""Parse what the npu tool captured, with torch_npu's offline analysis: every capture below a directory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rankscope import CommandError, render_table
from rankscope_npu import folders
from rankscope_npu.options import EXPORTS

EXAMPLES = """\
examples:
  rankscope analyse outputs/profile
  rankscope analyse outputs/profile --export text --processes 4
  rankscope analyse outputs/profile --json

It needs torch_npu and the libraries of CANN, and no device. Captures that are analysed already are left as they are.
The exit status is 1 when one of them could not be analysed."""

FIELDS = ("path", "role", "rank", "step", "scope", "status", "exports", "seconds", "reason")
"""What JSON output tells of each capture."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One capture and what came of it.

    Attributes:
        path: torch_npu's folder.
        role, rank, step, scope: what it covers, as rankscope wrote down beside it; None where it did not.
        status: ``analysed``, ``already`` (analysed before) or ``failed``.
        exports: what the analysis has written: any of db and text.
        seconds: how long it took now.
        reason: why it failed, or what torch_npu complained of all the same.
    """

    path: str
    role: str | None
    rank: int | None
    step: int | None
    scope: str | None
    status: str
    exports: tuple[str, ...]
    seconds: float | None = None
    reason: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a save path, or anything above the captures")
    parser.add_argument("--export", choices=EXPORTS, help="what to write; by default as it was configured")
    parser.add_argument("--processes", metavar="N", type=_positive, default=1, help="how many captures at once (1)")
    parser.add_argument(
        "--timeout", metavar="S", type=_positive, default=1800, help="most seconds for each capture (1800)"
    )
    parser.add_argument("--again", action="store_true", help="also those that are analysed already")
    parser.add_argument("--json", action="store_true", help="print JSON: {complete: ..., rows: [...]}")


def run(arguments: argparse.Namespace) -> int:
    """Analyse; 0 when everything is analysed, else 1.

    Raises:
        CommandError: no such directory, nothing to analyse, or no torch_npu.
    """
    directory: Path = arguments.directory.expanduser().resolve()
    if not directory.is_dir():
        raise CommandError(f"cannot read the directory {str(directory)!r}: there is no such directory")
    found = list(folders.find(directory))
    if not found:
        raise CommandError(f"there is no capture below {str(directory)!r}: no folder whose name ends in _ascend_pt")
    asked = (arguments.export,) if arguments.export else ()
    rows: list[Row] = []
    todo: list[Path] = []
    for folder in found:
        if folders.analysed(folder, asked) and not arguments.again:
            rows.append(_row(folder, "already"))
        else:
            todo.append(folder)
    if todo:
        _must_have_torch_npu()
    for number, row in enumerate(_analyse(todo, asked, arguments.processes, arguments.timeout), 1):
        rows.append(row)
        took = f" in {row.seconds:g} s" if row.seconds is not None else ""
        print(f"{number} of {len(todo)}: {row.status}{took}: {row.path}", file=sys.stderr, flush=True)  # noqa: T201
    rows.sort(key=lambda row: row.path)
    _show(rows, directory, as_json=arguments.json)
    return 0 if _complete(rows) else 1


def _analyse(todo: list[Path], asked: tuple[str, ...], processes: int, timeout: float) -> Iterator[Row]:
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from rankscope_npu.analysis import Analysed, analyse, end_all

    def one(folder: Path) -> Analysed:
        # The analysis begins by removing what an earlier one wrote: that is written anew, beside what is asked for now.
        exports = tuple(sorted({*asked, *folders.exports(folder)})) if asked else ()
        return analyse(folder, exports=exports, timeout=timeout)

    with ThreadPoolExecutor(max_workers=processes) as pool:
        try:
            for future in as_completed([pool.submit(one, folder) for folder in todo]):
                outcome = future.result()
                status = "analysed" if outcome.done else "failed"
                yield _row(outcome.folder, status, outcome.seconds, outcome.reason)
        except BaseException:  # a Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def _row(folder: Path, status: str, seconds: float | None = None, reason: str = "") -> Row:
    about = folders.read_about(folder)
    return Row(
        str(folder),
        about.get("role"),
        about.get("rank", folders.read_info(folder).get("rank_id")),
        about.get("step"),
        about.get("scope"),
        status,
        folders.exports(folder),
        seconds,
        reason,
    )


def _must_have_torch_npu() -> None:
    from importlib.util import find_spec

    if find_spec("torch_npu") is None:
        raise CommandError(
            "torch_npu is not installed here. Analyse on a machine that has it (no device is needed), with: "
            "pip install rankscope-npu torch-npu"
        )


def _show(rows: list[Row], directory: Path, *, as_json: bool) -> None:
    if as_json:
        shown = [{field: getattr(row, field) for field in FIELDS} for row in rows]
        print(json.dumps({"complete": _complete(rows), "rows": shown}, indent=2))  # noqa: T201
        return
    cells = [
        (
            row.role,
            row.rank,
            row.step,
            row.scope,
            row.status,
            ", ".join(row.exports),
            _shown(Path(row.path), directory),
            row.reason,
        )
        for row in rows
    ]
    headers = ("role", "rank", "step", "scope", "status", "wrote", "folder", "reason")
    print(render_table(headers, cells, right=("rank", "step")))  # noqa: T201
    counts = Counter(row.status for row in rows)
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    print(f"\n{len(rows)} captures: {summary}")  # noqa: T201


def _shown(folder: Path, directory: Path) -> str:
    """The artifact that the folder lies in, or a folder of somebody else, as seen from the directory."""
    path = folder.parent if folder.parent.name.endswith(folders.SUFFIX) else folder
    return str(path.relative_to(directory)) if directory in path.parents else str(path)


def _complete(rows: Iterable[Row]) -> bool:
    return all(row.status != "failed" for row in rows)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number
