"""After a fork the child starts clean: programs of their own, since a test process has threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import recording

HEAD = """
import json, multiprocessing, os, sys, traceback
from rankscope import DistProfiler, annotate
from rankscope.annotate import current_stage
from rankscope.windows import opened
import recording
from recording import calls

facts = json.loads(sys.argv[1])

def make(role="actor"):
    return DistProfiler(facts, role=role, rank=0, world_size=1)

def fork(action):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child failed"
"""

CHILD_STARTS_CLEAN = """
handle, guest = make(), make("critic")
handle.start(step=1)
guest.start(step=1)
before = list(recording.CALLS)

def child():
    assert opened() == ()
    assert not handle.recording and not guest.recording
    with annotate("in_child"):
        handle.step()
    for one in (handle, guest):
        assert one.start(step=2) is False
        one.advance(step=3)
        one.stop(last=True)
        one.finish()
        assert one.relocate() == ()
        one.close()
        assert not one.closed
    assert recording.CALLS == before

fork(child)
assert handle.recording and guest.recording
with annotate("in_parent"):
    pass
handle.stop()
assert calls("enter", "stop")[-2:] == ["rec enter in_parent", "rec stop 1 train"]
"""

SPANS_ACROSS_A_FORK = """
handle = make()
handle.start(step=1)

@annotate("generator")
def generator():
    yield 1
    yield 2

rows = generator()
next(rows)
with annotate("outer", scheduled=True):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        seen = list(recording.CALLS)
        assert current_stage() is None
if pid == 0:
    code = 1
    try:
        assert list(rows) == [2]
        with annotate("more"):
            pass
        assert recording.CALLS == seen, recording.CALLS
        assert not handle.faults
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert list(rows) == [2]
handle.stop()
assert "rec exit outer" in recording.CALLS and "rec exit generator" in recording.CALLS
assert not handle.faults
"""

A_CHILD_MAY_PROFILE = """
handle = make()
handle.start(step=1)

def child():
    own = make()
    assert own.start(step=5)
    own.stop(last=True)
    own.close()
    assert [artifact.step for artifact in own.artifacts] == [5]

fork(child)
handle.stop(last=True)
handle.close()
assert [artifact.step for artifact in handle.artifacts] == [1]
assert len({record["pid"] for record in recording.ledger(handle.save_path)}) == 2
"""

A_FORK_IN_THE_MIDDLE_OF_A_START = """
from rankscope.transitions import outside_transition
handle = make()
def forking_start(window, original=handle.tools[0]._hooks["start"]):
    global pid
    original(window)
    pid = os.fork()
handle.tools[0]._hooks["start"] = forking_start
handle.start(step=1)
if pid == 0:
    ran = []
    outside_transition(lambda: ran.append(1))
    os._exit(0 if ran == [1] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
handle.stop()
assert calls("stop") == ["rec stop 1 train"]
"""

FORKED_CHILDREN_DO_NOT_HOLD_THE_HELPER = """
from rankscope.artifacts.exports import exports
facts["global_profiler"]["global_tool_config"] = {"rec": {"write": "later"}}
handle = make()
handle.start(step=1)
handle.stop()
assert exports().drain(60)
helper = exports()._process
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(write)
    os.read(read, 1)      # lives until the parent lets go
    os._exit(0)
os.close(read)
handle.close()
assert helper.wait(30) == 0
os.close(write)
os.waitpid(pid, 0)
"""

A_SIGNAL_IN_THE_CHILD = """
import signal, time
facts["global_profiler"]["flush_on_sigterm"] = True
handle = make()
handle.start(step=1)
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(write, b"x")
    while True:
        time.sleep(0.02)
os.read(read, 1)  # a signal that comes in the middle of the fork is lost, whoever is to handle it
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
assert {record["pid"] for record in recording.ledger(handle.save_path)} == {os.getpid()}
assert handle.recording
handle.close()
assert calls("stop") == ["rec stop 1 train"]
"""

MULTIPROCESSING = """
def child(queue):
    inherited = globals().get("handle")
    queue.put((len(opened()), None if inherited is None else inherited.start(step=7)))
    own = make()
    own.start(step=9)     # never closed: the end of the process has to do that

def main():
    global handle
    handle = make()
    handle.start(step=1)
    context = multiprocessing.get_context(sys.argv[2])
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
    assert process.exitcode == 0, process.exitcode
    assert handle.recording
    handle.stop(last=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "program",
    [
        CHILD_STARTS_CLEAN,
        SPANS_ACROSS_A_FORK,
        A_CHILD_MAY_PROFILE,
        A_FORK_IN_THE_MIDDLE_OF_A_START,
        FORKED_CHILDREN_DO_NOT_HOLD_THE_HELPER,
        A_SIGNAL_IN_THE_CHILD,
    ],
    ids=["clean", "spans", "own handle", "in a start", "helper", "signal"],
)
@pytest.mark.parametrize("options", [{}, {"rec": {"discrete": False, "write": "later"}}], ids=["now", "later"])
def test_after_os_fork(site: Path, save_path: Path, program: str, options: dict[str, dict[str, object]]) -> None:
    facts = recording.config(save_path, roles=("actor", "critic"), options=options)
    result = recording.run_python(site, HEAD + program, json.dumps(facts))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("method", "inherited"), [("fork", False), ("spawn", None), ("forkserver", None)])
def test_after_multiprocessing(
    site: Path, save_path: Path, tmp_path: Path, method: str, inherited: bool | None
) -> None:
    program = tmp_path / "program.py"
    program.write_text(HEAD + MULTIPROCESSING)
    facts = json.dumps(recording.config(save_path))
    result = subprocess.run(
        [sys.executable, str(program), facts, method],
        env=recording.environment(site),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{(0, inherited)}\n"
    assert sorted(recording.files(save_path)) == ["step 1", "step 9"]
    closes = recording.ledger(save_path, "close")
    assert sorted(record["last_step"] for record in closes) == [1, 9]
