"""The runtime_env of an actor: what its tools need, merged with what the user wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray_launching

from rankscope import ConfigError
from rankscope.integrations.ray_env import runtime_env


@pytest.fixture(autouse=True)
def _tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ray_launching.install(tmp_path / "site")))
    monkeypatch.delenv("RANKSCOPE_STRICT")


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(tool: Any, **section: Any) -> dict[str, Any]:
        return {
            "global_profiler": {"steps": [1, 2], "save_path": str(tmp_path / "out")},
            "actor": {"profiler": {"enable": True, "ranks": [0], "tool": tool, **section}},
        }

    return make


def test_a_rank_gets_what_its_tools_need_and_the_others_what_the_user_gave(config: Any) -> None:
    base = {"env_vars": {"MINE": "1"}, "py_executable": "/opt/python -X dev", "working_dir": "/code"}
    facts = {"roles": ["actor"], "world_size": 2, "base": base}
    assert runtime_env(config("variables"), rank=0, **facts) == {
        **base,
        "env_vars": {"MINE": "1", "WANTED": "actor 0", "NVTX_INJECTION64_PATH": "/none"},
    }
    for other in (
        runtime_env(config("variables"), rank=1, **facts),
        runtime_env(config("variables"), **{**facts, "roles": ["critic"]}),
        runtime_env({**config("variables"), "global_profiler": {"steps": None}}, rank=0, **facts),
    ):
        assert other == base
    assert base["env_vars"] == {"MINE": "1"}
    assert runtime_env(config("variables"), rank=1) == {}


def test_a_variable_of_the_users_own_wins_and_that_is_said(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"env_vars": {"WANTED": "mine"}}
    assert runtime_env(config("variables"), base=base)["env_vars"]["WANTED"] == "mine"
    said = capsys.readouterr().err
    assert "runtime_env.env_vars has its own WANTED, which is kept" in said
    assert 'own=mine wanted="actor 0" tools=variables' in said


def test_our_own_variables_of_the_driver_reach_profiled_ranks(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_LOG_LEVEL", "debug")
    monkeypatch.setenv("RANKSCOPE_STRICT", "1")
    variables = runtime_env(config("nothing"), base={"env_vars": {"RANKSCOPE_STRICT": "0"}})["env_vars"]
    assert variables == {"RANKSCOPE_LOG_LEVEL": "debug", "RANKSCOPE_STRICT": "0"}
    assert runtime_env(config("nothing"), rank=1) == {}


@pytest.mark.parametrize("key", ["nsight", "_nsight"])
def test_a_second_nsight_is_refused_by_name(config: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runtime_env(config("nsighted"), base={key: "default"})
    text = str(caught.value)
    assert text.startswith("runtime_env.nsight: it is 'default', and tool 'nsighted' needs {")
    assert "take it out, or leave 'nsighted' out of this role's tool" in text
    same = {"t": "nvtx", "o": "/out/r%p"}
    assert runtime_env(config("nsighted"), base={key: same}) == {key: same}
    assert runtime_env(config("nsighted"), rank=1, base={key: "default"}) == {key: "default"}


def test_any_entry_that_cannot_be_shared_is_refused(config: Any) -> None:
    assert runtime_env(config("entry"))["wrap"] == 1
    with pytest.raises(ConfigError, match=r"runtime_env.wrap: it is 2, and tool 'entry' needs 1"):
        runtime_env(config("entry"), base={"wrap": 2})


def test_the_users_python_is_kept_under_nsight(config: Any) -> None:
    """Ray would start ``python`` of PATH instead."""
    found = runtime_env(config("nsighted"), base={"py_executable": "/opt/python -X dev"})
    assert found == {"py_executable": "nsys profile -t nvtx -o /out/r%p /opt/python -X dev"}
    assert runtime_env(config("nsighted")) == {"nsight": {"t": "nvtx", "o": "/out/r%p"}}


def test_a_tool_that_knows_nothing_of_ray_starts_the_process_all_the_same(config: Any) -> None:
    import sys

    assert runtime_env(config("prefixed")) == {"py_executable": f"env 'MARK=a b' {sys.executable}"}
    found = runtime_env(config("prefixed"), base={"py_executable": "/opt/python"})
    assert found == {"py_executable": "env 'MARK=a b' /opt/python"}


def test_a_tool_that_needs_cupti_beside_the_users_nsight(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"nsight": "default"}
    assert runtime_env(config("device"), base=base) == base
    assert "runtime_env.nsight and tool 'device' both need CUPTI" in capsys.readouterr().err


def test_a_runtime_env_of_rays_own(config: Any) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed; install it with: pip install ray")
    base = ray.runtime_env.RuntimeEnv(env_vars={"MINE": "1"}, nsight="default")
    with pytest.raises(ConfigError, match=r"runtime_env.nsight: it is 'default'"):
        runtime_env(config("nsighted"), base=base)
    assert runtime_env(config("variables"), base=base)["env_vars"]["MINE"] == "1"


def test_a_real_actor_is_started_with_it(cluster: Any, config: Any) -> None:
    import os

    import ray
    import ray_workers

    base = {"env_vars": {"MINE": "1"}}
    wanted = runtime_env(config(["prefixed", "variables"]), base=base)
    kind = ray.remote(ray_workers.NoWorker).options(num_cpus=0, resources={"a": 1}, runtime_env=wanted)
    actor = kind.remote()
    found = ray.get(actor.__ray_call__.remote(lambda _: dict(os.environ)), timeout=60)
    ray.kill(actor)
    assert {key: found.get(key) for key in ("MARK", "MINE", "WANTED")} == {
        "MARK": "a b",
        "MINE": "1",
        "WANTED": "actor 0",
    }
