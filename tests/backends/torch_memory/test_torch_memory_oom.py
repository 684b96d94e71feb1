"""When the device runs out of memory: what is saved, how often, and that the error passes unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import ProfileController, annotate
from rankscope.artifacts.names import parse_name
from rankscope.artifacts.status import read_status
from rankscope_torch_memory.oom import out_of_memory

MEBI = 1 << 20


@pytest.fixture
def small(use: Callable[..., Any]) -> Any:
    """A device of ten MiB."""
    device = use(limit=10 * MEBI)
    device.initialise()
    return device


@pytest.fixture
def blind(use: Callable[..., Any]) -> Any:
    """The same, of a torch that tells nobody when an allocation fails."""
    device = use(limit=10 * MEBI, without=("_cuda_attach_out_of_memory_observer",))
    device.initialise()
    return device


def fill(device: Any) -> None:
    for _ in range(4):
        device.alloc(2 * MEBI)


def greedy(device: Any) -> None:
    fill(device)
    device.alloc(64 * MEBI)


@pytest.fixture(params=["observer", "exception"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("small" if request.param == "observer" else "blind")


def test_snapshot_and_table_are_saved_and_the_error_passes_unchanged(
    either: Any,
    profiler: Callable[..., Any],
    files: Callable[..., Any],
    snapshots: Callable[..., Any],
    stand_in: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prof = profiler()
    prof.start(step=5)
    error = pytest.raises(stand_in.OutOfMemoryError, match="Tried to allocate 67108864")
    with error as caught, annotate("outer"), annotate("update"):
        greedy(either)
    assert vars(caught.value) == {}
    assert caught.value.__cause__ is caught.value.__context__ is None
    (picture,) = files("oom")
    (table,) = files("oom", suffix=".txt")
    name = parse_name(picture.name)
    assert name is not None
    assert (name.role, name.scope, name.step, name.rank) == ("actor", "oom", 5, 0)
    (snapshot,) = snapshots("oom")
    assert snapshot["device_traces"][0][-1]["action"] == "oom"
    assert snapshot["rankscope"]["scope"] == "oom"
    text = table.read_text(encoding="utf-8")
    for words in (
        "Out of memory on cuda",
        "role actor, rank 0 of 2, step 5",
        f"snapshot: {picture.name}",
        "Where it failed, innermost first\n",
        "greedy (",
        "8.0 MiB allocated in 4 blocks",
        "8.0 MiB  100.0 %        4  fill (",
    ):
        assert words in text
    assert text.index("greedy (") < text.index("test_snapshot_and_table_are_saved")
    told = capfd.readouterr().err
    assert told.count("the device is out of memory") == 1
    assert str(table) in told
    prof.stop()
    assert len(files("oom")) == 1
    assert len(files("train")) == 1


def test_what_the_observer_learns_is_in_the_table(
    small: Any, profiler: Callable[..., Any], files: Callable[..., Any]
) -> None:
    prof = profiler()
    prof.start(step=2)
    with pytest.raises(RuntimeError), annotate("update"):
        greedy(small)
    text = files("oom", suffix=".txt")[0].read_text(encoding="utf-8")
    assert "device 0: 64.0 MiB were asked for; it has 10.0 MiB (or may use so much), 2.0 MiB are free" in text
    prof.stop()


def test_what_the_exception_says_is_in_the_table(
    blind: Any, profiler: Callable[..., Any], files: Callable[..., Any]
) -> None:
    prof = profiler()
    prof.start(step=2)
    with pytest.raises(RuntimeError), annotate("update"):
        greedy(blind)
    text = files("oom", suffix=".txt")[0].read_text(encoding="utf-8")
    assert "the error says: CUDA out of memory. Tried to allocate 67108864 bytes." in text
    prof.stop()


def test_an_error_that_leaves_the_step_without_a_stage_is_seen(
    blind: Any, profiler: Callable[..., Any], files: Callable[..., Any], stand_in: Any, save_path: Path
) -> None:
    prof = profiler(steps=(1, 2))
    controller = ProfileController(prof.config, workers=[prof], total_steps=2)
    with pytest.raises(stand_in.OutOfMemoryError), controller.step(1):
        greedy(blind)
    assert len(files("oom_step1")) == 1
    assert len(files("train-aborted_step1")) == 1
    assert {(row.scope, row.status) for row in read_status(save_path).rows if row.step == 1} == {
        ("oom", "aborted"),
        ("train-aborted", "aborted"),
    }


def test_at_most_so_many_are_saved(
    either: Any, profiler: Callable[..., Any], files: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    prof = profiler(oom_max_dumps=2)
    prof.start(step=2)
    for _ in range(5):
        with pytest.raises(RuntimeError), annotate("update"):
            either.alloc(64 * MEBI)
    prof.stop()
    assert len(files("oom")) == len(files("oom", suffix=".txt")) == 2
    assert capfd.readouterr().err.count("oom_max_dumps is reached") == 1


def test_an_error_that_was_caught_does_not_hide_the_next(
    small: Any, profiler: Callable[..., Any], files: Callable[..., Any]
) -> None:
    prof = profiler(oom_max_dumps=5)
    prof.start(step=2)
    with annotate("update"), pytest.raises(RuntimeError):
        small.alloc(64 * MEBI)
    with pytest.raises(RuntimeError), annotate("update"):
        small.alloc(65 * MEBI)
    prof.stop()
    assert len(files("oom")) == 2


def test_one_failure_is_saved_once_even_inside_another_error(
    blind: Any, profiler: Callable[..., Any], files: Callable[..., Any]
) -> None:
    prof = profiler(oom_max_dumps=5)
    prof.start(step=2)

    @annotate("outer")
    def wrapping() -> None:
        try:
            with annotate("inner"):
                blind.alloc(64 * MEBI)
        except RuntimeError as error:
            raise ValueError("wrapped") from error

    with pytest.raises(ValueError, match="wrapped"):
        wrapping()
    prof.stop()
    assert len(files("oom")) == 1


def test_it_can_be_switched_off(small: Any, profiler: Callable[..., Any], files: Callable[..., Any]) -> None:
    prof = profiler(oom=False)
    prof.start(step=2)
    with pytest.raises(RuntimeError), annotate("update"):
        small.alloc(64 * MEBI)
    prof.stop()
    assert small.observers == []
    assert files("oom") == []


def test_outside_of_windows_nothing_is_saved_unless_asked(
    small: Any, profiler: Callable[..., Any], files: Callable[..., Any]
) -> None:
    prof = profiler(steps=(2,))
    prof.start(step=2)
    prof.stop()
    with pytest.raises(RuntimeError):
        greedy(small)
    assert files("oom") == []


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_outside_of_windows_it_is_saved_on_request_with_stacks(
    use: Callable[..., Any],
    profiler: Callable[..., Any],
    files: Callable[..., Any],
    snapshots: Callable[..., Any],
    stand_in: Any,
    when: str,
) -> None:
    device = use(limit=10 * MEBI)
    prof = profiler(oom_outside_steps=True, steps=(2,) if when == "after" else (2, 5))
    assert not device.initialised
    if when != "before":
        prof.start(step=2)
        device.alloc(512)
        prof.stop()
    with pytest.raises(stand_in.OutOfMemoryError):
        greedy(device)
    (path,) = files("oom")
    name = parse_name(path.name)
    assert name is not None
    assert name.step is None
    (snapshot,) = snapshots("oom")
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert "fill" in {block["frames"][0]["name"] for block in blocks if block["frames"]}
    assert "outside of profiled steps" in files("oom", suffix=".txt")[0].read_text(encoding="utf-8")
    if when == "after":
        assert device.options["entries"] == 1  # live memory only, without events
    prof.close()
    assert device.history


def test_a_failure_on_another_thread_is_saved(
    small: Any, profiler: Callable[..., Any], files: Callable[..., Any]
) -> None:
    prof = profiler()
    prof.start(step=2)
    raised = []

    def work() -> None:
        try:
            greedy(small)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    prof.stop()
    assert len(raised) == 1
    assert len(files("oom")) == 1


@pytest.mark.parametrize("what", ["snapshot", "disk"])
def test_trouble_while_saving_never_replaces_the_error(
    either: Any,
    profiler: Callable[..., Any],
    files: Callable[..., Any],
    stand_in: Any,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prof = profiler()
    prof.start(step=2)
    if what == "snapshot":
        either.broken["snapshot"] = RuntimeError("the allocator is torn")
    else:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("rankscope_torch_memory.oom.write", full)
    with pytest.raises(stand_in.OutOfMemoryError), annotate("update"):
        greedy(either)
    either.broken.clear()
    prof.stop()
    assert prof.faults == ()
    assert files("oom") == []
    told = capfd.readouterr().err
    assert ("the allocator is torn" if what == "snapshot" else "No space left") in told
    # The table needs no room to speak of, and is there all the same.
    assert len(files("oom", suffix=".txt")) == (0 if what == "snapshot" else 1)


def test_an_observer_that_cannot_be_attached_is_told(
    small: Any, profiler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("not with this allocator")

    import sys

    monkeypatch.setattr(sys.modules["torch"]._C, "_cuda_attach_out_of_memory_observer", refuse)
    prof = profiler()
    for step in (2, 3):
        prof.start(step=step)
        small.alloc(512)
        prof.stop()
    assert capfd.readouterr().err.count("not with this allocator") == 1


def test_it_is_attached_once_in_a_process(small: Any, profiler: Callable[..., Any]) -> None:
    actor, critic = profiler(role="actor"), profiler(role="critic")
    for step, handle in ((2, actor), (3, critic), (5, actor)):
        handle.start(step=step)
        small.alloc(512)
        handle.stop()
    assert len(small.observers) == 1


def test_what_counts_as_out_of_memory() -> None:
    real = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})("CUDA out of memory")
    derived = type("Mine", (type(real),), {})("full")
    assert out_of_memory(real) is real
    assert out_of_memory(derived) is derived
    below = RuntimeError("CUDA error: out of memory")
    assert out_of_memory(below) is below
    for other in (ValueError("out of memory"), RuntimeError("shape mismatch"), KeyboardInterrupt()):
        assert out_of_memory(other) is None
    wrapper = ValueError("step failed")
    wrapper.__cause__ = real
    assert out_of_memory(wrapper) is real
    unrelated = ValueError("later")
    unrelated.__context__ = real
    assert out_of_memory(unrelated) is None
    ring = ValueError("ring")
    ring.__cause__ = ring
    assert out_of_memory(ring) is None
