"""What all subjects share: fresh child processes, interleaved rounds, medians with spread, ratios with targets."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
SOURCES = (ROOT / "core" / "src", ROOT / "backends" / "torch" / "src")
_MARK = "BENCH-RESULT "


class ChildFailed(Exception):  # noqa: N818 - told in the report, the other measurements go on
    """A measuring process ended without a result."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run measures.

    Attributes:
        quick: small sizes and few repeats.
        verl: the interpreter that can import verl; None leaves verl out.
        sizes: the raw trace sizes in MB that ``export`` measures.
    """

    quick: bool = False
    verl: str | None = None
    sizes: tuple[int, ...] = (5, 50, 300)


@dataclasses.dataclass
class Series:
    """Samples of one quantity, measured one way.

    Attributes:
        way: what was measured: ``rankscope``, ``torch``, ``verl`` …
        what: the quantity, with its circumstances.
        unit: ``s``, ``ms``, ``us``, ``ns``, ``MB`` or a plain word.
        samples: one a round, in the order of the rounds.
    """

    way: str
    what: str
    unit: str
    samples: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def text(self) -> str:
        """``median (min..max)``."""
        low, high = min(self.samples), max(self.samples)
        middle = number(self.median)
        return middle if len(self.samples) == 1 or low == high else f"{middle} ({number(low)}..{number(high)})"


@dataclasses.dataclass
class Ratio:
    """One way's share of another's, round by round.

    Attributes:
        what: in words, e.g. ``blocked, 50 MB, shapes: rankscope / verl``.
        value: median by median.
        low, high: smallest and largest of the rounds.
        target: the limit, or None.
        at_least: whether the target is a lower limit.
    """

    what: str
    value: float
    low: float
    high: float
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def wanted(self) -> str:
        """The target in words."""
        if self.target is None:
            return ""
        return f"{'at least' if self.at_least else 'at most'} {self.target:g}"


class Report:
    """What a subject found out."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.series: list[Series] = []
        self.ratios: list[Ratio] = []
        self.notes: list[str] = []

    def add(self, way: str, what: str, unit: str, samples: Iterable[float]) -> Series | None:
        """Keep samples; none at all is no series."""
        values = [float(value) for value in samples]
        if not values:
            return None
        series = Series(way, what, unit, values)
        self.series.append(series)
        return series

    def find(self, way: str, what: str) -> Series | None:
        """A series that was added."""
        return next((one for one in self.series if one.way == way and one.what == what), None)

    def ratio(
        self,
        what: str,
        above: Series | None,
        below: Series | None,
        *,
        target: float | None = None,
        at_least: bool = False,
    ) -> None:
        """Compare two series of the same rounds; left out when one of them is missing."""
        if above is None or below is None or not below.median:
            return
        pairs = [a / b for a, b in zip(above.samples, below.samples, strict=False) if b]
        value = above.median / below.median
        self.ratios.append(Ratio(what, value, min(pairs, default=value), max(pairs, default=value), target, at_least))

    def note(self, text: str) -> None:
        """Say something that no number says."""
        self.notes.append(text)

    def plain(self) -> dict[str, Any]:
        """For the kept JSON."""
        return {
            "series": [
                {**dataclasses.asdict(one), "median": one.median, "min": min(one.samples), "max": max(one.samples)}
                for one in self.series
            ],
            "ratios": [{**dataclasses.asdict(one), "met": one.met} for one in self.ratios],
            "notes": self.notes,
        }

    @classmethod
    def from_plain(cls, subject: str, plain: Mapping[str, Any]) -> Report:
        """Read back what ``plain`` made."""
        report = cls(subject)
        for one in plain["series"]:
            report.add(one["way"], one["what"], one["unit"], one["samples"])
        fields = [field.name for field in dataclasses.fields(Ratio)]
        report.ratios = [Ratio(**{name: one[name] for name in fields}) for one in plain["ratios"]]
        report.notes = list(plain["notes"])
        return report


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.5f}"


def tables(report: Report) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows: first the quantities (a column a way), then the ratios."""
    ways = list(dict.fromkeys(one.way for one in report.series))
    found: list[tuple[list[str], list[list[str]]]] = []
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in report.series:
        rows.setdefault((one.what, one.unit), {})[one.way] = one.text
    if rows:
        body = [[what, unit, *(cells.get(way, "") for way in ways)] for (what, unit), cells in rows.items()]
        found.append((["median (min..max)", "unit", *ways], body))
    if report.ratios:
        body = [
            [
                one.what,
                f"{number(one.value)} ({number(one.low)}..{number(one.high)})",
                one.wanted,
                "" if one.met is None else ("met" if one.met else "MISSED"),
            ]
            for one in report.ratios
        ]
        found.append((["ratio", "median (min..max)", "target", ""], body))
    return found


def as_text(report: Report) -> str:
    """For the terminal."""
    lines = [f"== {report.subject}"]
    for header, body in tables(report):
        widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [header, *body]
        ]
        lines.append("")
    lines += [f"note: {text}" for text in report.notes]
    return "\n".join(lines)


def as_markdown(report: Report) -> str:
    """For the pages."""
    parts = []
    for header, body in tables(report):
        rows = [header, ["---"] * len(header), *body]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
    parts += [f"Note: {text}" for text in report.notes]
    return "\n\n".join(parts)


# Child processes.


def child(module: str, arguments: Mapping[str, Any], *, python: str | None = None, timeout: float = 900) -> Any:
    """Run ``bench.<module>`` in a fresh interpreter and return what it answers.

    Args:
        module: the module's name; its ``measure(arguments)`` does the work.
        arguments: anything that JSON can hold.
        python: the interpreter; this one by default.
        timeout: seconds after which the process is killed.

    Raises:
        ChildFailed: it did not answer.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANKSCOPE_", "VERL_"))}
    environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [python or sys.executable, "-c", _BOOT, module, json.dumps(arguments)]
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as place:
        try:
            done = subprocess.run(
                command,
                cwd=place,
                env=environ,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"{module}: no answer within {timeout:g} s") from error
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    raise ChildFailed(f"{module} ended with status {done.returncode}: {done.stderr.strip()[-800:] or 'no output'}")


_BOOT = "import sys; from bench.common import answer; answer(sys.argv[1], sys.argv[2])"


def answer(module: str, arguments: str) -> None:
    """In the child: measure, and write the result where the parent looks for it."""
    import importlib

    result = importlib.import_module(f"bench.{module}").measure(json.loads(arguments))
    sys.stdout.write(f"\n{_MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


def rounds(count: int, ways: Sequence[str], run: Callable[[str], Any]) -> dict[str, list[Any]]:
    """A, B, C, A, B, C, …: what disturbs the machine for a while disturbs all ways alike.

    A way that fails is said so once and left out.
    """
    found: dict[str, list[Any]] = {way: [] for way in ways}
    broken: set[str] = set()
    for _ in range(count):
        for way in ways:
            if way in broken:
                continue
            try:
                found[way].append(run(way))
            except ChildFailed as error:
                broken.add(way)
                progress(f"{way} is left out: {error}")
    return found


def progress(text: str) -> None:
    """Tell the user what is going on; the results themselves go to standard output."""
    print(f"[bench] {text}", file=sys.stderr, flush=True)


# Shared by children.


def rankscope_config(save_path: Path, contents: Sequence[str], *, discrete: bool = False) -> dict[str, Any]:
    """One role, one tool."""
    return {
        "global_profiler": {
            "tool": "torch",
            "steps": [1],
            "save_path": str(save_path),
            "global_tool_config": {"torch": {"contents": list(contents), "discrete": discrete}},
        },
        "actor": {"profiler": {"enable": True, "ranks": "all"}},
    }


def rankscope_handle(save_path: Path, contents: Sequence[str], *, discrete: bool = False) -> Any:
    """A handle as a user makes one."""
    from rankscope import DistProfiler

    return DistProfiler(rankscope_config(save_path, contents, discrete=discrete), role="actor", rank=0, world_size=1)


def verl_handle(save_path: Path, contents: Sequence[str], *, discrete: bool = False) -> Any:
    """verl's profiler, set up as verl's workers do it."""
    from verl.utils.profiler import DistProfiler, ProfilerConfig
    from verl.utils.profiler.config import TorchProfilerToolConfig

    tool = TorchProfilerToolConfig(contents=list(contents), discrete=discrete)
    config = ProfilerConfig(tool="torch", enable=True, all_ranks=True, save_path=str(save_path), tool_config=tool)
    return DistProfiler(rank=0, config=config, tool_config=tool, save_file_prefix="actor")


def torch_profile(contents: Sequence[str]) -> Any:
    """torch's profiler, with nothing around it."""
    import torch

    return torch.profiler._KinetoProfile(  # noqa: SLF001
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes="shapes" in contents,
        with_stack="stack" in contents,
        profile_memory="memory" in contents,
    )


def memory_mb() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_mb() -> float:
    """Most resident memory of this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024 / 1e3
