from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recording
from recording import calls

from rankscope import DistProfiler, FaultError, annotate, load_config
from rankscope.windows import opened

Make = Callable[..., DistProfiler]
HOOKS = ["start", "step", "stop", "annotate", "enter", "exit", "relocate", "finish"]


def train(handle: DistProfiler, steps: range | list[int], log: list[Any]) -> int:
    """A training loop; its result must be the same whatever the tools do."""

    @annotate("update", scheduled=True)
    def update(number: int) -> int:
        for i in range(2):
            with annotate(f"mini_batch{i}"):
                log.append((number, i))
            handle.step()
        return number * 10

    total = 0
    for number in steps:
        handle.start(step=number)
        total += update(number)
        handle.stop(last=number == steps[-1])
    return total


# A whole run.


def test_a_run_without_faults(profiler: Make, save_path: Path) -> None:
    log: list[Any] = []
    with profiler(steps=(1, 2)) as handle:
        assert train(handle, [1, 2], log) == 30
    assert log == [(1, 0), (1, 1), (2, 0), (2, 1)]
    one = [
        "rec start {n} train",
        "rec annotate step{n}",
        "rec enter step{n}",
        "rec annotate update",
        "rec enter update",
        *(
            call
            for i in range(2)
            for call in (
                f"rec annotate mini_batch{i}",
                f"rec enter mini_batch{i}",
                f"rec exit mini_batch{i}",
                "rec step update",
            )
        ),
        "rec exit update",
        "rec exit step{n}",
        "rec stop {n} train",
    ]
    expected = [call.format(n=n) for n in (1, 2) for call in one]
    assert [*expected, "rec finish 2"] == recording.CALLS
    assert recording.files(save_path) == ["step 1", "step 2"]
    assert [artifact.step for artifact in handle.artifacts] == [1, 2]
    assert handle.closed
    assert handle.start(step=3) is False


def test_what_a_window_says(profiler: Make) -> None:
    handle = profiler(steps=(2, 3, 5), profile_continuous_steps=True, total_steps=5)
    handle.start(step=2)
    handle.stop()
    handle.start()
    handle.stop()
    handle.start(step=5, scope="warm-up")
    handle.stop()
    facts = [(w.role, w.step, w.steps, w.scope, w.reason) for w in recording.WINDOWS]
    assert facts == [
        ("actor", 2, (2, 3), "train", "step"),
        ("actor", None, (), "train", "manual"),
        ("actor", 5, (5,), "warm-up", "step"),
    ]
    assert len({window.id for window in recording.WINDOWS}) == 3


def test_advance_names_the_steps_of_a_continuous_stretch(profiler: Make, save_path: Path) -> None:
    handle = profiler(profile_continuous_steps=True)
    handle.start(step=1)
    handle.advance(step=1)
    handle.advance(step=2)
    with annotate("a"):
        pass
    handle.advance(step=3)
    handle.stop()
    assert calls("start", "enter", "exit", "stop") == [
        "rec start 1 train",
        "rec enter step1",
        "rec exit step1",
        "rec enter step2",
        "rec enter a",
        "rec exit a",
        "rec exit step2",
        "rec enter step3",
        "rec exit step3",
        "rec stop 1 train",
    ]
    handle.advance(step=4)
    assert recording.CALLS[-1] == "rec stop 1 train"


def test_a_window_that_nobody_closed_is_saved_as_aborted(profiler: Make, save_path: Path) -> None:
    handle = profiler()
    handle.start(step=1)
    handle.start(step=2)
    handle.stop()
    assert calls("start", "stop") == [
        "rec start 1 train",
        "rec stop 1 train-aborted",
        "rec start 2 train",
        "rec stop 2 train",
    ]
    closes = [w for w in recording.ledger(save_path, "window") if w["event"] == "close"]
    assert [(w["step"], w["aborted"]) for w in closes] == [(1, True), (2, False)]
    assert sum("aborted" in path.name for path in save_path.iterdir()) == 1


def test_stops_without_a_start_do_nothing(profiler: Make) -> None:
    handle = profiler()
    handle.stop()
    handle.stop(last=True)
    handle.step()
    handle.advance(step=3)
    assert recording.CALLS == []
    handle.start(step=1)
    handle.stop()
    handle.stop()
    assert len(calls("stop")) == 1


def test_close_saves_what_is_open_and_can_be_repeated(profiler: Make, save_path: Path) -> None:
    handle = profiler()
    handle.start(step=1)
    handle.close()
    handle.close()
    assert calls("stop", "finish") == ["rec stop 1 train", "rec finish 1"]
    assert recording.files(save_path) == ["step 1"]
    assert [record["reason"] for record in recording.ledger(save_path, "close")] == ["closed"]


def test_the_block_ends_the_handle_and_lets_the_exception_through(profiler: Make) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, profiler() as handle:  # noqa: PT012
        handle.start(step=1)
        raise error
    assert caught.value is error
    assert calls("stop") == ["rec stop 1 train"]
    with pytest.raises(KeyError) as caught, profiler(options={"rec": {"fail": "stop"}}) as handle:  # noqa: PT012
        handle.start(step=2)
        raise error
    assert caught.value is error


def test_a_handle_does_not_travel_but_its_config_does(profiler: Make) -> None:
    handle = profiler()
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(handle)
    assert pickle.loads(pickle.dumps(handle.config)) == handle.config
    again = DistProfiler(pickle.loads(pickle.dumps(handle.config)), role="critic", rank=0, world_size=1)
    assert again.selected


# Faults.

EXPECTED = [(n, i) for n in (1, 2, 3) for i in range(2)]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_in_any_hook_does_not_reach_the_training(
    profiler: Make, save_path: Path, hook: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[Any] = []
    with profiler(tool=["rec", "rec2"], options={"rec": {"fail": hook}}, relocate_results=True) as handle:
        assert train(handle, [1, 2, 3], log) == 60
    assert log == EXPECTED
    mine = [call for call in recording.CALLS if call.startswith("rec ")]
    others = [call for call in recording.CALLS if call.startswith("rec2 ")]
    first = next(i for i, call in enumerate(mine) if call.split()[1] == hook)
    # Off after its fault, but for one attempt to stop what was started.
    rest = [call.split()[1] for call in mine[first + 1 :]]
    started = hook in {"step", "annotate", "enter", "exit"}
    assert [name for name in rest if name != "exit"] == (["stop"] if started else [])
    assert len(calls("enter")) - (hook == "enter") == len(calls("exit"))  # what was entered is left
    assert [call for call in others if call.split()[1] in {"start", "stop", "finish"}] == [
        *(f"rec2 {what} {n} train" for n in (1, 2, 3) for what in ("start", "stop")),
        "rec2 finish 3",
    ]
    step = None if hook == "finish" else 1
    told = {"enter": "annotate", "exit": "annotate"}.get(hook, hook)
    assert [(fault.tool, fault.hook, str(fault.error)) for fault in handle.faults] == [("rec", told, f"broken {hook}")]
    lines = recording.ledger(save_path, "fault")
    assert [(line["tool"], line["hook"], line["error"]) for line in lines] == [
        ("rec", told, f"ValueError: broken {hook}")
    ]
    assert step is None or lines[0]["step"] == step
    assert "in note" in lines[0]["traceback"]
    errors = capsys.readouterr().err
    assert errors.count(f"ValueError: broken {hook}; this tool is off") == 1
    assert errors.count("Traceback") == 1
    events = [(w["event"], w["window"]) for w in recording.ledger(save_path, "window") if w["tool"] == "rec"]
    assert sorted(number for event, number in events if event == "open") == sorted(
        number for event, number in events if event == "close"
    )
    assert opened() == ()


@pytest.mark.parametrize("hook", HOOKS)
def test_strict_mode_raises_after_the_loop(profiler: Make, hook: str) -> None:
    handle = profiler(tool=["rec", "rec2"], options={"rec": {"fail": hook}}, relocate_results=True)
    log: list[Any] = []
    with pytest.raises(FaultError) as caught:
        train(handle, [1], log)
    assert [fault.tool for fault in caught.value.faults] == ["rec"]
    assert isinstance(caught.value.__cause__, ValueError)
    started_before_it_was_raised = hook in {"start", "annotate", "enter"}
    assert ("rec2 start 1 train" in recording.CALLS) is True
    assert len(log) == (0 if started_before_it_was_raised else 1 if hook in {"step", "exit"} else 2)
    handle.close()
    assert calls("stop").count("rec2 stop 1 train") == 1


@pytest.mark.usefixtures("lenient")
def test_two_faults_one_tool_each(profiler: Make, save_path: Path) -> None:
    log: list[Any] = []
    broken = {"rec": {"fail": "enter,stop"}, "rec2": {"fail": "step"}}
    with profiler(tool=["rec", "rec2"], options=broken) as handle:
        assert train(handle, [1, 2, 3], log) == 60
    assert [(fault.tool, fault.hook) for fault in handle.faults] == [
        ("rec", "annotate"),
        ("rec", "stop"),
        ("rec2", "step"),
    ]
    assert log == EXPECTED


@pytest.mark.usefixtures("lenient")
def test_the_bodys_exception_cannot_be_swallowed_or_replaced(profiler: Make) -> None:
    for options in ({"swallow": True}, {"fail": "exit"}):
        handle = profiler(options={"rec": options})
        handle.start(step=1)
        error = LookupError("mine")
        with pytest.raises(LookupError) as caught, annotate("a"):
            raise error
        assert caught.value is error
        with pytest.raises(LookupError) as caught:
            annotate("f")(fail_with)(error)
        assert caught.value is error
        handle.close()


def test_the_bodys_exception_wins_in_strict_mode_too(profiler: Make) -> None:
    handle = profiler(options={"rec": {"fail": "exit"}})
    handle.start(step=1)
    with pytest.raises(LookupError), annotate("a"):
        raise LookupError
    handle.stop()
    assert len(handle.faults) == 1


def fail_with(error: BaseException) -> None:
    raise error


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("hook", HOOKS[:6])
@pytest.mark.parametrize("kind", ["sync", "generator", "async", "async_generator", "with"])
def test_the_body_runs_exactly_once(profiler: Make, hook: str, kind: str) -> None:
    import asyncio

    ran: list[str] = []

    @annotate("f")
    def sync() -> int:
        ran.append("sync")
        handle.step()
        return 1

    @annotate("f")
    def generator() -> Any:
        ran.append("generator")
        handle.step()
        yield 1

    @annotate("f")
    async def coroutine() -> int:
        ran.append("async")
        handle.step()
        return 1

    @annotate("f")
    async def async_generator() -> Any:
        ran.append("async_generator")
        handle.step()
        yield 1

    async def all_of() -> list[int]:
        return [value async for value in async_generator()]

    def block() -> int:
        with annotate("f"):
            ran.append("with")
            handle.step()
        return 1

    run: dict[str, Callable[[], Any]] = {
        "sync": sync,
        "generator": lambda: next(iter(generator())),
        "async": lambda: asyncio.run(coroutine()),
        "async_generator": lambda: asyncio.run(all_of())[0],
        "with": block,
    }
    handle = profiler(options={"rec": {"fail": hook}})
    handle.start(step=1)
    assert run[kind]() == 1
    handle.stop()
    assert ran == [kind]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(("name", "error"), [("KeyboardInterrupt", KeyboardInterrupt), ("SystemExit", SystemExit)])
@pytest.mark.parametrize("hook", ["start", "step", "stop", "enter", "exit", "finish"])
def test_interrupts_pass_through_every_hook(profiler: Make, hook: str, name: str, error: type[BaseException]) -> None:
    handle = profiler(options={"rec": {"fail": hook, "error": name}})
    with pytest.raises(error):
        train(handle, [1], [])
    assert handle.faults == ()
    backend: Any = handle.tools[0].backend
    object.__setattr__(backend.options, "fail", "")  # the user pressed the key once
    handle.close()
    assert len(calls("stop")) == (0 if hook == "start" else 1)


@pytest.mark.usefixtures("lenient")
def test_a_tool_that_went_off_outside_its_window_is_still_stopped(profiler: Make, tmp_path: Path) -> None:
    handle = profiler(relocate_results=True, options={"rec": {"fail": "relocate"}})
    handle.start(step=1)
    handle.stop()
    handle.start(step=2)
    handle.relocate()
    handle.stop()
    assert calls("start", "stop", "relocate") == [
        "rec start 1 train",
        "rec stop 1 train",
        "rec start 2 train",
        "rec relocate 1",
        "rec stop 2 train",
    ]


@pytest.mark.usefixtures("lenient")
def test_a_fault_of_a_span_that_outlived_its_window_stops_the_window_that_is_open(profiler: Make) -> None:
    handle = profiler()
    handle.start(step=1)
    with annotate("long"):
        handle.stop()
        handle.start(step=2)
        object.__setattr__(handle.tools[0].backend.options, "fail", "exit")  # type: ignore[attr-defined]
    assert calls("start", "stop") == [
        "rec start 1 train",
        "rec stop 1 train",
        "rec start 2 train",
        "rec stop 2 train",
    ]
    assert opened() == ()


def test_relocated_files_are_moved_once(profiler: Make, save_path: Path, tmp_path: Path) -> None:
    handle = profiler(relocate_results=True)
    backend: Any = handle.tools[0].backend
    handle.start(step=1)
    handle.stop()
    report = tmp_path / "elsewhere" / "report.bin"
    report.parent.mkdir()
    backend.elsewhere.append(report)
    assert handle.relocate() == ()
    report.write_bytes(b"report")
    (moved,) = handle.relocate()
    assert moved.path.read_bytes() == b"report"
    assert moved.path.parent == save_path
    assert not report.exists()
    handle.stop(last=True)
    assert len(handle.artifacts) == 2


# Finish.


def finish_command(tmp_path: Path) -> str:
    return f"echo run >> {tmp_path}/ran; cp $RANKSCOPE_PROFILE_MANIFEST {tmp_path}/manifest.json"


def runs(tmp_path: Path) -> int:
    path = tmp_path / "ran"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_finish_runs_once_for_three_roles_that_all_say_last(profiler: Make, tmp_path: Path) -> None:
    command = finish_command(tmp_path)
    tools = {"actor": "rec", "critic": "rec2", "ref": "rec"}
    handles = [profiler(role, tool=tool, finish_hook_cmd=command) for role, tool in tools.items()]
    for handle in handles:
        handle.start(step=1)
    assert [call.split()[0] for call in calls("start")] == ["rec", "rec2"]
    handles[0].stop(last=True)
    assert runs(tmp_path) == 0  # the critic still captures
    assert calls("finish") == []
    handles[1].stop(last=True)
    assert runs(tmp_path) == 1
    for handle in [*handles, *handles]:
        handle.stop(last=True)
    for handle in handles:
        handle.close()
    assert runs(tmp_path) == 1
    assert sorted(calls("finish")) == ["rec finish 1", "rec2 finish 1"]
    listed = json.loads((tmp_path / "manifest.json").read_text())["artifacts"]
    assert sorted((one["tool"], one["role"]) for one in listed) == [("rec", "actor"), ("rec2", "critic")]


def test_the_manifest_has_the_files_of_handles_that_are_closed_already(profiler: Make, tmp_path: Path) -> None:
    command = finish_command(tmp_path)
    actor = profiler("actor", finish_hook_cmd=command)
    critic = profiler("critic", tool="rec2", finish_hook_cmd=command)
    actor.start(step=1)
    critic.start(step=1)
    actor.close()
    assert runs(tmp_path) == 0
    critic.close()
    assert runs(tmp_path) == 1
    listed = json.loads((tmp_path / "manifest.json").read_text())["artifacts"]
    assert sorted(one["tool"] for one in listed) == ["rec", "rec2"]
    assert all(Path(one["path"]).is_file() for one in listed)


def test_another_save_path_has_a_finish_of_its_own(profiler: Make, tmp_path: Path) -> None:
    command = f"echo run >> {tmp_path}/ran"
    for name in ("one", "two"):
        handle = profiler(save_path=tmp_path / name, finish_hook_cmd=command)
        handle.start(step=1)
        handle.stop(last=True)
    assert runs(tmp_path) == 2


@pytest.mark.parametrize(
    ("section", "expected"), [({}, 0), ({"finish_hook_ranks": [1]}, 1), ({"finish_hook_all_ranks": True}, 1)]
)
def test_a_rank_that_captured_nothing_runs_the_command_only_when_it_is_named(
    profiler: Make, tmp_path: Path, section: dict[str, Any], expected: int
) -> None:
    command = finish_command(tmp_path)
    selected = {"all_ranks": False, "ranks": [0], **section}
    handle = profiler(rank=1, world_size=2, section=selected, finish_hook_cmd=command)
    assert not handle.selected
    handle.start(step=1)
    handle.stop(last=True)
    handle.stop(last=True)
    handle.close()
    assert runs(tmp_path) == expected
    assert recording.CALLS == []


def test_nothing_captured_nothing_finished(profiler: Make, tmp_path: Path) -> None:
    with profiler(finish_hook_cmd=finish_command(tmp_path)) as handle:
        handle.stop(last=True)
    assert runs(tmp_path) == 0
    assert recording.CALLS == []


def test_close_finishes_when_the_last_configured_step_was_never_reached(profiler: Make, tmp_path: Path) -> None:
    with profiler(steps=(1, 50), finish_hook_cmd=finish_command(tmp_path)) as handle:
        handle.start(step=1)
        handle.stop()
        assert runs(tmp_path) == 0
    assert runs(tmp_path) == 1
    assert calls("finish") == ["rec finish 1"]


def test_a_slow_command_holds_up_the_training_for_a_moment_only(profiler: Make, save_path: Path) -> None:
    import time

    handle = profiler(finish_hook_cmd="sleep 60", finish_hook_timeout=2, finish_hook_wait=0.2)
    handle.start(step=1)
    began = time.monotonic()
    handle.stop(last=True)
    assert time.monotonic() - began < 1.5
    handle.close()
    assert time.monotonic() - began < 30
    (record,) = recording.ledger(save_path, "finish")
    assert record["timed_out"]


@pytest.mark.parametrize("wait", [0, 0.1])
def test_finish_sees_complete_captures_even_when_they_take_long(profiler: Make, tmp_path: Path, wait: float) -> None:
    options = {"rec": {"write": "later", "seconds": 0.7}}
    handle = profiler(options=options, finish_hook_cmd=finish_command(tmp_path), finish_hook_wait=wait)
    handle.start(step=1)
    handle.stop(last=True)
    assert runs(tmp_path) == 0  # the file is still being made; the training goes on
    assert handle.artifacts == ()
    recording.wait_for(lambda: runs(tmp_path) == 1)  # in the background, long before the end
    handle.close()
    assert runs(tmp_path) == 1
    assert calls("finish") == ["rec finish 1"]
    assert len(json.loads((tmp_path / "manifest.json").read_text())["artifacts"]) == 1


def test_close_waits_for_what_finish_left_to_the_background(profiler: Make, tmp_path: Path) -> None:
    options = {"rec": {"write": "later", "seconds": 0.5}}
    handle = profiler(options=options, finish_hook_cmd=finish_command(tmp_path), finish_hook_wait=0)
    handle.start(step=1)
    handle.stop(last=True)
    handle.close()
    assert runs(tmp_path) == 1
    assert len(json.loads((tmp_path / "manifest.json").read_text())["artifacts"]) == 1


# The end, in words.


@pytest.mark.parametrize(
    ("facts", "start", "words"),
    [
        ({}, False, "nothing called start()"),
        ({"options": {"rec": {"discrete": True}}}, True, "none ran while a window was open"),
        ({"options": {"rec": {"write": "never"}}}, True, "the windows held nothing"),
    ],
)
def test_a_rank_that_leaves_nothing_says_why(
    profiler: Make, capsys: pytest.CaptureFixture[str], facts: dict[str, Any], start: bool, words: str
) -> None:
    with profiler(**facts) as handle:
        if start:
            handle.start(step=1)
    text = capsys.readouterr().err
    assert "profiling was on for this rank and left no file" in text
    assert words in text


# The end of the process.

RUN = """
import json, os, signal, sys, time
from rankscope import DistProfiler, annotate
import recording
handle = DistProfiler(json.loads(sys.argv[1]), role="actor", rank=0, world_size=1)
"""


def test_an_open_window_is_saved_and_finished_at_exit(site: Path, save_path: Path, tmp_path: Path) -> None:
    config = recording.config(save_path, finish_hook_cmd=finish_command(tmp_path), options={"rec": {"write": "later"}})
    program = RUN + "handle.start(step=1)\nraise SystemExit(3)"
    result = recording.run_python(site, program, json.dumps(config))
    assert result.returncode == 3, result.stderr
    assert recording.files(save_path) == ["step 1 finished"]
    assert runs(tmp_path) == 1
    assert [record["reason"] for record in recording.ledger(save_path, "close")] == ["exit"]


def start(site: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=recording.environment(site),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


WAIT = """
handle.start(step=1)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_sigterm_saves_the_window_where_it_was_asked_for(site: Path, save_path: Path) -> None:
    config = json.dumps(recording.config(save_path, flush_on_sigterm=True))
    with start(site, RUN + WAIT, config) as process:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert recording.files(save_path) == ["step 1"]
    assert [record["reason"] for record in recording.ledger(save_path, "close")] == ["SIGTERM"]


def test_sigterm_is_left_alone_where_nobody_asked(site: Path, save_path: Path) -> None:
    program = RUN + "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n" + WAIT
    with start(site, program, json.dumps(recording.config(save_path))) as process:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert recording.files(save_path) == []


def test_an_earlier_handler_of_sigterm_runs_after_ours(site: Path, save_path: Path) -> None:
    before = """
import signal, sys
def mine(number, frame):
    print("mine", [str(path) for path in handle.artifacts] != [], flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, mine)
"""
    config = json.dumps(recording.config(save_path, flush_on_sigterm=True))
    with start(site, before + RUN + WAIT, config) as process:
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("mine True\n", 7)


def test_sigterm_waits_for_a_start_that_is_under_way_on_any_thread(site: Path, save_path: Path) -> None:
    slow = """
import threading
inside, sent = threading.Event(), threading.Event()
def slow_start(window, original=handle.tools[0]._hooks["start"]):
    inside.set(); sent.wait(30)
    time.sleep(0.3)
    original(window)
handle.tools[0]._hooks["start"] = slow_start
thread = threading.Thread(target=handle.start, kwargs={"step": 1}, daemon=True)
thread.start()
inside.wait(30)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
sent.set()
while True:
    time.sleep(0.05)
"""
    config = json.dumps(recording.config(save_path, flush_on_sigterm=True))
    with start(site, RUN + slow, config) as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert recording.files(save_path) == ["step 1"]


def test_a_loaded_config_is_taken_as_it_is(site: Path, save_path: Path) -> None:
    config = load_config(recording.config(save_path))
    handle = DistProfiler(config, role="actor", rank=0, world_size=1)
    assert handle.config is config


def test_parallel_dimensions_that_come_up_after_the_handle_are_in_its_names(profiler: Make, save_path: Path) -> None:
    from rankscope import topology

    found: dict[str, tuple[int, int]] = {}
    topology.add_provider("late", lambda: found)
    try:
        with profiler() as handle:
            context = handle.tools[0].backend.context  # type: ignore[attr-defined]
            assert dict(context.topology) == {}
            found["tp"] = (1, 2)
            train(handle, [1], [])
            assert dict(context.topology) == {"tp": 1}
            assert [path.name for path in save_path.glob("*_tp1_*")] == [handle.artifacts[0].path.name]
    finally:
        topology.remove_provider("late")
