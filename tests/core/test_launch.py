"""What a process needs before it starts, and the command that starts it with that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import launching
import pytest

from rankscope import ConfigError, DistProfiler, load_config, plan_launch
from rankscope.artifacts.status import read_status
from rankscope.cli import main
from rankscope.launch import launcher_of
from rankscope.plan import make_plan


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = launching.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    return site


def config(tmp_path: Path, tool: object = "wraps", *, critic: object = None, **facts: object) -> dict[str, object]:
    facts = {"steps": [1, 2], "save_path": str(tmp_path / "out"), **facts}
    roles = {"actor": {"profiler": {"enable": True, "ranks": [0], "tool": tool}}}
    if critic is not None:
        roles["critic"] = {"profiler": {"enable": True, "ranks": [0], "tool": critic}}
    return {"global_profiler": facts, **roles}


def test_a_selected_rank_gets_what_its_tool_wants(tmp_path: Path) -> None:
    plan = plan_launch(config(tmp_path), roles=["actor"], rank=0, world_size=2, total_steps=1)
    assert plan.env == {"WRAPPED": "actor0 steps (1,) False"}
    assert plan.command_prefix[0] == "bash"
    assert plan.ray == {"wrap": {"o": "w"}, "env_vars": plan.env}
    assert plan.reasons == {"actor": "rank 0 is listed"}


def test_others_get_nothing_and_import_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.registry.load", lambda *_: pytest.fail("imported"))
    for facts in ({"rank": 1}, {"roles": ["critic"]}):
        plan = plan_launch(config(tmp_path), world_size=2, **facts)
        assert (plan.env, plan.command_prefix, plan.ray, plan.tools) == ({}, (), {}, ())
    off = plan_launch(config(tmp_path, steps=None))
    assert off.reasons == {"actor": "no step is set: global_profiler.steps"}


def test_env_of_two_tools_goes_together_and_a_contradiction_is_named(tmp_path: Path) -> None:
    plan = plan_launch(config(tmp_path, ["wraps", "env"]))
    assert plan.ray["env_vars"].keys() == {"WRAPPED", "SHARED", "MORE"}
    with pytest.raises(ConfigError, match="'env' and 'env2' need different values of the environment variable SHARED"):
        plan_launch(config(tmp_path, ["env", "env2"]))
    with pytest.raises(ConfigError, match="'wraps' and 'wraps2' both have to start the process"):
        plan_launch(config(tmp_path, ["wraps", "wraps2"]))


def test_a_tool_that_cannot_be_launched_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor.profiler.tool: tool .fails. cannot say .*: no such tool"):
        plan_launch(config(tmp_path, "fails"))


def test_a_tool_of_two_roles_is_asked_once_for_the_first(tmp_path: Path) -> None:
    plan = plan_launch(config(tmp_path, critic="wraps"))
    assert plan.env["WRAPPED"].startswith("actor0")
    assert [tool.context.role for tool in plan.tools] == ["actor"]


@pytest.mark.parametrize(("ranks", "rank", "local", "maybe"), [
    ("tp=0,pp=last", 3, 3, True),
    ("per_node", 0, 0, True),
    ("per_node", 1, 1, False),
    ("per_node", 1, None, True),
    ("2&tp=0", 1, None, False),
])  # fmt: skip
def test_ranks_that_only_the_process_knows_get_what_they_may_need(
    tmp_path: Path, ranks: str, rank: int, local: int | None, maybe: bool
) -> None:
    source = config(tmp_path)
    source["actor"]["profiler"]["ranks"] = ranks  # type: ignore[index]
    assert bool(plan_launch(source, rank=rank, world_size=8, local_rank=local).tools) is maybe


# What a tool needs for itself.


def test_tools_of_two_roles_in_one_process_may_not_need_the_same(tmp_path: Path) -> None:
    source = config(tmp_path, "some", critic="device")
    source["actor"]["profiler"]["tool_config"] = {"some": {"word": "device"}}  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"'some' \(of role 'actor'\) and 'device' \(of role 'critic'\) both need "):
        plan_launch(source)
    with (
        DistProfiler(source, role="actor", rank=0, world_size=1),
        pytest.raises(ConfigError, match="tool 'device' needs 'device', which tool 'some' of role 'actor' has"),
    ):
        DistProfiler(source, role="critic", rank=0, world_size=1)
    with DistProfiler(source, role="critic", rank=0, world_size=1):
        pass  # the handle that had it is closed


def test_it_may_depend_on_the_options(tmp_path: Path) -> None:
    load_config(config(tmp_path, ["some", "device"]))
    source = config(tmp_path, ["some", "device"])
    source["actor"]["profiler"]["tool_config"] = {"some": {"word": "device"}}  # type: ignore[index]
    with pytest.raises(ConfigError, match="'some' and 'device' of actor both need 'device'"):
        load_config(source)


# Whether a tool can work here.


def test_a_tool_that_cannot_work_here_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor.profiler.tool: tool 'absent' cannot work here: its .*; pip install"):
        DistProfiler(config(tmp_path, "absent"), role="actor", rank=0, world_size=2)
    with DistProfiler(config(tmp_path, "absent"), role="actor", rank=1, world_size=2) as other:
        assert not other.selected
    [warning] = [
        text for text in make_plan(load_config(config(tmp_path, "absent")), world_size=1).warnings if "abs" in text
    ]
    assert warning.endswith("cannot work on this machine: its library is not installed; pip install itslib")


def test_what_will_be_missing_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for role in ("actor", "critic"):
        with DistProfiler(config(tmp_path, "partly", critic="partly"), role=role, rank=0, world_size=1):
            pass
    assert capsys.readouterr().err.count("no device: nothing will be recorded") == 1


# The command.


def write(tmp_path: Path, source: object) -> str:
    (tmp_path / "profile.yaml").write_text(json.dumps(source))
    return str(tmp_path / "profile.yaml")


def start(site: Path, *words: str, **environ: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(site), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-m", "rankscope", "launch", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environ},
    )


def test_the_command_runs_inside_the_prefix_and_what_it_left_is_collected(tmp_path: Path, tools: Path) -> None:
    file = write(tmp_path, config(tmp_path))
    process = start(tools, "--config", file, "--", "bash", "-c", "echo out $0 $1; exit 7", "--", "--role")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "out -- --role\n"), err
    [row] = read_status(tmp_path / "out").rows
    assert (row.status, row.role, row.step) == ("published", "actor", 1)
    assert Path(row.path).read_text() == "w actor0 steps (1, 2) False\n"


def test_on_other_ranks_the_command_takes_our_place(tmp_path: Path, tools: Path) -> None:
    file = write(tmp_path, config(tmp_path))
    process = start(tools, "--config", file, "--", "bash", "-c", "echo $$ ${WRAPPED:-none}", RANK="1", WORLD_SIZE="2")
    out, _ = process.communicate(timeout=60)
    assert out == f"{process.pid} none\n"
    assert not (tmp_path / "out").exists()


def test_overrides_and_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, config(tmp_path))
    words = ["launch", "--config", file, "--dry-run", "global_profiler.steps=3"]
    assert main([*words, "--", "python", "a b.py"]) == 0
    shown = capsys.readouterr().out
    assert "# actor: rank 0 is listed" in shown
    assert shown.endswith("bash python 'a b.py'\n")
    assert main([*words, "--json", "--", "python", "x.py"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["env"] == {"WRAPPED": "actor0 steps (3,) False"}
    assert answer["command"][-2:] == ["python", "x.py"]


@pytest.mark.parametrize(("words", "said"), [
    (["--", "no-such-program"], "no program 'no-such-program'"),
    (["--", "no-program-behind-it"], "no program 'no-program-behind-it'"),
    ([], "write it after --"),
    (["--role", "actr", "--", "true"], "Did you mean"),
    (["--", "torchrun", "train.py"], "torchrun ... --no-python rankscope launch"),
    (["--", "python", "-m", "torch.distributed.run", "x.py"], "once for each process"),
])  # fmt: skip
def test_what_cannot_be_started_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    file = write(tmp_path, config(tmp_path, "env" if "no-such-program" in words else "wraps"))
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("started"))
    assert main(["launch", "--config", file, *words]) == 2
    assert said in capsys.readouterr().err


def test_launchers_are_told_from_programs() -> None:
    assert launcher_of(["/usr/bin/torchrun", "x"]) == "torchrun"
    assert launcher_of(["python3", "-u", "-m", "torch.distributed.run"]) == "torch.distributed.run"
    assert launcher_of(["python3", "torchrun"]) == ""
    assert launcher_of([]) == ""


def lines(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


TRAPPING = "trap 'echo got; exit 5' TERM; echo $$; while :; do sleep 0.05; done"


def test_signals_reach_the_command(tmp_path: Path, tools: Path) -> None:
    process = start(tools, "--config", write(tmp_path, config(tmp_path)), "--", "bash", "-c", TRAPPING)
    assert lines(process).isdigit()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "got\n"
    assert process.returncode == 5
    assert read_status(tmp_path / "out").rows  # collected all the same


def test_a_command_that_a_signal_ends_is_reported_like_a_shell_does(tmp_path: Path, tools: Path) -> None:
    process = start(tools, "--config", write(tmp_path, config(tmp_path)), "--", "bash", "-c", "kill -9 $$")
    process.communicate(timeout=60)
    assert process.returncode == 128 + 9


def test_the_command_ends_when_we_are_killed(tmp_path: Path, tools: Path) -> None:
    process = start(tools, "--config", write(tmp_path, config(tmp_path)), "--", "bash", "-c", TRAPPING)
    child = int(lines(process))
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # the pace of a poll
