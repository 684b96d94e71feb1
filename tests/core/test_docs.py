"""The pages say what the code does: generated parts are current, names and links exist, samples run as printed."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rankscope
from rankscope import environment, finish
from rankscope.cli import COMMANDS, main
from rankscope.dispatch import HOOKS
from rankscope.hookspecs import BackendSpecs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FRONT = [
    ROOT / "README.md",
    ROOT / "core/README.md",
    *sorted(ROOT.glob("backends/*/README.md")),
    *sorted(ROOT.glob("examples/backends/*/README.md")),
    *sorted(ROOT.glob("integrations/*/README.md")),
    ROOT / "examples/ppo/README.md",
]
ALL = [*FRONT, ROOT / "CHANGELOG.md", *PAGES]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> Iterator[str]:
    """Code of each fenced block of a language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def sample(page: str, name: str) -> str:
    """Code of the fenced block below ``<!-- sample: name -->``."""
    found = re.findall(
        rf"<!-- sample: {re.escape(name)} -->\n```\w+\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE
    )
    assert len(found) == 1, f"{page} has {len(found)} samples {name!r}"
    return found[0]


def outputs(page: Path) -> list[tuple[str, str]]:
    """Command and printed output of each block below ``<!-- output: command -->``."""
    return re.findall(r"<!-- output: (.+?) -->\n```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def without_chance(text: str) -> list[str]:
    """Lines without what differs from run to run: pids, times, sizes, and blanks that align columns."""
    text = re.sub(r"pid\d+_\d{17}(-\d+)?", "pid_time", text)
    text = re.sub(r"\d+(\.\d)? (B|KiB|MiB)", "size", text)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def printed(command: str) -> str:
    """What a ``rankscope`` command prints."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        main(shlex.split(command)[1:])
    return told.getvalue()


def plain_environment() -> dict[str, str]:
    """The environment of a user at the keyboard: no launcher, no strict mode; errors of ours would be contained."""
    ours = ("RANKSCOPE_", "VERL_")
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_", "RAY_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith((*ours, *launchers))}
    return {**environ, "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path, **more: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**plain_environment(), **more},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# ---------------------------------------------------------------- generated parts


@pytest.fixture
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rankscope_docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_every_generator_has_a_place(generate: ModuleType) -> None:
    used = re.findall(r"<!-- generated:begin (\S+) -->", "".join(page.read_text(encoding="utf-8") for page in PAGES))
    assert sorted(used) == sorted(generate.GENERATED)


def test_a_stale_part_is_noticed_and_rewritten(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "configuration.md"
    shutil.copy(DOCS / page.name, page)
    good = page.read_text(encoding="utf-8")
    stale = good.replace("`finish_hook_timeout`", "`finish_hook_patience`", 1).replace("Null means: inherit", "By hand")
    page.write_text(stale, encoding="utf-8")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "configuration.md" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == stale
    assert generate.main([]) == 0
    assert page.read_text(encoding="utf-8") == good.replace("Null means: inherit", "By hand")


def test_an_unknown_part_is_refused(generate: ModuleType) -> None:
    with pytest.raises(SystemExit, match="nothing generates 'nonsense'"):
        generate.rewritten("<!-- generated:begin nonsense -->\n<!-- generated:end -->")


# ---------------------------------------------------------------- everything is mentioned


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_documented_with_its_arguments(hook: str) -> None:
    arguments = [name for name in inspect.signature(getattr(BackendSpecs, hook)).parameters if name != "self"]
    headings = re.findall(r"^### `(.+?)`", text_of("docs/writing-a-backend.md"), re.MULTILINE)
    assert headings.count(f"{hook}({', '.join(arguments)})") == 1


def test_no_hook_is_documented_that_does_not_exist() -> None:
    headings = re.findall(r"^### `(\w+)\(", text_of("docs/writing-a-backend.md"), re.MULTILINE)
    assert sorted(headings) == sorted(HOOKS)


@pytest.mark.parametrize("name", rankscope.__all__)
def test_each_public_name_is_in_the_guide(name: str) -> None:
    assert any(re.search(rf"`{name}\b", page.read_text(encoding="utf-8")) for page in PAGES)


def test_each_environment_variable_is_documented() -> None:
    page = text_of("docs/environment.md")
    values = [value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str)]
    assert len(values) >= 6
    assert [value for value in values if value not in page] == []


@pytest.mark.parametrize("name", finish._NAMES)
def test_each_variable_of_the_finish_command_is_documented(name: str) -> None:
    assert f"| `{name}` |" in text_of("docs/finish-command.md")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_and_option_is_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = text_of("docs/cli.md")
    section = re.search(rf"^## `rankscope {command}`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert f"rankscope {command}" in text_of("README.md")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    options = set(re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]*)", shown, re.MULTILINE)) - {"--help"}
    assert options
    assert sorted(option for option in options if f"`{option}" not in section[1]) == []


def test_help_is_mentioned_where_commands_are() -> None:
    assert "--help" in text_of("README.md")
    assert "--help" in text_of("docs/cli.md")


def test_the_index_leads_to_every_page() -> None:
    index = text_of("docs/index.md")
    assert [page.name for page in PAGES if page.name != "index.md" and f"({page.name})" not in index] == []


def test_what_is_announced_is_not_called_present() -> None:
    from rankscope import registry

    for tool, package in registry.FIRST_PARTY.items():
        row = next(line for line in text_of("README.md").splitlines() if line.startswith(f"| `{tool}` |"))
        assert package in row
        here = (ROOT / "backends" / tool / "pyproject.toml").is_file()
        assert ("not part of this release" in row) is not here


# ---------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("page", ALL, ids=page_id)
def test_python_blocks_are_python(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")


@pytest.mark.torch
@pytest.mark.parametrize("page", ALL, ids=page_id)
def test_config_blocks_load(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in blocks(page, "yaml"):
        if "global_profiler:" in text:
            Path("sample.yaml").write_text(text, encoding="utf-8")
            assert isinstance(rankscope.load_config("sample.yaml"), rankscope.Config)


def test_ways_to_write_steps_mean_the_same() -> None:
    import yaml

    from rankscope.steps import parse_steps

    text = next(text for text in blocks(DOCS / "configuration.md", "yaml") if text.startswith("steps:"))
    assert {parse_steps(yaml.safe_load(line)["steps"]) for line in text.splitlines()} == {(2, 4, 6)}


def test_the_schedules_of_the_guide() -> None:
    import yaml

    from rankscope import Schedule, ScheduleOptions

    rows = re.findall(r"^\| `(\{.+?\})` \| .+? \| (.+?) \|$", text_of("docs/torch.md"), re.MULTILINE)
    assert len(rows) >= 4
    for written, files in rows:
        options = ScheduleOptions(**yaml.safe_load(written))
        schedule = Schedule(options, options.repeat)
        parts: list[list[int]] = []
        for index in range(6):
            if schedule.phase(index) == "record":
                if schedule.begins(index):
                    parts.append([])
                parts[-1].append(index)
        expected = [f"`…_mb{part[0]}" + (f"-{part[-1]}`" if len(part) > 1 else "`") for part in parts]
        assert files.split(", ") == expected


@pytest.mark.torch
@pytest.mark.parametrize(
    ("page", "command", "expected"),
    [
        pytest.param(page, command, expected, id=f"{page.name}-{number}")
        for page in ALL
        for number, (command, expected) in enumerate(outputs(page))
        if "status" not in command
    ],
)
def test_printed_output_is_real(
    page: Path, command: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANKSCOPE_DISABLE", raising=False)
    from rankscope import registry

    ours = {tool: infos for tool, infos in registry.providers().items() if tool in registry.FIRST_PARTY}
    monkeypatch.setattr(registry, "providers", lambda: ours)  # whatever else is installed here
    Path("profile.yaml").write_text(sample("README.md", "profile.yaml"), encoding="utf-8")
    assert without_chance(printed(command).replace(str(tmp_path), "/home/me/run")) == without_chance(expected)


@pytest.mark.torch
@pytest.mark.torchrun
def test_the_loop_of_the_first_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("profile.yaml", "train.py"):
        (tmp_path / name).write_text(sample("README.md", name), encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*launcher, "train.py"], tmp_path)
    traces = sorted((tmp_path / "outputs/profile").glob("*.json.gz"))
    assert len(traces) == 4
    for path in traces:
        rows = [
            event["name"]
            for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            if event.get("cat") == "user_annotation"
        ]
        assert [rows.count(name) for name in ("actor_update", "mini_batch0", "mini_batch3")] == [1, 1, 1]
    monkeypatch.chdir(tmp_path)
    command, expected = next(pair for pair in outputs(ROOT / "README.md") if "status" in pair[0])
    assert without_chance(printed(command)) == without_chance(expected)


@pytest.mark.torch
def test_the_loop_by_hand(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(sample("README.md", "profile.yaml"), encoding="utf-8")
    (tmp_path / "train.py").write_text(sample("docs/quickstart.md", "by-hand"), encoding="utf-8")
    run([sys.executable, "train.py"], tmp_path, RANKSCOPE_STRICT="1")
    names = [path.name for path in sorted((tmp_path / "outputs/profile").glob("*.json.gz"))]
    assert [name[: name.index("_pid")] for name in names] == ["actor_train_step2_rank0", "actor_train_step4_rank0"]


def test_the_backend_of_the_guide(tmp_path: Path) -> None:
    """The sample as an installed distribution, selected by name and driven by the public API."""
    page = "docs/writing-a-backend.md"
    installed = tmp_path / "site"
    info = installed / "rankscope_wallclock-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rankscope-wallclock\nVersion: 0.1\n")
    group, entry = sample(page, "entry-point").splitlines()
    assert group == '[project.entry-points."rankscope.backends"]'
    (info / "entry_points.txt").write_text("[rankscope.backends]\n" + entry.replace('"', "") + "\n")
    (installed / "rankscope_wallclock.py").write_text(sample(page, "backend"), encoding="utf-8")
    config = {
        "global_profiler": {"tool": "wallclock", "steps": [1], "save_path": str(tmp_path / "out")},
        "actor": {"profiler": {"enable": True}},
    }
    (tmp_path / "train.py").write_text(
        "from rankscope import DistProfiler, ProfileController, annotate\n"
        f"config = {config!r}\n"
        "profiler = DistProfiler(config, role='actor', rank=0, world_size=1)\n"
        "with ProfileController(config, workers=[profiler], total_steps=1) as controller:\n"
        "    with controller.step(1), annotate('actor_update'):\n"
        "        pass\n"
        "profiler.close()\n"
        "assert not profiler.faults\n"
    )
    shown = run([sys.executable, "-m", "rankscope", "plugins", "--check"], tmp_path, PYTHONPATH=str(installed))
    assert re.search(r"^wallclock +0\.1 +rankscope-wallclock +yes", shown, re.MULTILINE)
    run([sys.executable, "train.py"], tmp_path, PYTHONPATH=str(installed), RANKSCOPE_STRICT="1")
    (file,) = (tmp_path / "out").glob("*.txt")
    assert file.name.startswith("actor_train_step1_rank0-of-1_")
    assert int(file.read_text()) > 0
