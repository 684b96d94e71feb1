"""The commands plugins, plan and status as a user runs them: real processes, fake distributions, real ledgers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.ledger import Ledger
from rankscope.cli import COMMANDS, main
from rankscope.cli.plan import collapse
from rankscope.plan import PlanRow
from rankscope.table import human_size, render_table
from rankscope.topology import host_name

WORKS = """
from dataclasses import dataclass
from rankscope.types import Availability

print("noise of a plugin")

@dataclass(frozen=True)
class Options:
    depth: int = 1

class Backend:
    Options = Options
    suffix = ".json.gz"

    @staticmethod
    def available():
        return {available}
"""


def distribution(site: Path, name: str, tools: dict[str, str], modules: dict[str, str]) -> None:
    info = site / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    entries = "\n".join(f"{tool} = {value}" for tool, value in tools.items())
    (info / "entry_points.txt").write_text(f"[rankscope.backends]\n{entries}\n")
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of fake distributions: tools that work, cannot work, cannot be imported, and one that two provide."""
    folder = tmp_path / "site"
    distribution(
        folder,
        "acme-tools",
        {
            "works": "acme_works:Backend",
            "lacks": "acme_lacks:Backend",
            "broken": "acme_broken:Backend",
            "leaves": "acme_leaves:Backend",
            "plain": "acme_plain:Backend",
            "lies": "acme_lies:Backend",
            "raises": "acme_raises:Backend",
            "twice": "acme_works:Backend",
        },
        {
            "acme_works": WORKS.format(available="Availability(True)"),
            "acme_lacks": WORKS.format(available="Availability(False, 'no driver', 'load the driver')"),
            "acme_broken": "raise ImportError('libacme.so is missing')",
            "acme_leaves": "raise SystemExit(3)",
            "acme_plain": "class Backend: pass",
            "acme_lies": WORKS.format(available="'yes'"),
            "acme_raises": WORKS.format(available="1 / 0"),
        },
    )
    distribution(folder, "other-tools", {"twice": "other:Backend"}, {"other": "class Backend: pass"})
    return folder


def environ(site: Path | None = None, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RANKSCOPE_", "PYTHON"))}
    return {**kept, **({"PYTHONPATH": str(site)} if site else {}), "COLUMNS": "100", **more}


def rankscope(*words: object, site: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    more = options.pop("env", {})
    command = [sys.executable, *options.pop("python", ()), "-m", "rankscope", *map(str, words)]
    return subprocess.run(
        command, env=environ(site, **more), capture_output=True, text=True, check=False, timeout=60, **options
    )


# ---------------------------------------------------------------- the command itself


def test_version_and_help():
    assert rankscope("--version").stdout == f"rankscope {version('rankscope')}\n"
    shown = rankscope("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in COMMANDS)
    nothing = rankscope()
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "usage: rankscope" in nothing.stderr


@pytest.fixture
def brought_along(tmp_path, monkeypatch):
    """A distribution with two commands, one of which cannot be imported."""
    (tmp_path / "extra_command.py").write_text(
        '"""Count words."""\nEXAMPLES = "example:\\n  rankscope count"\n'
        "def add_arguments(parser):\n    parser.add_argument('words', nargs='*')\n"
        "def run(arguments):\n    print(len(arguments.words))\n    return 0\n"
    )
    info = tmp_path / "extra-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[rankscope.commands]\ncount = extra_command\nbroken = extra_absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("brought_along")
def test_a_distribution_brings_a_command_along(capsys):
    assert main(["count", "a", "b"]) == 0
    assert capsys.readouterr().out == "2\n"
    assert main(["--help"]) == 0
    assert re.search(r"^  count +\(of extra\)$", capsys.readouterr().out, re.MULTILINE)
    assert main(["coutn"]) == 2
    assert "Did you mean 'count'?" in capsys.readouterr().err


@pytest.mark.usefixtures("brought_along")
def test_a_command_that_cannot_be_imported_names_its_distribution(capsys):
    assert main(["broken"]) == 2
    said = capsys.readouterr().err
    assert "extra_absent from extra 2.0" in said
    assert "ModuleNotFoundError" in said


def test_a_command_of_ours_that_is_not_installed_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("rankscope.registry.commands", dict)
    assert main(["memory", "x.pickle"]) == 2
    assert "pip install rankscope-torch-memory" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"\n  rankscope {command}" in capsys.readouterr().out.partition("example")[2]


def test_an_unknown_command_or_option(capsys):
    assert main(["plugin"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rankscope: no command named 'plugin'. Did you mean 'plugins'? Commands: plugins, plan, ")
    assert all(command in said for command in COMMANDS)
    assert main(["plugins", "--chek"]) == 2
    assert "unrecognized arguments: --chek" in capsys.readouterr().err
    assert main(["--verbose"]) == 2


def test_the_console_script_is_the_same_command():
    script = Path(sys.executable).with_name("rankscope")
    if not script.exists():
        pytest.skip("no scripts folder beside this interpreter")
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout.endswith("\n")


_NO_JSON = {"json"} if sys.version_info < (3, 13) else set()  # importlib.metadata imports it since 3.13


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["plugins"], {"torch", "omegaconf", "structlog", "yaml", "pluggy", *_NO_JSON}),
        (["status", "."], {"torch", "omegaconf", "structlog", "yaml", "pluggy"}),
        (["--version"], {"torch", "omegaconf", "structlog", "yaml", "pluggy", "difflib"}),
    ],
)
def test_start_up_imports_little(words, heavy, site, tmp_path):
    script = "import sys; from rankscope.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env=environ(site),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "rankscope.cli" in loaded
    assert not heavy & loaded
    assert not [name for name in loaded if name.startswith(("acme", "rankscope_"))]


def test_a_reader_that_went_away_is_no_error(site):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", "plugins"],
            env=environ(site),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_interrupt_ends_quietly(tmp_path):
    config = tmp_path / "config.yaml"
    os.mkfifo(config)
    process = subprocess.Popen(
        [sys.executable, "-m", "rankscope", "plan", config, "--world-size", "1"],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with config.open("w"):  # open returns when the command has opened the other end and waits for text
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_tables_and_sizes():
    assert render_table(("a", "n"), [("x", 1), (None, 23), ("two\nlines", "")], right=("n",)) == (
        "a           n\nx           1\n-          23\ntwo lines   -"
    )
    assert [human_size(count) for count in (None, 0, 1023, 1536, 1023 * 1024, 5 * 2**30, 2**50)] == [
        "",
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 GiB",
        "1024.0 TiB",
    ]
    assert render_table(("a",), [("\x1b[2Jred\x07 é",), ("half \udcff",)]) == "a\n?[2Jred? é\nhalf ?"


# ---------------------------------------------------------------- plugins


def test_plugins_lists_without_importing(site):
    done = rankscope("plugins", "--json", site=site, env={"RANKSCOPE_DISABLE": "lacks"})
    assert (done.returncode, done.stderr) == (0, "")
    rows = {(row["name"], row["distribution"]): row for row in json.loads(done.stdout)}
    assert rows["broken", "acme-tools"] == {
        "name": "broken",
        "distribution": "acme-tools",
        "version": "1.2",
        "available": None,
        "reason": "",
        "file": "",
    }
    assert "disabled by RANKSCOPE_DISABLE" in rows["lacks", "acme-tools"]["reason"]
    for provider in ("acme-tools", "other-tools"):
        reason = rows["twice", provider]["reason"]
        assert reason.startswith("tool 'twice' is provided by more than one distribution: ")
        assert "acme-tools 1.2" in reason
        assert "other-tools 1.2" in reason
    assert all(row["available"] is None for row in rows.values())


def test_plugins_check_asks_each_tool(site):
    done = rankscope("plugins", "--check", "--json", site=site, env={"RANKSCOPE_DISABLE": "torch"})
    assert done.returncode == 0
    assert "noise of a plugin" in done.stderr
    rows = json.loads(done.stdout)
    files = {row["name"]: row["file"] for row in rows}
    assert Path(files["works"]).is_file()
    assert Path(files["works"]).is_relative_to(site)
    assert files["broken"] == ""
    found = {row["name"]: (row["available"], row["reason"]) for row in rows}
    assert found["works"] == (True, "")
    assert found["plain"] == (True, "")
    assert found["lacks"] == (False, "no driver; load the driver")
    assert found["raises"] == (False, "available() failed: ZeroDivisionError: division by zero")
    assert found["lies"] == (False, "available() returned 'yes' and not an Availability")
    assert found["broken"][0] is False
    assert "acme_broken:Backend from acme-tools 1.2" in found["broken"][1]
    assert found["broken"][1].endswith("ImportError: libacme.so is missing")
    assert found["leaves"][0] is False
    assert found["twice"][0] is False
    assert found["torch"] == (False, "tool 'torch' is disabled by RANKSCOPE_DISABLE; unset it or choose another tool")


def test_plugins_table(site):
    lines = rankscope("plugins", site=site).stdout.splitlines()
    assert lines[0].split() == ["tool", "version", "distribution", "available", "reason"]
    assert ["works", "1.2", "acme-tools", "not", "checked", "-"] in [line.split() for line in lines]


def test_plugins_names_our_tools_that_are_not_installed(monkeypatch, capsys):
    monkeypatch.setattr("rankscope.registry.FIRST_PARTY", {"ours": "rankscope-ours", "torch": "rankscope-torch"})
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out.endswith("\nnot installed: ours; to install: pip install rankscope-ours\n")


def test_plugins_where_there_are_none(monkeypatch, capsys):
    monkeypatch.setattr("rankscope.registry.providers", dict)
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out.startswith("no tool is installed\n\nnot installed: torch, ")
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


# ---------------------------------------------------------------- plan

CONFIG = """
global_profiler: {tool: works, steps: [2, 4], save_path: /traces}
actor: {profiler: {enable: true, ranks: "0-5"}}
critic: {profiler: {enable: false}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "profile.yaml"
    file.write_text(CONFIG)
    return file


def test_plan_json_has_a_row_for_each_rank(site, config):
    done = rankscope("plan", config, "--world-size", 8, "--steps-total", 3, "--json", site=site)
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert set(plan) == {"rows", "warnings", "notes"}
    assert plan["rows"][1] == {
        "role": "actor",
        "rank": 0,
        "step": 2,
        "tool": "works",
        "profiled": True,
        "reason": "rank 0 is in ranks 0-5",
        "file": "actor_train_step2_rank0-of-8_*.json.gz",
    }
    assert [row["rank"] for row in plan["rows"] if row["profiled"]] == list(range(6))
    assert plan["warnings"] == ["beyond the run's last step 3: step 4"]


def test_plan_json_is_not_spoiled_by_what_a_tool_prints(site, config):
    done = rankscope("plan", config, "--world-size", 1, "--json", site=site)
    assert set(json.loads(done.stdout)) == {"rows", "warnings", "notes"}
    assert done.stderr == "noise of a plugin\n"


def test_plan_table_collapses_ranks_and_takes_overrides_anywhere(site, config):
    done = rankscope("plan", "actor.profiler.enable=true", config, "--world-size", 8, site=site)
    assert done.returncode == 2, "the first word is the config"
    done = rankscope(
        "plan", config, "global_profiler.steps=[7]", "--world-size", 8, "critic.profiler.enable=true", site=site
    )
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert lines == [
        ["role", "rank", "step", "tool", "profiled", "reason", "file"],
        ["actor", "0-5", "7", "works", "yes", "in", "ranks", "0-5", "actor_train_step7_rank*-of-8_*.json.gz"],
        ["actor", "6-7", "all", "-", "no", "not", "in", "ranks", "0-5", "-"],
        ["critic", "0", "7", "works", "yes", "the", "default", "critic_train_step7_rank0-of-8_*.json.gz"],
        [
            "critic",
            "1-7",
            "all",
            "-",
            "no",
            "not",
            "rank",
            "0,",
            "the",
            "default;",
            "set",
            "ranks",
            "or",
            "all_ranks",
            "-",
        ],
    ]


def test_collapse_keeps_what_differs_and_the_order():
    rows = [
        PlanRow("rank1", rank, step, "t", True, f"rank {rank} is listed", f"rank1_train_step{step}_rank{rank}-of-12_*")
        for rank in (0, 1, 11)
        for step in (1, 2)
    ]
    rows.append(PlanRow("ref", None, None, None, False, "each process decides for itself: local rank 0 of each node"))
    assert collapse(rows) == [
        ("rank1", "0-1,11", 1, "t", "yes", "listed", "rank1_train_step1_rank*-of-12_*"),
        ("rank1", "0-1,11", 2, "t", "yes", "listed", "rank1_train_step2_rank*-of-12_*"),
        ("ref", "all", "all", None, "no", "each process decides for itself: local rank 0 of each node", None),
    ]


def test_plan_reads_standard_input(site):
    done = rankscope("plan", "-", "--world-size", 1, site=site, input=CONFIG)
    assert "actor_train_step4_rank0-of-1_*.json.gz" in done.stdout
    for text, message in (("a: [", "is not valid YAML"), ("[1]", "does not hold a mapping")):
        done = rankscope("plan", "-", "--world-size", 1, site=site, input=text)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_plan_shows_warnings(site, config):
    done = rankscope("plan", config, "--world-size", 2, "actor.profiler.enable=false", site=site)
    assert done.returncode == 0
    assert "\nwarning: nothing will be profiled: no role is enabled; set actor.profiler.enable" in done.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("global_profiler.tool=wroks", "no tool named 'wroks'. Did you mean 'works'?"),
        ("actor.profiler.rank=3", "actor.profiler.rank: unknown key 'rank'. Did you mean 'ranks'?"),
        ("global_profiler.global_tool_config.works.dept=3", "global_profiler.global_tool_config.works.dept"),
        ("global_profiler.tool=broken", "libacme.so is missing"),
    ],
)
def test_plan_refuses_what_training_would_refuse(override, message, site, config):
    done = rankscope("plan", config, override, "--world-size", 2, site=site)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.partition("rankscope plan: ")[1]
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_of_a_file_that_is_not_there(site, tmp_path):
    done = rankscope("plan", tmp_path / "no.yaml", "--world-size", 2, site=site)
    assert done.returncode == 2
    assert "cannot read the config" in done.stderr
    assert rankscope("plan", tmp_path / "no.yaml", "--world-size", 0).returncode == 2


# ---------------------------------------------------------------- status


def expect(ledger: Ledger, role: str, steps: list[int]) -> None:
    ledger.write("plan", role=role, rank=0, tool="works", profiled=True, reason="", steps=steps)


def capture(ledger: Ledger, role: str, step: int, window: int, path: Path | None) -> None:
    same = {"role": role, "rank": 0, "tool": "works", "window": window, "step": step, "scope": "train"}
    ledger.write("window", **same, event="open", steps=[step])
    if path is not None:
        ledger.write("artifact", **same, status="published", path=str(path), bytes=2048)
    ledger.write("window", **same, event="close")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A save path in which step 2 came and step 4 did not, and an older run that is complete."""
    folder = tmp_path / "traces"
    old = Ledger(folder, host=host_name(), run_id="a")
    expect(old, "critic", [1])
    capture(old, "critic", 1, 1, folder / "old.json.gz")
    old.write("close", role="critic", rank=0, last_step=1)
    new = Ledger(folder, host=host_name(), run_id="b")
    expect(new, "actor", [2, 4])
    capture(new, "actor", 2, 1, folder / "new.json.gz")
    capture(new, "actor", 4, 2, None)
    new.write("close", role="actor", rank=0, last_step=5)
    return folder


def test_status_json(traces):
    done = rankscope("status", traces, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout) == {
        "complete": False,
        "rows": [
            {
                "role": "actor",
                "rank": 0,
                "step": 2,
                "scope": "train",
                "tool": "works",
                "status": "published",
                "reason": "",
                "path": str(traces / "new.json.gz"),
                "bytes": 2048,
            },
            {
                "role": "actor",
                "rank": 0,
                "step": 4,
                "scope": "train",
                "tool": "works",
                "status": "missing",
                "reason": "the window was closed and left no file",
                "path": "",
                "bytes": None,
            },
        ],
    }


def test_status_table_and_all_runs(traces):
    done = rankscope("status", ".", cwd=traces)
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1] == ["actor", "0", "2", "train", "works", "published", "2.0", "KiB", "new.json.gz", "-"]
    assert lines[2][5:9] == ["missing", "-", "-", "the"]
    assert done.stdout.endswith("\n\n1 of 2 are there: 1 published, 1 missing\n")
    assert "old.json.gz" not in done.stdout
    assert "old.json.gz" in rankscope("status", traces, "--all-runs").stdout


def test_status_of_a_complete_run_is_zero(tmp_path):
    ledger = Ledger(tmp_path, host=host_name(), run_id="a")
    expect(ledger, "actor", [2])
    capture(ledger, "actor", 2, 1, tmp_path / "x.json.gz")
    ledger.write("close", role="actor", rank=0, last_step=2)
    assert rankscope("status", tmp_path).returncode == 0


def test_status_without_a_ledger_or_a_directory(tmp_path):
    empty = rankscope("status", tmp_path, "--json")
    assert (empty.returncode, json.loads(empty.stdout)) == (1, {"complete": False, "rows": []})
    assert empty.stderr.startswith(f"no ledger in {tmp_path}")
    for path, word in ((tmp_path / "no", "No such file"), (Path(__file__), "Not a directory")):
        missing = rankscope("status", path)
        assert (missing.returncode, missing.stdout) == (2, "")
        assert missing.stderr.startswith("rankscope status: cannot read the directory")
        assert word in missing.stderr
