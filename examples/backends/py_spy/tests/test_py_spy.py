"""The rules of a backend, and what py-spy's files hold."""

import json
import sys
import time

import pytest
import rankscope_py_spy

from rankscope import ConfigError, DistProfiler, annotate
from rankscope.testing import BackendConformance, profile_config, read_ledger

_answer = rankscope_py_spy.PySpyBackend.available()
needs_py_spy = pytest.mark.skipif(not _answer.available, reason=_answer.why)


def busy_function(seconds=0.5):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))


class TestPySpyBackend(BackendConformance):
    tool = "py_spy"
    seconds = 120.0

    def exercise(self):
        busy_function(0.1)


def capture(tmp_path, **options):
    config = profile_config(tmp_path, "py_spy", options={"py_spy": options})
    with DistProfiler(config, role="actor", rank=0, world_size=1) as profiler:
        profiler.start(step=1)
        with annotate("actor_update"):
            busy_function()
        profiler.stop()
        return profiler.artifacts


@needs_py_spy
def test_speedscope_holds_the_busy_function(tmp_path):
    [artifact] = capture(tmp_path, rate=200)
    found = json.loads(artifact.path.read_text())
    assert found["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    names = [frame["name"] for frame in found["shared"]["frames"]]
    ours = {at for at, name in enumerate(names) if name == "busy_function"}  # a frame for each line
    samples = [stack for profile in found["profiles"] for stack in profile["samples"]]
    # Most of the window; how many samples there are depends on the machine.
    assert sum(not ours.isdisjoint(stack) for stack in samples) > len(samples) / 2


@needs_py_spy
@pytest.mark.parametrize(("form", "begins"), [("flamegraph", "<?xml"), ("chrometrace", "["), ("raw", "")])
def test_other_formats(tmp_path, form, begins):
    [artifact] = capture(tmp_path, format=form)
    text = artifact.path.read_text()
    assert text.startswith(begins)
    assert "busy_function" in text


@needs_py_spy
def test_a_py_spy_that_cannot_attach_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rankscope_py_spy, "_program", lambda: sys.executable)
    assert capture(tmp_path) == ()
    [record] = read_ledger(tmp_path, "artifact", status="failed")
    assert "py-spy could not attach: " in record["reason"]


def test_without_py_spy_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(rankscope_py_spy, "_program", lambda: None)
    with pytest.raises(ConfigError, match="py-spy is not installed; pip install py-spy"):
        capture(tmp_path)


def test_where_nobody_may_look_it_says_so(monkeypatch):
    monkeypatch.setattr(rankscope_py_spy, "_scope", lambda: 2)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    answer = rankscope_py_spy.PySpyBackend.available()
    assert not answer.available
    assert "SYS_PTRACE" in answer.hint


def test_wrong_options_are_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        capture(tmp_path, format="html", rate=0)
    assert "py_spy.format: 'html' is not one of: speedscope, flamegraph, chrometrace, raw" in str(caught.value)
    assert "py_spy.rate: must be between 1 and 1000, got 0" in str(caught.value)
