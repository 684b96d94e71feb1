"""The parts of the demo: finding the example, starting it, reading stage times, the table. A slow test runs it all."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.artifacts.ledger import Ledger
from rankscope.cli import CommandError, main, stages
from rankscope.cli.demo import Captured, find_example
from rankscope.cli.stages import OUTSIDE, StageTime, describe, of_role, read_stages, stage_times
from rankscope.topology import host_name


def event(name: str, began: float, lasted: float, *, tid: int = 7, cat: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 70, "tid": tid, "ts": began, "dur": lasted, "args": {"x": 1}}


def update(name: str, began: float) -> list[dict[str, Any]]:
    """1 s of an update stage: two mini-batches of two micro-batches."""
    events = [event(name, began, 1e6)]
    for mini in range(2):
        at = began + mini * 5e5
        events.append(event(f"mini_batch{mini}", at, 5e5))
        events += [event(f"micro_batch{micro}", at + micro * 2e5, 2e5) for micro in range(2)]
        events += [event("Optimizer.step#Adam.step", at + 4e5, 1e5), event("aten::mm", at, 10, cat="cpu_op")]
    return events


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 70, "args": {"name": "python"}},
    event("step2", 0, 9e6),
    event("ProfilerStep#0", 0, 9e6),
    event("rollout_generate", 1e5, 2e5),
    event("gloo:all_reduce", 4e5, 1e3),
    event("actor_compute_log_prob", 5e5, 1e5),
    event("micro_batch0", 5e5, 1e5),
    event("actor_compute_log_prob", 7e5, 1e5),
    *update("critic_update", 1e6),
    *update("actor_update", 2e6),
    event("inner", 2.1e6, 10),
    event("reward_score", 1e6, 3e5, tid=8),
]


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    trace = {"schemaVersion": 1, "traceEvents": events, "distributedInfo": {"rank": 0}}
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


# ---------------------------------------------------------------- stage times


def test_stages_are_the_outermost_annotations():
    assert stage_times(reversed(EVENTS)) == [
        StageTime("actor_update", 1.0, 1, 2, 4),
        StageTime("critic_update", 1.0, 1, 2, 4),
        StageTime("reward_score", 0.3, 1),
        StageTime("actor_compute_log_prob", 0.2, 2, 0, 1),
        StageTime("rollout_generate", 0.2, 1),
    ]


def test_batches_outside_of_a_stage_are_counted():
    found = stage_times([event("mini_batch1", 0, 10), event("micro_batch0", 0, 5), event("score", 10, 10)])
    assert found == [StageTime("score", 1e-5, 1), StageTime(OUTSIDE, 0.0, 0, 1, 1)]
    assert describe(found) == "score 0.000 s, outside of stages 1 mini, 1 micro"


def test_stages_in_words():
    assert describe(stage_times(EVENTS), most=2) == (
        "actor_update 1.000 s (2 mini, 4 micro), critic_update 1.000 s (2 mini, 4 micro), 3 more"
    )
    assert describe([]) == ""


def test_each_role_of_a_shared_file_gets_its_own_stages():
    found = [StageTime(name) for name in ("actor_update", "ref_log_prob", "critic_update", "critics", "generate", "")]
    roles = {"actor-ref", "critic"}

    def names(role: str, owner: bool) -> list[str]:
        return [stage.name for stage in of_role(found, role, roles - {role}, owner=owner)]

    assert names("actor-ref", owner=True) == ["actor_update", "ref_log_prob", "critics", "generate", ""]
    assert names("critic", owner=False) == ["critic_update"]
    assert of_role(found, "critic", [], owner=True) == found


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_is_read_packed_or_plain(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    text = json.dumps([event("a", 0, 2e6)]).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    assert read_stages(path) == [StageTime("a", 2.0, 1)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b'{"traceEvents": [')[:-9],
        gzip.compress(b"{"),
        gzip.compress(b"3"),
        gzip.compress(b'{"traceEvents": 3}'),
        gzip.compress(b"[" * 200_000),
    ],
    ids=["empty", "no gzip", "cut off", "no JSON", "a number", "no list", "too deep"],  # the bytes hold the time
)
def test_a_damaged_trace_is_a_value_error(tmp_path, content):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        read_stages(path)


def test_a_huge_trace_is_left_alone(tmp_path, monkeypatch):
    path = write_trace(tmp_path / "trace.json.gz", EVENTS)
    monkeypatch.setattr(stages, "MAX_BYTES", path.stat().st_size)
    assert read_stages(path)
    monkeypatch.setattr(stages, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(ValueError, match="larger than"):
        read_stages(path)


# ---------------------------------------------------------------- what was captured


def write_run(folder: Path, *, damaged: bool = False) -> None:
    """A run of two processes, in each an actor that owns the window and a critic that joins it."""
    for rank in (0, 1):
        ledger = Ledger(folder, host=f"node{rank}", run_id="run")
        process = {"rank": rank, "tool": "torch"}
        for role in ("actor", "critic"):
            ledger.write("plan", **process, role=role, profiled=True, reason="", steps=[2])
        window = {**process, "role": "actor", "window": 1, "step": 2, "scope": "train"}
        path = folder / f"actor_train_step2_rank{rank}-of-2_pid{rank}_20250101000000000.json.gz"
        write_trace(path, EVENTS)
        ledger.write("window", **window, event="open", steps=[2])
        ledger.write("join", **process, role="critic", step=2, owner_role="actor", window=1)
        ledger.write("artifact", **window, status="published", path=str(path), bytes=path.stat().st_size)
        ledger.write("window", **window, event="close")
        for role in ("actor", "critic"):
            ledger.write("close", **process, role=role, last_step=3)
        if damaged:
            path.write_bytes(b"x")


def test_the_table_has_a_line_for_each_role_rank_and_step(tmp_path):
    write_run(tmp_path)
    captured = Captured([tmp_path])
    assert captured.complete
    assert captured.notes == []
    text = captured.text()
    lines = text.splitlines()
    assert lines[0].startswith(f"traces: {tmp_path} (2 files, ")
    name = "actor_train_step2_rank{rank}-of-2_pid{rank}_20250101000000000.json.gz"
    own = "actor_update 1.000 s (2 mini, 4 micro), reward_score 0.300 s"
    assert [line.split()[:4] for line in lines[3:7]] == [
        ["actor", "0", "2", "torch"],
        ["actor", "1", "2", "torch"],
        ["critic", "0", "2", "torch"],
        ["critic", "1", "2", "torch"],
    ]
    assert f"{name.format(rank=1)}  {own}" in lines[4]
    assert lines[5].endswith(f"{name.format(rank=0)}  critic_update 1.000 s (2 mini, 4 micro)")
    assert lines[-1].startswith("To look at one: https://ui.perfetto.dev")


def test_the_same_as_data(tmp_path):
    write_run(tmp_path)
    data = json.loads(json.dumps(Captured([tmp_path]).as_data()))
    assert set(data) == {"directories", "complete", "rows", "notes"}
    row = data["rows"][2]
    assert (row["role"], row["rank"], row["status"]) == ("critic", 0, "joined")
    assert row["path"] == data["rows"][0]["path"]
    assert row["stages"] == [
        {"name": "critic_update", "seconds": 1.0, "runs": 1, "mini_batches": 2, "micro_batches": 4}
    ]


def test_what_cannot_be_read_or_did_not_come_is_said(tmp_path):
    write_run(tmp_path / "damaged", damaged=True)
    text = Captured([tmp_path / "damaged"]).text()
    assert text.count("note: no stage times of actor_train_step2_rank") == 2
    ledger = Ledger(tmp_path / "late", host=host_name(), run_id="run")
    ledger.write("plan", role="actor", rank=0, tool="torch", profiled=True, reason="", steps=[8])
    ledger.write("close", role="actor", rank=0, last_step=3)
    late = Captured([tmp_path / "late", tmp_path / "never"])
    assert late.directories == [tmp_path / "late"]
    assert not late.complete
    assert "not reached: the run ended at step 3" in late.text()
    assert "perfetto" not in late.text()
    nothing = Captured([tmp_path / "never"])
    assert not nothing.complete
    assert f"note: no ledger in {tmp_path / 'never'}" in nothing.text()


# ---------------------------------------------------------------- finding and running the example


def test_the_example_is_found_above_a_folder(tmp_path):
    example = tmp_path / "checkout" / "examples" / "ppo"
    inner = tmp_path / "checkout" / "a" / "b"
    for folder in (example, inner):
        folder.mkdir(parents=True)
    with pytest.raises(CommandError, match="checkout of the source"):
        find_example([inner])
    (example / "train.py").touch()
    assert find_example([tmp_path, inner]) == example
    assert find_example([tmp_path / "checkout"]) == example


def test_wrong_overrides_are_told_before_anything_starts(capsys, monkeypatch):
    assert main(["demo", "global_profiler.stepz=1"]) == 2
    assert "global_profiler.stepz: unknown key 'stepz'. Did you mean 'steps'?" in capsys.readouterr().err
    assert main(["demo", "--dir", "x", "global_profiler.save_path=y"]) == 2
    assert "give one of them" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install rankscope-torch torch" in capsys.readouterr().err


CHECKOUT_TRAIN = """
import json, os, sys
print(json.dumps(sys.argv[1:]))
print("USDT: noise", file=sys.stderr)
print("OMP", os.environ["OMP_NUM_THREADS"], file=sys.stderr)
"""

LAUNCHER = """
import runpy, sys
at = next(i for i, word in enumerate(sys.argv) if word.endswith("train.py"))
print(sys.argv[1:at])
sys.argv = sys.argv[at:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def demo(tmp_path: Path) -> Any:
    """Runs the demo with a stand-in for torch and the example: what it starts and where is what is tested."""
    launcher = tmp_path / "site" / "torch" / "distributed"
    launcher.mkdir(parents=True)
    (launcher.parent / "__init__.py").touch()
    (launcher / "__init__.py").touch()
    (launcher / "run.py").write_text(LAUNCHER)
    example = tmp_path / "checkout" / "examples" / "ppo"
    example.mkdir(parents=True)
    (example / "train.py").write_text(CHECKOUT_TRAIN)
    (example / "profile.yaml").write_text("global_profiler: {save_path: outputs/ppo}")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rankscope.cli import demo, main\n"
        "demo.__file__ = str(Path.cwd() / 'x.py')\n"
        "sys.exit(main(['demo', *sys.argv[1:]]))\n"
    )

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        base = {key: value for key, value in os.environ.items() if not key.startswith(("RANKSCOPE_", "OMP_"))}
        return subprocess.run(
            [sys.executable, "-c", script, *words],
            env={**base, "PYTHONPATH": str(tmp_path / "site"), **env},
            cwd=tmp_path / "checkout",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def started(done: subprocess.CompletedProcess[str]) -> list[str]:
    words: list[str] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('["--config')))
    return words


def test_the_command_that_is_started(demo, tmp_path):
    done = demo("--steps", "6", "global_profiler.steps=2-3")
    checkout = tmp_path / "checkout"
    assert "['--standalone', '--nproc-per-node', '2']\n" in done.stdout
    words = started(done)
    assert words[:5] == [
        "--config",
        str(checkout / "examples/ppo/profile.yaml"),
        "--steps",
        "6",
        "global_profiler.steps=2-3",
    ]
    assert words[5].startswith(f'global_profiler.save_path="{checkout}/outputs/demo-2')
    assert done.stderr == "OMP 1\n"
    assert done.returncode == 1, "nothing was captured"
    assert f"note: no ledger in {checkout}/outputs/demo-2" in done.stdout


def test_where_the_traces_go(demo, tmp_path):
    checkout = tmp_path / "checkout"
    assert started(demo("--dir", "here"))[2:] == [f'global_profiler.save_path="{checkout}/here"']
    assert started(demo("global_profiler.save_path=/x"))[2:] == ["global_profiler.save_path=/x"]
    own = checkout / "own.yaml"
    own.write_text("global_profiler: {save_path: mine}")
    assert started(demo("--config", "own.yaml")) == ["--config", "own.yaml"]
    own.write_text("global_profiler: {}")
    assert started(demo("--config", "own.yaml"))[2].startswith("global_profiler.save_path=")
    assert demo("--config", "no.yaml").returncode == 2


def test_json_stands_alone_on_standard_output(demo):
    done = demo("--json", "--nproc", "3", OMP_NUM_THREADS="4")
    data = json.loads(done.stdout)
    assert data["exit_status"] == 0
    assert data["rows"] == []
    assert "'--nproc-per-node', '3'" in done.stderr
    assert "OMP 4" in done.stderr


def test_the_status_of_a_run_that_fails(demo, tmp_path):
    (tmp_path / "checkout/examples/ppo/train.py").write_text("import sys; sys.exit(5)")
    done = demo()
    assert done.returncode == 5
    assert done.stderr == "rankscope demo: the run ended with status 5\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_once(number, status):
    child = (
        "import os, signal, sys\n"
        "def stop(number, frame):\n"
        "    print('child got', number, flush=True); sys.exit(3)\n"
        f"signal.signal({int(number)}, stop)\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    script = (
        "import sys\n"
        "from rankscope.cli.demo import _run\n"
        "sys.exit(_run([sys.executable, '-c', sys.argv[1]], sys.stdout))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, child], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == f"child got {int(number)}\n"
    assert err == "rankscope demo: waiting for the run to end\n"
    assert process.returncode == status
