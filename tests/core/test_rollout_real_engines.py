"""The adapters against the engines' own code, where it is at hand: nothing of it is needed or kept here.

``RANKSCOPE_TEST_ENGINES`` names a folder with unpacked wheels, each in a folder named after its version::

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d FOLDER/vllm-0.33.0

The vLLM that is run needs pydantic, msgspec, packaging, cbor2, psutil, pyzmq, urllib3 and regex; they may lie in
``FOLDER/site`` (``pip install --target``). What these tests find is what `rollout_signatures` and the adapters state.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rollout_signatures

from rankscope.rollout.sglang import KEYWORDS
from rankscope.rollout.vllm import FIELDS_0_13

FOLDER = os.environ.get("RANKSCOPE_TEST_ENGINES", "")
VLLM, SGLANG = "vllm/v1/engine/async_llm.py", "sglang/srt/managers/tokenizer_control_mixin.py"


def wheel(version: str) -> Path:
    if not FOLDER:
        pytest.skip("RANKSCOPE_TEST_ENGINES names no folder with unpacked wheels of the engines")
    folder = Path(FOLDER, version)
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


def parameters(file: Path, function: str) -> list[str]:
    """Names of the parameters of a function in a source file, without ``self``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return [one.arg for one in (*node.args.args, *node.args.kwonlyargs) if one.arg != "self"]
    raise AssertionError(f"{file} has no {function}")


def fields(file: Path, name: str) -> set[str]:
    """Names of the annotated fields of a class in a source file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
    raise AssertionError(f"{file} has no {name}")


@pytest.mark.parametrize(
    ("version", "file", "recorded"),
    [
        ("vllm-0.33.0", VLLM, rollout_signatures.AsyncLLM033),
        ("vllm-0.33.0", "vllm/entrypoints/llm.py", rollout_signatures.LLM033),
        ("vllm-0.13.0", VLLM, rollout_signatures.AsyncLLM013),
        ("vllm-0.12.0", VLLM, rollout_signatures.AsyncLLM013),
        ("sglang-0.5.12", SGLANG, rollout_signatures.TokenizerManager0512),
        ("sglang-0.5.23", SGLANG, rollout_signatures.TokenizerManager0523),
    ],
)
def test_recorded_signatures_are_those_of_the_engines(version: str, file: str, recorded: Any) -> None:
    for function in ("start_profile", "stop_profile"):
        own = [name for name in inspect.signature(getattr(recorded, function)).parameters if name != "self"]
        assert parameters(wheel(version) / file, function) == own


def test_the_fields_of_the_engines_are_those_that_we_know() -> None:
    assert fields(wheel("vllm-0.13.0") / "vllm/config/profiler.py", "ProfilerConfig") == FIELDS_0_13
    newest = fields(wheel("vllm-0.33.0") / "vllm/config/profiler.py", "ProfilerConfig")
    assert newest >= FIELDS_0_13 | {"torch_profiler_activities"}
    request = fields(wheel("sglang-0.5.23") / "sglang/srt/managers/io_struct.py", "ProfileReq")
    assert request == set(rollout_signatures.ProfileReq.__annotations__)
    assert request >= KEYWORDS
    assert set(parameters(wheel("sglang-0.5.12") / SGLANG, "start_profile")) == KEYWORDS


RUN_VLLM = """
import sys, types, os, json, gzip, dataclasses
root, out = sys.argv[1:3]
sys.path.insert(0, root)
for name in ("vllm", "vllm.config", "vllm.utils", "vllm.profiler", "vllm.distributed"):
    module = types.ModuleType(name)
    module.__path__ = [root + "/" + name.replace(".", "/")]
    sys.modules[name] = module

def stand_in(name, **facts):
    module = types.ModuleType(name)
    module.__dict__.update(facts)
    sys.modules[name] = module
    return module

sys.modules["vllm"].version = stand_in("vllm.version", __version__="0.33.0", __version_tuple__=(0, 33, 0))
from vllm.config.profiler import ProfilerConfig, validate_profile_prefix
sys.modules["vllm.config"].ProfilerConfig = ProfilerConfig
platform = types.SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True, device_type="cpu")
stand_in("vllm.platforms", current_platform=platform)
stand_in("vllm.distributed.parallel_state", is_local_first_rank=lambda: True, is_global_first_rank=lambda: True)
from vllm.profiler.wrapper import TorchProfilerWrapper
import torch
from rankscope.rollout import Layout
from rankscope.rollout.vllm import VllmEngine
from rankscope.rollout.wanted import make_prefix, wanted

engine = VllmEngine(version="0.33.0")
found = {"configs": [], "windows": {}}
known = [field.name for field in dataclasses.fields(ProfilerConfig)]
for tool, kind in (("torch", "torch"), ("nsys", "cuda")):
    for contents in ((), ("all",), ("cpu",), ("stack", "shapes", "memory", "flops")):
        asked = wanted(tool, kind, {"contents": contents}, (), out)
        launch = engine.launch(asked)
        assert launch == engine.launch(asked, fields=known)
        config = ProfilerConfig(**launch.arguments["profiler_config"])
        found["configs"].append([config.profiler, config.torch_profiler_with_stack, config.ignore_frontend])
for start, end in ((None, None), (2, 5), (None, 3)):
    asked = wanted("torch", "torch", {"profile_token_start": start, "profile_token_end": end}, (), out)
    config = ProfilerConfig(**engine.launch(asked).arguments["profiler_config"])
    prefix = validate_profile_prefix(make_prefix(7))
    worker = f"{prefix}_dp0_pp0_tp1_dcp0_ep1_rank1"
    wrapper = TorchProfilerWrapper(config, worker_name=worker, local_rank=1, activities=["CPU"])
    wrapper.start()
    for number in range(1, 9):
        wrapper.step()
        with wrapper.annotate_context_manager(f"iteration{number}"):
            torch.ones(8) @ torch.ones(8)
    wrapper.stop()
    files = {}
    for name in sorted(os.listdir(out)):
        file = engine.parse(name)
        files[file.kind] = [file.prefix == prefix, file.rank, engine.place(file, 2, Layout(tp=2), [file]).local]
        if file.kind == "trace":
            events = json.load(gzip.open(os.path.join(out, name)))["traceEvents"]
            rows = sorted({e["name"] for e in events if str(e.get("name", "")).startswith("iteration")})
        os.unlink(os.path.join(out, name))
    found["windows"][f"{start}-{end}"] = [rows, files]
print("FOUND " + json.dumps(found))
"""


@pytest.mark.torch
def test_vllm_takes_our_arguments_and_we_read_its_files(tmp_path: Path) -> None:
    root = wheel("vllm-0.33.0")
    site = Path(FOLDER, "site")
    paths = [str(site)] if site.is_dir() else []
    result = subprocess.run(
        [sys.executable, "-c", RUN_VLLM, str(root), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "No module named" in result.stderr and "Traceback" in result.stderr:
        pytest.skip(f"vLLM needs more than is installed: {result.stderr.strip().splitlines()[-1]}")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["configs"] == [
        ["torch", False, True],
        ["torch", True, True],
        ["torch", False, True],
        ["torch", True, True],
        *[["cuda", True, False]] * 4,
    ]
    files = {"trace": [True, 1, 1], "table": [True, 1, 1]}
    assert found["windows"] == {
        "None-None": [[f"iteration{number}" for number in range(1, 9)], files],
        "2-5": [["iteration2", "iteration3", "iteration4"], files],
        "None-3": [["iteration1", "iteration2", "iteration3"], files],
    }
