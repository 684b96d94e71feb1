"""Captures of the real torch_npu on a CPU: what lies in the save path, and what reached the stand-ins for CANN."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Any]


def work(amount: int = 1) -> None:
    import torch

    for _ in range(amount):
        torch.ones(8) + 1


def step(handle: Any, number: int | None = 1, body: Callable[[], None] = work) -> None:
    handle.start(step=number)
    body()
    handle.stop()


def test_a_step_is_one_folder_that_is_whole(
    profiler: Make, results: Any, stub_log: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from rankscope import annotate

    before = sys.stdout
    handle = profiler({"level": 1}, rank=3, world_size=8)

    def body() -> None:
        with annotate("actor_update", scheduled=True):
            for index in range(2):
                with annotate(f"mini_batch{index}"):
                    work()
                handle.step()

    step(handle, 2, body)
    handle.close()
    found = results.folder()
    name = found.name
    assert (name.role, name.scope, name.step, name.rank, name.world_size) == ("actor", "train", 2, 3, 8)
    assert [path.name for path in sorted(found.path.iterdir())] == ["rankscope.json", found.vendor.name]
    assert {"role": "actor", "rank": 3, "step": 2, "contents": ["cpu", "npu"]}.items() <= found.about.items()
    assert found.info["rank_id"] == 3
    assert (found.vendor / "profiler_info_3.json").exists()
    assert any(file.stat().st_size for file in (found.vendor / "FRAMEWORK").iterdir())
    metadata = json.loads((found.vendor / "profiler_metadata.json").read_text())
    assert metadata["rankscope"]["role"] == "actor"
    assert results.left_over() == []
    device = [call["call"] for call in stub_log.calls() if call["call"].startswith("aclprof")]
    kept = [name for name in device if name not in {"aclprofCreateConfig", "aclprofDestroyConfig"}]
    assert kept == ["aclprofInit", "aclprofStart", "aclprofStop", "aclprofFinalize"]
    assert stub_log.ranges() == [(label, "", True) for label in ("actor_update", "mini_batch0", "mini_batch1")]
    # torch_npu's own words are not printed, and what is missing is said in ours.
    out, err = capfd.readouterr()
    assert out == ""
    assert "profiler.py" not in err
    assert err.count("nothing of the device was recorded") == 1
    assert sys.stdout is before
    [record] = results.ledger("artifact", status="published")
    assert record["folder"] == found.vendor.name
    assert record["bytes"] > 0


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([], {"activities": 2}),
        (["npu"], {"activities": 2}),
        (["cpu"], {"activities": 1}),
        (["memory"], {"activities": 1, "profile_memory": True}),
        (["npu", "shapes"], {"activities": 2, "record_shapes": True}),
        (["npu", "module"], {"activities": 2, "with_modules": True}),
        (["npu", "stack"], {"activities": 2, "with_stack": True}),
        (["npu", "flops"], {"activities": 2, "with_flops": True}),
        (
            ["all"],
            {"activities": 2, "profile_memory": True, "record_shapes": True, "with_modules": True, "with_stack": True},
        ),
    ],
)
def test_contents_become_the_arguments_of_the_profiler(
    profiler: Make, results: Any, stub_log: Any, contents: list[str], expected: dict[str, Any]
) -> None:
    handle = profiler({"contents": contents})
    step(handle)
    handle.close()
    found = results.folder()
    common = dict(found.common)
    off = dict.fromkeys(("profile_memory", "record_shapes", "with_modules", "with_stack", "with_flops"), False)
    activities = common.pop("activities")
    assert "ProfilerActivity.CPU" in activities
    assert {"activities": len(activities), **{name: common[name] for name in off}} == {**off, **expected}
    assert bool(stub_log.calls("aclprofStart")) == (expected["activities"] == 2)
    if expected["activities"] == 1:  # nothing of a device was asked for, so nothing of it is missing
        assert "warnings" not in found.about


@pytest.mark.parametrize(
    ("level", "theirs", "metrics"),
    [
        ("none", "Level_none", "ACL_AICORE_NONE"),
        ("level_none", "Level_none", "ACL_AICORE_NONE"),
        (0, "Level0", "ACL_AICORE_NONE"),
        ("level0", "Level0", "ACL_AICORE_NONE"),
        ("1", "Level1", "ACL_AICORE_PIPE_UTILIZATION"),
        (2, "Level2", "ACL_AICORE_PIPE_UTILIZATION"),
    ],
)
def test_levels_and_their_aliases(
    profiler: Make, results: Any, level: object, theirs: str, metrics: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = profiler({"level": level})
    step(handle)
    handle.close()
    experimental = results.folder().experimental
    assert (experimental["profiler_level"], experimental["aic_metrics"]) == (theirs, metrics)
    assert experimental["mstx"] is True


def test_every_option_reaches_torch_npu(profiler: Make, results: Any) -> None:
    handle = profiler(
        {
            "level": 2,
            "aic_metrics": "MemoryUB",
            "export_type": ["text", "db"],
            "mstx_domain_exclude": ["noise"],
            "data_simplification": False,
            "l2_cache": True,
            "op_attr": True,
            "gc_detect_threshold": 0,
            "host_sys": ["cpu", "mem"],
            "sys_io": True,
            "sys_interconnection": True,
        }
    )
    step(handle)
    handle.close()
    experimental = results.folder().experimental
    assert sorted(experimental.pop("export_type")) == ["db", "text"]
    assert sorted(experimental.pop("host_sys")) == ["cpu", "mem"]
    assert experimental == {
        "profiler_level": "Level2",
        "aic_metrics": "ACL_AICORE_MEMORY_UB",
        "l2_cache": True,
        "msprof_tx": False,
        "mstx": True,
        "data_simplification": False,
        "record_op_args": False,
        "op_attr": True,
        "gc_detect_threshold": 0.0,
        "mstx_domain_include": [],
        "mstx_domain_exclude": ["noise"],
        "sys_io": True,
        "sys_interconnection": True,
    }


def test_each_window_is_a_profiler_of_its_own(profiler: Make, results: Any, stub_log: Any) -> None:
    handle = profiler()
    for number in (1, 2, 2):
        step(handle, number)
    handle.close()
    found = results.folders()
    assert [folder.name.step for folder in found] == [1, 2, 2]
    assert len({folder.vendor.name for folder in found}) == 3
    assert len(stub_log.calls("aclprofStart")) == len(stub_log.calls("aclprofFinalize")) == 3


def test_neighbouring_steps_share_a_folder_and_have_rows(profiler: Make, results: Any) -> None:
    handle = profiler({"step_rows": True, "contents": ["cpu"]}, profile_continuous_steps=True)
    handle.start(step=1)
    work()
    handle.advance(step=2)
    work()
    handle.stop()
    handle.close()
    found = results.folder()
    assert found.about["steps"] == list(range(1, 10))
    rows = [name for name in found.operators() if name.startswith("ProfilerStep#")]
    assert rows == ["ProfilerStep#1", "ProfilerStep#2"]


def test_discrete_stages_are_folders_of_their_own(profiler: Make, results: Any, stub_log: Any) -> None:
    from rankscope import annotate

    handle = profiler({"discrete": True})

    def body() -> None:
        for stage in ("rollout", "update"):
            with annotate(stage), annotate("inner"):
                work()

    step(handle, 4, body)
    handle.close()
    assert [(found.name.scope, found.name.step) for found in results.folders()] == [("rollout", 4), ("update", 4)]
    assert [text for text, _, ended in stub_log.ranges() if ended] == ["rollout", "inner", "update", "inner"]


def test_a_schedule_makes_a_folder_for_each_cycle(profiler: Make, results: Any, stub_log: Any) -> None:
    from rankscope import annotate

    handle = profiler({"schedule": {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}})

    def body() -> None:
        with annotate("update", scheduled=True):
            for index in range(9):
                with annotate(f"mini_batch{index}"):
                    work()
                handle.step()

    step(handle, 1, body)
    handle.close()
    found = results.folders()
    assert sorted(folder.name.part for folder in found) == ["mb2-3", "mb6-7"]
    assert all(folder.about["partial"] is False for folder in found)
    assert len(stub_log.calls("aclprofWarmup")) == len(stub_log.calls("aclprofStart")) == 2
    # The stage began before and ends after its recorded mini-batches: it shows in both, from edge to edge.
    expected = ["update", "mini_batch2", "mini_batch3", "update", "mini_batch6", "mini_batch7"]
    assert stub_log.ranges() == [(label, "", True) for label in expected]
    assert results.left_over() == []


def test_a_schedule_that_ends_in_a_warm_up_leaves_no_junk(profiler: Make, results: Any, stub_log: Any) -> None:
    from rankscope import annotate

    handle = profiler({"schedule": {"warmup": 1, "active": 1}, "discrete": True})

    def body() -> None:
        with annotate("update", scheduled=True):
            for index in range(2):
                with annotate(f"mini_batch{index}"):
                    work()
                handle.step()

    step(handle, 1, body)
    step(handle, 2, body)
    handle.close()
    assert [(folder.name.step, folder.name.part) for folder in results.folders()] == [(1, "mb1"), (2, "mb1")]
    assert results.left_over() == []
    assert results.reasons("empty") == results.reasons("failed") == []
    assert len(stub_log.calls("aclprofWarmup")) == 4


def test_a_stage_that_ends_early_says_so(profiler: Make, results: Any) -> None:
    from rankscope import annotate

    handle = profiler({"schedule": {"wait": 1, "active": 3}})

    def body() -> None:
        with annotate("update", scheduled=True):
            for index in range(3):
                with annotate(f"mini_batch{index}"):
                    work()
                handle.step()

    step(handle, 1, body)
    handle.close()
    found = results.folder()
    assert (found.name.part, found.about["mini_batches"], found.about["partial"]) == ("mb1-2", [1, 2], True)


def test_a_schedule_that_is_never_reached_is_told(profiler: Make, results: Any) -> None:
    from rankscope import annotate

    handle = profiler({"schedule": {"wait": 5, "active": 1}})

    def body() -> None:
        with annotate("update", scheduled=True):
            work()
            handle.step()

    step(handle, 1, body)
    handle.close()
    assert results.folders() == []
    [reason] = results.reasons("empty")
    assert "needs at least 6; 1 ran in stage 'update'" in reason


def test_ranges_end_when_the_body_raises(profiler: Make, results: Any, stub_log: Any) -> None:
    from rankscope import annotate

    handle = profiler()

    @annotate("update")
    def update() -> None:
        with annotate("mini_batch0"):
            raise RuntimeError("the training's own error")

    handle.start(step=1)
    with pytest.raises(RuntimeError, match="own error"):
        update()
    with annotate("after"):
        work()
    handle.stop()
    handle.close()
    assert stub_log.ranges() == [(label, "", True) for label in ("update", "mini_batch0", "after")]
    assert results.folder().name.step == 1


def test_a_discrete_stage_that_raises_leaves_no_profiler_running(profiler: Make, results: Any, stub_log: Any) -> None:
    from rankscope import annotate

    handle = profiler({"discrete": True})
    handle.start(step=1)

    @annotate("update")
    def update() -> None:
        work()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        update()
    assert len(stub_log.calls("aclprofStop")) == len(stub_log.calls("aclprofFinalize")) == 1
    with annotate("rollout"):
        work()
    handle.stop()
    handle.close()
    assert [found.name.scope for found in results.folders()] == ["update", "rollout"]
    assert all(ended for _, _, ended in stub_log.ranges())


def test_coroutines_and_domains(profiler: Make, stub_log: Any) -> None:
    from rankscope import annotate

    @annotate("serve", domain="rl")
    async def serve() -> None:
        await asyncio.sleep(0)
        work()

    async def both() -> None:
        await asyncio.gather(serve(), serve())

    handle = profiler()
    step(handle, 1, lambda: asyncio.run(both()))
    handle.close()
    assert stub_log.ranges() == [("serve", "rl", True)] * 2
    begun = [call["call"] for call in stub_log.calls() if call["call"].startswith("mstxDomainRange")]
    assert begun == ["mstxDomainRangeStartA"] * 2 + ["mstxDomainRangeEnd"] * 2


@pytest.mark.parametrize("label", ['say "hi"', "back\\slash", "new\nline", "x" * 400, "层" * 80, "\ud800"])
def test_a_label_that_would_break_torch_npus_files_is_written_otherwise(
    profiler: Make, results: Any, stub_log: Any, label: str
) -> None:
    from rankscope import annotate

    handle = profiler()
    handle.start(step=1)
    with annotate(label):
        work()
    handle.stop()
    handle.close()
    [(text, _, ended)] = stub_log.ranges()
    assert ended
    assert text.isprintable()
    assert '"' not in text
    assert len(text.encode()) <= 156
    assert results.folder().about["labels"] == {text: label}


def test_without_the_device_stages_are_rows_among_the_operators(
    profiler: Make, results: Any, stub_log: Any, tmp_path: Path
) -> None:
    from rankscope import annotate

    handle = profiler({"contents": ["cpu", "shapes"]})
    handle.start(step=1)
    with annotate("rollout"), annotate("inner"):
        work()
    handle.stop()
    handle.close()
    assert stub_log.ranges() == []
    names = results.folder().operators()
    assert names[:2] == ["rollout", "inner"]
    assert "aten::add" in names


def test_two_roles_of_a_process_share_one_capture(profiler: Make, results: Any, stub_log: Any) -> None:
    from rankscope import annotate

    actor, ref = profiler(role="actor"), profiler(role="ref")
    actor.start(step=1)
    ref.start(step=1)
    with annotate("ref_log_prob"):
        work()
    ref.stop()
    actor.stop()
    for handle in (actor, ref):
        handle.close()
    assert results.folder().name.role == "actor"
    assert len(stub_log.calls("aclprofStart")) == 1
