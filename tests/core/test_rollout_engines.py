"""What the engines are told, for the signatures of named versions, and how adapters are found."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rollout_signatures import (
    LLM033,
    AsyncLLM013,
    AsyncLLM033,
    Noting,
    PassesOn,
    ProfileReq,
    SglangEngine0512,
    SglangEngine0523,
    TokenizerManager0512,
    TokenizerManager0523,
    TrtLlm,
    TrtLlmRpc,
)

from rankscope import ConfigError
from rankscope.rollout import Engine, EngineLaunch, Layout, Wanted, engines
from rankscope.rollout.engine import version_of
from rankscope.rollout.sglang import NEVER, SglangEngine
from rankscope.rollout.trtllm import TrtllmEngine, TrtllmOptions
from rankscope.rollout.vllm import FIELDS_0_13, VllmEngine, VllmOptions
from rankscope.rollout.wanted import wanted

WINDOW = {"profile_token_start": 10, "profile_token_end": 14}


def want(tool: str = "torch", own: tuple[str, ...] = (), **options: Any) -> Wanted:
    kind = {"torch": "torch", "npu": "torch", "nsys": "cuda", "torch_memory": "memory"}[tool]
    return wanted(tool, kind, options, own, "/traces/r0")  # type: ignore[arg-type]


def call(engine: Engine, handle: Noting, asked: Wanted) -> Any:
    """Make the call that starts it, and return what arrived."""
    value = engine.start_call(handle, asked)()
    if inspect.isawaitable(value):
        asyncio.run(_wait(value))
    ((name, given),) = handle.calls
    assert name in {"start", "start_profile"}
    return given


async def _wait(value: Any) -> Any:
    return await value


# vLLM.


def test_vllm_takes_a_profiler_config_of_real_values() -> None:
    launch = VllmEngine(version="0.13.0").launch(want(contents=("stack", "shapes")))
    assert launch == EngineLaunch(
        {
            "profiler_config": {
                "profiler": "torch",
                "torch_profiler_dir": "/traces/r0",
                "torch_profiler_with_stack": True,
                "torch_profiler_record_shapes": True,
                "torch_profiler_with_memory": False,
                "torch_profiler_with_flops": False,
                "ignore_frontend": True,
                "delay_iterations": 0,
                "max_iterations": 0,
            }
        }
    )
    text = launch.json_arguments["profiler_config"]
    assert json.loads(text) == launch.arguments["profiler_config"]
    assert launch.command_line == ["--profiler-config", text]
    assert str(launch).startswith("--profiler-config '{")


@pytest.mark.parametrize(
    ("contents", "stack", "shapes", "memory", "flops"),
    [
        ((), False, False, False, False),
        (("all",), True, True, True, True),
        (("module",), True, False, False, False),
        (("memory", "cpu"), False, False, True, False),
    ],
)
def test_contents_become_options_of_vllm(
    contents: tuple[str, ...], stack: bool, shapes: bool, memory: bool, flops: bool
) -> None:
    config = VllmEngine(version="0.33.0").launch(want(contents=contents)).arguments["profiler_config"]
    names = ("with_stack", "record_shapes", "with_memory", "with_flops")
    assert [config[f"torch_profiler_{name}"] for name in names] == [stack, shapes, memory, flops]


def test_a_token_window_in_vllm_is_one_of_iterations_and_that_is_said() -> None:
    launch = VllmEngine(version="0.33.0").launch(want(**WINDOW))
    config = launch.arguments["profiler_config"]
    assert (config["delay_iterations"], config["max_iterations"]) == (10, 4)
    (note,) = launch.notes
    assert "not tokens in vLLM: it counts iterations of a worker" in note
    assert VllmEngine().launch(want(profile_token_start=10)).arguments["profiler_config"]["max_iterations"] == 0


def test_only_the_cpu_needs_a_vllm_that_can_choose() -> None:
    asked = want(contents=("cpu",))
    new = VllmEngine(version="0.33.0").launch(asked)
    assert new.arguments["profiler_config"]["torch_profiler_activities"] == ["CPU"]
    assert new.notes == ()
    old = VllmEngine(version="0.13.0").launch(asked)
    assert "torch_profiler_activities" not in old.arguments["profiler_config"]
    assert old.notes == ("vLLM records CPU and device; one of them alone needs vLLM 0.33 or newer",)


def test_fields_that_the_installed_vllm_does_not_know_are_left_out_and_named() -> None:
    fields = FIELDS_0_13 - {"torch_profiler_with_flops", "ignore_frontend"}
    launch = VllmEngine().launch(want(), fields=fields)
    assert set(launch.arguments["profiler_config"]) <= fields
    assert launch.notes == (
        "this vLLM's ProfilerConfig does not know ignore_frontend, torch_profiler_with_flops: left out",
    )


def test_nsys_makes_vllm_switch_the_cuda_profiler() -> None:
    config = VllmEngine(version="0.33.0").launch(want("nsys")).arguments["profiler_config"]
    assert config == {"profiler": "cuda", "delay_iterations": 0, "max_iterations": 0}


def test_the_front_end_is_an_option() -> None:
    config = VllmEngine(VllmOptions(frontend=True), version="0.33.0").launch(want()).arguments["profiler_config"]
    assert config["ignore_frontend"] is False


def test_an_old_vllm_reads_the_environment_and_only_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_WITH_STACK", "mine")
    monkeypatch.delenv("VLLM_TORCH_PROFILER_DIR", raising=False)
    before = dict(os.environ)
    launch = VllmEngine(version="0.12.0").launch(want(contents=("shapes",), **WINDOW))
    assert launch.arguments == {}
    assert launch.env == {
        "VLLM_TORCH_PROFILER_DIR": "/traces/r0",
        "VLLM_TORCH_PROFILER_WITH_STACK": "0",
        "VLLM_TORCH_PROFILER_RECORD_SHAPES": "1",
        "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": "0",
        "VLLM_TORCH_PROFILER_WITH_FLOPS": "0",
        "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM": "1",
        "VLLM_PROFILER_DELAY_ITERS": "10",
        "VLLM_PROFILER_MAX_ITERS": "4",
    }
    assert dict(os.environ) == before
    with launch.environment():
        assert os.environ["VLLM_TORCH_PROFILER_DIR"] == "/traces/r0"
        assert os.environ["VLLM_TORCH_PROFILER_WITH_STACK"] == "0"
    assert dict(os.environ) == before
    with pytest.raises(ZeroDivisionError), launch.environment():
        raise ZeroDivisionError
    assert dict(os.environ) == before
    assert str(launch).startswith("VLLM_TORCH_PROFILER_DIR=/traces/r0 ")


def test_a_new_vllm_gets_nothing_in_the_environment() -> None:
    launch = VllmEngine(version="0.13.0").launch(want())
    before = dict(os.environ)
    with launch.environment():
        assert dict(os.environ) == before


@pytest.mark.parametrize("handle", [AsyncLLM033(), LLM033()])
def test_vllm_0_33_gets_prefix_and_window(handle: Noting) -> None:
    import dataclasses

    asked = dataclasses.replace(want(**WINDOW), prefix="rankscope-step2-0badcafe")
    assert call(VllmEngine(), handle, asked) == ("rankscope-step2-0badcafe", 10, 4, None)


def test_vllm_0_13_gets_nothing_that_it_would_refuse() -> None:
    assert call(VllmEngine(), AsyncLLM013(), want(**WINDOW)) is None
    assert call(VllmEngine(), PassesOn(), want(**WINDOW)) == {}


def test_a_server_of_vllm_is_asked_again_without_what_it_refused() -> None:
    engine = VllmEngine()
    assert engine.retry_body(422, {"profile_prefix": "x"}) == {}
    assert engine.retry_body(400, {"profile_prefix": "x"}) == {}
    assert engine.retry_body(422, {}) is None
    assert engine.retry_body(500, {"profile_prefix": "x"}) is None


# SGLang.


def test_sglang_0_5_12_takes_keywords() -> None:
    given = call(SglangEngine(), TokenizerManager0512(), want(contents=("stack",)))
    assert given == {
        "output_dir": "/traces/r0",
        "start_step": None,
        "num_steps": None,
        "activities": ["CPU", "GPU"],
        "with_stack": True,
        "record_shapes": False,
        "profile_prefix": None,
    }


@pytest.mark.parametrize("handle", [TokenizerManager0523(), SglangEngine0523()])
def test_sglang_0_5_23_takes_one_request(handle: Noting) -> None:
    import dataclasses

    asked = dataclasses.replace(
        want(profile_token_end=4, contents=("cpu", "shapes")), prefix="rankscope-step2-0badcafe"
    )
    assert call(SglangEngine(), handle, asked) == ProfileReq(
        output_dir="/traces/r0",
        num_steps=4,
        activities=["CPU"],
        with_stack=False,
        record_shapes=True,
        profile_prefix="rankscope-step2-0badcafe",
    )


def test_an_engine_of_sglang_0_5_12_gets_what_its_manager_takes() -> None:
    given = call(SglangEngine(), SglangEngine0512(), want())
    assert set(given) == {"output_dir", "activities", "with_stack", "record_shapes"}


def test_a_start_that_fits_neither_generation_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="neither the keywords of SGLang"):
        SglangEngine().start_call(AsyncLLM013(), want())


def test_a_token_window_in_sglang_is_counted_from_where_the_engine_is() -> None:
    import dataclasses

    engine = SglangEngine()
    asked = want(**WINDOW)
    unknown = engine.start_arguments(asked)
    assert "start_step" not in unknown.arguments
    assert unknown.arguments["num_steps"] == 4
    assert "begins at once and not 10 forward passes later" in unknown.notes[0]
    known = engine.start_arguments(dataclasses.replace(asked, forward_count=500))
    assert (known.arguments["start_step"], known.arguments["num_steps"], known.notes) == (511, 4, ())
    assert any("forward passes of its scheduler over its whole life" in note for note in engine.launch(asked).notes)


def test_a_window_that_sglang_may_not_reach_can_be_taken_back() -> None:
    import dataclasses

    engine, asked = SglangEngine(), want(**WINDOW)
    assert engine.disarm(asked) is None
    assert engine.disarm(want()) is None
    assert engine.disarm(dataclasses.replace(asked, forward_count=500)) == {
        "output_dir": "/traces/r0",
        "start_step": NEVER,
    }


def test_what_sglang_lacks_is_said() -> None:
    notes = SglangEngine().launch(want(contents=("memory", "flops"))).notes
    assert notes == ("SGLang's profiler cannot record memory and flops: left out",)


@pytest.mark.parametrize(
    ("tool", "activities"), [("torch", ["CPU", "GPU"]), ("nsys", ["CUDA_PROFILER"]), ("torch_memory", ["MEM"])]
)
def test_tools_become_activities_of_sglang(tool: str, activities: list[str]) -> None:
    assert SglangEngine().start_arguments(want(tool)).arguments["activities"] == activities


@pytest.mark.parametrize(
    ("error", "options", "expected"),
    [
        ("RuntimeError: Profiling is not in progress. Call /start_profile first.", {}, True),
        ("HttpError: HTTP 500: Internal Server Error", {"profile_token_end": 4}, True),
        ("HttpError: HTTP 500: Internal Server Error", {}, False),
        ("RuntimeError: something else", {"profile_token_end": 4}, False),
    ],
)
def test_sglang_that_ended_by_itself(error: str, options: dict[str, int], expected: bool) -> None:
    assert SglangEngine().ended_already(error, want(**options)) is expected


# TensorRT-LLM.


def test_trtllm_counts_from_the_start() -> None:
    engine = TrtllmEngine()
    assert call(engine, TrtLlm(), want(**WINDOW)) == ("/traces/r0", 4, 10, ["CPU", "GPU"])
    assert call(engine, TrtLlm(), want("nsys")) == ("/traces/r0", None, 0, ["CUDA_PROFILER"])
    notes = engine.launch(want(contents=("stack", "shapes", "flops"))).notes
    assert notes == ("TensorRT-LLM's profiler cannot record stack, flops: left out; shapes are always recorded",)


def test_an_older_trtllm_is_called_through_its_workers() -> None:
    handle, engine = TrtLlmRpc(), TrtllmEngine()
    assert call(engine, handle, want(**WINDOW)) == ((), None)
    engine.stop_call(handle)()
    assert handle.calls[1] == ("stop_profile", ((), None))


def test_trtllm_by_its_environment() -> None:
    engine = TrtllmEngine(TrtllmOptions(by_environment=True))
    assert engine.passive
    assert engine.launch(want(**WINDOW)).env == {
        "TLLM_PROFILE_START_STOP": "10-14",
        "TLLM_TORCH_PROFILE_TRACE": "/traces/r0/trace.json",
    }
    bare = engine.launch(want())
    assert bare.env == {}
    assert any("without them nothing is recorded" in note for note in bare.notes)
    assert not TrtllmEngine().passive


# All of them.


@pytest.mark.parametrize("engine", [VllmEngine(), SglangEngine(), TrtllmEngine()])
def test_options_that_no_engine_knows_are_named(engine: Engine) -> None:
    (note,) = engine.launch(want(own=("contents", "schedule", "compression"))).notes
    assert note == f"{engine.title} knows nothing of these options of tool torch: compression, schedule"


class Object:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


@pytest.mark.parametrize(
    ("engine", "handle", "expected"),
    [
        (
            VllmEngine(),
            Object(
                vllm_config=Object(
                    parallel_config=Object(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=3)
                )
            ),
            Layout(tp=2, dp=3),
        ),
        (VllmEngine(), Object(), None),
        (
            SglangEngine(),
            Object(
                tokenizer_manager=Object(server_args=Object(tp_size=4, pp_size=1, dp_size=2, enable_dp_attention=True))
            ),
            Layout(tp=4, dp=2, dp_attention=True),
        ),
        (SglangEngine(), Object(server_args=Object(tp_size="auto", pp_size=1, dp_size=2)), None),
        (TrtllmEngine(), Object(args=Object(parallel_config=Object(tp_size=4, pp_size=2))), Layout(tp=4, pp=2)),
    ],
)
def test_an_engine_object_may_know_its_layout(engine: Engine, handle: Any, expected: Layout | None) -> None:
    assert engine.layout(handle) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.33.0", (0, 33, 0)), ("0.13.0rc1", (0, 13, 0)), ("0.12.0+cpu", (0, 12, 0)), ("", ()), (None, ()), ("dev", ())],
)
def test_versions(text: str | None, expected: tuple[int, ...]) -> None:
    assert version_of(text) == expected


# How adapters are found.


def distribution(directory: Path, name: str, entries: str) -> None:
    info = directory / f"{name.replace('-', '_')}-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[rankscope.engines]\n" + entries)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    return directory


def test_our_adapters_are_installed() -> None:
    assert {"vllm", "sglang", "trtllm"} <= set(engines.installed())
    assert engines.load("vllm") is VllmEngine


def test_an_adapter_of_another_distribution_is_found(site: Path) -> None:
    distribution(site, "my-engine", "mine = my_engine_adapter:MyEngine\n")
    (site / "my_engine_adapter.py").write_text(
        "from rankscope.rollout import Engine\n\nclass MyEngine(Engine):\n    name, title = 'mine', 'Mine'\n"
    )
    assert engines.installed()["mine"].provider == "my-engine 2.0"
    made = engines.make("mine", version="1.0")
    assert (made.title, made.version, made.kinds["torch"]) == ("Mine", "1.0", "torch")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vlm", ["engine: no engine named 'vlm'. Did you mean 'vllm'?", "group rankscope.engines"]),
        ("gone", ["engine 'gone' (no_such_engine:X from bad-engines 2.0) could not be imported: ModuleNotFoundError"]),
        ("five", ["engine 'five' (five_engine:X from bad-engines 2.0) is 5, not an Engine class"]),
        ("dict", ["dict"]),
        ("twice", ["engine 'twice' is provided by more than one distribution: bad-engines 2.0, other-engines 2.0"]),
    ],
)
def test_an_adapter_that_cannot_be_had_says_why(site: Path, name: str, words: list[str]) -> None:
    distribution(
        site,
        "bad-engines",
        "gone = no_such_engine:X\nfive = five_engine:X\ndict = five_engine:D\ntwice = five_engine:X\n",
    )
    distribution(site, "other-engines", "twice = other_engine:X\n")
    (site / "five_engine.py").write_text(
        "X = 5\n\nclass D:\n    import dataclasses\n    Options = dataclasses.make_dataclass('Options', [])\n\n"
        "    def __init__(self, options, version=None):\n        pass\n"
    )
    with pytest.raises(ConfigError) as caught:
        engines.make(name)
    for word in words:
        assert word in str(caught.value)


def test_a_disabled_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_DISABLE", "vllm")
    assert "vllm" not in engines.installed()
    with pytest.raises(ConfigError, match="engine 'vllm' is disabled by RANKSCOPE_DISABLE"):
        engines.load("vllm")


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        engines.make("vllm", {"fronted": True})
    assert "engine_options.fronted: unknown option 'fronted'. Did you mean 'frontend'?" in str(caught.value)
    assert engines.make("vllm", {"frontend": "true"}).options == VllmOptions(frontend=True)
