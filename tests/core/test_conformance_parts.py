"""The parts of the kit that can be used by themselves: stand-ins, the isolated registry, fixtures."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope import ConfigError, DistProfiler, annotate, registry
from rankscope.testing import (
    FakeClock,
    FakeWorld,
    RecordingBackend,
    install_tools,
    isolated_registry,
    profile_config,
    read_ledger,
    wait_for,
)
from rankscope.testing.isolation import IsolatedRegistry
from rankscope.topology import detect

pytest_plugins = ["rankscope.testing.fixtures"]


class Second(RecordingBackend):
    pass


def handle(save_path: Path, tool: str = "mine", role: str = "actor", **facts: Any) -> DistProfiler:
    return DistProfiler(profile_config(save_path, tool, **facts), role=role, rank=0, world_size=1)


# The registry.


def test_in_an_isolated_registry_exactly_its_tools_exist(tmp_path: Path) -> None:
    before = registry.providers()
    with isolated_registry({"mine": RecordingBackend}) as tools:
        tools.add("other", Second)
        assert set(registry.installed()) == {"mine", "other"}
        assert registry.load("other") is Second
        with handle(tmp_path) as profiler:
            assert isinstance(profiler.tools[0].backend, RecordingBackend)
        with pytest.raises(ConfigError, match=r"no tool named 'mien'\. Did you mean 'mine'"):
            handle(tmp_path, "mien")
    assert registry.providers() == before


def test_a_name_can_be_used_again_for_another_tool() -> None:
    for factory in (RecordingBackend, Second):
        with isolated_registry({"mine": factory}):
            assert registry.load("mine") is factory


def test_two_tools_of_one_name_clash_as_two_distributions_do() -> None:
    with isolated_registry({"mine": RecordingBackend}) as tools:
        tools.add("mine", Second)
        with pytest.raises(ConfigError, match="provided by more than one distribution"):
            registry.load("mine")


def test_tools_for_another_process(tmp_path: Path) -> None:
    site = install_tools(tmp_path, {"mine": "rankscope.testing.recording:RecordingBackend"}, version="3.1")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from rankscope import registry; "
        "print(registry.installed()['mine'].provider, registry.load('mine').__name__, 'pytest' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(site)], capture_output=True, text=True, check=False)
    assert done.stdout == "tools-of-a-test 3.1 RecordingBackend False\n", done.stderr


# The recording backend and the fixtures.


def test_the_recording_backend_notes_everything(rankscope_tools: IsolatedRegistry, tmp_path: Path) -> None:
    rankscope_tools.add("mine", RecordingBackend)
    profiler = handle(tmp_path, relocate_results=True)
    profiler.start(step=1)
    with annotate("update", scheduled=True):
        profiler.step()
    profiler.stop(last=True)
    assert RecordingBackend.record.of("start", "step", "stop", "relocate", "finish") == [
        "mine start 1 train",
        "mine step update",
        "mine stop 1 train",
        *["mine relocate 1"] * len(RecordingBackend.record.of("relocate")),
        "mine finish 1",
    ]
    assert [span.stage for span in RecordingBackend.record.spans] == ["step1", "update"]
    assert [record["status"] for record in read_ledger(tmp_path, "artifact")] == ["published"]


def test_it_keeps_no_argument_of_a_stage(rankscope_tools: IsolatedRegistry, tmp_path: Path) -> None:
    rankscope_tools.add("mine", RecordingBackend)
    profiler = handle(tmp_path)
    profiler.start(step=1)

    @annotate("outer")
    def outer(batch: object) -> None:
        with annotate("inner"):
            pass

    outer(object())
    assert [(span.stage, span.args) for span in RecordingBackend.record.spans[1:]] == [("outer", ()), ("inner", ())]
    parent = RecordingBackend.record.spans[2].parent
    assert parent is not None
    assert (parent.stage, parent.args) == ("outer", ())


def test_the_fixture_leaves_nothing_open_and_nothing_noted() -> None:
    from rankscope import windows

    assert windows.opened() == ()
    assert RecordingBackend.record.calls == []


# Clock and world.


def test_handles_go_by_a_fake_clock(
    rankscope_tools: IsolatedRegistry, rankscope_clock: FakeClock, tmp_path: Path
) -> None:
    rankscope_tools.add("mine", RecordingBackend)
    profiler = handle(tmp_path)
    backend: Any = profiler.tools[0].backend
    assert backend.context.clock() == rankscope_clock.now
    for _ in range(2):
        profiler.start(step=1)
        profiler.stop()
    rankscope_clock.advance(1.5)
    profiler.start(step=1)
    profiler.stop()
    assert backend.context.clock() == 1_700_000_001_500_000_000
    times = [artifact.path.name.rsplit("_", 1)[1] for artifact in profiler.artifacts]
    assert times == ["20231114221320000.txt", "20231114221320000-1.txt", "20231114221321500.txt"]


def test_a_clock_that_is_not_installed_any_more(rankscope_tools: IsolatedRegistry, tmp_path: Path) -> None:
    rankscope_tools.add("mine", RecordingBackend)
    clock = FakeClock()
    with clock.installed():
        pass
    backend: Any = handle(tmp_path).tools[0].backend
    assert backend.context.clock() > clock.now


def test_the_places_of_a_world() -> None:
    world = FakeWorld(8, local_size=4, dimensions={"tp": 2, "pp": 2, "dp": 2})
    assert world.place(5) == {"rank": 5, "world_size": 8, "topology": {"tp": 1, "pp": 0, "dp": 1}}
    assert world.environment(5)["LOCAL_RANK"] == "1"
    with pytest.raises(ValueError, match="rank 8 does not exist: the world size is 8"):
        world.place(8)


def test_the_variables_of_a_world_are_those_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FakeWorld(4).environment(2).items():
        monkeypatch.setenv(name, value)
    place = detect()
    assert (place.rank, place.world_size, place.local_rank) == (2, 4, 2)


# Waiting.


def test_waiting_has_an_end() -> None:
    wait_for(lambda: True)
    with pytest.raises(AssertionError, match="within 0 seconds"):
        wait_for(lambda: False, seconds=0)


# What the scenarios stand on.


def test_what_is_not_there_cannot_be_found_or_imported() -> None:
    program = """
import importlib.metadata, importlib.util, json, sys
import hypothesis
from rankscope.testing.absence import OnlyThese, packages
assert packages(["json.decoder", "rankscope.types", "_private", "torch.nn", "omegaconf"]) == {"torch"}
OnlyThese({"pytest"})
told = [importlib.util.find_spec("hypothesis"), importlib.util.find_spec("pytest") is not None]
for ask in (lambda: importlib.import_module("hypothesis"), lambda: importlib.metadata.version("hypothesis")):
    try:
        told.append(str(ask()))
    except ImportError as error:
        told.append(type(error).__name__)
told += [importlib.metadata.version("pytest") != "", importlib.metadata.version("rankscope") != ""]
print(json.dumps(told))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == [None, True, "ModuleNotFoundError", "PackageNotFoundError", True, True]


def test_whoever_calls_the_master_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from rankscope.testing.tripwire import lonely_rank

    with lonely_rank() as calls:
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")
    assert calls == []
    with lonely_rank() as calls:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with socket.create_connection(address):
            pass
    assert calls == ["a connection to MASTER_ADDR:MASTER_PORT"]
    assert "MASTER_PORT" not in os.environ


@pytest.mark.torch
def test_each_collective_of_torch_is_noticed() -> None:
    program = """
import warnings; warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from rankscope.testing.tripwire import lonely_rank, torch_group
one, two = torch.ones(1), torch.ones(2)
uses = [
    lambda: dist.barrier(),
    lambda: dist.all_reduce(one),
    lambda: dist.broadcast(one, 0),
    lambda: dist.send(one, 1),
    lambda: dist.recv(one, 1),
    lambda: dist.all_gather_object([None, None], 1),
    lambda: dist.all_to_all_single(two, two),
    lambda: dist.reduce(one, 0),
    lambda: dist.scatter(one, [one, one]),
    lambda: dist.gather(one, [one, one]),
    lambda: dist.all_gather_into_tensor(two, one),
    lambda: dist.reduce_scatter_tensor(one, two),
    lambda: dist.new_group([0, 1]),
]
with lonely_rank() as calls, torch_group(calls) as there:
    assert there and dist.get_rank() == 0 and dist.get_world_size() == 2
    for use in uses:
        before = len(calls)
        try:
            use()
        except RuntimeError as error:
            assert "no other rank takes part" in str(error), error
        assert len(calls) == before + 1, calls
assert not dist.is_initialized()
print(len(calls))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "13\n", done.stderr
