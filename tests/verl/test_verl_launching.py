"""What a worker's process gets before it starts: by verl's own worker group, with a stand-in for Ray's actor."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, create_colocated_worker_cls
from verl.trainer.constants_ppo import NVTX_INJECTION_ENV, get_ppo_ray_runtime_env
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorkerConfig
from verl_workers import CpuActorWorker, CpuTrainingWorker

from rankscope import ConfigError

pytestmark = pytest.mark.usefixtures("tools_folder")

Compose = Callable[..., Any]
ACTOR = "actor_rollout_ref.actor.profiler"
CUPTI = "/usr/local/cuda/lib64/libcupti.so"
NSIGHT = {"capture-range": "cudaProfilerApi", "capture-range-end": None}


def started(config: Any, *, rank: int = 0, colocated: bool = True, device: str = "cuda", **facts: Any) -> Any:
    """The ``runtime_env`` with which verl would start the worker of a rank."""
    critic = TrainingWorkerConfig(
        model_type="value_model", profiler_config=omega_conf_to_dataclass(config.critic.profiler)
    )
    classes = {
        "actor": RayClassWithInitArgs(ray.remote(CpuActorWorker), config=config.actor_rollout_ref, role="actor"),
        "critic": RayClassWithInitArgs(ray.remote(CpuTrainingWorker), config=critic),
    }
    worker = create_colocated_worker_cls(classes) if colocated else classes["critic"]
    seen: dict[str, Any] = {}
    worker.update_options = seen.update
    kind = type(worker)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(kind, "__call__", lambda self, **_: "an actor")
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    group.__dict__.update(
        use_gpu=False,
        name_prefix="x",
        _master_addr="127.0.0.1",
        _master_port="1",
        _workers=[],
        _worker_names=[],
        device_name=device,
        profile_steps=[1],
        **{"worker_nsight_options": None, **facts},
    )
    try:
        group._create_worker(
            rank=rank,
            pg_idx=0,
            pg=None,
            local_rank=rank,
            resource_pool=SimpleNamespace(world_size=4, use_gpu=False, store=[4], max_colocate_count=1),
            ray_cls_with_init=worker,
            worker_env=None,
            detached=False,
        )
    finally:
        monkey.undo()
    assert group._workers == ["an actor"]
    return seen["runtime_env"]


def test_torch_gets_cupti_for_itself_on_the_ranks_that_are_profiled(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(
        "global_profiler.tool=torch", "global_profiler.steps=[1]", f"{ACTOR}.enable=true", f"{ACTOR}.ranks=[1]"
    )
    for rank in (0, 1):
        env = started(config, rank=rank)["env_vars"]
        assert env["RANK"] == str(rank)
        assert (NVTX_INJECTION_ENV in env) == (rank == 1)


def test_nothing_is_added_where_nothing_is_profiled(compose: Compose) -> None:
    plain = started(compose(), device="cpu")
    assert set(plain["env_vars"]) == {
        *("WORLD_SIZE", "RANK", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    assert set(plain) == {"env_vars"}


def test_nsys_is_ours_and_only_where_it_is_wanted(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(
        "global_profiler.tool=nsys",
        "global_profiler.steps=[1,2,5]",
        f"{ACTOR}.enable=true",
        "global_profiler.global_tool_config.nsys.worker_nsight_options.trace=cuda",
    )
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    options = {**NSIGHT, "trace": "cuda", "capture-range-end": "repeat-shutdown:18"}
    first = started(config, worker_nsight_options=dict(options))
    assert first["nsight"]["trace"] == "cuda"
    assert first["nsight"]["capture-range-end"] != "repeat-shutdown:18"  # verl counts six windows a step
    assert started(config, rank=1, worker_nsight_options=dict(options)).get("nsight") is None


def test_a_worker_group_of_one_class_is_known_too(compose: Compose) -> None:
    config = compose("global_profiler.tool=torch", "global_profiler.steps=[1]", "critic.profiler.enable=true")
    assert NVTX_INJECTION_ENV in started(config, colocated=False)["env_vars"]
    assert NVTX_INJECTION_ENV in started(config)["env_vars"]
    assert NVTX_INJECTION_ENV not in started(config, rank=1)["env_vars"]


def test_tools_that_cannot_share_a_process_are_refused_by_the_driver(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    config = compose(
        "global_profiler.steps=[1]",
        *(f"{ACTOR}.enable=true", f"{ACTOR}.tool=torch"),
        *("critic.profiler.enable=true", "critic.profiler.tool=nsys"),
    )
    with pytest.raises(ConfigError, match="both need 'cupti'"):
        started(config)


def test_a_config_that_is_not_understood_leaves_the_start_to_verl(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    from rankscope_verl import launching

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(launching, "read", fail)
    config = compose("global_profiler.tool=torch", "global_profiler.steps=[1]", f"{ACTOR}.enable=true")
    assert NVTX_INJECTION_ENV not in started(config, device="cpu")["env_vars"]
    assert "what a worker's process needs is not known" in said()


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"global_profiler": {"tool": "torch"}}, True),
        ({"global_profiler": {"tool": "nsys", "steps": [1]}, "actor": {"profiler": {"enable": True}}}, False),
        ({"global_profiler": {"steps": [1]}, "actor": {"profiler": {"enable": True, "tool": "torch"}}}, True),
        ({"global_profiler": {"steps": [1]}, "actor": {"profiler": {"enable": False, "tool": "torch"}}}, False),
        ({"global_profiler": {"steps": None}, "actor": {"profiler": {"enable": True, "tool": "torch"}}}, False),
        ({"global_profiler": {"steps": [1]}, "actor": {"profiler": {"enable": True, "tool": "torch,diary"}}}, True),
        ({"global_profiler": {"steps": "nonsense"}, "actor": {"profiler": {"enable": 7}}}, False),
    ],
)
def test_all_workers_leave_cupti_to_torch_if_any_role_uses_it(
    facts: dict[str, Any], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NVTX_INJECTION_ENV, CUPTI)
    variables = get_ppo_ray_runtime_env(OmegaConf.create(facts))["env_vars"]
    assert (variables.get(NVTX_INJECTION_ENV, CUPTI) != CUPTI) == found
    monkeypatch.setenv("VERL_KEEP_NVTX_INJECTION", "1")
    assert NVTX_INJECTION_ENV not in get_ppo_ray_runtime_env(OmegaConf.create(facts))["env_vars"]
