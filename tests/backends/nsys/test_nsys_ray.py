"""Through a local Ray cluster: actors of the plan run under the real nsys, the others do not."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cluster(real_nsys: str, kit: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    path = tmp_path_factory.mktemp("ray") / "out"
    source = kit.config(path, section={"ranks": [1]})
    driver = [sys.executable, str(kit.HERE / "nsys_ray_driver.py"), str(kit.write_config(path, source))]
    ended = kit.run(driver, seconds=200, RAY_DISABLE_IMPORT_WARNING="1", RAY_USAGE_STATS_ENABLED="0")
    assert ended.code == 0, ended.out + ended.err
    return path, ended


def test_actors_of_the_plan_run_under_nsys_and_bring_their_reports(cluster: tuple[Path, Any], kit: Any) -> None:
    path, ended = cluster
    line = next(line for line in ended.out.splitlines() if line.startswith("RESULTS "))
    (_, none, plain), (pid, names, traced) = json.loads(line.removeprefix("RESULTS "))
    assert (none, plain, traced) == ([], False, True)
    assert [report.name for report in kit.reports(path)] == names
    assert [name.partition(f"_pid{pid}-")[0].rpartition("_rank1_")[0] for name in names] == [
        "actor_train_step1",
        "actor_train_step2",
    ]
    assert [row[1:] for row in kit.status(path)] == [(1, "train", "published"), (2, "train", "published")]


def test_the_reports_hold_the_ranges_of_the_actor(cluster: tuple[Path, Any], kit: Any) -> None:
    assert [kit.labels(report) for report in kit.reports(cluster[0])] == [
        ["step1", "actor_update"],
        ["step2", "actor_update"],
    ]


def test_nothing_is_left_where_reports_wait(cluster: tuple[Path, Any], kit: Any) -> None:
    assert kit.left_over(cluster[0]) == []
