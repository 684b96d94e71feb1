"""Spans as programs make them: nested, interleaved, on many threads, left by exceptions, with any label."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from rankscope import annotate
from rankscope.testing.life import Life
from rankscope.testing.rules import RuleBroken, rule

if TYPE_CHECKING:
    from rankscope import DistProfiler


class Unwell(Exception):  # noqa: N818 - the training's own
    """What a stage raises here."""


class Leaving(BaseException):
    """The same, of the kind that a KeyboardInterrupt is."""


@rule
def exceptions(life: Life) -> None:
    """The exception of a stage passes through unchanged, whatever its kind; the window is saved all the same."""
    handle = life.handle()
    life.start(handle, 1)
    for kind in (Unwell, Leaving):
        for stage in (_in_a_with, _in_a_call, _in_a_generator, _in_a_coroutine):
            error = kind("from the training", 1)
            _check_same(error, stage, life)
    life.sound(handle, "stages that raised")
    life.stop(handle, 1, aborted=True)
    life.step(handle, 2)
    life.end(handle)
    life.told()


def _in_a_with(life: Life, error: BaseException) -> None:
    with annotate("in_a_with"), annotate("inner"):
        life.exercise()
        raise error


def _in_a_call(life: Life, error: BaseException) -> None:
    @annotate("in_a_call", scheduled=True)
    def stage() -> None:
        _in_a_with(life, error)

    stage()


def _in_a_generator(life: Life, error: BaseException) -> None:
    @annotate("in_a_generator")
    def stage() -> Iterator[int]:
        yield 1
        life.exercise()
        raise error

    list(stage())


def _in_a_coroutine(life: Life, error: BaseException) -> None:
    @annotate("in_a_coroutine")
    async def stage() -> None:
        await asyncio.sleep(0)
        _in_a_with(life, error)

    loop = asyncio.new_event_loop()  # run() would turn what is no Exception into something of its own
    try:
        loop.run_until_complete(stage())
    finally:
        loop.close()


def _check_same(error: BaseException, stage: Callable[[Life, BaseException], None], life: Life) -> None:
    arguments = error.args
    where = stage.__name__.removeprefix("_").replace("_", " ")
    caught: BaseException | None = None
    try:
        stage(life, error)
    except BaseException as found:  # noqa: BLE001 - all kinds are meant
        caught = found
    if caught is not error:
        raise RuleBroken(f"{error!r} {where} came out as {caught!r}", "raise nothing in __exit__")
    more = (error.__context__, error.__cause__, getattr(error, "__notes__", None))
    if error.args != arguments or any(more):
        raise RuleBroken(
            f"{error!r} {where} was changed: args {error.args}, context {more[0]!r}, cause {more[1]!r}, "
            f"notes {more[2]!r}",
            "look at the exception in __exit__, and leave it as it is",
        )


@rule
def nesting(life: Life) -> None:
    """Spans nest, repeat their labels, interleave, begin before the window and end after it."""
    handle = life.handle()

    @annotate("rows")
    def rows() -> Generator[int, None, None]:
        for number in range(3):
            life.exercise()
            yield number

    before = annotate("begun_before_the_window")
    after = annotate("ended_after_the_window")
    before.__enter__()
    life.start(handle, 1)
    for _ in range(3):
        with annotate("same"), annotate("same"), annotate("same"):
            life.exercise()
    deep = [annotate(f"depth{level}") for level in range(50)]
    for one in deep:
        one.__enter__()
    for one in reversed(deep):
        one.__exit__(None, None, None)
    list(zip(rows(), rows(), strict=True))
    with contextlib.closing(rows()) as given_up:
        next(given_up)
    one, two = annotate("one"), annotate("two")
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)  # overlaps, and does not nest
    two.__exit__(None, None, None)
    life.sound(handle, "nested and interleaved spans")
    before.__exit__(None, None, None)
    life.sound(handle, "the end of a span that began before the window")
    after.__enter__()
    life.stop(handle, 1)
    life.start(handle, 2)
    after.__exit__(None, None, None)
    life.sound(handle, "the end of a span of an earlier window")
    life.train(handle)
    life.stop(handle, 2)
    life.end(handle)
    life.told()


class _Sulking:
    """An argument whose texts cannot be had."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__

    def __len__(self) -> int:
        raise ValueError("no length")

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


@rule
def labels(life: Life) -> None:
    """Any text can be a stage, and anything can be the argument of one."""
    handle = life.handle()
    life.start(handle, 1)
    texts = (
        " ",
        "a" * 5_000,
        'quotes " and \\ back\\slashes',
        "line\nbreak\tand\x00null",
        "../../up/and/away",
        "Phase: 生成 🚀",
        "half \ud800 surrogate",
        "%s {} {0} $HOME",
        "step3",
        "mini_batch",
    )
    for text in texts:
        with annotate(text):
            life.exercise()
        life.sound(handle, f"the stage {text[:40]!r}")

    @annotate("arguments", scheduled=True, color="no colour", domain="a/domain", category="a category")
    def stage(*_: Any, **__: Any) -> None:
        life.exercise()

    stage(_Sulking(), None, [_Sulking()], key=_Sulking())
    stage()
    life.sound(handle, "a stage with unusual arguments")
    life.stop(handle, 1)
    life.end(handle)
    life.told()


@rule
def threads(life: Life) -> None:
    """Spans may run on any thread; a window may be stopped from another one, also when its own thread has ended."""
    handle = life.handle()
    life.start(handle, 1)
    turns = _Turns(life.facts.seconds / 3)

    def work(number: int) -> Callable[[], None]:
        def body() -> None:
            turns.wait(number)
            with annotate("on_a_thread"), annotate(f"mini_batch{number}"):
                turns.next()
                life.exercise()
                turns.wait(3 + number)  # whoever came first goes first: threads do not nest
            turns.next()

        return body

    _run(life, [work(number) for number in range(3)])
    life.sound(handle, "spans on other threads")
    life.stop(handle, 1)

    started, stopped = threading.Event(), threading.Event()

    def own_window() -> None:
        handle.start(step=2)
        started.set()
        stopped.wait(life.facts.seconds / 3)
        with annotate("carried_over"):
            pass

    def foreign_stop() -> None:
        started.wait(life.facts.seconds / 3)
        handle.stop()
        stopped.set()

    _run(life, [own_window, foreign_stop])
    life.sound(handle, "a stop from another thread")
    _run(life, [lambda: _begin(handle, life)])
    life.stop(handle, 3)
    life.step(handle, 4)
    life.end(handle)
    life.told()


class _Turns:
    """Lets threads do things one after the other.

    Args:
        seconds: most that one waits for its turn.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now = 0
        self._changed = threading.Condition()

    def wait(self, turn: int) -> None:
        """Until it is this turn; or for too long, where another thread hangs."""
        with self._changed:
            self._changed.wait_for(lambda: self._now >= turn, self._seconds)

    def next(self) -> None:
        """The turn is over."""
        with self._changed:
            self._now += 1
            self._changed.notify_all()


def _begin(handle: DistProfiler, life: Life) -> None:
    handle.start(step=3)
    life.train(handle)


def _run(life: Life, bodies: list[Callable[[], None]]) -> None:
    """Run each on a thread of its own, to their ends."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - raised below, on the scenario's own thread
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(life.facts.seconds / 2)
        if thread.is_alive():
            raise RuleBroken(
                "a thread hangs in an annotated call or in a start or stop", "take no lock that another hook may hold"
            )
    if errors:
        raise errors[0]


@rule
def async_(life: Life) -> None:
    """Spans of tasks interleave, are cancelled, and end in another order than they began in."""
    handle = life.handle()
    life.start(handle, 1)

    @annotate("coroutine")
    async def coroutine(turns: int) -> None:
        for _ in range(turns):
            with annotate("turn"):
                await asyncio.sleep(0)
                life.exercise()

    @annotate("async_rows")
    async def rows() -> AsyncGenerator[int, None]:
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    async def consume(most: int) -> None:
        found = rows()
        async for number in found:
            if number >= most:
                break
        await found.aclose()

    async def main() -> None:
        waiting = asyncio.ensure_future(coroutine(1_000_000))
        # Begun in this order, ended in the reverse of it and in between.
        await asyncio.gather(coroutine(1), coroutine(5), coroutine(3), consume(1), consume(9))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(main())
    life.sound(handle, "interleaved tasks")
    life.stop(handle, 1)
    life.end(handle)
    life.told()


class _Batch:
    """Something large, as far as a backend can know."""


@rule
def references(life: Life) -> None:
    """After the stop nothing of a stage is kept alive: not its object, its arguments or its exception."""
    handle = life.handle()
    life.start(handle, 1)
    kept = _stage_with_a_batch(life)
    life.stop(handle, 1)
    gc.collect()
    for name, reference in kept.items():
        alive = reference()
        if alive is not None:
            holders = {type(holder).__name__ for holder in gc.get_referrers(alive)} - {"frame"}
            raise RuleBroken(
                f"{name} is still alive after the stop, held by: {', '.join(sorted(holders)) or 'a C object'}",
                "read from span.instance, span.args and span.kwargs what is needed, and keep none of them",
            )
    life.end(handle)


def _stage_with_a_batch(life: Life) -> dict[str, weakref.ref[Any]]:
    class Model:
        @annotate("actor_update", scheduled=True)
        def update(self, batch: _Batch, *, more: _Batch) -> None:
            life.exercise()
            error = Unwell("kept", batch, more)
            kept["an exception"] = weakref.ref(error)
            with annotate("inner"):
                raise error

    kept: dict[str, weakref.ref[Any]] = {}
    model, batch, more = Model(), _Batch(), _Batch()
    kept |= {"span.instance": weakref.ref(model), "an argument": weakref.ref(batch), "a keyword": weakref.ref(more)}
    try:
        model.update(batch, more=more)
    except Unwell as error:
        error.__traceback__ = None
    return kept
