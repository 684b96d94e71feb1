"""From the config and the given replicas to what each engine shall do; nothing is started here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope import registry
from rankscope.config import Config, ConfigError, RoleConfig, load_config, tool_options
from rankscope.rollout.engine import Engine
from rankscope.rollout.engines import make
from rankscope.rollout.replicas import FOLDER, Choice, Layout, Replica, choose, placed
from rankscope.rollout.wanted import Wanted, wanted


@dataclasses.dataclass(frozen=True)
class Given:
    """What the user says of the engines; the fields are arguments of `RolloutProfiler`."""

    engine: str | Engine
    replicas: Sequence[Any]
    layout: Layout | None = None
    gpus_per_replica: int | None = None
    world_size: int | None = None
    gpus_per_node: int | None = None
    options: Mapping[str, Any] | None = None
    version: str | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is profiled, and how.

    Attributes:
        replicas: all that were given, with their devices.
        choice: the profiled ones and their ranks.
        world_size: number of rollout GPUs, or None.
        engine: the adapter; None where nothing is profiled.
        tool: the tool of the config that the engines record with, or empty.
        wanted: by number of a profiled replica, what its engine shall record.
        layouts: the same for the layout of its engine, where that is known.
        notes: what the engine cannot do of what was asked, in words.
    """

    replicas: tuple[Replica, ...] = ()
    choice: Choice = dataclasses.field(default_factory=lambda: Choice({}))
    world_size: int | None = None
    engine: Engine | None = None
    tool: str = ""
    wanted: Mapping[int, Wanted] = dataclasses.field(default_factory=dict)
    layouts: Mapping[int, Layout | None] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def profiled(self) -> list[Replica]:
        """The replicas that are profiled."""
        return [replica for replica in self.replicas if replica.index in self.choice.ranks]

    @property
    def ranks(self) -> list[int]:
        """The ranks whose files are wanted, ascending."""
        return sorted(rank for ranks in self.choice.ranks.values() for rank in ranks)

    @property
    def writes(self) -> bool:
        """Whether the engine leaves files where it is told."""
        return self.engine is not None and self.engine.kinds[self.tool] in self.engine.writes


def work_out(config: Config, section: RoleConfig, given: Given) -> Setup:
    """Choose replicas and ranks, load the adapter, and read the tool's options for it.

    The adapter and the tool are loaded only where a replica is profiled.

    Raises:
        ConfigError: the replicas do not fit, or the engine, the tool or an option is wrong.
    """
    layout, gpus = given.layout, _gpus(given)
    replicas = placed(given.replicas, gpus, given.world_size)
    devices = sum(len(replica.devices or ()) for replica in replicas)
    complete = given.world_size == devices or (given.world_size is None and len(replicas) > 1)
    choice = choose(
        section.ranks,
        replicas,
        layout=layout,
        world_size=given.world_size,
        gpus_per_node=given.gpus_per_node,
        complete=complete,
    )
    world_size = devices if complete else given.world_size
    if not choice.ranks:
        return Setup(replicas, choice, world_size)
    engine = make(given.engine, given.options, version=given.version)
    load_config(config)  # imports the tools and checks their options
    able = [tool for tool in section.tools if tool in engine.kinds]
    notes = [
        f"{engine.title} cannot record with tool {tool!r} (it can: {', '.join(engine.kinds)})"
        for tool in section.tools
        if tool not in engine.kinds
    ]
    if not able:
        return Setup(replicas, dataclasses.replace(choice, ranks={}, reason=notes[0]), world_size, notes=tuple(notes))
    notes += [f"an engine takes one tool at a time: {able[0]!r} records, {tool!r} is left out" for tool in able[1:]]
    setup = Setup(replicas, choice, world_size, engine, able[0])
    asked = _wanted(setup, section, engine)
    layouts = {replica.index: layout or _asked_layout(engine, replica) for replica in setup.profiled}
    notes += engine.launch(next(iter(asked.values()))).notes
    return dataclasses.replace(setup, wanted=asked, layouts=layouts, notes=tuple(dict.fromkeys(notes)))


def directory_of(replica: Replica, save_path: Path) -> Path:
    """Where the engine of a replica writes: its own place, or ``<save_path>/agent_loop_rollout_replica_<r>``."""
    return Path(replica.directory) if replica.directory else save_path / f"{FOLDER}{replica.index}"


def _gpus(given: Given) -> int:
    layout, gpus = given.layout, given.gpus_per_replica
    if layout is not None and gpus is not None and layout.gpus != gpus:
        raise ConfigError(f"rollout: gpus_per_replica={gpus}, but the layout has {layout.gpus} GPUs")
    if layout is not None:
        return layout.gpus
    if gpus is not None:
        return gpus
    if all(isinstance(one, Replica) and one.devices for one in given.replicas):
        return 1
    raise ConfigError("rollout: nobody says how many GPUs a replica has: give layout=Layout(tp=…) or gpus_per_replica")


def _wanted(setup: Setup, section: RoleConfig, engine: Engine) -> dict[int, Wanted]:
    tool = setup.tool
    checked, _ = tool_options(registry.load(tool, section.tool_path), section, tool)
    values = {field.name: getattr(checked, field.name) for field in dataclasses.fields(checked)}
    own = [key for key, value in section.tool_config.get(tool, {}).items() if value is not None]
    return {
        replica.index: wanted(
            tool, engine.kinds[tool], values, own, str(directory_of(replica, Path(section.save_path)))
        )
        for replica in setup.profiled
    }


def _asked_layout(engine: Engine, replica: Replica) -> Layout | None:
    """The layout that the engine's own object knows, if it fits the replica."""
    if replica.target is None or replica.url is not None:
        return None
    with contextlib.suppress(Exception):  # somebody else's object
        layout = engine.layout(replica.target)
        if layout is not None and layout.gpus == len(replica.devices or ()):
            return layout
    return None
