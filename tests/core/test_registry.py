from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recording

from rankscope import ConfigError, DistProfiler, registry


def distribution(directory: Path, name: str, entries: str, *, metadata: bool = True) -> None:
    info = directory / f"{name.replace('-', '_')}-2.0.dist-info"
    info.mkdir(parents=True)
    if metadata:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[rankscope.backends]\n" + entries)


def test_tools_are_listed_without_importing_any(site: Path) -> None:
    result = recording.run_python(
        site,
        "import sys; from rankscope import registry; print(registry.installed()['rec'].provider, "
        "'recording' in sys.modules, 'pluggy' in sys.modules, registry.installed()['rec'].value)",
    )
    assert result.stdout == "recording-tools 1.0 False False recording:RecordingBackend\n"


def test_load_gives_what_the_entry_point_names(site: Path) -> None:
    assert registry.load("rec") is recording.RecordingBackend
    assert registry.check("rec", "x") is None
    assert registry.known("rec")
    assert registry.known("nsys")
    assert not registry.known("recc")


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("recc", ["a.tool: no tool named 'recc'. Did you mean 'rec'?", "Installed: ", " bound, ", " rec, rec2, "]),
        ("ours", ["a.tool: tool 'ours' is not installed", "pip install rankscope-ours"]),
        ("gone", ["'gone' (no_such_module_at_all:X from bad-tools 2.0)", "ModuleNotFoundError"]),
        ("broken", ["'broken' (broken_tool:X from bad-tools 2.0) could not be imported: ZeroDivisionError"]),
        ("constant", ["'constant' (broken_constant:X from bad-tools 2.0) is 5, not a backend class"]),
        ("Upper", ["'Upper' of bad-tools 2.0 has no valid name"]),
    ],
)
def test_a_tool_that_cannot_be_had_says_why_and_what_helps(
    site: Path, monkeypatch: pytest.MonkeyPatch, tool: str, words: list[str]
) -> None:
    distribution(
        site,
        "bad-tools",
        "gone = no_such_module_at_all:X\nbroken = broken_tool:X\nconstant = broken_constant:X\nUpper = os:sep\n",
    )
    (site / "broken_tool.py").write_text("1 / 0\n")
    (site / "broken_constant.py").write_text("X = 5\n")
    monkeypatch.setattr(registry, "FIRST_PARTY", {"ours": "rankscope-ours"})
    with pytest.raises(ConfigError) as caught:
        registry.load(tool, "a.tool")
    for word in words:
        assert word in str(caught.value)


def test_two_distributions_with_one_name(site: Path) -> None:
    distribution(site, "other-tools", "rec = other:Backend\n")
    with pytest.raises(ConfigError) as caught:
        registry.load("rec", "a.tool")
    assert "more than one distribution" in str(caught.value)
    assert "recording-tools 1.0" in str(caught.value)
    assert "other-tools 2.0" in str(caught.value)
    assert "rec" not in registry.installed()
    assert "rec2" in registry.installed()


def test_one_distribution_that_is_found_twice_is_no_clash(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(recording.install(tmp_path / "again")))
    assert registry.load("rec") is recording.RecordingBackend


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_half_removed_distribution_does_not_stop_the_others(site: Path) -> None:
    distribution(site, "half-removed", "halved = halved:X\n", metadata=False)
    assert registry.load("rec") is recording.RecordingBackend
    assert [info.tool if hasattr(info, "tool") else info.name for info in registry.providers()["halved"]] == ["halved"]


def test_disabled_tools(site: Path, monkeypatch: pytest.MonkeyPatch, save_path: Path) -> None:
    monkeypatch.setenv("RANKSCOPE_DISABLE", "rec, other")
    with pytest.raises(ConfigError, match="'rec' is disabled by RANKSCOPE_DISABLE"):
        DistProfiler(recording.config(save_path), role="actor", rank=0, world_size=1)
    assert set(registry.installed()) & {"rec", "rec2"} == {"rec2"}
    monkeypatch.setenv("RANKSCOPE_DISABLE", "*")
    assert registry.installed() == {}


# When a config is read.

UNSELECTED = """
import sys, json
from pathlib import Path
import importlib.util
sys.path.insert(0, sys.argv[2])
from rankscope import DistProfiler, annotate
config = json.loads(sys.argv[1])
handle = DistProfiler(config, role="actor", rank=int(sys.argv[3]), world_size=4)
handle.start(step=1)
with annotate("a"):
    handle.step()
handle.stop(last=True)
print(handle.selected, "recording" in sys.modules, "pluggy" in sys.modules, handle.why)
"""


@pytest.mark.parametrize(("rank", "selected"), [(0, "True True"), (1, "False False")])
def test_an_unselected_rank_imports_no_backend(site: Path, save_path: Path, rank: int, selected: str) -> None:
    import json

    config = recording.config(save_path, section={"all_ranks": False, "ranks": [0]})
    result = recording.run_python(site, UNSELECTED, json.dumps(config), recording.HERE, rank)
    assert result.stdout.startswith(selected), result.stderr
    plans = recording.ledger(save_path, "plan")
    assert [(plan["rank"], plan["profiled"]) for plan in plans] == [(rank, rank == 0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_tool_is_an_error_on_every_rank(site: Path, save_path: Path, rank: int) -> None:
    config = recording.config(save_path, tool="recc", section={"all_ranks": False, "ranks": [0]})
    with pytest.raises(ConfigError, match=r"global_profiler\.tool: no tool named 'recc'"):
        DistProfiler(config, role="actor", rank=rank, world_size=2)
    assert not save_path.exists()


@pytest.mark.parametrize("off", [{"steps": None}, {"steps": []}, {"section": {"enable": False}}])
def test_switched_off_means_nothing_at_all(site: Path, save_path: Path, off: dict[str, Any]) -> None:
    handle = DistProfiler(recording.config(save_path, **off), role="actor", rank=0, world_size=1)
    assert not handle.enabled
    assert handle.start(step=1) is False
    handle.step()
    handle.advance(step=2)
    handle.stop(last=True)
    handle.close()
    assert recording.CALLS == []
    assert not save_path.exists()
    assert handle.why


def test_a_backend_that_cannot_be_set_up_is_a_config_error(site: Path, save_path: Path) -> None:
    (site / "hopeless_tool.py").write_text(
        "import recording\n"
        "class Hopeless(recording.RecordingBackend):\n"
        "    def __init__(self, context, options):\n"
        "        raise OSError('no driver')\n"
    )
    distribution(site, "hopeless-tools", "hopeless = hopeless_tool:Hopeless\n")
    with pytest.raises(ConfigError) as caught:
        DistProfiler(recording.config(save_path, tool="hopeless"), role="actor", rank=0, world_size=1)
    assert "global_profiler.tool: tool 'hopeless' could not be set up: OSError: no driver" in str(caught.value)
