"""Rollout servers: verl's own config and functions, and servers with the signatures of verl's.

vLLM and SGLang are not here: the servers and engines are stand-ins, written from the signatures in verl 0.9.1, vllm
0.33.0 and sglang 0.5.12. The engines write real, gzipped traces.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import verl.utils.profiler as verls
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler import DistProfiler, ProfilerConfig
from verl.utils.profiler.config import TorchProfilerToolConfig

from rankscope import ConfigError, shutdown
from rankscope_verl import engines, step
from rankscope_verl.changes import Changes, MisfitError

Compose = Callable[..., Any]
ROLLOUT = "actor_rollout_ref.rollout"
ON = (
    f"{ROLLOUT}.name=vllm",
    "global_profiler.tool=torch",
    "global_profiler.steps=[1,2]",
    "global_profiler.relocate_results=true",
    f"{ROLLOUT}.profiler.enable=true",
    f"{ROLLOUT}.profiler.relocate_results=true",
    f"{ROLLOUT}.profiler.tool_config.torch.discrete=true",
)


class Engine:
    """Writes a trace for each GPU at its stop, named like vLLM's or SGLang's."""

    def __init__(self, width: int, style: str) -> None:
        self.width, self.style = width, style
        self.told: list[dict[str, Any]] = []
        self.directory: Path | None = None
        self.error: Exception | None = None

    def write(self, prefix: str = "") -> None:
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        for rank in range(self.width):
            facts = {"traceEvents": [], "distributedInfo": {"rank": rank, "world_size": self.width}}
            name = self.style.format(prefix=prefix, rank=rank)
            (self.directory / name).write_bytes(gzip.compress(json.dumps(facts).encode()))


class Vllm(Engine):
    prefix = ""

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        self.told.append({"profile_prefix": profile_prefix})
        self.prefix = f"{profile_prefix}_" if profile_prefix else ""

    async def stop_profile(self) -> None:
        if self.error:
            raise self.error
        self.write(self.prefix)


class Sglang(Engine):
    server_args = SimpleNamespace(tp_size=2, pp_size=1, dp_size=1, enable_dp_attention=False)

    async def start_profile(
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: list[str] | None = None,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
        profile_by_stage: bool = False,
        merge_profiles: bool = False,
        profile_prefix: str | None = None,
        profile_stages: list[str] | None = None,
    ) -> None:
        self.told.append({"output_dir": output_dir, "with_stack": with_stack, "num_steps": num_steps})
        self.directory, self.prefix = Path(output_dir or ""), f"{profile_prefix}-" if profile_prefix else ""

    async def stop_profile(self) -> None:
        if self.error:
            raise self.error
        self.write(self.prefix)


class Server:
    """What both servers of verl do with their profiler's config."""

    def take(self, config: Any, replica_rank: int, node_rank: int) -> None:
        self.config = omega_conf_to_dataclass(config)
        self.replica_rank, self.node_rank = replica_rank, node_rank
        self.replica_world_size = self.config.tensor_model_parallel_size
        section, options = self.config.profiler, None
        if section.tool in ("torch", "npu"):
            options = omega_conf_to_dataclass((section.tool_config or {}).get(section.tool))
        else:
            section = None
        self.profiler_controller = verls.build_rollout_dist_profiler(
            replica_rank, self.replica_world_size, config=section, tool_config=options
        )
        self.by_verl: list[str] = []

    def _should_profile(self) -> bool:
        asked = self.profiler_controller
        return bool(asked.check_enable() and asked.check_this_rank() and asked.is_discrete_mode())


def vllm_server() -> Any:
    class vLLMHttpServer(Server):
        def __init__(
            self,
            config: Any,
            model_config: Any,
            rollout_mode: Any,
            workers: Any,
            replica_rank: int,
            node_rank: int,
            gpus_per_node: int,
            nnodes: int,
            cuda_visible_devices: str,
            disaggregation_role: str = "null",
            disaggregation_kv_transfer_config: Any = None,
        ) -> None:
            self.take(config, replica_rank, node_rank)

        def launch(self) -> dict[str, Any]:
            made = {}
            if self._should_profile():
                made = verls.build_vllm_profiler_args(
                    self.profiler_controller.config, self.profiler_controller.tool_config, self.replica_rank, False
                )
            self.engine = Vllm(
                self.replica_world_size, "{prefix}dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.1234567.pt.trace.json.gz"
            )
            if made:
                self.engine.directory = Path(json.loads(made["profiler_config"])["torch_profiler_dir"])
            return made

        async def start_profile(self, **kwargs: Any) -> None:
            self.by_verl.append("start")

        async def stop_profile(self) -> None:
            self.by_verl.append("stop")

    return vLLMHttpServer


def sglang_server() -> Any:
    class SGLangHttpServer(Server):
        def __init__(
            self,
            config: Any,
            model_config: Any,
            rollout_mode: Any,
            workers: Any,
            replica_rank: int,
            node_rank: int,
            nnodes: int,
            cuda_visible_devices: str,
            base_gpu_id: int,
            disaggregation_role: str = "null",
            disaggregation_bootstrap_port: int | None = None,
        ) -> None:
            self.take(config, replica_rank, node_rank)
            self.tokenizer_manager = Sglang(self.replica_world_size, "{prefix}1764460000.123-TP-{rank}.trace.json.gz")

        async def start_profile(self, **kwargs: Any) -> None:
            self.by_verl.append("start")

        async def stop_profile(self) -> None:
            self.by_verl.append("stop")

    return SGLangHttpServer


def vllm(config: Any, replica: int = 0, node: int = 0) -> Any:
    kind = vllm_server()
    module = ModuleType("vllm_async_server")
    module.vLLMHttpServer = kind  # type: ignore[attr-defined]
    engines.change_vllm(module, Changes())
    server = kind(config.actor_rollout_ref.rollout, None, None, [], replica, node, 8, 1, "0")
    server.args = server.launch()
    return server


def sglang(config: Any, replica: int = 0) -> Any:
    kind = sglang_server()
    module = ModuleType("async_sglang_server")
    module.SGLangHttpServer = kind  # type: ignore[attr-defined]
    engines.change_sglang(module, Changes())
    return kind(config.actor_rollout_ref.rollout, None, None, [], replica, 0, 1, "0", 0)


async def one_step(server: Any, **facts: Any) -> None:
    await server.start_profile(**facts)
    await server.stop_profile()


def traces(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json.gz"))


# Which replica.


@pytest.mark.parametrize(
    ("facts", "width", "selected"),
    [
        ({"ranks": [0, 8]}, 8, [0, 1]),
        ({"ranks": [9]}, 8, [1]),
        ({"ranks": [0, 8]}, 2, [0, 4]),
        ({"ranks": []}, 8, [0]),
        ({"ranks": [0], "all_ranks": True}, 8, [0, 1, 2, 3, 4]),
        ({"ranks": [2], "enable": False}, 1, []),
    ],
)
def test_ranks_are_those_of_gpus(facts: dict[str, Any], width: int, selected: list[int]) -> None:
    options = TorchProfilerToolConfig(contents=["cpu"], discrete=True)
    given = {"tool": "torch", "enable": True, "tool_config": {"torch": options}, **facts}
    section = ProfilerConfig(**given)
    found = []
    for replica in range(5):
        made = verls.build_rollout_dist_profiler(replica, width, config=section, tool_config=options)
        assert isinstance(made, DistProfiler)
        if made.check_enable() and made.check_this_rank() and made.is_discrete_mode():
            found.append(replica)
    assert found == selected
    assert list(section.ranks) == given["ranks"]
    assert shutdown.handles() == ()  # a server makes no backend of its own


def test_a_rollout_that_will_not_be_profiled_says_what_to_set(compose: Compose, said: Callable[[], str]) -> None:
    server = vllm(compose(*ON[:-1]))
    assert not server._should_profile()
    assert f"{ROLLOUT}.profiler.tool_config.torch.discrete=true" in said()
    vllm(compose(*ON[:-1]), replica=1)
    vllm(compose(ON[0], "global_profiler.tool=torch", "global_profiler.steps=[1]"))
    assert "not profiled" not in said()


def test_a_mistake_comes_before_the_engine_starts(compose: Compose) -> None:
    with pytest.raises(ConfigError, match="max_trace_mb"):
        vllm(compose(*ON, f"+{ROLLOUT}.profiler.tool_config.torch.max_trace_mb=-1"))


# vLLM.


def test_vllm_is_launched_started_and_gathered_by_rankscope(
    compose: Compose, save_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = f"{ROLLOUT}.profiler.tool_config.torch.contents=[cpu,stack]"
    config = compose(*ON, contents, f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.profiler.ranks=[3]")
    assert not vllm(config)._should_profile()
    server = vllm(config, replica=1)
    told = json.loads(server.args["profiler_config"])
    assert told["torch_profiler_dir"] == str(save_path / "agent_loop_rollout_replica_1")
    assert (told["torch_profiler_with_stack"], told["ignore_frontend"]) == (True, True)
    for number in (1, 2):
        monkeypatch.setattr(engines, "announced", lambda number=number: number)
        asyncio.run(one_step(server))
    assert server.by_verl == []
    kept = [name for name in traces(save_path) if name.startswith("rollout-replica1-globalrank3_step")]
    assert kept == traces(save_path)
    assert [name.split("_")[1] for name in kept] == ["step1", "step2"]
    assert all("_tp1_" in name for name in kept)
    assert len(traces(save_path / "agent_loop_rollout_replica_1")) == 2  # those of rank 2 stay where they are


def test_an_unknown_step_is_not_guessed(compose: Compose, save_path: Path) -> None:
    server = vllm(compose(*ON))
    asyncio.run(one_step(server, global_step=77))
    (name,) = traces(save_path)
    assert name.startswith("rollout-replica0-globalrank0_dp0")


def test_an_engine_that_fails_does_not_end_the_training(
    compose: Compose, lenient: None, said: Callable[[], str]
) -> None:
    server = vllm(compose(*ON))
    server.engine.error = RuntimeError("the engine is gone")
    asyncio.run(one_step(server, global_step=1))
    assert "the engine is gone" in said()
    server.engine.error = None
    engines.rollout_of(server).profiler.close_profile(0.0)  # type: ignore[union-attr]


def test_the_other_nodes_of_a_replica_drive_nothing(compose: Compose, save_path: Path) -> None:
    server = vllm(compose(*ON), node=1)
    server.engine.error = AssertionError("driven")
    server.engine.write()
    asyncio.run(one_step(server, global_step=1))
    assert server.engine.told == []


def test_a_list_of_tools_may_hold_one_that_an_engine_knows(compose: Compose, save_path: Path) -> None:
    overrides = [one for one in ON if not one.startswith("global_profiler.tool=")]
    server = vllm(compose(*overrides, 'global_profiler.tool="torch,torch_memory"'))
    assert server._should_profile()
    asyncio.run(one_step(server, global_step=2))
    assert [name.split("_")[:2] for name in traces(save_path)] == [["rollout-replica0-globalrank0", "step2"]]


def test_verl_drives_where_rankscopes_tool_is_missing(
    compose: Compose, save_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankscope import registry

    found = {name: infos for name, infos in registry.providers().items() if name != "torch"}
    monkeypatch.setattr(registry, "providers", lambda: found)
    server = vllm(compose(*ON))
    assert server._should_profile()
    assert "torch_profiler_dir" in server.args["profiler_config"]
    asyncio.run(one_step(server))
    assert server.by_verl == ["start", "stop"]


def test_a_fault_of_ours_leaves_the_server_to_verl(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(engines.Rollout, "bind", fail)
    server = vllm(compose(*ON))
    asyncio.run(one_step(server))
    assert server.by_verl == ["start", "stop"]
    assert "a rollout server, which is left to verl" in said()


def test_a_server_that_looks_different_is_left_to_verl() -> None:
    class vLLMHttpServer:
        def __init__(self, config: Any) -> None:
            pass

    module = ModuleType("vllm_async_server")
    module.vLLMHttpServer = vLLMHttpServer  # type: ignore[attr-defined]
    with pytest.raises(MisfitError, match=r"takes \(self, config\), not"):
        engines.change_vllm(module, Changes())


# SGLang.


def test_sglang_is_started_and_gathered_by_rankscope(compose: Compose, save_path: Path) -> None:
    contents = f"{ROLLOUT}.profiler.tool_config.torch.contents=[cpu,stack]"
    window = f"{ROLLOUT}.profiler.tool_config.torch.profile_token_end=16"
    server = sglang(compose(*ON, contents, window, f"{ROLLOUT}.tensor_model_parallel_size=2"))
    server.tokenizer_manager.error = RuntimeError("Profiling is not in progress. Call /start_profile first.")
    server.tokenizer_manager.directory = save_path / "agent_loop_rollout_replica_0"

    async def two_steps() -> None:
        await server.start_profile(global_step=1)
        server.tokenizer_manager.write(server.tokenizer_manager.prefix)  # it stopped by itself after 16 passes
        await server.stop_profile()
        server.tokenizer_manager.error = None
        await one_step(server, global_step=2)

    asyncio.run(two_steps())
    folder = str(save_path / "agent_loop_rollout_replica_0")
    assert server.tokenizer_manager.told == [{"output_dir": folder, "with_stack": True, "num_steps": 16}] * 2
    assert server.by_verl == []
    found = traces(save_path)
    assert [name.split("_")[:2] for name in found] == [["rollout-replica0-globalrank0", f"step{n}"] for n in (1, 2)]


def test_without_a_cluster_nobody_announces_a_step() -> None:
    assert step.announced() is None
