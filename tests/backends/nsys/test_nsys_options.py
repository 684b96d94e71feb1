"""Options: verl's block as it is, names of nsys options, values that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rankscope import ConfigError, DistProfiler, load_config
from rankscope_nsys import NsysBackend, NsysOptions
from rankscope_nsys.ends import parse_end, report_name, report_paths
from rankscope_nsys.flags import LONG, SHORT, binary

VERL = """
global_profiler:
  _target_: verl.utils.profiler.ProfilerConfig
  tool: nsys
  steps: [1, 2, 5]
  profile_continuous_steps: false
  save_path: outputs/profile
  global_tool_config:
    nsys:
      _target_: verl.utils.profiler.config.NsightToolConfig
      discrete: false
      controller_nsight_options:
        trace: "cuda,nvtx,cublas,ucx"
        cuda-memory-usage: "true"
        cuda-graph-trace: "graph"
      worker_nsight_options:
        trace: "cuda,nvtx,cublas,ucx"
        cuda-memory-usage: "true"
        cuda-graph-trace: "graph"
        capture-range: "cudaProfilerApi"
        capture-range-end: null
        kill: none
actor_rollout_ref:
  actor:
    profiler: {enable: true, all_ranks: true}
"""


def problems(**options: Any) -> dict[str, str]:
    """What the config says of these options, by option."""
    source = {
        "global_profiler": {"tool": "nsys", "steps": [1], "global_tool_config": {"nsys": options}},
        "actor": {"profiler": {"enable": True, "all_ranks": True}},
    }
    with pytest.raises(ConfigError) as raised:
        load_config(source)
    return {problem.path.partition(".nsys.")[2]: problem.message for problem in raised.value.problems}


def test_the_block_of_verl_loads_unchanged(tmp_path: Path) -> None:
    source = yaml.safe_load(VERL)
    source["global_profiler"]["save_path"] = str(tmp_path)
    with DistProfiler(source, role="actor", rank=0, world_size=1) as profiler:
        (tool,) = profiler.tools
        backend = tool.backend
        assert isinstance(backend, NsysBackend)
        options = backend.options
    worker = options.nsight_options(controller=False)
    assert worker["trace"] == "cuda,nvtx,cublas,ucx"
    assert (worker["capture-range"], worker["kill"]) == ("cudaProfilerApi", "none")
    assert "capture-range-end" not in worker
    assert options.nsight_options(controller=True)["cuda-memory-usage"] == "true"


@pytest.mark.parametrize(("preset", "trace"), [
    ("light", "cuda,nvtx"),
    ("comm", "cuda,nvtx,ucx,mpi"),
    ("full", "cuda,nvtx,osrt,cublas,cudnn,ucx"),
])  # fmt: skip
def test_presets_and_what_is_set_on_top_of_them(preset: str, trace: str) -> None:
    plain = NsysOptions(preset=preset).nsight_options(controller=False)
    assert (plain["trace"], plain["sample"], plain["cpuctxsw"]) == (trace, "none", "none")
    own = NsysOptions(preset=preset, worker_nsight_options={"t": "nvtx", "stats": True, "sample": None, "delay": 3})
    chosen = own.nsight_options(controller=False)
    assert (chosen["trace"], chosen["stats"], chosen["sample"], chosen["delay"]) == ("nvtx", "true", "none", "3")
    assert own.nsight_options(controller=True)["trace"] == trace


def test_unknown_names_are_refused_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = problems(
        worker_nsight_options={"trce": "nvtx", "--sample": "none", "cuda_memory_usage": "true"},
        controller_nsight_options={"q": "1"},
        presett="light",
    )
    assert found["worker_nsight_options.trce"] == "`nsys profile` has no option 'trce'. Did you mean 'trace'?"
    assert found["worker_nsight_options.--sample"] == "write the name without dashes: 'sample'"
    assert "Did you mean 'cuda-memory-usage'?" in found["worker_nsight_options.cuda_memory_usage"]
    assert "has no option 'q'" in found["controller_nsight_options.q"]
    assert "Did you mean 'preset'?" in found["presett"]


def test_values_that_cannot_work_are_refused() -> None:
    found = problems(
        preset="medium",
        capture="gpu",
        stages_per_step=0,
        report_wait=-1,
        worker_nsight_options={
            "capture-range": "cudaProfiler",
            "capture-range-end": "repeat-shutdown",
            "nvtx-capture": "mine",
            "trace": ["cuda", "nvtx"],
        },
        controller_nsight_options={"t": "nvtx", "trace": "cuda"},
    )
    assert found["preset"] == "must be one of light, comm, full; got 'medium'."
    assert "must be one of auto, cuda, nvtx" in found["capture"]
    assert "1 or more" in found["stages_per_step"]
    assert "0 or more" in found["report_wait"]
    assert "Did you mean 'cudaProfilerApi'?" in found["worker_nsight_options.capture-range"]
    assert "got 'repeat-shutdown'" in found["worker_nsight_options.capture-range-end"]
    assert "leave it out" in found["worker_nsight_options.nvtx-capture"]
    assert "must be a text" in found["worker_nsight_options.trace"]
    assert found["controller_nsight_options.trace"] == "is given twice: 't' is the same option"


def test_a_name_that_only_the_installed_nsys_knows_is_accepted(fake_nsys: Path) -> None:
    help_file = fake_nsys.parent.parent / "nsys-help.txt"
    help_file.write_text(help_file.read_text() + "\n\t--brand-new-trace=\n\n\t   New.\n")
    assert NsysOptions(worker_nsight_options={"brand-new-trace": "on"}).worker_nsight_options
    with pytest.raises(ValueError, match="has no option 'brand-newer-trace'"):
        NsysOptions(worker_nsight_options={"brand-newer-trace": "on"})


def test_the_table_of_options_is_that_of_the_real_nsys(real_nsys: str, kit: Any) -> None:
    binary.cache_clear()
    found = binary(real_nsys)
    assert found.version.startswith("20")
    assert found.options >= set(SHORT.values())
    if found.version.startswith("2023.4"):
        assert found.options - {"help"} <= LONG
        assert not found.writes_early
        refused = kit.run(["nsys", "profile", "--pytorch=autograd-nvtx", "true"])
        assert refused.code != 0  # an option of a later nsys, which launch has to refuse here


@pytest.mark.parametrize(("text", "limit", "ends", "deferred"), [
    ("none", None, False, False),
    ("stop", 1, True, False),
    ("stop-shutdown", 1, True, False),
    ("repeat", None, True, True),
    ("repeat:3", 3, True, True),
    ("repeat:async", None, True, False),
    ("repeat-shutdown:12", 12, True, True),
    ("repeat:3:sync", 3, True, False),
])  # fmt: skip
def test_what_the_end_of_a_range_means(text: str, limit: int | None, ends: bool, deferred: bool) -> None:
    end = parse_end(text)
    assert end is not None
    assert (end.limit, end.ends, end.deferred) == (limit, ends, deferred)
    assert end.written_by(3) == (ends and (not deferred or limit == 3))


@pytest.mark.parametrize("text", ["", "repeat:", "repeat:0", "repeat:-1", "repeat-shutdown", "stop:2", "repeat:3:late"])
def test_what_nsys_would_refuse_means_nothing(text: str) -> None:
    assert parse_end(text) is None


def test_names_of_reports() -> None:
    assert report_paths("/x/pid1", 1) == [Path("/x/pid1.1.nsys-rep"), Path("/x/pid1.nsys-rep")]
    assert report_paths("/x/mine.nsys-rep", 2) == [Path("/x/mine.2.nsys-rep")]
    assert report_name("/x/mine.nsys-rep", 2) == "mine.2.nsys-rep"


def test_without_the_nvtx_package_it_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    answer = NsysBackend.available()
    assert (answer.available, answer.hint) == (False, "pip install nvtx")
    with pytest.raises(ConfigError, match="the nvtx package is not installed; pip install nvtx"):
        DistProfiler(kit.config(tmp_path), role="actor", rank=0, world_size=1)
    unprofiled = {"global_profiler": {"steps": None, "tool": "nsys"}, "actor": {"profiler": {"enable": True}}}
    DistProfiler(unprofiled, role="actor", rank=0, world_size=1).close()


def test_ranges_that_are_switched_off_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_DISABLE", "1")
    answer = NsysBackend.available()
    assert answer.available
    assert "NVTX_DISABLE is set" in answer.reason
