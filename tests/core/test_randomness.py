"""A rank that is profiled draws the same random numbers as one that is not."""

from __future__ import annotations

import json
from pathlib import Path

import recording

PROGRAM = """
import json, random, sys, types
from rankscope import DistProfiler

# A library that draws when it is imported, as rich does; structlog imports it where it is installed.
class Draws:
    def find_spec(self, name, path=None, target=None):
        if name in {"structlog", "recording"}:
            random.random()
        return None

sys.meta_path.insert(0, Draws())
random.seed(1)
with DistProfiler(json.loads(sys.argv[1]), role="actor", rank=int(sys.argv[2]), world_size=2) as profiler:
    print(random.random(), profiler.selected)
    profiler.start(step=1)
    profiler.stop()
    print(random.random())
"""


def test_profiling_draws_no_random_number_of_the_training(site: Path, save_path: Path) -> None:
    facts = recording.config(save_path)
    facts["actor"]["profiler"] |= {"all_ranks": False, "ranks": [0]}
    said = []
    for rank in (0, 1):
        done = recording.run_python(site, PROGRAM, json.dumps(facts), rank)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    (first, selected, second), (plain, other, later) = said
    assert (selected, other) == ("True", "False")
    assert (first, second) == (plain, later)
