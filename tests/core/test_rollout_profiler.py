"""The rollout profiler against engines' servers in processes of their own, also such as misbehave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rollout_kit import Server, config, names, records, rows, servers, wait_for
from rollout_server import made_up

from rankscope import ConfigError, ProfileController
from rankscope.rollout import EngineLaunch, Layout, Replica, ReplicaResult, RolloutError, RolloutProfiler

TP2 = Layout(tp=2)
DEAD = "http://127.0.0.1:9"


def profiler(out: Path, engines: list[Server], *, steps: Any = (1, 2, 3), layout: Layout = TP2, **facts: Any) -> Any:
    """A rollout profiler with short deadlines; keywords of ``config`` go there."""
    common = {
        key: facts.pop(key) for key in ("section", "options", "relocate_results", "finish_hook_cmd") if key in facts
    }
    given = {
        "start_timeout": 5.0,
        "stop_timeout": 5.0,
        "patience": 5.0,
        "close_patience": 5.0,
        "engine": "vllm",
        **facts,
    }
    replicas = given.pop("replicas", [engine.url for engine in engines])
    return RolloutProfiler(config(out, steps=list(steps), **common), replicas=replicas, layout=layout, **given)


def step(rollout: RolloutProfiler, engines: list[Server], n: int, passes: int = 3) -> None:
    rollout.start_profile(step=n)
    for engine in engines:
        engine.forward(passes)
    rollout.stop_profile()
    rollout.relocate_profile()


def failed(rollout: RolloutProfiler) -> list[tuple[int, str, str]]:
    return [(one.replica, one.action, one.error) for one in rollout.results if not one.ok]


# As it should be.


def test_a_controller_drives_it_like_a_worker(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with servers(tmp_path, {}, {}, gpus=2) as engines:
        rollout = profiler(out, engines, steps=[2])
        with ProfileController(config(out, steps=[2]), workers=[rollout], total_steps=3) as controller:
            for n in range(1, 4):
                with controller.step(n):
                    for engine in engines:
                        engine.forward(3)
        rollout.close_profile()
        for engine in engines:
            assert engine.paths == ["forward", "start", "forward", "stop", "forward"]
            assert engine.body("/start_profile")["profile_prefix"].startswith("rankscope-step2-")
    assert [name.split(".")[0] for name in names(out)] == [
        "rollout-replica0-globalrank0_step2_dp0_pp0_tp0_dcp0_ep0_rank0",
        "rollout-replica0-globalrank1_step2_dp0_pp0_tp1_dcp0_ep0_rank1",
        "rollout-replica1-globalrank2_step2_dp0_pp0_tp0_dcp0_ep0_rank0",
        "rollout-replica1-globalrank3_step2_dp0_pp0_tp1_dcp0_ep0_rank1",
    ]
    assert rows(out) == [(rank, 2, "published") for rank in range(4)]
    assert {Path(one["moved_from"]).parent.name for one in records(out, "artifact")} == {
        "agent_loop_rollout_replica_0",
        "agent_loop_rollout_replica_1",
    }


def test_only_the_replicas_and_files_of_the_listed_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    place = [str(out / f"agent_loop_rollout_replica_{number}") for number in (0, 4)]
    with servers(tmp_path, {"directory": place[0]}, {"directory": place[1]}, gpus=2) as engines:
        urls = [DEAD] * 8
        urls[0], urls[4] = engines[0].url, engines[1].url
        with profiler(out, engines, replicas=urls, section={"ranks": [0, 8]}) as rollout:
            assert rollout.profiled == {0: (0,), 4: (8,)}
            assert rollout.launch(1) == EngineLaunch()
            assert rollout.launch(4).arguments["profiler_config"]["torch_profiler_dir"] == place[1]
            step(rollout, engines, 1)
    assert [name.split("_")[0] for name in names(out)] == [
        "rollout-replica0-globalrank0",
        "rollout-replica4-globalrank8",
    ]
    assert ["rank1" in name for folder in place for name in names(Path(folder))] == [True, True]
    assert rows(out) == [
        (rank, at, status)
        for rank in (0, 8)
        for at, status in ((1, "published"), (2, "not reached"), (3, "not reached"))
    ]


def test_other_steps_are_not_profiled(tmp_path: Path) -> None:
    with servers(tmp_path, {}, gpus=2) as engines:
        with profiler(tmp_path / "out", engines, steps=[2]) as rollout:
            step(rollout, engines, 1)
            assert engines[0].paths == ["forward"]
            assert rollout.start_profile(step=2)
            assert rollout.recording
        assert engines[0].paths == ["forward", "start", "stop"]
    assert len(names(tmp_path / "out")) == 2


def test_one_gpu_a_replica_needs_no_second_number(tmp_path: Path) -> None:
    with servers(tmp_path, {}, gpus=1) as engines, profiler(tmp_path / "out", engines, layout=Layout()) as rollout:
        step(rollout, engines, 1)
    assert names(tmp_path / "out")[0].startswith("rollout-replica0_step1_dp0_")


def test_devices_that_the_replica_reports(tmp_path: Path) -> None:
    with servers(tmp_path, {}, gpus=2) as engines:
        replicas = [Replica(0, engines[0].url, devices=(5, 3))]
        with profiler(tmp_path / "out", engines, replicas=replicas) as rollout:
            step(rollout, engines, 1)
    assert [name.split("_")[0] for name in names(tmp_path / "out")] == [
        "rollout-replica0-globalrank3",
        "rollout-replica0-globalrank5",
    ]


def test_sglang_and_trtllm(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with servers(tmp_path, {"engine": "sglang"}, gpus=2) as engines:
        with profiler(out, engines, engine="sglang") as rollout:
            step(rollout, engines, 1)
        body = engines[0].body("/start_profile")
        assert body["output_dir"] == str(out / "agent_loop_rollout_replica_0")
        assert (body["with_stack"], body["record_shapes"], body["activities"]) == (False, False, ["CPU", "GPU"])
    assert ["globalrank0_step1_" in names(out)[0], "-TP-0.trace.json.gz" in names(out)[0]] == [True, True]
    other = tmp_path / "other"
    with (
        servers(tmp_path, {"engine": "trtllm"}, gpus=2) as engines,
        profiler(other, engines, engine="trtllm") as rollout,
    ):
        step(rollout, engines, 2)
    assert [name.split("-")[-1] for name in names(other)] == ["0.json", "1.json"]


def test_an_api_key_is_sent_and_kept_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with servers(tmp_path, {"start": ["500"]}, gpus=2) as engines:
        url = engines[0].url.replace("http://", "http://user:hidden@")
        assert Replica(0, url).shown.endswith(engines[0].url.removeprefix("http://") + ")")
        replicas = [Replica(0, engines[0].url, headers={"Authorization": "Bearer hidden"})]
        rollout = profiler(out, engines, replicas=replicas)
        with pytest.raises(RolloutError):
            rollout.start_profile(step=1)
        rollout.close_profile()
        assert engines[0].calls[0]["auth"] == "Bearer hidden"
    said = capsys.readouterr().err + "".join(path.read_text() for path in (out / ".rankscope").iterdir())
    assert "hidden" not in said
    assert "replica 0" in said


# One fails.


@pytest.mark.usefixtures("lenient")
def test_when_one_cannot_be_started_the_others_are_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with servers(tmp_path, {}, {"start": ["500", "ok"]}, {}, gpus=2) as engines, profiler(out, engines) as rollout:
        assert rollout.start_profile(step=1) is False
        assert failed(rollout) == [(1, "start", "HttpError: HTTP 500: it is broken")]
        assert [engine.paths for engine in engines] == [["start", "stop"]] * 3
        rollout.stop_profile()
        rollout.relocate_profile()
        (session,) = rollout.sessions
        assert session.partial == ["stopped at once, since replica 1 could not be started"]
        step(rollout, engines, 2)
        assert rollout.sessions[1].partial == []
    found = rows(out)
    assert [row for row in found if row[1] == 1] == [
        (0, 1, "published"),
        (1, 1, "published"),
        (2, 1, "failed"),
        (3, 1, "failed"),
        (4, 1, "published"),
        (5, 1, "published"),
    ]
    assert [row for row in found if row[1] == 2] == [(rank, 2, "published") for rank in range(6)]
    said = [record for record in records(out, "artifact") if record["step"] == 1]
    assert {tuple(record.get("warnings", ())) for record in said if record["status"] == "published"} == {
        ("stopped at once, since replica 1 could not be started",)
    }
    assert {record["reason"] for record in said if record["status"] == "failed"} == {
        "the engine's profiler could not be started: HttpError: HTTP 500: it is broken"
    }


@pytest.mark.usefixtures("lenient")
def test_the_others_may_go_on_recording(tmp_path: Path) -> None:
    with servers(tmp_path, {}, {"start": ["500"]}, gpus=2) as engines:
        with profiler(tmp_path / "out", engines, if_one_fails="keep") as rollout:
            assert rollout.start_profile(step=1) is True
            rollout.stop_profile()
        assert engines[0].paths == ["start", "stop"]
    assert [name.split("_")[0] for name in names(tmp_path / "out")] == [
        "rollout-replica0-globalrank0",
        "rollout-replica0-globalrank1",
    ]


@pytest.mark.usefixtures("lenient")
def test_a_start_that_failed_and_yet_records_is_stopped(tmp_path: Path) -> None:
    with servers(tmp_path, {"start": ["partial", "ok"]}, gpus=2) as engines:
        with profiler(tmp_path / "out", engines) as rollout:
            assert rollout.start_profile(step=1) is False
            assert engines[0].paths == ["start", "stop"]
            step(rollout, engines, 2)
        assert engines[0].paths == ["start", "stop", "start", "forward", "stop"]
    assert {name.split("_")[1] for name in names(tmp_path / "out")} >= {"step2"}


@pytest.mark.usefixtures("lenient")
def test_an_error_is_not_hidden_by_the_stop_that_fails_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with servers(tmp_path, {"start": ["500"], "stop": ["500"]}, gpus=2) as engines:
        rollout = profiler(tmp_path / "out", engines)
        rollout.start_profile(step=1)
        assert [(one.action, one.ok) for one in rollout.results] == [("start", False), ("compensate", False)]
        rollout.start_profile(step=2)
        assert [(one.action, one.ok) for one in rollout.results][2:] == [
            ("retry", False),
            ("start", False),
            ("compensate", False),
        ]
        assert "not started, since its last window could not be ended" in rollout.results[3].error
        rollout.close_profile()
    said = capsys.readouterr().err
    assert "start failed; training goes on" in said
    assert "could not be started: HttpError: HTTP 500" in said


def test_strict_mode_raises_at_the_end_of_the_call(tmp_path: Path) -> None:
    with servers(tmp_path, {}, {"start": ["500"]}, gpus=2) as engines:
        rollout = profiler(tmp_path / "out", engines)
        with pytest.raises(RolloutError, match="replica 1: start failed: HttpError: HTTP 500") as caught:
            rollout.start_profile(step=1)
        assert [result.replica for result in caught.value.results] == [1]
        assert engines[0].paths == ["start", "stop"]
        rollout.close_profile()


@pytest.mark.usefixtures("lenient")
def test_a_start_that_never_returns(tmp_path: Path) -> None:
    with servers(tmp_path, {}, {"start": ["never"]}, gpus=2) as engines:
        rollout = profiler(tmp_path / "out", engines, start_timeout=0.5, close_patience=0.2)
        began = time.monotonic()
        assert rollout.start_profile(step=1) is False
        assert time.monotonic() - began < 4
        assert failed(rollout)[0][:2] == (1, "start")
        assert "no answer within 0.5 s" in failed(rollout)[0][2] or "timed out" in failed(rollout)[0][2]
        assert engines[0].paths == ["start", "stop"]
        rollout.close_profile()


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("word", ["never", "drip"])
def test_a_stop_that_never_returns_is_tried_again_at_the_end(tmp_path: Path, word: str) -> None:
    out = tmp_path / "out"
    with servers(tmp_path, {"stop": [word, "ok"]}, {}, gpus=2) as engines:
        rollout = profiler(out, engines, stop_timeout=1.0, patience=0.2)
        rollout.start_profile(step=1)
        began = time.monotonic()
        rollout.stop_profile()
        assert time.monotonic() - began < 4
        assert [(one.replica, one.action) for one in rollout.results if not one.ok] == [(0, "stop")]
        assert "could not be stopped" in rollout.sessions[0].partial[0]
        rollout.relocate_profile()
        assert [name.split("_")[0] for name in names(out)] == [f"rollout-replica1-globalrank{rank}" for rank in (2, 3)]
        rollout.close_profile()
        last = rollout.results[-1]
        assert (last.replica, last.action, last.ok) == (0, "retry", True)
    assert [row[2] for row in rows(out) if row[1] == 1] == ["published"] * 4
    assert len(names(out)) == 4


@pytest.mark.usefixtures("lenient")
def test_a_stop_that_failed_is_tried_again_before_the_next_start(tmp_path: Path) -> None:
    with (
        servers(tmp_path, {"stop": ["500", "ok"]}, gpus=2) as engines,
        profiler(tmp_path / "out", engines, patience=0.2) as rollout,
    ):
        step(rollout, engines, 1)
        step(rollout, engines, 2)
        assert [(one.action, one.ok) for one in rollout.results] == [
            ("start", True),
            ("stop", False),
            ("retry", True),
            ("start", True),
            ("stop", True),
        ]
    steps = sorted(name.split("_")[1] for name in names(tmp_path / "out"))
    assert steps == ["step1", "step1", "step2", "step2"]


def test_a_slow_stop_is_waited_for(tmp_path: Path) -> None:
    with (
        servers(tmp_path, {"stop": ["slow"], "seconds": 1.0}, gpus=2) as engines,
        profiler(tmp_path / "out", engines) as rollout,
    ):
        step(rollout, engines, 1)
        assert rollout.results[-1].seconds >= 1.0
    assert len(names(tmp_path / "out")) == 2


@pytest.mark.usefixtures("lenient")
def test_a_window_that_somebody_else_opened_is_left_alone(tmp_path: Path) -> None:
    from rankscope.rollout.calls import post

    with servers(tmp_path, {}, gpus=2) as engines:
        post(f"{engines[0].url}/start_profile", None, {}, 5)
        with profiler(tmp_path / "out", engines) as rollout:
            assert rollout.start_profile(step=1) is False
            assert "somebody else opened" in failed(rollout)[0][2]
        assert engines[0].paths == ["start", "start"]


def test_a_server_that_refuses_a_body_is_asked_without(tmp_path: Path) -> None:
    with servers(tmp_path, {"start": ["422"]}, gpus=2) as engines:
        with profiler(tmp_path / "out", engines) as rollout:
            assert rollout.start_profile(step=1) is True
        assert [bool(call["body"]) for call in engines[0].calls] == [True, False, False]
    assert [name.split("_")[1] for name in names(tmp_path / "out")] == ["step1", "step1"]


@pytest.mark.usefixtures("lenient")
def test_servers_that_are_not_there_or_cannot_profile(tmp_path: Path) -> None:
    with servers(tmp_path, {"start": ["404"]}, gpus=2) as engines:
        with profiler(tmp_path / "out", engines, replicas=[engines[0].url, DEAD, Replica(2)]) as rollout:
            assert rollout.start_profile(step=1) is False
            errors = {replica: text for replica, action, text in failed(rollout) if action == "start"}
            assert "started without --profiler-config" in errors[0]
            assert "refused" in errors[1]
            assert "give Replica(…, target=…) its handle or URL" in errors[2]
        assert engines[0].paths == ["start"]
        assert {one.action for one in rollout.results} == {"start"}


@pytest.mark.usefixtures("lenient")
def test_a_dead_server_does_not_hurt(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        servers(tmp_path, {}, {}, gpus=2) as engines,
        profiler(out, engines, patience=1.0, close_patience=0.2) as rollout,
    ):
        rollout.start_profile(step=1)
        os.kill(engines[1].process.pid, signal.SIGKILL)
        engines[1].process.wait()
        rollout.stop_profile()
        assert [one[0] for one in failed(rollout)] == [1]
        assert len(rollout.relocate_profile()) == 2
        rollout.start_profile(step=2)
        assert [one[1] for one in failed(rollout)] == ["stop", "start"]
        assert "refused" in failed(rollout)[1][2]
    assert [row[2] for row in rows(out) if row[1] == 1] == ["published", "published", "failed", "failed"]


# Windows that end by themselves.


def test_vllm_that_stopped_by_itself(tmp_path: Path) -> None:
    options = {"profile_token_start": 2, "profile_token_end": 4}
    with servers(tmp_path, {}, gpus=2) as engines:
        with profiler(tmp_path / "out", engines, options=options) as rollout:
            step(rollout, engines, 1, passes=8)
            assert failed(rollout) == []
        body = engines[0].body("/start_profile")
        assert (body["delay_iterations"], body["max_iterations"]) == (2, 2)
    assert len(names(tmp_path / "out")) == 2


def test_sglang_that_stopped_by_itself_says_nothing_over_http(tmp_path: Path) -> None:
    with (
        servers(tmp_path, {"engine": "sglang"}, gpus=2) as engines,
        profiler(tmp_path / "out", engines, engine="sglang", options={"profile_token_end": 2}) as rollout,
    ):
        step(rollout, engines, 1, passes=8)
        step(rollout, engines, 2, passes=8)
        assert [(one.action, one.ok, one.note) for one in rollout.results][1] == (
            "stop",
            True,
            "its window had ended by itself, or was not reached",
        )
    steps = sorted(name.split("_")[1] for name in names(tmp_path / "out"))
    assert steps == ["step1", "step1", "step2", "step2"]


def test_a_window_that_sglang_did_not_reach_does_not_begin_later(tmp_path: Path) -> None:
    """It would record in a step that nobody profiles, and no stop would ever come."""
    options = {"profile_token_start": 5, "profile_token_end": 7}
    out = tmp_path / "out"
    with servers(tmp_path, {"engine": "sglang"}, gpus=2) as engines:
        engine = engines[0]
        replicas = [Replica(0, engine.url, forward_count=lambda: engine.forward(0))]
        rollout = profiler(
            out, engines, engine="sglang", options=options, replicas=replicas, patience=1.0, close_patience=0.2
        )
        engine.forward(10)
        step(rollout, engines, 1, passes=10)
        assert engine.body("/start_profile")["start_step"] == 16
        assert len(names(out)) == 2
        rollout.start_profile(step=2)
        engine.forward(3)
        rollout.stop_profile()
        assert failed(rollout) == []
        assert engine.paths[-2:] == ["stop", "start"]
        engine.forward(100)
        rollout.start_profile(step=3)
        engine.forward(10)
        rollout.stop_profile()
        rollout.relocate_profile()
        rollout.close_profile()
    assert sorted(name.split("_")[1] for name in names(out)) == ["step1", "step1", "step3", "step3"]
    assert [row[2] for row in rows(out) if row[0] == 0] == ["published", "failed", "published"]


# The end.


def test_what_is_open_at_exit_is_saved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with servers(tmp_path, {}, gpus=2) as engines:
        program = (
            "import sys, json; from rankscope.rollout import *\n"
            "r = RolloutProfiler(json.loads(sys.argv[1]), engine='vllm', replicas=[sys.argv[2]], layout=Layout(tp=2))\n"
            "assert r.start_profile(step=1)\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", program, json.dumps(config(out)), engines[0].url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert engines[0].paths == ["start", "stop"]
    assert len(names(out)) == 2
    assert "captured role=rollout files=2" in result.stderr


def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    with servers(tmp_path, {}, gpus=2) as engines:
        rollout = profiler(tmp_path / "out", engines)
        rollout.start_profile(step=1)
        child = os.fork()
        if child == 0:
            rollout.stop_profile()
            rollout.close_profile()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert engines[0].paths == ["start"]
        rollout.close_profile()
        assert engines[0].paths == ["start", "stop"]


def test_the_step_raised(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with servers(tmp_path, {}, gpus=2) as engines:
        rollout = profiler(out, engines, steps=[1])
        controller = ProfileController(config(out, steps=[1]), workers=[rollout])
        with pytest.raises(ZeroDivisionError), controller.step(1):
            raise ZeroDivisionError
        controller.close()
        rollout.close_profile()
        assert engines[0].paths == ["start", "stop"]
    assert rows(out) == [(0, 1, "aborted"), (1, 1, "aborted")]


def test_neighbouring_steps_share_a_window(tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = config(out, steps=[1, 2], profile_continuous_steps=True)
    with servers(tmp_path, {}, gpus=2) as engines:
        rollout = RolloutProfiler(both, engine="vllm", replicas=[engines[0].url], layout=TP2)
        with ProfileController(both, workers=[rollout], total_steps=3) as controller:
            for n in (1, 2, 3):
                with controller.step(n):
                    engines[0].forward(1)
        rollout.close_profile()
        assert engines[0].paths == ["start", "forward", "forward", "stop", "forward"]
    assert rows(out) == [(0, 1, "published"), (1, 1, "published")]


def test_the_finish_command_runs_once_and_sees_every_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = (
        f"ls $RANKSCOPE_PROFILE_SAVE_PATH | grep json >> {tmp_path}/listed; "
        f"echo $RANKSCOPE_PROFILE_ROLE $RANKSCOPE_PROFILE_ARTIFACTS >> {tmp_path}/said"
    )
    with servers(tmp_path, {"late": 1.0}, gpus=2) as engines:
        rollout = profiler(out, engines, finish_hook_cmd=command, patience=0.0)
        step(rollout, engines, 1)
        rollout.finish_profile()
        rollout.finish_profile()
        rollout.close_profile()
    assert len((tmp_path / "listed").read_text().splitlines()) == 2
    assert (tmp_path / "said").read_text() == "rollout 2\n"


def test_the_finish_command_is_left_to_a_training_process_on_this_host(tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = config(out, finish_hook_cmd=f"touch {tmp_path}/ran")
    both["actor"] = {"profiler": {"enable": True, "all_ranks": True}}
    program = (
        "import sys, json; from rankscope import DistProfiler\n"
        "p = DistProfiler(json.loads(sys.argv[1]), role='actor', rank=0, world_size=1)\n"
        "sys.stdin.read(); p.close()\n"
    )
    with servers(tmp_path, {}, gpus=2) as engines:
        worker = subprocess.Popen([sys.executable, "-c", program, json.dumps(both)], stdin=subprocess.PIPE)
        try:
            wait_for(lambda: any(record["role"] == "actor" for record in records(out, "plan")))
            rollout = RolloutProfiler(both, engine="vllm", replicas=[engines[0].url], layout=TP2)
            assert rollout._ending.why_not() == "a process of role 'actor' on this host runs it"
            step(rollout, engines, 1)
            rollout.close_profile()
        finally:
            worker.communicate(b"")
    assert not (tmp_path / "ran").exists()
    assert len(names(out)) == 2


# Off.


def test_nothing_happens_where_nothing_is_profiled(tmp_path: Path) -> None:
    off = config(tmp_path / "out", section={"enable": False})
    program = (
        "import sys, json\n"
        "from rankscope.rollout import *\n"
        "r = RolloutProfiler(json.loads(sys.argv[1]), engine='no such engine', replicas=[object()])\n"
        "assert not r.enabled and not r.selected and r.start_profile(step=1) is False\n"
        "r.stop_profile(last=True); r.close_profile(); assert r.launch(0).arguments == {}\n"
        "print([name for name in ('rankscope_torch', 'torch', 'vllm') if name in sys.modules], r.why)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(off)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout == "[] role 'rollout' is not enabled: set rollout.profiler.enable\n", result.stderr
    assert result.stderr == ""
    assert not (tmp_path / "out").exists()


def test_an_unselected_server_loads_no_tool_and_says_why(tmp_path: Path) -> None:
    only = config(tmp_path / "out", section={"ranks": [0]})
    rollout = RolloutProfiler(only, engine="no such engine", replicas=[Replica(3, DEAD)], layout=TP2, world_size=8)
    assert (rollout.enabled, rollout.selected) == (True, False)
    assert "is not rank 0" in rollout.why
    assert rollout.start_profile(step=1) is False
    assert records(tmp_path / "out", "plan")[0]["profiled"] is False


def test_a_tool_that_the_engine_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = config(tmp_path / "out", tool="torch_memory")
    memory["global_profiler"]["global_tool_config"] = {}
    rollout = RolloutProfiler(memory, engine="vllm", replicas=[DEAD], layout=TP2)
    assert rollout.selected is False
    assert rollout.why == "vLLM cannot record with tool 'torch_memory' (it can: torch, npu, nsys)"
    assert rollout.why in capsys.readouterr().err


def test_notes_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"tool_config": {"torch": {"compression": 3, "contents": ["stack"]}}}
    rollout = profiler(tmp_path / "out", [], replicas=[DEAD, DEAD.replace("9", "10")], section=section)
    assert rollout.notes == ("vLLM knows nothing of these options of tool torch: compression",)
    assert capsys.readouterr().err.count("knows nothing of these options") == 1
    assert rollout.launch(1).arguments["profiler_config"]["torch_profiler_with_stack"] is True
    rollout.close_profile()


def test_an_engine_that_was_told_all_at_its_launch_is_not_called(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = out / "agent_loop_rollout_replica_0"
    rollout = profiler(
        out,
        [],
        engine="trtllm",
        engine_options={"by_environment": True},
        replicas=[Replica(0)],
        options={"profile_token_start": 3, "profile_token_end": 5},
        patience=0.0,
        close_patience=5.0,
    )
    assert rollout.launch(0).env["TLLM_TORCH_PROFILE_TRACE"] == str(folder / "trace.json")
    assert rollout.start_profile(step=1) is True
    for rank in range(2):
        (folder / f"trace-rank-{rank}.json").write_bytes(made_up(rank, 2, compressed=False))
    rollout.stop_profile()
    rollout.close_profile()
    assert names(out) == [f"rollout-replica0-globalrank{rank}_step1_trace-rank-{rank}.json" for rank in range(2)]


def test_nsys_leaves_its_files_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "out"
    nsys = config(out, tool="nsys", steps=[1])
    nsys["global_profiler"]["global_tool_config"] = {}
    with servers(tmp_path, {}, gpus=2) as engines:
        rollout = RolloutProfiler(nsys, engine="vllm", replicas=[engines[0].url], layout=TP2)
        assert rollout.launch(0).arguments["profiler_config"]["profiler"] == "cuda"
        step(rollout, engines, 1)
        rollout.close_profile()
        assert engines[0].paths == ["start", "forward", "stop"]
    assert rows(out) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"layout": None}, "give layout=Layout(tp=…) or gpus_per_replica"),
        ({"gpus_per_replica": 4}, "gpus_per_replica=4, but the layout has 2 GPUs"),
        ({"world_size": 5}, "5 GPUs cannot be divided into replicas of 2"),
        ({"engine": "vlm"}, "no engine named 'vlm'. Did you mean 'vllm'?"),
        ({"engine_options": {"frontend": 3}}, "engine_options.frontend: 3 is neither true nor false"),
        ({"if_one_fails": "go"}, "write stop or keep"),
        ({"replicas": ["localhost:8000"]}, "is no URL"),
    ],
)
def test_what_cannot_be_is_said_before_training(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    given = {"engine": "vllm", "replicas": [DEAD], "layout": TP2, **facts}
    with pytest.raises(ConfigError) as caught:
        RolloutProfiler(config(tmp_path / "out"), **given)
    assert words in str(caught.value)


def test_results_have_words() -> None:
    assert str(ReplicaResult(3, "stop", False, error="no answer within 5 s")) == (
        "replica 3: stop failed: no answer within 5 s"
    )
    assert str(ReplicaResult(3, "stop", True)) == "replica 3: stop ok"
