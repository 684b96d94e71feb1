"""Ray: actors that are profiled, the driver that drives them, and the runtime_env that they start with.

Source of the interfaces: ray 2.60.0, ``ray/actor.py`` (handles, ``__ray_call__``), ``ray/exceptions.py``,
``ray/_private/runtime_env/``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray

from rankscope.integrations.actors.calls import ActorCallError
from rankscope.integrations.actors.group import ActorGroup, Deadlines
from rankscope.integrations.actors.inside import Place, ProfiledRayActor
from rankscope.integrations.actors.members import Member, State
from rankscope.integrations.ray_env import runtime_env, runtime_envs

__all__ = [
    "ActorCallError",
    "Deadlines",
    "Member",
    "Place",
    "ProfiledRayActor",
    "RayGroup",
    "runtime_env",
    "runtime_envs",
]

_LONGEST = 300
"""Characters of an error of Ray that are told."""

_COLOURS = re.compile(r"\x1b\[\d*m")

_PAUSE = 0.2
"""Seconds between two attempts to hear of a Ray that does not work."""


class RayGroup(ActorGroup):
    """All profiled actors of a run, driven like one worker.

    Example::

        with RayGroup({"actor": actors, "critic": critics, "rollout": rollouts}) as group:
            controller = ProfileController(config, workers=[group], total_steps=100)
            for n in range(1, 101):
                with controller.step(n):
                    train(n)
            controller.close()

    Handles of one actor are called once, however many there are; so are actors of one process. Calls go out to all
    actors at once, and a phase ends when all have answered or its deadline is over. An actor that died, or does not
    answer, is named once in the log and in the ledger; the others and the training go on.

    Args:
        actors: actor handles: one, several, or by name of their group; objects with a list of handles in ``workers``
            are accepted, too. Their class inherits from `ProfiledRayActor`, or has the methods of
            `rankscope.ProfiledWorker`.
        deadlines: seconds for each phase.
        max_in_flight: most calls at once.
        strict: whether to raise what actors' methods raised, after all were called; as ``RANKSCOPE_STRICT`` says where
            it is None. An actor that died or is late is never raised.
        finish_per_node: run the finish command once on each node, even where nodes share the save path.

    Raises:
        TypeError: something is no actor handle, or its class cannot be profiled.
    """

    def __init__(
        self,
        actors: Any,
        *,
        deadlines: Deadlines | None = None,
        max_in_flight: int = 256,
        strict: bool | None = None,
        finish_per_node: bool = False,
    ) -> None:
        super().__init__(
            list(_members(actors)),
            _RayTransport(),
            deadlines=deadlines,
            max_in_flight=max_in_flight,
            strict=strict,
            finish_per_node=finish_per_node,
        )


class _RayTransport:
    """Calls by Ray."""

    def __init__(self) -> None:
        self._task: Any = None

    def usable(self) -> bool:
        """Asked before each phase: a call after ``ray.shutdown()`` would start a new cluster."""
        return bool(ray.is_initialized())

    def call(self, member: Member, method: str, arguments: Mapping[str, Any]) -> Hashable:
        """By ``profile_call`` where the class has it, else by the method itself."""
        if member.ours:
            return _ref(member.target.profile_call.remote(method, dict(arguments)))
        function = getattr(member.target, method, None)
        if function is None:  # an optional method; asking where it is changes nothing
            return _ref(member.target.__ray_ready__.remote())
        return _ref(function.remote(**arguments))

    def settle(self, member: Member, seconds: float) -> Hashable:
        """On whatever thread of the actor."""
        return _ref(member.target.profile_settle.remote(seconds))

    def run(self, member: Member, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Hashable:
        """By ``__ray_call__``, which every actor has. An asynchronous one runs it beside its event loop."""
        return _ref(member.target.__ray_call__.remote(function, **arguments))

    def run_on_node(self, node: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Hashable:
        """As a task that takes nothing of the node's resources."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._task is None:
            self._task = ray.remote(num_cpus=0, max_retries=0)(_run)
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return _ref(self._task.options(scheduling_strategy=strategy).remote(function, dict(arguments)))

    def wait(self, calls: list[Any], seconds: float) -> Sequence[Any]:
        """The first one is waited for, the others are taken along."""
        try:
            done, rest = ray.wait(calls, num_returns=1, timeout=seconds, fetch_local=False)
            if done and rest:
                more, _ = ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)
                done = [*done, *more]
        except Exception:  # noqa: BLE001 - a Ray that has gone meanwhile: nobody answers any more
            time.sleep(min(seconds, _PAUSE))
            return ()
        return list(done)

    def result(self, call: Any) -> Any:
        """It is done, so that only a large result of a node that is just being lost could keep us."""
        return ray.get(call, timeout=30)

    def explain(self, error: Exception) -> tuple[State, str]:
        """By the classes of ``ray.exceptions``."""
        known = ray.exceptions
        if isinstance(error, known.RayTaskError):
            cause = getattr(error, "cause", None)
            return "fine", _line(f"{type(cause).__name__}: {cause}" if cause is not None else str(error))
        if isinstance(error, getattr(known, "UnserializableException", ())):  # what it raised cannot be made here
            return "fine", _line(str(error).rpartition("Original exception: ")[2])
        if isinstance(error, known.ActorDiedError):  # lines that begin with a tab say which actor, as we do ourselves
            words = [line for line in str(error).splitlines() if not line.startswith("\t")]
            return "dead", _line(" ".join(words[1:] or words))
        return "unreachable", _line(f"{type(error).__name__}: {error}")


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return function(**arguments)


def _ref(call: Any) -> Hashable:
    """Of a method that is declared with several returns, any of them says when it is done."""
    return call[0] if isinstance(call, list) else call  # type: ignore[no-any-return]


def _line(text: str) -> str:
    words = " ".join(_COLOURS.sub("", text).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"


def _members(actors: Any) -> Iterator[Member]:
    groups: Iterable[tuple[str, Any]] = actors.items() if isinstance(actors, Mapping) else [("actors", actors)]
    for name, group in groups:
        for number, handle in enumerate(_handles(group)):
            yield _member(handle, f"{name}[{number}]")


def _handles(group: Any) -> list[Any]:
    """The handles of a group, flattened; what is neither a handle nor a collection is left for the check."""
    if not _is_handle(group):
        group = getattr(group, "workers", group)
    if _is_handle(group) or isinstance(group, (str, bytes)) or not isinstance(group, Iterable):
        return [group]
    return [handle for item in group for handle in _handles(item)]


def _is_handle(thing: Any) -> bool:
    return isinstance(thing, ray.actor.ActorHandle) or type(thing).__name__ == "ClientActorHandle"


def _member(handle: Any, name: str) -> Member:
    if not _is_handle(handle):
        raise TypeError(f"actors: {name} is {handle!r}, not a Ray actor handle")
    ours = hasattr(handle, "profile_call")
    for method in () if ours else ("start_profile", "stop_profile"):
        if not hasattr(handle, method):
            raise TypeError(
                f"actors: {name} ({handle!r}) has no {method}(): let its class inherit from ProfiledRayActor of "
                "rankscope.integrations.ray"
            )
    key = getattr(handle, "_actor_id", None) or getattr(handle, "actor_ref", None) or id(handle)
    return Member(handle, name, key.hex() if hasattr(key, "hex") else key, ours=ours)
