"""A bounded number of exports: max_exports and exports_full."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recording

from rankscope import DistProfiler, Window
from rankscope.artifacts.exports import exports
from rankscope.artifacts.status import read_status
from rankscope.artifacts.store import Store
from rankscope.config import ConfigError

Make = Callable[..., DistProfiler]


def window(step: int) -> Window:
    return Window(id=step, role="actor", step=step, steps=(step,), scope="train", reason="step")


class Gate:
    """A flag file that holds exports up."""

    def __init__(self, folder: Path) -> None:
        self.began, self.go = folder / "began", folder / "go"

    def submit(self, store: Store, step: int) -> None:
        with store.reserve(window(step), suffix=".txt") as file:
            file.staged.write_text(f"step {step}")
            file.finish_later("recording:wait_for_file", {"began": str(self.began), "go": str(self.go)})


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def failures(store: Store) -> list[tuple[int, str]]:
    records = recording.ledger(store.save_path, "artifact")
    return [(record["step"], record["reason"]) for record in records if record["status"] == "failed"]


def test_with_room_nobody_waits_and_nothing_is_said(
    profiler: Make, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    store = profiler(max_exports=2).stores[0]
    assert store.admit(window(1))
    gate.submit(store, 1)
    assert store.admit(window(2))
    gate.go.touch()
    assert exports().drain(60)
    assert "waiting for exports" not in capsys.readouterr().err
    assert failures(store) == []


def test_drop_gives_the_new_one_up_at_once(profiler: Make, gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    store = profiler(max_exports=1, exports_full="drop", close_timeout=60).stores[0]
    assert store.wait_for_exports == 0
    gate.submit(store, 1)
    recording.wait_for(gate.began.exists)
    capsys.readouterr()
    assert store.admit(window(2)) is False
    told = capsys.readouterr().err
    assert "waiting for exports" not in told
    assert "given up: 1 files are still being exported (max_exports)" in told
    assert failures(store) == [(2, "given up: 1 files are still being exported (max_exports)")]
    gate.go.touch()
    assert exports().drain(60)
    assert store.admit(window(3))
    assert recording.files(store.save_path) == ["step 1 finished"]
    row = next(row for row in read_status(store.save_path).rows if row.step == 2)
    assert (row.status, row.reason) == ("failed", "given up: 1 files are still being exported (max_exports)")


def test_wait_waits_until_one_is_done(profiler: Make, gate: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    store = profiler(max_exports=1, close_timeout=60).stores[0]
    assert store.wait_for_exports == 60
    gate.submit(store, 1)
    recording.wait_for(gate.began.exists)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(store.admit(window(2))))
    waiting.start()
    told = ""

    def says_so() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "waiting for exports: as many as are allowed are under way" in told

    recording.wait_for(says_so)
    assert answers == []
    gate.go.touch()
    waiting.join(60)
    assert answers == [True]
    assert failures(store) == []


def test_waiting_has_a_deadline(profiler: Make, gate: Gate) -> None:
    store = profiler(max_exports=1, close_timeout=0.2).stores[0]
    gate.submit(store, 1)
    assert store.admit(window(2)) is False
    assert [step for step, _ in failures(store)] == [2]
    gate.go.touch()
    assert exports().drain(60)


def test_it_counts_files_of_all_roles_and_waits_for_few_enough(profiler: Make, gate: Gate) -> None:
    first = profiler("actor", max_exports=2, exports_full="drop").stores[0]
    second = profiler("critic", max_exports=2, exports_full="drop").stores[0]
    gate.submit(first, 1)
    assert second.admit(window(1))
    gate.submit(second, 1)
    assert not first.admit(window(2))
    assert not second.admit(window(2))
    gate.go.touch()
    assert exports().drain(60)
    assert first.admit(window(3))


def test_a_backend_that_asks_nobody_is_bounded_too(profiler: Make, gate: Gate) -> None:
    store = profiler(max_exports=1, exports_full="drop").stores[0]
    gate.submit(store, 1)
    with store.reserve(window(2), suffix=".txt") as file:
        file.staged.write_text("raw")
        staged = file.staged
        file.finish_later("recording:finish_file", {})
    assert not staged.exists()
    gate.go.touch()
    assert exports().drain(60)
    assert [(step, "max_exports" in reason) for step, reason in failures(store)] == [(2, True)]


def test_a_helper_that_died_does_not_block_for_ever(profiler: Make) -> None:
    store = profiler(max_exports=1, close_timeout=60).stores[0]
    with store.reserve(window(1), suffix=".txt") as file:
        file.staged.write_text("raw")
        file.finish_later("recording:kill_itself", {})
    assert store.admit(window(2))
    assert [step for step, _ in failures(store)] == [1]


@pytest.mark.parametrize("value", [0, -1, "many", True, 1.5, [2]])
def test_bad_numbers_are_named(profiler: Make, value: object) -> None:
    with pytest.raises(ConfigError, match=r"global_profiler\.max_exports"):
        profiler(max_exports=value)


@pytest.mark.parametrize(("value", "hint"), [("drp", "drop"), (True, ""), (3, ""), ([], "")])
def test_bad_words_are_named_with_the_choices(profiler: Make, value: object, hint: str) -> None:
    with pytest.raises(ConfigError, match=r"global_profiler\.exports_full.*wait.*drop") as caught:
        profiler(exports_full=value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(("given", "number"), [({}, 32), ({"max_exports": "4"}, 4), ({"max_exports": None}, 32)])
def test_good_numbers_reach_the_store(profiler: Make, given: dict[str, Any], number: int) -> None:
    store = profiler(close_timeout=7, **given).stores[0]
    assert (store.max_exports, store.wait_for_exports) == (number, 7)
