"""Calls into engines: all replicas at once, each with a deadline, whatever they are: methods, coroutines, HTTP servers.

Threads do it, since an engine may block for ever. A thread that is still waiting at the deadline is left behind (it is
a daemon), and whoever asked goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rankscope.errors import error_text

T = TypeVar("T")

MOST_AT_ONCE = 64
"""Replicas that are called at the same time."""

_LONGEST_ANSWER = 4096


class HttpError(Exception):
    """A server answered with an error.

    Attributes:
        status: its code.
    """

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {text.strip() or 'no text'}")


class LoopError(Exception):
    """A coroutine cannot be run from where the call was made."""


@dataclasses.dataclass
class Outcome:
    """How one call ended.

    Attributes:
        error: what went wrong, in words; empty when it returned.
        value: what it returned.
        seconds: how long it took, or was waited for.
        began: whether it was made at all.
        running: whether it has not returned yet.
    """

    error: str = ""
    value: Any = None
    seconds: float = 0.0
    began: bool = False
    running: bool = False

    @property
    def ok(self) -> bool:
        """Whether it returned."""
        return not self.error


class FanOut:
    """Makes several calls at once.

    Args:
        calls: what to call; each gets the seconds that are left, and may return an awaitable.
        timeout: seconds for all of them together, and so for each.
        loops: for each call the event loop of what it returns; None runs that in a loop of its own.
        busy: the event loop that waits for this very call, and so cannot run a coroutine.
        bounded: for each call whether it ends by itself when the time is over: then it needs no thread.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[float], Any]],
        timeout: float,
        *,
        loops: Sequence[asyncio.AbstractEventLoop | None] | None = None,
        busy: asyncio.AbstractEventLoop | None = None,
        bounded: Sequence[bool] | None = None,
    ) -> None:
        self.calls = calls
        self.outcomes = [Outcome(error="it was not called: the others took all the time") for _ in calls]
        self._loops = loops or [None] * len(calls)
        self._busy = busy
        self._bounded = bounded or [False] * len(calls)
        self._inline = False
        self._next = 0
        self._left = len(calls)
        self._changed = threading.Condition()
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def run(self) -> list[Outcome]:
        """The outcomes in order. They go on changing while calls are running that have run out of time."""
        threads = min(len(self.calls), MOST_AT_ONCE)
        for number in range(threads):
            thread = threading.Thread(target=self._work, name=f"rankscope-rollout-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is on its way out: no thread can be started any more
                self._inline = True
                self._work()
                break
        with self._changed:
            while self._left and (remaining := self._deadline - time.monotonic()) > 0:
                self._changed.wait(remaining)
            for outcome in self.outcomes:
                if outcome.running:
                    outcome.error, outcome.seconds = f"no answer within {self._timeout:g} s", self._timeout
        return self.outcomes

    def _work(self) -> None:
        while True:
            with self._changed:
                remaining = self._deadline - time.monotonic()
                if self._next == len(self.calls) or remaining <= 0:
                    return
                number = self._next
                self._next += 1
                outcome = self.outcomes[number]
                outcome.error, outcome.began, outcome.running = "", True, True
            began = time.monotonic()
            try:
                if self._inline and not self._bounded[number]:
                    raise RuntimeError("the interpreter is on its way out")
                value, error = self._finish(self.calls[number](remaining), self._loops[number]), ""
            except BaseException as fault:  # noqa: BLE001 - it is an engine's
                value, error = None, error_text(fault)
            with self._changed:
                outcome.value, outcome.running = value, False
                if time.monotonic() <= self._deadline or not outcome.error:
                    outcome.error, outcome.seconds = error, time.monotonic() - began
                self._left -= 1
                self._changed.notify_all()

    def _finish(self, value: Any, loop: asyncio.AbstractEventLoop | None) -> Any:
        if not inspect.isawaitable(value):
            return value
        if loop is not None and loop is not self._busy and loop.is_running():
            # It is not cancelled at the deadline: an engine whose stop is cut off half-way is worse than a late one.
            return asyncio.run_coroutine_threadsafe(_wait(value), loop).result()
        if self._busy is not None and inspect.iscoroutine(value):
            value.close()
            raise LoopError(
                "the engine is asynchronous and its event loop waits for this call: await the _async method"
            )
        return asyncio.run(_wait(value))


async def _wait(value: Any) -> Any:
    return await value


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that this thread is running, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def in_thread(function: Callable[[], T]) -> T:
    """Run something that blocks, without holding up the event loop, in a thread that nobody has to wait for at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as fault:  # noqa: BLE001 - raised where it is awaited
            error = fault
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="rankscope-rollout", daemon=True).start()
    return await future


def post(url: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout: float) -> str:
    """Send a POST request, with JSON if there is any, and return what the server answered.

    No proxy of the environment is used: engines are on this machine or in this cluster.

    Raises:
        HttpError: the server answered with an error.
        OSError: it could not be reached, or did not answer in time.
    """
    data = json.dumps(dict(body)).encode() if body else b""
    sent = {"Content-Type": "application/json", **headers} if body else dict(headers)
    request = urllib.request.Request(url, data=data, headers=sent, method="POST")  # noqa: S310 - http(s), checked
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=max(0.001, timeout)) as answer:
            return str(answer.read(_LONGEST_ANSWER).decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(_LONGEST_ANSWER).decode("utf-8", "replace")
        raise HttpError(error.code, text) from None
    except urllib.error.URLError as error:
        raise OSError(f"{error.reason}") from None
