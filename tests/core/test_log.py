from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog

from rankscope import log


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", {})
    monkeypatch.delenv("RANKSCOPE_LOG_LEVEL", raising=False)
    monkeypatch.delenv("RANKSCOPE_LOG_FORMAT", raising=False)


def _python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_line_has_prefix_time_level_event_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    log.get_logger(tool="torch", rank=3).info("window closed", step=4, path="/a b/c", note="")
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\[rankscope\] \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info    window closed "
        r'tool=torch rank=3 step=4 path="/a b/c" note=""\n',
        line,
    )


def test_a_message_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.get_logger().warning("first\nsecond", why='a\n"b"', pair="k=v")
    out = capsys.readouterr().err
    assert out.count("\n") == 1
    assert r"first\nsecond" in out
    assert r'why="a\n\"b\""' in out
    assert 'pair="k=v"' in out


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_LOG_FORMAT", "json")
    log.get_logger(role="actor").error("lost", path=Path("/x"), exc_info=ValueError("why"))
    record = json.loads(capsys.readouterr().err)
    assert record.pop("timestamp")
    assert record == {
        "logger": "rankscope",
        "level": "error",
        "event": "lost",
        "role": "actor",
        "path": "/x",
        "exception": "ValueError: why",
    }


@pytest.mark.parametrize("fact", [{(1, 2): 3}, float("nan"), {1, 2}])
def test_json_stays_valid_whatever_the_fact(
    fact: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_LOG_FORMAT", "json")
    log.get_logger().info("odd", fact=fact)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(capsys.readouterr().err, parse_constant=refuse)["fact"] == str(fact)


@pytest.mark.parametrize(
    ("level", "said"),
    [("debug", "dbg inf war err"), ("", "inf war err"), ("WARNING", "war err"), (" error ", "err")],
)
def test_level_is_read_at_each_message(
    level: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = log.get_logger()
    monkeypatch.setenv("RANKSCOPE_LOG_LEVEL", level)
    logger.debug("dbg")
    logger.info("inf")
    logger.warning("war")
    logger.error("err")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == said.split()


def test_an_unknown_level_is_named_once_and_info_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_LOG_LEVEL", "warnin")
    log.get_logger().debug("one")
    log.get_logger().info("two")
    complaint, line = capsys.readouterr().err.splitlines()
    assert "RANKSCOPE_LOG_LEVEL='warnin'" in complaint
    assert "debug, info, warning, error" in complaint
    assert "Did you mean 'warning'?" in complaint
    assert line.endswith("two")


def test_traceback_of_a_given_error_and_of_the_current_one(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError("needle")
    except KeyError as error:
        caught = error
        log.get_logger().error("now", exc_info=True)
    log.get_logger().error("later", exc_info=caught)
    log.get_logger().error("nothing", exc_info=True)
    out = capsys.readouterr().err
    assert out.count("Traceback (most recent call last)") == 2
    assert out.count("KeyError: 'needle'") == 2
    assert out.splitlines()[-1].endswith("nothing")


def test_facts_may_have_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    log.get_logger(level=1).info("words", method_name=2, facts=3, logger=4, timestamp=5)
    assert capsys.readouterr().err.rstrip().endswith("words level_=1 method_name=2 facts=3 logger=4 timestamp_=5")


def test_it_follows_the_current_stderr_and_survives_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    logger = log.get_logger()
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stderr", narrow)
    logger.info("gruß", fact=Broken())
    narrow.seek(0)
    assert narrow.read().rstrip().endswith(r"gru\xdf fact=" + '"<Broken without a text>"')

    narrow.close()
    last_resort = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", last_resort)
    logger.info("closed")
    monkeypatch.setattr(sys, "stderr", None)
    logger.info("none")
    assert [line.split()[-1] for line in last_resort.getvalue().splitlines()] == ["closed", "none"]

    monkeypatch.setattr(sys, "__stderr__", None)
    logger.info("nowhere")


def test_the_applications_logging_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[object] = []

    def take(_logger: object, _level: str, fields: object) -> object:
        taken.append(fields)
        raise structlog.DropEvent

    before = structlog.get_config()
    handlers, level = list(logging.root.handlers), logging.root.level
    structlog.configure(processors=[take])
    try:
        mine = structlog.get_config()
        log.get_logger().info("ours")
        assert structlog.get_config() == mine
    finally:
        structlog.configure(**before)
    assert not taken
    assert (list(logging.root.handlers), logging.root.level) == (handlers, level)
    assert capsys.readouterr().err.rstrip().endswith("ours")


def test_structlog_is_imported_by_the_first_message_only() -> None:
    done = _python(
        "import sys; from rankscope.log import get_logger\n"
        "get_logger().debug('quiet'); print('structlog' in sys.modules)\n"
        "get_logger().info('loud'); print('structlog' in sys.modules)\n"
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
    assert done.stderr.rstrip().endswith("loud")


def test_it_works_at_exit() -> None:
    done = _python(
        "import atexit; from rankscope.log import get_logger\natexit.register(lambda: get_logger().info('bye', n=1))\n"
    )
    assert (done.returncode, done.stderr.rstrip()[-7:]) == (0, "bye n=1")


def test_it_works_without_structlog() -> None:
    done = _python(
        "import sys; sys.modules['structlog'] = None\n"
        "from rankscope.log import get_logger\nget_logger().info('still', n=1)\n"
    )
    assert (done.returncode, done.stderr.rstrip()[-9:]) == (0, "still n=1")


def test_once_per_key_from_many_threads(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.get_logger()
    barrier = threading.Barrier(8)

    def warn() -> None:
        barrier.wait()
        log.warn_once(logger, ("topic", 1), "careful")

    threads = [threading.Thread(target=warn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.warn_once(logger, ("topic", 2), "careful") is True
    assert log.warn_once(logger, ("topic", 2), "careful") is False
    assert capsys.readouterr().err.count("careful") == 2
