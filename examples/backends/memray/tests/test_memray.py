"""The rules of a backend, and memray's own reader on what it left."""

import json
import subprocess
import sys

import memray
import pytest

from rankscope import ConfigError, DistProfiler, annotate
from rankscope.testing import BackendConformance, profile_config, read_ledger

SIZE = 64 << 20


class TestMemrayBackend(BackendConformance):
    tool = "memray"
    must_capture = True
    preload = ("memray",)


def allocate():
    return bytearray(SIZE)


def capture(tmp_path, **options):
    config = profile_config(tmp_path, "memray", options={"memray": options})
    with DistProfiler(config, role="actor", rank=0, world_size=1) as profiler:
        profiler.start(step=1)
        with annotate("actor_update"):
            allocate()
        profiler.stop()
        return profiler.artifacts


@pytest.mark.parametrize("aggregate", [False, True])
def test_the_largest_allocation_is_found(tmp_path, aggregate):
    [artifact] = capture(tmp_path, aggregate=aggregate)
    assert artifact.facts["peak_bytes"] >= SIZE
    with memray.FileReader(str(artifact.path)) as reader:
        largest = max(reader.get_high_watermark_allocation_records(merge_threads=True), key=lambda record: record.size)
        assert largest.size >= SIZE
        names = [frame[0] for frame in largest.stack_trace()]
        assert names[:2] == ["allocate", "capture"]
        assert "test_the_largest_allocation_is_found" in names


def test_its_own_command_reads_it(tmp_path):
    [artifact] = capture(tmp_path)
    words = [sys.executable, "-m", "memray", "stats", "--json", "-o", str(tmp_path / "stats.json"), str(artifact.path)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    assert json.loads((tmp_path / "stats.json").read_text())["metadata"]["peak_memory"] >= SIZE


def test_discrete_files(tmp_path):
    [artifact] = capture(tmp_path, discrete=True)
    assert artifact.scope == "actor-update"


def test_another_tracker_is_left_alone(tmp_path):
    with memray.Tracker(tmp_path / "own.bin"):
        assert capture(tmp_path / "out") == ()
    [record] = read_ledger(tmp_path / "out", "artifact", status="failed")
    assert "No more than one Tracker" in record["reason"]
    with memray.FileReader(str(tmp_path / "own.bin")) as reader:
        assert reader.metadata.total_allocations > 0


def test_a_wrong_option_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"memray.interval_ms: must be 1 or more, got 0"):
        capture(tmp_path, interval_ms=0)
