from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rankscope import finish
from rankscope.artifacts.ledger import Ledger, read_ledgers
from rankscope.finish import FinishCommand, FinishResult, claim_once, write_manifest
from rankscope.testing import wait_for
from rankscope.types import Artifact


def run(command: str | list[str], **facts: Any) -> tuple[FinishResult, list[str]]:
    lines: list[str] = []
    result = FinishCommand(command, **{"output": lines.append, "prefix": "", **facts}).run()
    return result, lines[:-1]  # the last line tells how it ended


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}
    except FileNotFoundError:
        return True


def artifact(path: str, **facts: Any) -> Artifact:
    base = {"tool": "fake", "role": "actor", "rank": 0, "step": 1, "scope": "train", "bytes": 5, "checksum": "crc32:1"}
    return Artifact(path=Path(path), **{**base, **facts})


# What is run, and with what.


def test_a_text_goes_to_the_shell() -> None:
    result, lines = run("""x='a  "b"'; echo "$x" $((1+2)); echo to stderr >&2; exit 7""")
    assert lines == ['a  "b" 3', "to stderr"]
    assert result.launched
    assert (result.exit_code, result.timed_out, result.ok, result.error) == (7, False, False, "")


def test_a_list_is_run_without_a_shell() -> None:
    assert run(["/bin/echo", "$HOME", "a b"])[1] == ["$HOME a b"]


def test_the_environment_carries_every_fact_twice(tmp_path: Path) -> None:
    result, lines = run(
        "env | grep _PROFILE_ | sort",
        save_path=tmp_path,
        tool="torch",
        role="actor_rollout",
        rank=3,
        step=5,
        steps=[1, 5],
        world_size=8,
        host="node1",
        run_id="r1",
        artifacts=[artifact("/a")],
    )
    assert result.ok
    facts = {
        "ARTIFACTS": "1",
        "HOST": "node1",
        "MANIFEST": str(tmp_path / ".rankscope" / f"manifest-node1-{os.getpid()}-actor-rollout.json"),
        "PID": str(os.getpid()),
        "RANK": "3",
        "ROLE": "actor_rollout",
        "RUN_ID": "r1",
        "SAVE_PATH": str(tmp_path),
        "STEP": "5",
        "STEPS": "1,5",
        "TOOL": "torch",
        "WORLD_SIZE": "8",
    }
    assert lines == [
        f"{prefix}_PROFILE_{key}={value}" for prefix in ("RANKSCOPE", "VERL") for key, value in facts.items()
    ]


def test_stale_values_of_a_parent_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("RANKSCOPE", "VERL"):
        for name in ("ROLE", "STEP", "MANIFEST", "TOOL"):
            monkeypatch.setenv(f"{prefix}_PROFILE_{name}", "stale")
    monkeypatch.setenv("VERL_PROFILE_RAY_NSIGHT_DIR", "/kept")
    _, lines = run("env | grep _PROFILE_ | sort")
    assert "VERL_PROFILE_RAY_NSIGHT_DIR=/kept" in lines
    assert not any(line.endswith("=stale") for line in lines)
    assert "VERL_PROFILE_SAVE_PATH=" in lines  # an empty save path is passed on as such


def test_the_manifest_lists_the_files_of_the_process(tmp_path: Path) -> None:
    files = [artifact("/a"), artifact("/b", step=None, bytes=7)]
    result, lines = run('cat "$VERL_PROFILE_MANIFEST"', save_path=tmp_path, artifacts=files, role="actor", run_id="r")
    assert result.ok
    manifest = json.loads("\n".join(lines))
    assert manifest["save_path"] == str(tmp_path)
    assert (manifest["role"], manifest["run_id"], manifest["pid"]) == ("actor", "r", os.getpid())
    keys = ("path", "bytes", "checksum", "tool", "role", "rank", "step", "scope")
    assert manifest["artifacts"] == [
        dict(zip(keys, ("/a", 5, "crc32:1", "fake", "actor", 0, 1, "train"), strict=True)),
        dict(zip(keys, ("/b", 7, "crc32:1", "fake", "actor", 0, None, "train"), strict=True)),
    ]
    assert not list(tmp_path.rglob("*.part"))


def test_a_manifest_that_cannot_be_written_does_not_stop_the_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write_manifest(tmp_path / "file", [], "m")
    result, lines = run("echo ran ${VERL_PROFILE_MANIFEST-unset}", save_path=tmp_path / "file")
    assert result.ok
    assert "could not be written" in lines[0]
    assert lines[1] == "ran unset"


def test_the_working_directory_is_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("pwd -P")[1] == [str(tmp_path.resolve())]


def test_a_command_that_reads_gets_nothing() -> None:
    result, lines = run("cat; echo done", timeout=20)
    assert result.ok
    assert lines == ["done"]


def test_the_command_has_a_session_of_its_own() -> None:
    _, lines = run([sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid() == os.getpgid(0))"])
    assert lines == ["True"]


# What can go wrong.


@pytest.mark.parametrize("command", ["/no/such/command --x", "   ", "exit 3"])
def test_a_command_that_fails_is_only_reported(command: str) -> None:
    result, _ = run(command)
    assert not result.ok
    assert result.exit_code in {127, 3, None}
    assert result.launched == bool(command.strip())


def test_a_list_that_cannot_be_started_is_only_reported() -> None:
    told: list[str] = []
    result = FinishCommand(["/no/such/command"], output=told.append, prefix="P").run()
    assert (result.launched, result.exit_code) == (False, None)
    assert "FileNotFoundError" in result.error
    assert told == [f"P could not be started: {result.error}"]
    assert not FinishCommand([], output=told.append).run().launched


def test_output_of_any_bytes() -> None:
    result, lines = run(r"printf 'a\377b\n\000\033[31mred\n'; printf '10%%\r20%%\r\n'; printf 'no newline'")
    assert result.ok
    assert lines == ["a\ufffdb", "\ufffd\ufffd[31mred", "20%", "no newline"]
    result, lines = run("head -c 200000 /dev/urandom")
    assert result.ok
    assert lines
    assert all(len(line) <= finish.MAX_LINE + 10 for line in lines)


def test_a_flood_is_drained_counted_and_bounded() -> None:
    result, lines = run("yes | head -c 10000000", timeout=60)
    assert result.ok
    assert len(lines) == finish.MAX_LINES + 1
    assert (
        lines[-1]
        == f"… {5_000_000 - finish.MAX_LINES} more lines, {5_000_000 - finish.MAX_LINES} bytes of output not shown"
    )


def test_one_endless_line_is_cut() -> None:
    result, lines = run("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo after", timeout=60)
    assert result.ok
    assert lines[0] == "x" * finish.MAX_LINE + "… (cut)"
    assert lines[1] == "after"
    assert len(lines) == 3


def test_many_long_lines_are_bounded_in_bytes() -> None:
    _, lines = run("for i in $(seq 1000); do head -c 3000 /dev/zero | tr '\\0' x; echo; done", timeout=60)
    assert sum(len(line) for line in lines) <= finish.MAX_BYTES + 2 * finish.MAX_LINE


def test_a_child_in_the_background_does_not_hold_us_up(tmp_path: Path) -> None:
    began = time.monotonic()
    result, lines = run(f"sleep 30 & echo $! > {shlex.quote(str(tmp_path / 'pid'))}; echo done")
    assert result.ok
    assert lines == ["done"]
    assert time.monotonic() - began < 10
    child = int((tmp_path / "pid").read_text())
    assert not gone(child)  # the user wanted it in the background
    os.kill(child, signal.SIGKILL)


def test_the_time_limit_ends_the_command_and_its_children(tmp_path: Path) -> None:
    script = f"echo started; sh -c 'echo $$ > {tmp_path}/pid; sleep 60; :'; echo never"
    result, lines = run(script, timeout=1)
    assert result.timed_out
    assert not result.ok
    assert result.exit_code == -signal.SIGTERM
    assert lines == ["started"]
    wait_for(lambda: gone(int((tmp_path / "pid").read_text())))


def test_who_ignores_the_polite_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "TERM_GRACE", 0.5)
    script = f"trap '' TERM; sh -c 'echo $$ > {tmp_path}/pid; while :; do sleep 1; done'; :"
    result, _ = run(script, timeout=1)
    assert result.timed_out
    assert result.exit_code == -signal.SIGKILL
    wait_for(lambda: gone(int((tmp_path / "pid").read_text())))


def test_a_grandchild_may_clean_up_after_its_parent_is_gone(tmp_path: Path) -> None:
    done = tmp_path / "cleaned"
    inner = f"trap 'sleep 0.5; echo x > {done}; exit' TERM; echo ready > {tmp_path}/ready; while :; do sleep 0.1; done"
    script = f"sh -c {shlex.quote(inner)} & while :; do sleep 0.1; done"
    result, _ = run(script, timeout=2)
    assert (tmp_path / "ready").exists()
    assert result.timed_out
    assert done.exists()


def test_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("not here")

    monkeypatch.setattr(finish.os, "pidfd_open", refuse)
    result, lines = run("echo a; sleep 0.2; echo b; exec >&- 2>&-; sleep 0.2; exit 4")
    assert result.exit_code == 4
    assert lines == ["a", "b"]


def test_waiting_costs_no_processor_time() -> None:
    began = time.process_time()
    run("exec >&- 2>&-; sleep 1.5")
    run("sleep 5 & echo done")
    assert time.process_time() - began < 0.5


def test_a_callback_that_raises_is_replaced_by_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    def explode(_: str) -> None:
        raise RuntimeError("boom")

    result = FinishCommand("echo a; echo b", output=explode, prefix="P").run()
    assert result.ok
    err = capsys.readouterr().err
    assert "boom" in err
    assert "P b" in err


def test_by_default_lines_go_to_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    FinishCommand("echo hello", rank=3).run()
    err = capsys.readouterr().err
    assert "finish command [3]: hello" in err
    assert "finish command [3]: exit code 0" in err


# Records, background, once.


def test_the_ledger_tells_how_it_ended(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    run("exit 3", ledger=ledger, role="actor", rank=1, save_path=tmp_path)
    [record] = read_ledgers(tmp_path)
    assert record["kind"] == "finish"
    assert (record["command"], record["exit_code"], record["timed_out"]) == ("exit 3", 3, False)
    assert (record["role"], record["rank"], record["path"]) == ("actor", 1, str(tmp_path))


def test_in_the_background(tmp_path: Path) -> None:
    go = tmp_path / "go"
    command = FinishCommand(f"while [ ! -e {go} ]; do sleep 0.05; done; exit 5", output=lambda _: None)
    assert command.wait(0) is None
    command.start()
    command.start()
    assert command.wait(0.05) is None
    go.touch()
    result = command.wait(30)
    assert result is not None
    assert result.exit_code == 5
    assert command.run() is result


def test_a_background_command_can_be_ended() -> None:
    lines: list[str] = []
    command = FinishCommand("echo up; sleep 60", output=lines.append, prefix="")
    command.terminate()  # not started: nothing to end
    command.start()
    wait_for(lambda: lines == ["up"])
    command.terminate()
    result = command.wait(30)
    assert result is not None
    assert (result.exit_code, result.timed_out) == (-signal.SIGTERM, False)


def test_without_new_threads_it_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(finish.threading.Thread, "start", refuse)
    command = FinishCommand("exit 4", output=lambda _: None)
    command.start()
    result = command.wait()
    assert result is not None
    assert result.exit_code == 4


def test_from_an_atexit_handler(tmp_path: Path) -> None:
    code = """
import atexit, sys
from rankscope.finish import FinishCommand
def last():
    command = FinishCommand("echo x > " + sys.argv[1], output=print)
    command.start()
    print(command.wait(30))
atexit.register(last)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "mark")], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "mark").exists()
    assert "exit_code=0" in done.stdout
    assert done.stderr == ""


def test_once_for_a_process_and_a_path(tmp_path: Path) -> None:
    assert claim_once(tmp_path)
    assert not claim_once(str(tmp_path))
    assert not claim_once(tmp_path / "x" / "..")
    assert claim_once(tmp_path / "other")
    child = os.fork()
    if child == 0:
        os._exit(0 if claim_once(tmp_path) and not claim_once(tmp_path) else 1)
    assert os.waitpid(child, 0)[1] == 0
