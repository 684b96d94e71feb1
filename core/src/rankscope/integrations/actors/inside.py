"""What happens inside a Ray actor: the controller's calls, and where its process stands.

Free of Ray itself, except for the id of the node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankscope import shutdown, windows
from rankscope.errors import error_text
from rankscope.host import host_name
from rankscope.profiler import DistProfiler
from rankscope.types import Artifact
from rankscope.worker import ProfiledWorker

PAUSE = 0.02
"""Seconds between two looks while a call waits for another thread."""


@dataclasses.dataclass(frozen=True)
class HandleFacts:
    """What a driver has to know of one DistProfiler.

    Attributes:
        role, rank, world_size, tools: what it profiles.
        save_path: where its files end up.
        selected: whether this rank is profiled.
        captured: whether any role of its process has captured something into the save path.
        command: the finish command, if this rank is one of those that run it.
        named: whether the user chose the ranks that run it.
        steps: configured steps.
        last_step: the last one that it was started for.
        timeout: seconds that the finish command may take.
    """

    role: str
    rank: int
    world_size: int | None
    tools: tuple[str, ...]
    save_path: str
    selected: bool
    captured: bool
    command: str | tuple[str, ...] | None
    named: bool
    steps: tuple[int, ...]
    last_step: int | None
    timeout: float


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an actor's process is, and what is profiled in it.

    Attributes:
        node: id of the Ray node, or the host's name outside of Ray.
        host, pid: of the process.
        handles: its profilers that are not closed; those of roles that are not enabled are left out.
    """

    node: str
    host: str
    pid: int
    handles: tuple[HandleFacts, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reply:
    """The answer of one process.

    Attributes:
        place: where it comes from.
        artifacts: files, where the call was about files.
        busy: files that are still being exported, and windows that are still open; only told at the end.
        stopping: threads on which a stop still has to be carried out.
        error: what was raised, in words; the call went on with the other profilers of the process.
        trace: its traceback, as text.
    """

    place: Place
    artifacts: tuple[Artifact, ...] = ()
    busy: int = 0
    stopping: tuple[str, ...] = ()
    error: str = ""
    trace: str = ""


class ProfiledRayActor(ProfiledWorker):
    """Lets a `RayGroup` drive a Ray actor: a mix-in that goes before the other bases.

    Like `rankscope.ProfiledWorker`, it acts on ``self.profiler``; and with it on every other ``DistProfiler`` of the
    process, so that an actor with several roles is driven by one call. None of its methods is a coroutine function:
    adding it turns no actor into an asynchronous one. In an asynchronous actor it runs on the thread of the event loop,
    in a threaded one on any of its threads::

        @ray.remote
        class ActorWorker(ProfiledRayActor):
            def __init__(self, config, rank, world_size):
                self.profiler = DistProfiler(config, role="actor", rank=rank, world_size=world_size)
    """

    def profile_call(self, method: str, arguments: Mapping[str, Any]) -> Reply:
        """Call one of the methods of a profiled worker; what it raises is told in the reply."""
        return perform(self, method, arguments)

    def profile_settle(self, seconds: float) -> bool:
        """Carry out a stop that is due on the thread which this call landed on, or wait until another one has."""
        return settle(seconds)


def describe(actor: object) -> Reply:
    """Where this process is."""
    del actor
    return Reply(place())


def perform(actor: Any, method: str, arguments: Mapping[str, Any]) -> Reply:
    """Call a method of a profiled worker, for each profiler of the process."""
    artifacts: list[Artifact] = []
    errors: list[Exception] = []
    own = getattr(actor, "profiler", None)
    _call(actor, method, arguments, artifacts, errors)
    for handle in shutdown.handles():
        if handle is own or _started(handle, method, arguments):
            continue
        other = ProfiledWorker()
        other.profiler = handle
        _call(other, method, arguments, artifacts, errors)
    stopping = tuple(sorted({current.thread_name for current in windows.opened() if current.stopping}))
    return reply(errors, artifacts=tuple(artifacts), stopping=stopping)


def settle(seconds: float) -> bool:
    """Whether no stop waits for another thread any more; see `ProfiledRayActor.profile_settle`.

    A thread pool has no way to address one of its threads. A call that is not on the right one stays where it is, so
    that the next call has to go to another one.
    """
    end = time.monotonic() + seconds
    while waiting := [current for current in windows.opened() if current.stopping]:
        for current in waiting:
            current.settle_now()
        if time.monotonic() >= end:
            return False
        time.sleep(PAUSE)
    return True


def place() -> Place:
    """Where this process is, and its profilers."""
    return Place(node_id(), host_name(), os.getpid(), tuple(_facts(handle) for handle in shutdown.handles()))


def node_id() -> str:
    """The id of the Ray node that this process runs on; the host's name outside of Ray."""
    ray = sys.modules.get("ray")
    with contextlib.suppress(Exception):  # a Ray that is just going away
        if ray is not None and ray.is_initialized():
            return str(ray.get_runtime_context().get_node_id())
    return host_name()


@contextlib.contextmanager
def caught(errors: list[Exception]) -> Iterator[None]:
    """Keep what is raised for the reply: the other profilers of the process go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        errors.append(error)


def reply(errors: Sequence[Exception] = (), **facts: Any) -> Reply:
    """A reply of this process; only texts of the errors travel, since not every exception can."""
    return Reply(
        place(),
        error="; ".join(map(error_text, errors)),
        trace="".join(text for error in errors for text in traceback.format_exception(error)),
        **facts,
    )


def light(artifact: Artifact) -> Artifact:
    """Without the tool's own facts, which no driver reads and which might not travel."""
    return dataclasses.replace(artifact, facts={})


def _call(
    worker: Any, method: str, arguments: Mapping[str, Any], artifacts: list[Artifact], errors: list[Exception]
) -> None:
    with caught(errors):
        function = getattr(worker, method, None)
        if function is None:
            return
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"{type(worker).__name__}.{method} is a coroutine function; it has to be a plain one")
        if isinstance(value, (tuple, list)):
            artifacts += [light(item) for item in value if isinstance(item, Artifact)]


def _started(handle: DistProfiler, method: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the worker's own method has started this profiler already: a second start would cut the first short."""
    return method == "start_profile" and handle.recording and handle.last_step == arguments.get("step")


def _facts(handle: DistProfiler) -> HandleFacts:
    common, section = handle.config.global_profiler, handle.section
    return HandleFacts(
        role=handle.role,
        rank=handle.rank,
        world_size=handle.world_size,
        tools=section.tools,
        save_path=str(handle.save_path),
        selected=handle.selected,
        captured=shutdown.captured(handle),
        command=shutdown.command_due(handle),
        named=bool(section.finish_hook_all_ranks or section.finish_hook_ranks),
        steps=common.steps,
        last_step=handle.last_step,
        timeout=common.finish_hook_timeout,
    )
