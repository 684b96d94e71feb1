"""What a process gets before it starts: the command, the same for Ray, and when it gets nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rankscope import ConfigError, plan_launch
from rankscope.types import Context
from rankscope_nsys import NsysOptions, launching
from rankscope_nsys.attached import SESSION
from rankscope_nsys.flags import Binary
from rankscope_nsys.launching import capture_count, command, how_to_start, range_end, ray_options


@pytest.fixture
def plan(fake_nsys: Path, tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(launching, "cuda_device", lambda: False)

    def make(*, role: str = "actor", rank: int = 0, **facts: Any) -> Any:
        source = kit.config(tmp_path / "out", "actor", "controller", **facts)
        return plan_launch(source, roles=[role], rank=rank, world_size=2)

    return make


def options_of(prefix: tuple[str, ...]) -> dict[str, str]:
    return dict(word[2:].split("=", 1) for word in prefix[2:])


def context(steps: tuple[int, ...], *, continuous: bool = False) -> Context:
    return types.SimpleNamespace(steps=steps, continuous=continuous)  # type: ignore[return-value]


def test_the_command_of_a_selected_rank(plan: Any, fake_nsys: Path, tmp_path: Path) -> None:
    found = plan()
    assert found.command_prefix[:2] == (str(fake_nsys), "profile")
    chosen = options_of(found.command_prefix)
    output = chosen.pop("output")
    assert chosen == {
        "trace": "nvtx",
        "sample": "none",
        "cpuctxsw": "none",
        "wait": "primary",
        "kill": "none",
        "capture-range": "nvtx",
        "nvtx-capture": "rankscope.window@rankscope",
        "capture-range-end": "repeat:2",
    }
    folder, _, name = output.rpartition("/")
    assert folder == f"{tmp_path}/out/.rankscope/nsys/%h"
    assert name.startswith("pid%p-")
    assert (tmp_path / "out/.rankscope/nsys" / os.uname().nodename).is_dir()  # nsys makes no folders
    assert found.env.keys() == {"RANKSCOPE_NSYS_LAUNCH"}


def test_a_rank_that_is_not_selected_gets_nothing(plan: Any) -> None:
    found = plan(section={"ranks": [1]})
    assert (found.command_prefix, found.env, found.ray) == ((), {}, {})


def test_ranks_of_a_role_write_alike_and_are_told_apart(plan: Any) -> None:
    first, second = plan(rank=0), plan(rank=1)
    assert first.ray["nsight"] == second.ray["nsight"]
    assert first.env != second.env
    assert plan(rank=0).env == first.env


@pytest.mark.parametrize(("steps", "continuous", "discrete", "stages", "count"), [
    ((1, 2, 5), False, False, None, 3),
    ((1, 2, 5), True, False, None, 2),
    ((1, 2, 5), False, True, 4, 12),
    ((1, 2, 5), True, True, 4, 12),
    ((1, 2, 5), False, True, None, None),
    ((), False, False, None, None),
])  # fmt: skip
def test_the_number_of_captures_is_that_of_the_plan(
    steps: tuple[int, ...], continuous: bool, discrete: bool, stages: int | None, count: int | None
) -> None:
    options = NsysOptions(discrete=discrete, stages_per_step=stages)
    assert capture_count(options, context(steps, continuous=continuous)) == count
    assert range_end(count, None) == ("repeat" if count is None else f"repeat:{count}")


def test_an_nsys_that_can_write_reports_early_is_told_to() -> None:
    new = Binary("nsys", "2026.1", frozenset(), writes_early=True)
    assert (range_end(3, new), range_end(None, new)) == ("repeat:3:async", "repeat:async")


def test_the_capture_follows_the_device_unless_it_is_set(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(**facts: Any) -> tuple[str | None, str | None]:
        chosen = options_of(plan(**facts).command_prefix)
        return chosen.get("capture-range"), chosen.get("nvtx-capture")

    verl = {"worker_nsight_options": {"capture-range": "cudaProfilerApi"}}
    ours = ("nvtx", "rankscope.window@rankscope")
    assert capture() == capture(**verl) == capture(capture="nvtx", **verl) == ours
    assert capture(capture="cuda") == ("cudaProfilerApi", None)
    assert capture(worker_nsight_options={"capture-range": "none"}) == (None, None)
    monkeypatch.setattr(launching, "cuda_device", lambda: True)
    assert capture() == ("cudaProfilerApi", None)
    assert capture(worker_nsight_options={"c": "nvtx"}) == ours


def test_the_controller_is_captured_from_start_to_end_unless_it_has_a_range(plan: Any) -> None:
    chosen = options_of(plan(role="controller", controller_nsight_options={"trace": "nvtx,ucx"}).command_prefix)
    assert chosen["trace"] == "nvtx,ucx"
    assert not {"capture-range", "capture-range-end"} & chosen.keys()


def test_for_ray_names_are_bare_and_the_shell_changes_nothing() -> None:
    chosen = {"output": "/a b/$x/%h/pid%p", "trace": "cuda,nvtx", "capture-range-end": "repeat:3", "env-var": "A=b c"}
    assert ray_options(chosen) == {
        "o": "/a\\ b/\\$x/%h/pid%p",
        "trace": "cuda,nvtx",
        "capture-range-end": "repeat:3",
        "env-var": "'A=b c'",
    }
    assert command("nsys", {"trace": "nvtx", "env-var": "A=b c"}) == (
        "nsys", "profile", "--env-var=A=b c", "--trace=nvtx",
    )  # fmt: skip


def test_an_output_of_the_users_own_is_kept(plan: Any, tmp_path: Path) -> None:
    chosen = options_of(plan(worker_nsight_options={"o": f"{tmp_path}/mine/%p"}).command_prefix)
    assert chosen["output"] == f"{tmp_path}/mine/%p"
    assert (tmp_path / "mine").is_dir()
    elsewhere = options_of(plan(reports=f"{tmp_path}/disk").command_prefix)
    assert elsewhere["output"].startswith(f"{tmp_path}/disk/pid%p-")
    below = options_of(plan(reports="raw").command_prefix)
    assert below["output"].startswith(f"{tmp_path}/out/raw/pid%p-")


def test_a_save_path_is_no_pattern(fake_nsys: Path, kit: Any, tmp_path: Path) -> None:
    found = plan_launch(kit.config(tmp_path / "100%pid"))
    output = options_of(found.command_prefix)["output"]
    assert output.startswith(f"{tmp_path}/100%%pid/.rankscope/nsys/%h/pid%p-")
    assert (tmp_path / "100%pid/.rankscope/nsys" / os.uname().nodename).is_dir()


@pytest.mark.parametrize("letter", ['"', "&"])
def test_a_path_on_which_nsys_crashes_is_refused(fake_nsys: Path, kit: Any, tmp_path: Path, letter: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot write reports below a path with {letter}, .* tool_config.nsys.re"):
        plan_launch(kit.config(tmp_path / f"a{letter}b"))
    elsewhere = plan_launch(kit.config(tmp_path / f"a{letter}b", reports=f"{tmp_path}/plain"))
    assert options_of(elsewhere.command_prefix)["output"].startswith(f"{tmp_path}/plain/pid%p-")


def test_without_nsys_the_launch_is_refused(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match=r"needs the program 'nsys', which is not on PATH; install Nsight Systems"):
        plan_launch(kit.config(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: True))
    found = plan_launch(kit.config(tmp_path))
    assert (found.command_prefix, found.ray["nsight"]["trace"]) == ((), "nvtx")
    assert "the nodes on which Ray starts the workers need it there" in capfd.readouterr().err


def test_an_option_that_this_nsys_lacks_is_refused_with_its_version(plan: Any, fake_nsys: Path) -> None:
    with pytest.raises(ConfigError, match=r"nsys 2023.4.4.54 has no option 'gpu-metrics-devices'. Did you mean"):
        plan(worker_nsight_options={"gpu-metrics-devices": "all"})
    fake_nsys.write_text("#!/bin/sh\nexit 1\n")
    launching.binary.cache_clear()
    with pytest.raises(ConfigError, match="does not work here"):
        plan()


def test_a_filter_that_would_drop_the_capture_range_is_refused(plan: Any) -> None:
    with pytest.raises(ConfigError, match="the NVTX domain filter leaves out 'rankscope'"):
        plan(worker_nsight_options={"nvtx-domain-include": "default,NCCL"})
    with pytest.raises(ConfigError, match="the NVTX domain filter leaves out 'rankscope'"):
        plan(worker_nsight_options={"nvtx-domain-exclude": "rankscope"})
    assert plan(worker_nsight_options={"nvtx-domain-include": "default,rankscope"}).command_prefix


def test_a_limit_of_the_users_own_that_is_too_low_is_told(plan: Any, capfd: Any) -> None:
    assert options_of(plan(worker_nsight_options={"capture-range-end": "stop"}).command_prefix)
    assert "nsys will capture fewer windows than there may be" in capfd.readouterr().err
    assert plan(worker_nsight_options={"capture-range-end": "repeat-shutdown:6"}).command_prefix
    assert capfd.readouterr().err == ""


def test_an_injection_path_of_somebody_else_is_left_alone(
    plan: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/other/libinjection.so")
    found = plan()
    assert (found.command_prefix, found.env, found.ray) == ((), {}, {})
    assert os.environ["NVTX_INJECTION64_PATH"] == "/opt/other/libinjection.so"
    said = capfd.readouterr().err
    assert "another tool has set NVTX_INJECTION64_PATH=/opt/other/libinjection.so" in said


def test_inside_of_another_nsys_nothing_is_attached_again(
    plan: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsys/target-linux-x64/libToolsInjection64.so")
    found = plan()
    assert (found.command_prefix, found.env, found.ray) == ((), {}, {})
    assert "this process runs under nsys already" in capfd.readouterr().err


def test_a_driver_under_nsys_may_start_ray_workers_under_their_own(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    monkeypatch.setattr(launching, "ray_is_up", lambda: True)
    monkeypatch.setattr(launching, "_ray_runs_below_nsys", lambda: False)
    found = plan()
    assert found.command_prefix == ()
    assert found.ray["nsight"]["capture-range"] == "nvtx"
    monkeypatch.setattr(launching, "_ray_runs_below_nsys", lambda: True)
    assert plan().ray == {}


def test_a_python_that_ray_would_not_find_is_told(
    plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    other = tmp_path / "other" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setattr(launching, "ray_is_up", lambda: True)
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    plan(nsys="nsys")
    said = capfd.readouterr().err
    assert "Ray starts workers under nsys with the `python` of PATH" in said
    assert str(other) in said


def test_how_to_start_names_the_launcher_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    role = types.SimpleNamespace(role="actor-rollout")
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", "--name", "a b"])
    plain = "rankscope launch --config <your config> --role actor-rollout -- python3 train.py --name 'a b'"
    assert how_to_start(role) == plain  # type: ignore[arg-type]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert how_to_start(role) == f"torchrun ... --no-python {plain}"  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    assert "runtime_env" in how_to_start(role)  # type: ignore[arg-type]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_devices_are_no_devices(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    assert launching.cuda_device() is False
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launching.cuda_device() is True


def test_where_there_is_no_nsys_the_window_says_what_to_install(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv(SESSION, raising=False)
    script = (
        "import json, sys; from rankscope import DistProfiler\n"
        "handle = DistProfiler(json.loads(sys.argv[1]), role='actor', rank=0, world_size=1)\n"
        "handle.start(step=1); handle.stop()"
    )
    subprocess.run([sys.executable, "-c", script, json.dumps(kit.config(tmp_path / "out"))], check=True, timeout=60)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "nothing is captured" in line]
    assert "Nsight Systems (https://developer.nvidia.com/nsight-systems)" in line
