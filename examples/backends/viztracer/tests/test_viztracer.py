"""The rules of a backend, and what is in the files."""

import gzip
import json
import sys

import pytest
import viztracer

from rankscope import ConfigError, DistProfiler, annotate
from rankscope.testing import BackendConformance, profile_config, read_ledger


class TestVizTracerBackend(BackendConformance):
    tool = "viztracer"
    must_capture = True
    preload = ("viztracer",)


def inner(n):
    return sum(range(n))


def outer():
    return [inner(10), inner(20)]


def capture(tmp_path, **options):
    config = profile_config(tmp_path, "viztracer", options={"viztracer": options})
    with DistProfiler(config, role="actor", rank=3, world_size=4) as profiler:
        profiler.start(step=1)
        with annotate("actor_update"):
            outer()
        profiler.stop()
        profiler.close()
        return profiler.artifacts


def events(artifact):
    with gzip.open(artifact.path) as file:
        trace = json.load(file)
    assert (trace["rankscope"]["rank"], trace["rankscope"]["step"]) == (3, 1)
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.fixture(autouse=True)
def nobody_traces():
    """A measurement of coverage would be such a profiler."""
    if sys.getprofile() is not None:
        pytest.skip("another Python profiler runs")


def test_calls_nest_in_their_stage(tmp_path):
    [artifact] = capture(tmp_path)
    found = events(artifact)
    assert artifact.events == len(found)
    [stage] = [event for event in found if event["name"] == "actor_update"]
    calls = [event for event in found if event["name"].startswith(("inner", "outer"))]
    assert [event["name"].split(" ")[0] for event in sorted(calls, key=lambda e: e["ts"])] == [
        "outer",
        "inner",
        "inner",
    ]
    assert all(stage["ts"] <= e["ts"] and e["ts"] + e["dur"] <= stage["ts"] + stage["dur"] for e in calls)
    assert {event["pid"] for event in calls} == {stage["pid"]}
    assert {event["tid"] for event in calls} == {stage["tid"]}


def test_short_calls_are_left_out(tmp_path):
    [artifact] = capture(tmp_path, min_duration_us=10_000_000)
    assert {event["name"] for event in events(artifact)} == {"step1", "actor_update"}


def test_discrete_files(tmp_path):
    [artifact] = capture(tmp_path, discrete=True)
    assert artifact.scope == "actor-update"


def test_another_profiler_is_left_alone(tmp_path):
    with viztracer.VizTracer(verbose=0, output_file=str(tmp_path / "own.json")) as own:
        assert capture(tmp_path / "out") == ()
        assert own.enable
    [record] = read_ledger(tmp_path / "out", "artifact", status="failed")
    assert "another Python profiler" in record["reason"]


def test_a_wrong_option_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"viztracer.tracer_entries: must be 1 or more, got 0"):
        capture(tmp_path, tracer_entries=0)
