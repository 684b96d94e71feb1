"""Options of the npu tool, and whether it can work here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rankscope import ConfigError, OptionError
from rankscope.config import build_options
from rankscope_npu import NpuBackend, NpuOptions


def problems(**values: Any) -> list[tuple[str, str]]:
    with pytest.raises(OptionError) as caught:
        NpuOptions(**values)
    return caught.value.problems


def test_unset_contents_are_npu_and_cpu() -> None:
    """verl's default is an empty list, with which it records no device."""
    options = NpuOptions()
    assert options.wants_device
    assert [name for name in ("memory", "shapes", "module", "stack", "flops") if options.wants(name)] == []


@pytest.mark.parametrize(
    ("contents", "device", "rest"),
    [
        (("npu",), True, set()),
        (("cpu",), False, set()),
        (("memory", "stack"), False, {"memory", "stack"}),
        (("all",), True, {"memory", "shapes", "module", "stack"}),
        (("all", "flops"), True, {"memory", "shapes", "module", "stack", "flops"}),
    ],
)
def test_contents_by_name(contents: tuple[str, ...], device: bool, rest: set[str]) -> None:
    options = NpuOptions(contents=contents)
    assert options.wants_device == device
    assert {name for name in ("memory", "shapes", "module", "stack", "flops") if options.wants(name)} == rest


@pytest.mark.parametrize(
    ("given", "level"),
    [(0, "level0"), (1, "level1"), (2, "level2"), ("0", "level0"), ("level1", "level1"), ("level_none", "none")],
)
def test_levels_as_numbers_and_as_verl_writes_them(given: object, level: str) -> None:
    built, wrong = build_options(NpuOptions, {"level": given}, "npu")
    assert wrong == []
    assert built.level == level


def test_the_block_of_verl_works_unchanged() -> None:
    block = {
        "_target_": "verl.utils.profiler.config.NPUToolConfig",
        "contents": [],
        "level": "level0",
        "analysis": True,
        "discrete": False,
        "profile_token_start": None,
        "profile_token_end": None,
        "name": "npu",
    }
    built, wrong = build_options(NpuOptions, block, "npu")
    assert wrong == []
    assert (built.analysis, built.discrete, built.level) == (True, False, "level0")


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"contents": ("npus",)}, "contents", ("'npus'", "npu, cpu, memory", "Did you mean 'npu'?")),
        ({"level": "level3"}, "level", ("'level3'", "none, level0, level1, level2 (or 0, 1, 2)", "Did you mean")),
        ({"level": "3"}, "level", ("'3'",)),
        ({"export_type": ("sqlite",)}, "export_type", ("'sqlite'", "db, text")),
        ({"export_type": ()}, "export_type", ("is empty", "db, text")),
        ({"host_sys": ("cpus",)}, "host_sys", ("'cpus'", "Did you mean 'cpu'?")),
        ({"aic_metrics": "pipeutilization", "level": "1"}, "aic_metrics", ("Did you mean 'PipeUtilization'?",)),
        ({"aic_metrics": "Memory"}, "aic_metrics", ("needs level level1 or level2", "'level0'")),
        ({"op_attr": True, "export_type": ("text",)}, "op_attr", ("needs export_type db",)),
        ({"level": "none", "mstx": False}, "mstx", ("must be true with level none",)),
        ({"gc_detect_threshold": -1.0}, "gc_detect_threshold", ("must be 0 or more", "-1")),
        ({"analysis_timeout": 0.0}, "analysis_timeout", ("greater than 0",)),
        ({"profile_token_start": -1}, "profile_token_start", ("must be 0 or more",)),
        ({"profile_token_start": 5, "profile_token_end": 5}, "profile_token_end", ("greater than", "(5)")),
    ],
)
def test_a_bad_value_is_named_with_what_may_be_given(
    values: dict[str, Any], field: str, words: tuple[str, ...]
) -> None:
    [(where, message)] = problems(**values)
    assert where == field
    for word in words:
        assert word in message


def test_the_schedule_is_checked_as_everywhere() -> None:
    _, wrong = build_options(NpuOptions, {"schedule": {"wait": 2}}, "tool_config.npu")
    assert [problem.path for problem in wrong] == ["tool_config.npu.schedule.active"]


def test_every_option_is_explained() -> None:
    import dataclasses

    for field in dataclasses.fields(NpuOptions):
        assert (
            f"        {field.name}: " in NpuOptions.__doc__
            or f"{field.name}: token" in NpuOptions.__doc__
            or (field.name == "profile_token_start")
        )


def test_the_lower_levels_have_no_metrics() -> None:
    assert [NpuOptions(level=level).metrics for level in ("none", "0", "1", "2")] == [
        "AiCoreNone",
        "AiCoreNone",
        "PipeUtilization",
        "PipeUtilization",
    ]
    assert NpuOptions(level="1", aic_metrics="AiCoreNone").metrics == "AiCoreNone"


def test_include_goes_before_exclude() -> None:
    assert NpuOptions().domains == ((), ("communication",))
    assert NpuOptions(mstx_domain_include=("rl",)).domains == (("rl",), ())


def versions(monkeypatch: pytest.MonkeyPatch, **known: str) -> None:
    from rankscope_npu import backend

    backend._version.cache_clear()
    names = {name.replace("_", "-"): version for name, version in known.items()}

    def version(name: str) -> str:
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return names[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name.replace("_", "-") in names else None)


def test_without_torch_npu_it_is_not_available_and_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.13.0")
    answer = NpuBackend.available()
    assert not answer.available
    assert answer.reason == "torch_npu is not installed"
    for word in ("pip install torch-npu", "CANN", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert word in answer.hint


def test_an_old_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.0.1", torch_npu="2.0.1.post1")
    answer = NpuBackend.available()
    assert not answer.available
    assert "2.0.1.post1 is too old" in answer.reason


def test_what_will_be_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.14.0+cpu", torch_npu="2.13.0")
    answer = NpuBackend.available()
    assert answer.available
    assert "torch_npu 2.13.0 is made for another torch than 2.14.0+cpu" in answer.reason
    assert "no NPU device" in answer.reason


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_a_selected_rank_without_torch_npu_is_a_config_error(handle: Callable[..., Any]) -> None:
    from rankscope_npu import backend

    backend._version.cache_clear()
    with pytest.raises(ConfigError) as caught:
        handle()
    assert "torch_npu is not installed" in str(caught.value)
    assert "pip install torch-npu" in str(caught.value)


def test_asking_imports_nothing_heavy() -> None:
    import subprocess

    program = (
        "import sys\nfrom rankscope_npu import NpuBackend\nNpuBackend.available()\n"
        "print(sorted({'torch', 'torch_npu', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"
