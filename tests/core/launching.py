"""Tools that want something before a process starts; made known by ``install``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankscope import Availability, Context, Launch, Window, hookimpl

ENTRY_POINTS = """\
[rankscope.backends]
wraps = launching:Wraps
wraps2 = launching:WrapsToo
env = launching:Env
env2 = launching:OtherEnv
fails = launching:Fails
absent = launching:Absent
partly = launching:Partly
some = launching:Sometimes
device = launching:Device
"""


def install(directory: Path) -> Path:
    info = directory / "launching-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: launching\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return directory


@dataclass(frozen=True)
class Options:
    word: str = "w"


class Plain:
    Options = Options
    owns: frozenset[str] = frozenset()

    def __init__(self, context: Context, options: Options) -> None:
        self.context = context

    @hookimpl
    def start(self, window: Window) -> None:
        pass


class Wraps(Plain):
    """Starts the process through a shell that notes it, and collects that note afterwards."""

    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        context.save_path.mkdir(parents=True, exist_ok=True)
        note = context.save_path / "note"
        script = f'echo "{options.word} $WRAPPED" > {note}; exec "$@"'
        return Launch(
            env={"WRAPPED": f"{context.role}{context.rank} steps {context.steps} {context.continuous}"},
            runtime_env={"wrap": {"o": options.word}},
            command_prefix=("bash", "-c", script, "bash"),
        )

    @staticmethod
    def collect(options: Options, context: Context) -> None:
        window = Window(id=1, role=context.role, step=1, steps=(1,), scope="train", reason="step")
        context.store.adopt(context.save_path / "note", window)


class WrapsToo(Plain):
    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        return Launch(command_prefix=("nice",))


class Env(Plain):
    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        return Launch(env={"SHARED": "1"}, runtime_env={"env_vars": {"MORE": "2"}})


class OtherEnv(Plain):
    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        return Launch(env={"SHARED": "other"})


class Fails(Plain):
    @staticmethod
    def launch(options: Options, context: Context) -> Launch:
        raise RuntimeError("no such tool")


class Absent(Plain):
    @staticmethod
    def available() -> Availability:
        return Availability(False, "its library is not installed", "pip install itslib")


class Partly(Plain):
    @staticmethod
    def available() -> Availability:
        return Availability(True, "no device: nothing will be recorded")


class Sometimes(Plain):
    """What it needs for itself depends on its options."""

    @staticmethod
    def owns(options: Options) -> set[str]:  # type: ignore[override]
        return {"device"} if options.word == "device" else set()


class Device(Plain):
    owns = frozenset({"device"})
