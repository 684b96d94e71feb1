"""What is in a file: contents, metadata, names; and what happens when the save path goes away."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import ConfigError, DistProfiler, ProfileController, annotate

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent


def record(profiler: Any, kit: Any, *ops: str, step: int = 1) -> None:
    profiler.start(step=step)
    for name in ops or ("cos",):
        kit.op(name)
    profiler.stop()


@pytest.mark.parametrize(
    ("contents", "effective"),
    [
        (None, ["cpu"]),
        ([], ["cpu"]),
        (["cpu"], ["cpu"]),
        (["all"], ["cpu", "memory", "shapes", "stack", "flops"]),
        (["memory", "shapes"], ["cpu", "memory", "shapes"]),
    ],
)
def test_contents_are_what_they_say(
    handle: Callable[..., Any], kit: Any, tmp_path: Path, contents: list[str] | None, effective: list[str]
) -> None:
    import torch

    profiler = handle(contents=contents)
    profiler.start(step=1)
    kept = torch.ones(100, 100) @ torch.ones(100, 100)
    profiler.stop()
    profiler.close()
    trace = kit.trace(tmp_path)
    expected = [name for name in effective if name != "cuda"]
    if torch.cuda.is_available() and (not contents or "all" in contents):
        expected.insert(1, "cuda")
    assert trace.meta["contents"] == expected
    assert "mm" in trace.ops
    [mm] = [event for event in trace.events if event["name"] == "aten::mm"]
    assert ("Input Dims" in mm["args"]) == ("shapes" in expected or "flops" in expected)
    assert any(event.get("cat") == "python_function" for event in trace.events) == ("stack" in expected)
    allocations = [event for event in trace.events if event["name"] == "[memory]"]
    assert bool(allocations) == ("memory" in expected)
    if "memory" in expected:
        assert kept.nbytes in {event["args"]["Bytes"] for event in allocations}


@pytest.mark.parametrize("name", ["cuda", "device"])
def test_a_device_that_is_not_there_leaves_the_cpu_and_a_message(
    handle: Callable[..., Any], kit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here, and this is about a machine without one")
    profiler = handle(contents=[name])
    record(profiler, kit)
    record(profiler, kit, "sin", step=2)
    profiler.close()
    said = kit.messages(capsys.readouterr().err, "info")
    assert len([message for message in said if message["event"].startswith("no accelerator is present")]) == 1
    assert [trace.meta["contents"] for trace in kit.traces(tmp_path)] == [["cpu"], ["cpu"]]


def test_an_unknown_content_is_refused_with_the_nearest_one(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        DistProfiler(kit.config(tmp_path, contents=["memry"]), role="actor", rank=0)
    text = str(caught.value)
    assert "global_tool_config.torch.contents" in text
    assert "Did you mean 'memory'" in text


def test_a_quote_in_a_file_name_of_a_stack_is_repaired(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    names = ['a"b.py', "c\\d.py", "e\nf.py"]  # torch itself turns a backslash into a slash and drops the line break
    profiler = handle(contents=["stack"])
    profiler.start(step=1)
    for name in names:
        scope: dict[str, Any] = {"op": kit.op}
        exec(compile("def named():\n    op('cos')\nnamed()\n", name, "exec"), scope)
    profiler.stop()
    profiler.close()
    trace = kit.trace(tmp_path)
    frames = {event["name"] for event in trace.events if event.get("cat") == "python_function"}
    named = {frame for frame in frames if frame.endswith(": named")}
    [artifact] = kit.ledger(tmp_path, "artifact", status="published")
    if "a'b.py(1): named" in named:  # newer torch replaces the quote before it writes, so there is nothing to repair
        assert named == {"a'b.py(1): named", "c/d.py(1): named", "ef.py(1): named"}
    else:
        assert named == {'a"b.py(1): named', "c/d.py(1): named", "ef.py(1): named"}
        assert artifact["repaired"] >= 1
    assert "dropped" not in artifact


def test_a_role_of_odd_characters_is_kept_in_the_metadata(kit: Any, tmp_path: Path) -> None:
    role = 'actor "x" \\ größer'
    with DistProfiler(kit.config(tmp_path, role), role=role, rank=0) as profiler:
        record(profiler, kit)
    trace = kit.trace(tmp_path)
    assert trace.meta["role"] == role
    assert '"' not in trace.path.name


def test_rank_world_and_topology_are_in_name_and_metadata(kit: Any, tmp_path: Path) -> None:
    with DistProfiler(
        kit.config(tmp_path), role="actor", rank=5, world_size=8, topology={"tp": 1, "pp": 0, "dp": 1}
    ) as profiler:
        record(profiler, kit, step=2)
    trace = kit.trace(tmp_path)
    assert (trace.place["rank"], trace.place["world_size"]) == (5, 8)
    assert (trace.name.rank, trace.name.world_size) == (5, 8)
    assert trace.meta["topology"] == {"tp": 1, "pp": 0, "dp": 1}
    assert trace.name.topology["tp"] == 1
    assert (trace.meta["step"], trace.meta["steps"], trace.meta["scope"]) == (2, [2], "train")
    [artifact] = kit.ledger(tmp_path, "artifact", status="published")
    assert (artifact["step"], artifact["rank"], artifact["bytes"]) == (2, 5, trace.path.stat().st_size)
    assert artifact["events"] >= 1


def test_two_real_ranks_have_the_group_s_facts(kit: Any, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "scenarios.py"),
                "distributed",
                str(tmp_path / "out"),
                str(rank),
                str(tmp_path / "store"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in processes:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    first, second = sorted(kit.traces(tmp_path / "out"), key=lambda trace: trace.name.rank)
    for rank, trace in enumerate((first, second)):
        assert (trace.name.rank, trace.name.world_size) == (rank, 2)
        assert (trace.place["rank"], trace.place["world_size"], trace.place["backend"]) == (rank, 2, "gloo")
        assert trace.labels[0] == "exchange"
        assert any("allreduce" in event["name"] for event in trace.events)


def test_step_rows_carry_the_trainer_s_step(kit: Any, tmp_path: Path) -> None:
    settings = kit.config(tmp_path, common={"profile_continuous_steps": True, "steps": [2, 3]}, step_rows=True)
    with (
        DistProfiler(settings, role="actor", rank=0) as profiler,
        ProfileController(settings, workers=[profiler], total_steps=4) as controller,
    ):
        for number in range(1, 5):
            with controller.step(number), annotate("stage"):
                kit.op("cos")
    trace = kit.trace(tmp_path)
    assert trace.labels == ["ProfilerStep#2", "stage", "ProfilerStep#3", "stage"]
    assert (trace.name.step, trace.meta["steps"]) == (2, [2, 3])
    first, inside, *_ = trace.rows
    assert first.start <= inside.start <= inside.end <= first.end


def test_a_step_that_raises_is_saved_and_its_exception_passes(kit: Any, tmp_path: Path) -> None:
    settings = kit.config(tmp_path)
    error = ValueError("the step's own")

    def fail() -> None:
        kit.op("cos")
        raise error

    with (
        DistProfiler(settings, role="actor", rank=0) as profiler,
        ProfileController(settings, workers=[profiler], total_steps=2) as controller,
    ):
        with pytest.raises(ValueError) as caught, controller.step(1), annotate("stage"):
            fail()
        with controller.step(2):
            kit.op("sin")
    assert caught.value is error
    first, second = kit.traces(tmp_path)
    assert (first.name.step, first.labels, first.ops & {"cos", "sin"}) == (1, ["stage"], {"cos"})
    assert (second.name.step, second.ops & {"cos", "sin"}) == (2, {"sin"})


def test_without_step_rows_there_are_none(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    profiler = handle()
    record(profiler, kit)
    profiler.close()
    assert kit.trace(tmp_path).labels == []


def test_many_files_of_one_moment_have_names_of_their_own(handle: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    profiler = handle(discrete=True)
    profiler.start(step=1)
    for _ in range(40):
        with annotate("stage"):
            kit.op("cos")
    profiler.stop()
    profiler.close()
    traces = kit.traces(tmp_path)
    assert len({trace.path.name for trace in traces}) == 40
    assert all("cos" in trace.ops for trace in traces)


def test_a_save_path_that_is_removed_meanwhile_is_made_again(
    handle: Callable[..., Any], kit: Any, tmp_path: Path
) -> None:
    profiler = handle()
    record(profiler, kit)
    profiler.start(step=2)
    kit.op("sin")
    shutil.rmtree(tmp_path)
    profiler.stop()
    profiler.close()
    assert [trace.ops & {"cos", "sin"} for trace in kit.traces(tmp_path) if trace.name.step == 2] == [{"sin"}]


def test_a_save_path_that_becomes_a_file_sends_the_trace_elsewhere(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tempfile

    place, temporary = tmp_path / "place", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("RANKSCOPE_LOG_FORMAT", "json")
    with DistProfiler(kit.config(place), role="actor", rank=0) as profiler:
        profiler.start(step=1)
        kit.op("cos")
        shutil.rmtree(place)
        place.write_text("in the way")
        profiler.stop()
    [elsewhere] = next(temporary.glob("rankscope-*")).iterdir()
    trace = kit.trace(elsewhere)
    assert "cos" in trace.ops
    said = kit.messages(capsys.readouterr().err)
    assert [message for message in said if "fallback directory" in message["event"]]
    assert [message["path"] for message in said if message["event"] == "profile saved"] == [str(trace.path)]
