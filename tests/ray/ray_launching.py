"""Tools that want something before a process starts; made known by ``install``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankscope import Context, Launch, Window, hookimpl

ENTRY_POINTS = """\
[rankscope.backends]
nothing = ray_launching:Nothing
variables = ray_launching:Variables
nsighted = ray_launching:Nsighted
entry = ray_launching:Entry
prefixed = ray_launching:Prefixed
device = ray_launching:Device
"""


def install(directory: Path) -> Path:
    info = directory / "ray_launching-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-launching\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return directory


@dataclass(frozen=True)
class Options:
    pass


class Nothing:
    Options = Options
    owns: frozenset[str] = frozenset()

    def __init__(self, context: Context, options: Options) -> None:
        pass

    @hookimpl
    def start(self, window: Window) -> None:
        pass


class Variables(Nothing):
    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        return Launch(env={"WANTED": f"{context.role} {context.rank}", "NVTX_INJECTION64_PATH": "/none"})


class Nsighted(Nothing):
    owns = frozenset({"cupti"})

    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        return Launch(runtime_env={"nsight": {"t": "nvtx", "o": "/out/r%p"}}, command_prefix=("nsys", "profile"))


class Entry(Nothing):
    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        return Launch(runtime_env={"wrap": 1})


class Prefixed(Nothing):
    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        return Launch(command_prefix=("env", "MARK=a b"))


class Device(Nothing):
    owns = frozenset({"cupti"})
