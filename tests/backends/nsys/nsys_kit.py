"""What the tests of the nsys backend share, in the test process and in the processes that they start."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCENARIOS = HERE / "nsys_scenarios.py"


def why_no_nsys() -> str:
    """Why tests with the real nsys cannot run here, or an empty text."""
    import nvtx

    if shutil.which("nsys") is None:
        return (
            "nsys is not on PATH; `bash tests/backends/nsys/install_nsys.sh DIR` unpacks it, "
            "then put DIR/root/usr/bin on PATH"
        )
    said = run(["nsys", "--version"], seconds=30).out
    if "version 2023.4" in said and hasattr(nvtx, "Domain"):
        return "nsys 2023.4 records no ranges of nvtx 0.2.12 and newer; install nvtx==0.2.11"
    return ""


def config(
    save_path: Path | str,
    *roles: str,
    section: Mapping[str, Any] | None = None,
    common: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A config that profiles every rank of these roles (actor by default) with these options of the nsys backend."""
    section = {"profiler": {"enable": True, "ranks": "all", **(section or {})}}
    return {
        "global_profiler": {
            "tool": "nsys",
            "steps": [1, 2],
            "save_path": str(save_path),
            "global_tool_config": {"nsys": {"worker_nsight_options": {"trace": "nvtx"}, **options}},
            **(common or {}),
        },
        **dict.fromkeys(roles or ("actor",), section),
    }


@dataclasses.dataclass
class Ended:
    """A command that is over."""

    code: int
    out: str
    err: str
    seconds: float

    def said(self, words: str, level: str | None = None) -> list[dict[str, Any]]:
        """rankscope's messages with these words somewhere in them."""
        found = [json.loads(line) for line in self.err.splitlines() if line.startswith('{"logger": "rankscope"')]
        return [one for one in found if words in json.dumps(one) and level in {None, one["level"]}]


def run(command: list[str], *, seconds: float = 120, cwd: Path | None = None, **env: str) -> Ended:
    """Run a command to its end."""
    began = time.monotonic()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=cwd,
        env=environment(**env),
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def environment(**env: str) -> dict[str, str]:
    """The environment of a command: this Python first on PATH, strict, messages as JSON."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**kept, "PATH": path, "RANKSCOPE_STRICT": "1", "RANKSCOPE_LOG_FORMAT": "json", **env}


def scenario(name: str, save_path: Path, *arguments: str) -> list[str]:
    """The command that runs a function of nsys_scenarios.py."""
    return [sys.executable, str(SCENARIOS), name, str(save_path), *arguments]


def launched(save_path: Path, source: Mapping[str, Any], command: list[str], *words: str) -> list[str]:
    """The command, started by ``rankscope launch`` with this config, which the scenario finds as well."""
    path = write_config(save_path, source)
    launcher = [sys.executable, "-m", "rankscope", "launch", "--config", str(path), *words]
    return [*launcher, "--", *command]


def write_config(save_path: Path, source: Mapping[str, Any]) -> Path:
    save_path.mkdir(parents=True, exist_ok=True)
    path = save_path.parent / f"{save_path.name}.yaml"
    path.write_text(json.dumps(source))  # JSON is YAML
    return path


@dataclasses.dataclass
class Row:
    """One NVTX range in a report."""

    text: str
    domain: str
    category: str
    color: int | None
    start: int
    end: int | None
    kind: int
    thread: int


def ranges(report: Path) -> list[Row]:
    """The NVTX ranges of a report, as the real nsys exports them, in the order of their begin."""
    database = report.with_suffix(".sqlite")
    done = run(["nsys", "export", "-q", "true", "-t", "sqlite", "-f", "true", "-o", str(database), str(report)])
    assert done.code == 0, done.out + done.err
    connection = sqlite3.connect(database)
    try:
        texts = dict(connection.execute("select id, value from StringIds"))
        select = "select eventType, text, textId, domainId, category, color, start, end, globalTid from NVTX_EVENTS"
        events = connection.execute(select).fetchall()
    finally:
        connection.close()
    domains = {domain: text for kind, text, _, domain, *_ in events if kind == 75}
    categories = {(domain, category): text for kind, text, _, domain, category, *_ in events if kind == 33}
    rows = [
        Row(
            text=text if text is not None else texts[text_id],
            domain=domains.get(domain, ""),
            category=categories.get((domain, category), ""),
            color=color,
            start=start,
            end=end,
            kind=kind,
            thread=thread & 0xFFFFFF,
        )
        for kind, text, text_id, domain, category, color, start, end, thread in events
        if kind in {59, 60}
    ]
    return sorted(rows, key=lambda row: row.start)


def labels(report: Path) -> list[str]:
    """Labels of the ranges in a report, without the window's own."""
    return [row.text for row in ranges(report) if row.text != "rankscope.window"]


def reports(save_path: Path) -> list[Path]:
    """Reports that lie where they belong, in the order of their names."""
    return sorted(save_path.glob("*.nsys-rep"))


def index(save_path: Path) -> dict[str, Any]:
    """The one index."""
    (path,) = save_path.glob("*.nsys-index.json")
    return dict(json.loads(path.read_text()))


def left_over(save_path: Path) -> list[str]:
    """What lies in the folder of unfinished reports, and no longer should."""
    folder = save_path / ".rankscope" / "nsys"
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".owner")


def status(save_path: Path) -> list[tuple[str, int | None, str, str]]:
    """Role, step, scope and status of each row that ``rankscope status`` shows."""
    from rankscope.artifacts.status import read_status

    return [(row.role, row.step, row.scope, row.status) for row in read_status(save_path).rows]


def closed(save_path: Path) -> bool:
    """Whether the handle of the one process was closed."""
    from rankscope.artifacts.ledger import read_ledgers

    return any(record["kind"] == "close" for record in read_ledgers(save_path))


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something to become true; what it was."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come true within {seconds} seconds")
        time.sleep(0.05)
    return found
