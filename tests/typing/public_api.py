"""Typed use of everything public: checked by ``mypy --strict``, never run."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope import (
    Artifact,
    Availability,
    BackendError,
    Config,
    ConfigError,
    Context,
    ControllerError,
    DistProfiler,
    Fault,
    FaultError,
    Launch,
    NothingRecorded,
    OptionError,
    Problem,
    ProfileController,
    ProfiledWorker,
    RankscopeError,
    Reservation,
    RoleConfig,
    Span,
    StepGate,
    Store,
    Window,
    annotate,
    hookimpl,
    load_config,
)

if TYPE_CHECKING:
    from typing_extensions import assert_type

# Decorators keep the signature.


@annotate
def bare(x: int) -> str:
    return str(x)


@annotate("stage", scheduled=True, color="red", domain="d", category="c")
def named(x: int, *, y: float = 1.0) -> list[int]:
    return [x, int(y)]


@annotate(message="stage", role="actor")
async def coroutine(x: int) -> bytes:
    return bytes(x)


@annotate()
def rows(n: int) -> Iterator[int]:
    yield from range(n)


@annotate("rows")
async def async_rows(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


class Worker(ProfiledWorker):
    def __init__(self, config: Config) -> None:
        self.profiler = DistProfiler(config, role="actor", rank=0, world_size=8, topology={"tp": 1})

    @annotate("update", scheduled=True)
    def update(self, batches: Sequence[int]) -> float:
        for i, _ in enumerate(batches):
            with annotate(f"mini_batch{i}"):
                pass
            self.profiler.step()
        return 0.0

    @staticmethod
    @annotate("static")
    def static(x: int) -> int:
        return x

    @classmethod
    @annotate("of_class")
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__}{x}"

    @DistProfiler.annotate("log_prob")
    def log_prob(self, x: int) -> int:
        return x

    @property
    @annotate("value")
    def value(self) -> int:
        return 1


half = annotate("half")(functools.partial(named, 1))


async def use(worker: Worker) -> None:
    assert_type(bare(1), str)
    assert_type(named(1, y=2.0), list[int])
    assert_type(await coroutine(1), bytes)
    assert_type(rows(3), Iterator[int])
    assert_type(async_rows(3), AsyncIterator[int])
    assert_type(worker.update([1]), float)
    assert_type(Worker.static(1), int)
    assert_type(Worker.of_class(1), str)
    assert_type(worker.log_prob(1), int)
    assert_type(worker.value, int)
    assert_type(half(), list[int])


# A backend.


@dataclass(frozen=True)
class ClockOptions:
    unit: str = "s"


class Backend:
    Options = ClockOptions
    owns = frozenset({"clock"})
    thread_bound = False
    suffix = ".txt"

    @staticmethod
    def available() -> Availability:
        return Availability(False, "no clock", "buy one")

    @staticmethod
    def launch(options: ClockOptions, context: Context) -> Launch:
        return Launch(env={"UNIT": options.unit}, command_prefix=("nice",), runtime_env={"rank": context.rank})

    def __init__(self, context: Context, options: ClockOptions) -> None:
        self.context = context
        self.store: Store = context.store

    @hookimpl
    def start(self, window: Window) -> None:
        assert_type(window.step, int | None)
        assert_type(window.steps, tuple[int, ...])

    @hookimpl
    def step(self, window: Window, span: Span | None) -> None: ...

    @hookimpl
    def stop(self, window: Window) -> None:
        file: Reservation
        with self.store.reserve(window, suffix=".txt", part="mb3") as file:
            file.temporary.write_text("x")
            assert_type(file.publish(events=1), Artifact)

    @hookimpl
    def annotate(self, span: Span) -> AbstractContextManager[object] | None:
        return nullcontext() if span.scheduled else None

    @hookimpl
    def relocate(self, window: Window) -> Iterable[Path]:
        return []

    @hookimpl
    def finish(self, artifacts: Sequence[Artifact]) -> None:
        self.context.logger.info("kept", files=len(artifacts))


def finish_file(staged: Path, temporary: Path, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if not arguments:
        raise NothingRecorded(name)
    staged.replace(temporary)
    return {"events": 1}


# A loop.


def train(config: Config) -> None:
    role: RoleConfig = config.role("actor")
    assert_type(role.tools, tuple[str, ...])
    with DistProfiler(config, role="critic", overrides=["a=1"], total_steps=3) as profiler:
        assert_type(profiler, DistProfiler)
        assert_type(profiler.start(step=1, scope="train"), bool)
        profiler.advance(step=2)
        profiler.stop(last=True)
        assert_type(profiler.artifacts, tuple[Artifact, ...])
        assert_type(profiler.faults, tuple[Fault, ...])
        assert_type(profiler.relocate(), tuple[Artifact, ...])
        profiler.close(timeout=1.0)
    controller = ProfileController("config.yaml", workers=[Worker(config), profiler], total_steps=3, first_step=2)
    try:
        with controller, controller.step(2):
            pass
    except ControllerError as error:
        assert_type(error.errors, list[tuple[str, object, Exception]])
    except FaultError as error:
        assert_type(error.faults, tuple[Fault, ...])
    except ConfigError as error:
        assert_type(error.problems, tuple[Problem, ...])
    except (BackendError, OptionError, RankscopeError):
        raise
    gate = StepGate("1-3", continuous=True, total_steps=9)
    opening = gate.begin(1)
    if opening is not None:
        assert_type(opening.step, int)


assert_type(load_config({"global_profiler": {"steps": [1]}}, ["a=1"], check_tools="names"), Config)
