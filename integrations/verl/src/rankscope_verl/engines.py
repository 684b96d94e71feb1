"""Rollout servers of verl: the engine records itself, and rankscope tells it what, when and where to.

Source of the interfaces: verl 0.9.1, ``verl/workers/rollout/vllm_rollout/vllm_async_server.py`` and
``sglang_rollout/async_sglang_server.py``. Neither engine runs on a CPU, so these parts were not run with one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankscope.errors import ConfigError, FaultError
from rankscope_verl.changes import Changes
from rankscope_verl.install import tell
from rankscope_verl.settings import LeaveToVerlError, Setting, at_path, read
from rankscope_verl.step import announced

if TYPE_CHECKING:
    from rankscope.rollout import RolloutProfiler

ROLLOUT = "_rankscope_rollout"
"""On a server's profiler, and on the config that it holds: its `Rollout`."""

ENGINE_TOOLS = frozenset({"torch", "npu"})
"""Tools for which verl lets an engine record."""

_selecting = threading.local()


@dataclasses.dataclass
class Rollout:
    """One replica, as its server knows it.

    Attributes:
        setting: what the rollout section says.
        index: number of the replica.
        width: its GPUs.
        profiler: drives its engine, once the server is there.
    """

    setting: Setting
    index: int
    width: int
    profiler: RolloutProfiler | None = None

    def bind(self, server: Any, engine: str, handle: str, *, drive: bool) -> None:
        """Make what drives the engine of a server; the engine itself comes later."""
        from rankscope.rollout import Layout, Replica, RolloutProfiler

        sizes = server.config
        layout = Layout(sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, sizes.data_parallel_size)
        try:
            self.profiler = RolloutProfiler(
                self.setting.config,
                engine=engine,
                replicas=[Replica(self.index, target=_EngineOf(server, handle))],
                layout=layout if layout.gpus == self.width else None,
                gpus_per_replica=self.width,
                role=self.setting.role,
                drive=drive,
            )
        except ConfigError as error:
            raise at_path(error, self.setting.role, self.setting.path) from None


class _EngineOf:
    """The engine of a server, which is made after everything else."""

    def __init__(self, server: Any, handle: str) -> None:
        self._server = server
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self._server, self._handle), name)


def change(package: ModuleType, changes: Changes) -> None:
    """In ``verl.utils.profiler``: what the servers take from there."""
    module: Any = package.profile
    config: Any = package.config
    changes.replace(
        module, "build_rollout_dist_profiler", "replica_rank, replica_world_size, config, tool_config", _build
    )
    changes.put(package, "build_rollout_dist_profiler", module.build_rollout_dist_profiler)
    changes.replace(config, "build_vllm_profiler_args", "profiler_config, tool_config, rank, legacy_env", _vllm_args)
    changes.put(package, "build_vllm_profiler_args", config.build_vllm_profiler_args)


def change_vllm(module: ModuleType, changes: Changes) -> None:
    """In ``verl.workers.rollout.vllm_rollout.vllm_async_server``."""
    server: Any = module.vLLMHttpServer
    parameters = (
        "self, config, model_config, rollout_mode, workers, replica_rank, node_rank, gpus_per_node, nnodes, "
        "cuda_visible_devices, disaggregation_role, disaggregation_kv_transfer_config"
    )
    _change_server(server, parameters, "vllm", "engine", changes)


def change_sglang(module: ModuleType, changes: Changes) -> None:
    """In ``verl.workers.rollout.sglang_rollout.async_sglang_server``."""
    server: Any = module.SGLangHttpServer
    parameters = (
        "self, config, model_config, rollout_mode, workers, replica_rank, node_rank, nnodes, cuda_visible_devices, "
        "base_gpu_id, disaggregation_role, disaggregation_bootstrap_port"
    )
    _change_server(server, parameters, "sglang", "tokenizer_manager", changes)


def _change_server(server: Any, parameters: str, engine: str, handle: str, changes: Changes) -> None:
    changes.replace(server, "__init__", parameters, functools.partial(_binding, engine, handle))
    changes.replace(server, "start_profile", "self, kwargs", _start)
    changes.replace(server, "stop_profile", "self", _stop)


def selecting() -> bool:
    """Whether one of verl's profilers is being made that only tells which replica is profiled."""
    return bool(getattr(_selecting, "now", False))


@contextlib.contextmanager
def _as_selector() -> Iterator[None]:
    _selecting.now = True
    try:
        yield
    finally:
        _selecting.now = False


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_rollout_dist_profiler(
        replica_rank: int, replica_world_size: int, config: Any = None, tool_config: Any = None
    ) -> Any:
        with _as_selector():
            selector = original(replica_rank, replica_world_size, config, tool_config)
        try:
            setting = read(config, tool_config, "rollout") if config is not None else None
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - verl's own functions do it then
            if not isinstance(error, LeaveToVerlError):
                tell("rankscope failed in a rollout server, which is left to verl", reason=repr(error))
            return selector
        if setting is None or not selector.check_this_rank():
            return selector
        selector._discrete = setting.discrete  # noqa: SLF001
        if not setting.discrete:
            # As in verl: the key is the actor's, which most runs leave at false.
            key = f"{setting.path or 'rollout.profiler'}.tool_config.{setting.tools[0]}.discrete"
            tell("the rollout engines are not profiled, though their section is enabled", help=f"set {key}=true")
            return selector
        rollout = Rollout(setting, replica_rank, max(1, replica_world_size))
        for holder in (selector, selector.config):
            with contextlib.suppress(AttributeError):
                object.__setattr__(holder, ROLLOUT, rollout)
        return selector

    return build_rollout_dist_profiler


def _vllm_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_vllm_profiler_args(
        profiler_config: Any, tool_config: Any, rank: int, legacy_env: bool = True
    ) -> dict[str, Any]:
        rollout = getattr(profiler_config, "__dict__", {}).get(ROLLOUT)
        if isinstance(rollout, Rollout) and rollout.profiler is not None and not legacy_env:
            try:
                launch = rollout.profiler.launch(rank, **_fields_of_vllm())
                if launch.arguments:
                    return dict(launch.json_arguments)
            except Exception as error:  # noqa: BLE001 - verl's own arguments will do
                tell("rankscope could not say how vLLM is to be started; verl does", reason=repr(error))
        made: dict[str, Any] = original(profiler_config, tool_config, rank, legacy_env)
        return made

    return build_vllm_profiler_args


def _fields_of_vllm() -> dict[str, Any]:
    """What this vLLM's own class of options holds, where it is there to be asked."""
    kind = getattr(sys.modules.get("vllm.config"), "ProfilerConfig", None)
    fields = getattr(kind, "__dataclass_fields__", None)
    return {} if not fields else {"fields": tuple(fields)}


def _binding(engine: str, handle: str, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            _take_up_list(self)
            rollout = rollout_of(self)
            if rollout is not None:
                rollout.bind(self, engine, handle, drive=getattr(self, "node_rank", 0) == 0)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - verl drives the engine then
            self.profiler_controller.__dict__.pop(ROLLOUT, None)
            tell("rankscope failed in a rollout server, which is left to verl", reason=repr(error))

    return init


def _take_up_list(server: Any) -> None:
    """With a list of tools verl switches its engines' profiling off, though an engine may know one of them."""
    config = server.config.profiler
    tool = getattr(config, "tool", None)
    if isinstance(tool, str) and "," in tool and ENGINE_TOOLS & {word.strip() for word in tool.split(",")}:
        build = sys.modules["verl.utils.profiler"].build_rollout_dist_profiler
        server.profiler_controller = build(server.replica_rank, server.replica_world_size, config=config)


def rollout_of(server: Any) -> Rollout | None:
    """What is known of a server's replica; None where verl is to drive it, or nothing is profiled."""
    found = getattr(server.profiler_controller, "__dict__", {}).get(ROLLOUT)
    return found if isinstance(found, Rollout) else None


def _start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def start_profile(self: Any, **kwargs: Any) -> Any:
        rollout = rollout_of(self)
        if rollout is None or rollout.profiler is None:
            return await original(self, **kwargs)
        step = kwargs.get("global_step", announced())
        known = step if rollout.setting.steps and step in rollout.setting.steps else None
        await _contained(rollout.profiler.start_profile_async(step=known))
        return None

    return start_profile


def _stop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def stop_profile(self: Any) -> Any:
        rollout = rollout_of(self)
        if rollout is None or rollout.profiler is None:
            return await original(self)
        await _contained(rollout.profiler.stop_profile_async())
        await _contained(rollout.profiler.relocate_profile_async())
        return None

    return stop_profile


async def _contained(call: Any) -> None:
    """All replicas are waited for at once, and what one of them raises would end the training."""
    from rankscope.rollout import RolloutError

    try:
        await call
    except (FaultError, RolloutError):  # strict mode
        raise
    except Exception as error:  # noqa: BLE001 - see above
        tell("a rollout engine's profiling failed; the training goes on", reason=f"{type(error).__name__}: {error}")
