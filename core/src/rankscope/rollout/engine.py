r"""Engine: what a rollout engine's adapter tells and does; the page that an adapter's author reads.

An adapter is found by its entry point in the group ``rankscope.engines``; the name there is the engine's name::

    [project.entry-points."rankscope.engines"]
    myengine = "my_package.engine:MyEngine"

    class MyEngine(Engine):
        name, title = "myengine", "MyEngine"
        kinds = {"torch": "torch"}                      # tools of the config that it can do, and what they mean

        def start_arguments(self, wanted):              # also the JSON body over HTTP
            return Start({"directory": wanted.directory})

        def parse(self, name):                          # one file name, as the engine writes it
            match = re.fullmatch(r"worker(\d+)\.json\.gz", name)
            return EngineFile(name, rank=int(match[1])) if match else None

An adapter imports no engine: it works on what it is handed, and asks it for its real signature.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rankscope.rollout.wanted import Kind, Wanted

if TYPE_CHECKING:
    from rankscope.rollout.replicas import Layout

FileKind = Literal["trace", "frontend", "table", "memory", "unknown"]
"""What a file of an engine is: the trace of one GPU's worker, of the front end (on no GPU), a text table, a memory
snapshot, or something that only its content tells."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """An engine without options."""


@dataclasses.dataclass(frozen=True)
class EngineLaunch:
    """What an engine needs when it is started, so that it can be profiled later.

    Attributes:
        arguments: of the engine's constructor, as plain values (real booleans).
        env: environment variables of the engine's processes, for engines that read nothing else.
        notes: what the engine cannot do of what was asked, and what it does differently, in words.
    """

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def json_arguments(self) -> dict[str, str]:
        """The arguments with JSON texts for mappings, as command lines and some constructors take them."""
        return {
            name: json.dumps(value) if isinstance(value, Mapping | list | tuple) else str(value)
            for name, value in self.arguments.items()
        }

    @property
    def command_line(self) -> list[str]:
        """The arguments as words of a server's command line: ``--profiler-config`` and its JSON."""
        words: list[str] = []
        for name, value in self.json_arguments.items():
            words += [f"--{name.replace('_', '-')}", value]
        return words

    def __str__(self) -> str:
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*env, *(shlex.quote(word) for word in self.command_line)])

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """For an engine that reads its options from ``os.environ``: set them while it is built, and no longer.

        Other engines need nothing there, and nothing is touched.
        """
        before = {name: os.environ.get(name) for name in self.env}
        os.environ.update(self.env)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@dataclasses.dataclass(frozen=True)
class Start:
    """What an engine is told when a window begins.

    Attributes:
        arguments: keywords of its method, and the JSON body over HTTP.
        notes: as of `EngineLaunch`.
    """

    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class EngineFile:
    """What the name of an engine's file says.

    Attributes:
        name: as the engine wrote it.
        kind: what it is.
        rank: the rank that the engine gives, counted as the engine counts.
        coordinates: rank in each dimension that is named.
        prefix: what the window's start asked for, or empty.
        stamp: when the engine wrote it, in nanoseconds since the epoch, where the name says so.
    """

    name: str
    kind: FileKind = "trace"
    rank: int | None = None
    coordinates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    stamp: int | None = None

    @property
    def shown(self) -> str:
        """The engine's own name for it, without our prefix."""
        return self.name[len(self.prefix) :].lstrip("-_") or self.name if self.prefix else self.name

    @property
    def identity(self) -> tuple[Any, ...]:
        """What files of one worker and kind have in common, in all windows."""
        return (self.kind, self.rank, *sorted(self.coordinates.items()))


@dataclasses.dataclass(frozen=True)
class Place:
    """Which GPU of its replica a file is of.

    Attributes:
        local: its number in the replica, counted from 0; None: nobody can tell.
        reason: why not, in words.
        settled: False while more files of the replica may still tell.
    """

    local: int | None
    reason: str = ""
    settled: bool = True


class Engine:
    """An engine's adapter. Subclass it, and say what is different.

    Attributes:
        name: as in ``RolloutProfiler(engine=…)``.
        title: as people write it.
        Options: frozen dataclass of ``engine_options``, every field with a default.
        kinds: the tools of the config that it can do.
        writes: kinds of which it leaves files in the directory that it is given.
        counts: what a token window counts in this engine, in words.
        numbers_copies: whether its names always tell copies of the model (``dp``) apart.
        start_path, stop_path: routes of its server.
        no_route: what it means when its server does not know them, in words.

    Args:
        options: an instance of ``Options``.
        version: the engine's version, where that is known.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    Options: ClassVar[type] = NoOptions
    kinds: ClassVar[Mapping[str, Kind]] = {"torch": "torch", "npu": "torch"}
    writes: ClassVar[frozenset[Kind]] = frozenset({"torch", "memory"})
    counts: ClassVar[str] = "its own iterations"
    numbers_copies: ClassVar[bool] = False
    start_path: ClassVar[str] = "/start_profile"
    stop_path: ClassVar[str] = "/stop_profile"
    no_route: ClassVar[str] = "its server has no such route"

    def __init__(self, options: Any = None, *, version: str | None = None) -> None:
        self.options = options if options is not None else self.Options()
        self.version = version

    @property
    def passive(self) -> bool:
        """Whether it was told everything at its launch, so that a start and a stop call nothing."""
        return False

    # What it is told.

    def launch(self, wanted: Wanted) -> EngineLaunch:
        """What the engine needs when it is started; nothing, unless an adapter says otherwise."""
        return EngineLaunch(notes=tuple(self.notes(wanted)))

    def start_arguments(self, wanted: Wanted) -> Start:
        """What the engine is told when a window begins."""
        del wanted
        return Start()

    def notes(self, wanted: Wanted) -> Iterable[str]:
        """What the engine cannot do of what is wanted, and what it counts, in words."""
        if wanted.ignored:
            yield f"{self.title} knows nothing of these options of tool {wanted.tool}: {', '.join(wanted.ignored)}"
        if wanted.token_start is not None or wanted.token_end is not None:
            yield f"profile_token_start and profile_token_end are not tokens in {self.title}: it counts {self.counts}"

    # How it is told.

    def start_call(self, handle: Any, wanted: Wanted) -> Callable[[], Any]:
        """The call that begins a window; what it returns may be awaitable.

        Raises:
            AttributeError: the object has no such method.
        """
        return bound(handle.start_profile, self.start_arguments(wanted).arguments)

    def stop_call(self, handle: Any) -> Callable[[], Any]:
        """The call that ends it."""
        return bound(handle.stop_profile, {})

    def retry_body(self, status: int, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What to send instead when a server refuses the body of a start; None to leave it at that."""
        del status, body
        return None

    # What it answers.

    def ended_already(self, error: str, wanted: Wanted) -> bool:
        """Whether a stop failed only because the window had ended by itself."""
        del error, wanted
        return False

    def occupied(self, error: str) -> bool:
        """Whether a start failed because another window is open in the engine."""
        del error
        return False

    def disarm(self, wanted: Wanted) -> Mapping[str, Any] | None:
        """Arguments of a start that makes a window harmless which is armed and was never begun; None: not needed."""
        del wanted
        return None

    def arm_call(self, handle: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """A start with these arguments."""
        return bound(handle.start_profile, arguments)

    # What it leaves behind.

    def parse(self, name: str) -> EngineFile | None:
        """What a file name says; None where it is none of the engine's."""
        del name
        return None

    def place(self, file: EngineFile, width: int, layout: Layout | None, seen: Iterable[EngineFile]) -> Place:
        """Which GPU of its replica a file is of, as far as names tell. Never a guess.

        Args:
            file: of `parse`.
            width: GPUs of the replica.
            layout: the engine's, where it is known.
            seen: all files of this replica so far.
        """
        del layout, seen
        if file.rank is None:
            return Place(None, "the name says no rank")
        return within(file.rank, width)

    def agrees(self, file: EngineFile, local: int, width: int) -> bool:
        """Whether what the name says can be true of that GPU."""
        del width
        return file.rank is None or file.rank == local

    def layout(self, handle: Any) -> Layout | None:
        """The engine's layout, where the object that drives it knows it."""
        del handle
        return None


def within(local: int, width: int) -> Place:
    """A rank of the replica, unless it is beyond it."""
    if 0 <= local < width:
        return Place(local)
    return Place(None, f"rank {local} is beyond a replica of {width} GPUs")


def bound(function: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """A call with keywords; of a Ray actor's method, its ``remote``."""
    call = _remote(function) or function
    return lambda: call(**arguments)


def positional(function: Any, *arguments: Any) -> Callable[[], Any]:
    """The same with arguments by position."""
    call = _remote(function) or function
    return lambda: call(*arguments)


def accepted(function: Any) -> frozenset[str] | None:
    """The keywords that a function takes by name; None where it takes any, or does not say.

    A Ray actor's method does not say.
    """
    if _remote(function) is not None:
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def _remote(function: Any) -> Any:
    """``remote`` of a Ray actor's method; a plain function may have an attribute of that name, and is called itself."""
    if type(function).__module__.split(".")[0] == "ray" or not callable(function):
        return getattr(function, "remote", None)
    return None


def sizes_of(holder: Any, pattern: str, names: Iterable[str]) -> list[int] | None:
    """Sizes that an engine's own settings hold; None unless all are there and are sizes."""
    sizes = [getattr(holder, pattern.format(name), None) for name in names]
    found = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size >= 1]
    return found if len(found) == len(sizes) else None


def version_of(text: str | None) -> tuple[int, ...]:
    """``0.13.0rc1`` as ``(0, 13, 0)``; empty for what has no number in front."""
    match = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, found without importing it; None when it is not here."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
