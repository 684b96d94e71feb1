"""Says why the other tests of this folder are not run, where verl is not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed here; its tests have an environment of their own: make test-verl", True)
if importlib.util.find_spec("rankscope_verl") is None:
    pytest.skip("rankscope-verl is not installed here; see make test-verl", allow_module_level=True)


def test_this_verl_is_one_that_rankscope_was_written_for() -> None:
    from rankscope_verl import TESTED

    assert importlib.metadata.version("verl") in TESTED


def test_verl_finds_the_plugin_by_its_entry_point() -> None:
    import verl.utils.profiler

    from rankscope_verl import install

    found = importlib.metadata.entry_points(group="verl.plugins")
    assert [entry.value for entry in found if entry.name == "rankscope"] == ["rankscope_verl.plugin"]
    assert install.in_place()
    assert verl.utils.profiler.DistProfiler.start.__wrapped__.__module__ == "verl.utils.profiler.profile"
