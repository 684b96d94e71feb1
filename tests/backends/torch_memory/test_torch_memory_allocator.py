"""Which functions and arguments the installed torch has, and which device is chosen."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope_torch_memory.allocator import Allocator, find
from rankscope_torch_memory.arguments import Probed
from rankscope_torch_memory.options import TorchMemoryOptions
from rankscope_torch_memory.reading import load
from rankscope_torch_memory.writing import write


def test_a_function_says_what_it_takes() -> None:
    def function(first: int, *, second: int = 0) -> tuple[int, int]:
        return first, second

    probed = Probed(function)
    assert probed.names == {"first", "second"}
    assert probed.call({"first": 1, "second": 2, "third": 3}) == ((1, 2), {"third"})


def test_a_faked_signature_is_believed() -> None:
    def behind(enabled: str, stacks: str) -> None: ...

    def function(enabled: str, *args: Any, **kwargs: Any) -> None: ...

    function.__signature__ = inspect.signature(behind)  # type: ignore[attr-defined]  # as torch.cuda.memory does
    assert Probed(function).names == {"enabled", "stacks"}


def test_the_function_behind_a_wrapper_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("behind_a_wrapper")
    code = "def f_impl(a, b=1):\n    return a, b\n\ndef f(a, *args, **kwargs):\n    return f_impl(a, *args, **kwargs)\n"
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, "behind_a_wrapper", module)
    probed = Probed(module.f)
    assert probed.names == {"a", "b"}
    assert probed.call({"a": 1, "c": 2}) == ((1, 1), {"c"})


def test_what_only_a_call_can_tell_is_tried_and_left_out() -> None:
    taken: list[dict[str, int]] = []

    def hidden(*, a: int, b: int = 0) -> int:
        taken.append({"a": a, "b": b})
        return a

    def function(**kwargs: int) -> int:
        return hidden(**kwargs)

    probed = Probed(function)
    assert probed.names is None
    assert not probed.takes("a")
    assert probed.call({"x": 1, "a": 2, "y": 3}) == (2, {"x", "y"})
    assert taken == [{"a": 2, "b": 0}]


def test_an_error_of_the_function_itself_is_its_own() -> None:
    def function(**kwargs: int) -> int:
        raise TypeError("an integer is required")

    with pytest.raises(TypeError, match="an integer is required"):
        Probed(function).call({"a": 1})


def names(signature: str) -> list[str]:
    return re.findall(r"(\w+)(?:=[^,]*)?(?:, |$)", signature)


@pytest.mark.torch
def test_recorded_signatures_are_those_of_the_installed_torch(stand_in: Any) -> None:
    import torch

    version = ".".join(torch.__version__.split(".")[:2])
    recorded = stand_in.GENERATIONS.get(f"cuda {version}")
    if recorded is None:
        pytest.skip(f"no signature of torch {version} is recorded")
    found = Probed(torch.cuda.memory._record_memory_history).names
    assert found == set(names(recorded))
    legacy = inspect.signature(torch.cuda.memory._record_memory_history_legacy).parameters
    assert set(names(stand_in.GENERATIONS["legacy"])) <= set(legacy)
    for name in ("_snapshot", "_dump_snapshot", "_set_memory_metadata", "_get_memory_metadata"):
        assert callable(getattr(torch.cuda.memory, name))
    assert callable(torch.cuda._lazy_call)
    assert torch.OutOfMemoryError.__name__ == "OutOfMemoryError"


@pytest.mark.torch
def test_a_torch_without_a_device_has_no_allocator() -> None:
    import torch

    assert not torch.cuda.is_available()
    assert find(torch) is None


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu", "mtia"])
def test_the_accelerator_that_torch_names_is_taken(use: Callable[..., Any], kind: str) -> None:
    device = use(kind=kind)
    found = find(sys.modules["torch"])
    assert found is not None
    assert (found.name, found.initialised) == (kind, False)
    device.initialise()
    assert found.initialised
    assert found.recording() is False
    assert found.facts()["kind"] == kind


def test_an_older_torch_is_asked_for_a_registered_device(use: Callable[..., Any]) -> None:
    use(kind="npu")
    torch: Any = sys.modules["torch"]
    del torch.accelerator
    torch._C._get_privateuse1_backend_name = lambda: "npu"
    found = find(torch)
    assert found is not None
    assert found.name == "npu"


def test_a_device_that_is_not_there_is_not_taken(use: Callable[..., Any]) -> None:
    use()
    torch: Any = sys.modules["torch"]
    torch.cuda.device_count = lambda: 0
    assert find(torch) is None


def test_what_a_device_does_not_offer_is_asked_of_all_accelerators(use: Callable[..., Any]) -> None:
    device = use(without=("_snapshot", "_dump_snapshot"))
    torch: Any = sys.modules["torch"]
    assert find(torch) is None
    torch.accelerator.memory = types.SimpleNamespace(_snapshot=lambda: {"segments": [], "from": "accelerator"})
    device.initialise()
    found = find(torch)
    assert found is not None
    assert found.snapshot()["from"] == "accelerator"


def test_where_only_a_file_can_be_had_it_is_read_back(use: Callable[..., Any], tmp_path: Path) -> None:
    device = use(without=("_snapshot",))
    device.initialise()
    torch: Any = sys.modules["torch"]
    written: list[Path] = []

    def dump(path: str) -> None:
        written.append(Path(path))
        write({"segments": [], "device_traces": []}, Path(path))

    torch.cuda.memory._dump_snapshot = dump
    found = find(torch)
    assert found is not None
    assert found.snapshot() == {"segments": [], "device_traces": []}
    assert not written[0].exists()


def test_what_is_no_snapshot_is_refused(use: Callable[..., Any]) -> None:
    use().initialise()
    torch: Any = sys.modules["torch"]
    torch.cuda.memory._snapshot = lambda: None
    found = find(torch)
    assert found is not None
    with pytest.raises(TypeError, match="torch returned no snapshot but NoneType"):
        found.snapshot()


def test_events_are_left_out_where_torch_can(use: Callable[..., Any]) -> None:
    use().initialise()
    torch: Any = sys.modules["torch"]
    given: list[bool] = []

    def snapshot(include_traces: bool = True) -> dict[str, Any]:
        given.append(include_traces)
        return {"segments": []}

    torch.cuda.memory._snapshot = snapshot
    found = find(torch)
    assert found is not None
    found.snapshot(events=False)
    found.snapshot()
    assert given == [False, True]


def test_public_names_are_taken_where_there_are_no_others() -> None:
    """torch.mtia has no module memory, and its functions have no underscore."""
    calls: list[Any] = []
    module = types.SimpleNamespace(
        record_memory_history=lambda enabled="all", stacks="python", max_entries=0: calls.append(
            (enabled, stacks, max_entries)
        ),
        snapshot=lambda: {"segments": []},
        attach_out_of_memory_observer=calls.append,
    )
    allocator = Allocator("mtia", module)
    assert allocator.offers_history
    assert allocator.recording() is None
    assert allocator.record("all", TorchMemoryOptions(context="alloc"), clear=True) == ({"context"}, False)
    assert calls == [("all", "python", 100_000)]
    assert allocator.attach_oom(print)
    assert allocator.initialised
    assert allocator.facts() == {"kind": "mtia"}


def test_a_snapshot_is_written_as_plain_containers(tmp_path: Path) -> None:
    """Whatever a later torch puts in, our own reader can read it."""
    import collections
    import enum

    class Kind(enum.IntEnum):
        LARGE = 7

    class Thing:
        def __str__(self) -> str:
            return "thing"

    shared = [{"name": "f", "line": 1}]
    snapshot = {
        "segments": [collections.OrderedDict(frames=shared), collections.defaultdict(list, frames=shared)],
        "numbers": (Kind.LARGE, 1.5, None, True, b"raw"),
        "others": {Thing(): Thing(), "set": {1}},
    }
    path = tmp_path / "snapshot.pickle"
    write(snapshot, path)
    found = load(path)
    assert found == {
        "segments": [{"frames": shared}, {"frames": shared}],
        "numbers": (7, 1.5, None, True, b"raw"),
        "others": {"thing": "thing", "set": [1]},
    }
    assert type(found["segments"][0]) is dict
    assert type(found["numbers"][0]) is int
    assert found["segments"][0]["frames"] is found["segments"][1]["frames"]
