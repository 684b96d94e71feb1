"""The npu tool with a stand-in for torch_npu: what is asked for is what is passed on, and every failure is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope import annotate
from rankscope.artifacts.ledger import read_ledgers

Make = Callable[..., Any]


def records(tmp_path: Path, **facts: Any) -> list[dict[str, Any]]:
    return [
        record
        for record in read_ledgers(tmp_path / "out")
        if record["kind"] == "artifact" and all(record.get(key) == value for key, value in facts.items())
    ]


def step(profiler: Any, number: int = 1) -> None:
    profiler.start(step=number)
    with annotate("update"):
        pass
    profiler.stop()


@pytest.mark.parametrize(
    ("contents", "flags"),
    [
        ([], set()),
        (["npu", "shapes"], {"record_shapes"}),
        (["npu", "memory", "module", "stack"], {"profile_memory", "with_modules", "with_stack"}),
        (["all", "flops"], {"profile_memory", "with_modules", "with_stack", "record_shapes", "with_flops"}),
    ],
)
def test_the_profiler_gets_what_was_asked_for_and_no_more(
    npu: Any, handle: Make, contents: list[str], flags: set[str]
) -> None:
    profiler = handle(contents=contents)
    step(profiler)
    profiler.close()
    [made] = npu.made
    assert {name for name, value in made.items() if value is True} == flags
    assert [activity.name for activity in made["activities"]] == ["CPU", "NPU"]
    assert set(made) - flags == {"activities", "on_trace_ready", "experimental_config"}
    assert [handler["analyse_flag"] for handler in npu.handlers] == [False]


def test_the_device_is_asked_for_by_default_as_verl_asks(npu: Any, handle: Make) -> None:
    profiler = handle()
    step(profiler)
    profiler.close()
    assert npu.configs == [
        {
            "profiler_level": "Level0",
            "aic_metrics": "ACL_AICORE_NONE",
            "export_type": "db",
            "data_simplification": True,
            "mstx": True,
            "mstx_domain_exclude": ["communication"],
        }
    ]


def test_an_older_torch_npu_gets_what_it_has_and_the_rest_is_told(
    install: Make, handle: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in = install(without={"mstx", "mstx_domain_exclude", "sys_io", "host_sys", "with_flops", "MemoryUB"})
    profiler = handle(
        level=1, contents=["npu", "flops"], sys_io=True, host_sys=["cpu"], aic_metrics="MemoryUB", export_type="text"
    )
    for number in (1, 2):
        step(profiler, number)
    profiler.close()
    assert stand_in.configs[0] == {
        "profiler_level": "Level1",
        "export_type": "text",
        "data_simplification": True,
        "msprof_tx": True,
    }
    assert "with_flops" not in stand_in.made[0]
    err = capfd.readouterr().err
    assert err.count("cannot do all that is asked for") == 1
    line = next(line for line in err.splitlines() if "cannot do all" in line)
    for name in ("contents flops", "aic_metrics MemoryUB", "mstx_domain_exclude", "host_sys", "sys_io"):
        assert name in line
    assert stand_in.ranges[0] == ["update", "default", True]


def test_each_window_gets_a_new_profiler_that_is_let_go(npu: Any, handle: Make, tmp_path: Path) -> None:
    profiler = handle()
    for number in (1, 2, 3):
        step(profiler, number)
    profiler.close()
    assert len(npu.profiles) == 3
    assert all(made.calls == ["start", "stop"] and made.stopped for made in npu.profiles)
    assert len({handler["dir_name"] for handler in npu.handlers}) == 3
    assert [record["step"] for record in records(tmp_path, status="published")] == [1, 2, 3]


def test_the_folder_says_whose_it_is(npu: Any, handle: Make, tmp_path: Path) -> None:
    profiler = handle()
    step(profiler, 2)
    profiler.close()
    [artifact] = profiler.artifacts
    [vendor] = artifact.path.glob("*_ascend_pt")
    assert json.loads((vendor / "profiler_info_0.json").read_text()) == {"config": {}, "rank_id": 0}
    about = json.loads((artifact.path / "rankscope.json").read_text())
    assert {"role": "actor", "step": 2, "rank": 0, "scope": "train"}.items() <= about.items()
    assert json.loads(npu.profiles[0].metadata["rankscope"])["step"] == 2
    assert artifact.facts["folder"] == vendor.name


@pytest.mark.parametrize("rank_id", [7, "7", "0"])
def test_a_rank_that_torch_npu_found_stays_and_another_one_is_told(
    npu: Any, handle: Make, rank_id: object, capfd: pytest.CaptureFixture[str]
) -> None:
    profiler = handle()
    profiler.start(step=1)
    stop = npu.profiles[0].stop

    def stop_with_rank() -> None:
        stop()
        npu.profiles[0].path.joinpath("profiler_info.json").write_text(json.dumps({"rank_id": rank_id}))

    npu.profiles[0].stop = stop_with_rank
    profiler.stop()
    profiler.close()
    [artifact] = profiler.artifacts
    told = [text for text in artifact.facts["warnings"] if "says rank" in text]
    assert len(told) == (str(rank_id) != "0")


@pytest.mark.parametrize(
    ("swallow", "words"),
    [
        ({"start"}, ("did not start", "Call start failed. Exception: out of luck")),
        ({"stop"}, ("did not end the capture", "no profiler_info.json", "Call stop failed. Exception: out of luck")),
    ],
)
def test_an_error_that_torch_npu_only_prints_is_told_and_the_training_goes_on(
    npu: Any,
    handle: Make,
    tmp_path: Path,
    swallow: set[str],
    words: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
) -> None:
    profiler = handle()
    npu.swallow = swallow
    step(profiler, 1)
    npu.swallow = set()
    step(profiler, 2)
    profiler.close()
    [failed] = records(tmp_path, status="failed")
    assert failed["step"] == 1
    for word in words:
        assert word in failed["reason"]
    assert [record["step"] for record in records(tmp_path, status="published")] == [2]
    out, err = capfd.readouterr()
    assert out == ""
    assert "profile failed" in err
    assert profiler.faults == ()


def test_a_profiler_that_cannot_be_made_is_told_and_tried_again(npu: Any, handle: Make, tmp_path: Path) -> None:
    profiler = handle()
    npu.broken = "ACL stream synchronize failed"
    step(profiler, 1)
    npu.broken = ""
    step(profiler, 2)
    profiler.close()
    [failed] = records(tmp_path, status="failed")
    assert "made no profiler: ACL stream synchronize failed" in failed["reason"]
    assert [artifact.step for artifact in profiler.artifacts] == [2]
    assert list((tmp_path / "out" / ".rankscope" / "staged").iterdir()) == []


def test_without_a_device_each_window_says_so(npu: Any, handle: Make, tmp_path: Path) -> None:
    npu.devices = 0
    profiler = handle()
    step(profiler)
    profiler.close()
    assert npu.made == []
    [failed] = records(tmp_path, status="failed")
    assert "no NPU" in failed["reason"]


def test_ranges_that_are_not_taken_are_counted_and_told_once(
    npu: Any, handle: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    npu.refuse = {"noise"}
    profiler = handle()
    profiler.start(step=1)
    for _ in range(3):
        with annotate("a", domain="noise"), annotate("b"):
            pass
    profiler.stop()
    profiler.close()
    assert npu.ranges == [["b", "default", True]] * 3
    err = capfd.readouterr().err
    assert err.count("were not taken by mstx") == 1
    assert "ranges=3" in err


def test_the_stage_that_raises_gets_its_own_error_and_closed_ranges(npu: Any, handle: Make) -> None:
    profiler = handle(discrete=True)

    @annotate("update")
    def update() -> None:
        with annotate("mini_batch0"):
            raise KeyError("theirs")

    profiler.start(step=1)
    with pytest.raises(KeyError, match="theirs"):
        update()
    assert npu.profiles[0].calls == ["start", "stop"]
    assert npu.ranges == [["update", "default", True], ["mini_batch0", "default", True]]
    profiler.stop()
    profiler.close()


def test_what_others_print_meanwhile_is_not_kept_back(
    npu: Any, handle: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    import threading

    profiler = handle()
    profiler.start(step=1)
    stop = npu.profiles[0].stop

    def stop_with_company() -> None:
        thread = threading.Thread(target=print, args=("of another thread",))
        thread.start()
        thread.join()
        print("[2026-01-01 00:00:00] [WARNING] [1] profiler.py: torch_npu has its doubts")
        stop()

    npu.profiles[0].stop = stop_with_company
    profiler.stop()
    profiler.close()
    out, err = capfd.readouterr()
    assert out == "of another thread\n"
    assert err.count("torch_npu: torch_npu has its doubts") == 1


def test_a_full_disk_at_the_start_is_told(npu: Any, handle: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope import Store

    profiler = handle()

    def full(*_: Any, **__: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "_staging_folder", full)
    step(profiler, 1)
    monkeypatch.undo()
    assert npu.made == []
    assert profiler.faults == ()
