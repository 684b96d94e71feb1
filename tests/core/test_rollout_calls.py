"""Calls into engines: objects and servers, asynchronous and blocking ones, many of them, and such as never return."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rollout_kit import config, servers, wait_for
from rollout_signatures import LLM033, AsyncLLM033, SglangEngine0523, TokenizerManager0512, TokenizerManager0523

from rankscope.rollout import Layout, Replica, RolloutProfiler
from rankscope.rollout.calls import MOST_AT_ONCE, FanOut, HttpError, in_thread, post


def profiler(tmp_path: Path, *handles: Any, engine: str = "vllm", **facts: Any) -> RolloutProfiler:
    common = {key: facts.pop(key) for key in ("options",) if key in facts}
    given = {"patience": 0.0, "close_patience": 0.0, "start_timeout": 5.0, "stop_timeout": 5.0, **facts}
    return RolloutProfiler(
        config(tmp_path / "out", **common), engine=engine, replicas=handles, layout=Layout(), **given
    )


def done(handle: Any) -> list[str]:
    return [name for name, _ in handle.calls]


# Objects.


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("vllm", AsyncLLM033),
        ("vllm", LLM033),
        ("sglang", TokenizerManager0512),
        ("sglang", TokenizerManager0523),
        ("sglang", SglangEngine0523),
    ],
)
def test_engine_objects_are_driven(tmp_path: Path, engine: str, kind: Any) -> None:
    handle = kind()
    with profiler(tmp_path, handle, engine=engine) as rollout:
        assert rollout.start_profile(step=1) is True
        rollout.stop_profile()
        assert [(one.action, one.ok) for one in rollout.results] == [("start", True), ("stop", True)]
    assert done(handle) == ["start", "stop"]


@pytest.mark.parametrize("kind", [AsyncLLM033, LLM033])
def test_an_event_loop_is_not_held_up(tmp_path: Path, kind: Any) -> None:
    """Also not by an engine whose method blocks, or a stop that takes long."""
    loops: list[Any] = []

    class Slow(kind):  # type: ignore[misc]
        if kind is AsyncLLM033:

            async def stop_profile(self) -> None:
                loops.append(asyncio.get_running_loop())
                await asyncio.sleep(0.3)
                await super().stop_profile()

        else:

            def stop_profile(self) -> None:
                loops.append(None)
                time.sleep(0.3)
                super().stop_profile()

    handle = Slow()

    async def main() -> int:
        rollout = profiler(tmp_path, handle)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticker = asyncio.create_task(tick())
        assert await rollout.start_profile_async(step=1) is True
        await rollout.stop_profile_async()
        await rollout.relocate_profile_async()
        await rollout.finish_profile_async()
        await rollout.close_profile_async()
        ticker.cancel()
        assert loops == [asyncio.get_running_loop() if kind is AsyncLLM033 else None]
        return ticks

    assert asyncio.run(main()) > 10
    assert done(handle) == ["start", "stop"]


def test_a_synchronous_call_cannot_wait_for_its_own_event_loop(tmp_path: Path, lenient: None) -> None:
    del lenient
    handle = AsyncLLM033()

    async def main() -> RolloutProfiler:
        rollout = profiler(tmp_path, handle)
        assert rollout.start_profile(step=1) is False
        rollout.close_profile()
        return rollout

    rollout = asyncio.run(main())
    assert "await the _async method" in rollout.results[0].error
    assert [one.action for one in rollout.results] == ["start"]
    assert handle.calls == []


@contextlib.contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_engine_that_lives_in_another_loop_is_called_there(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Handle(AsyncLLM033):
        async def stop_profile(self) -> None:
            seen.append(asyncio.get_running_loop())

    with loop_in_a_thread() as loop, profiler(tmp_path, Replica(0, Handle(), loop=loop)) as rollout:
        rollout.start_profile(step=1)
        rollout.stop_profile()
        assert seen == [loop]


def test_what_has_only_remote_is_called_by_it(tmp_path: Path) -> None:
    """A Ray actor's method cannot be called, and does not say what it takes."""

    class Method:
        def __init__(self, name: str) -> None:
            self.name = name

        async def remote(self, **keywords: Any) -> None:
            calls.append((self.name, keywords))

    class Actor:
        start_profile, stop_profile = Method("start"), Method("stop")

    calls: list[Any] = []
    with profiler(tmp_path, Actor()) as rollout:
        rollout.start_profile(step=1)
        rollout.stop_profile()
    assert calls == [("start", {}), ("stop", {})]


@pytest.mark.usefixtures("lenient")
def test_an_object_without_the_method(tmp_path: Path) -> None:
    with profiler(tmp_path, object()) as rollout:
        assert rollout.start_profile(step=1) is False
        assert "has no attribute 'start_profile'" in rollout.results[0].error
        assert [one.action for one in rollout.results] == ["start"]


@pytest.mark.usefixtures("lenient")
def test_an_object_that_hangs_is_not_called_again_until_it_returned(tmp_path: Path) -> None:
    gate = threading.Event()

    class Hangs(LLM033):
        def stop_profile(self) -> None:
            gate.wait(30)
            super().stop_profile()

    handle = Hangs()
    rollout = profiler(tmp_path, handle, stop_timeout=0.2)
    rollout.start_profile(step=1)
    began = time.monotonic()
    rollout.stop_profile()
    assert time.monotonic() - began < 2
    assert rollout.results[-1].error == "no answer within 0.2 s"
    assert rollout.start_profile(step=2) is False
    assert [(one.action, one.error) for one in rollout.results][2:] == [
        ("retry", "its last call has not returned"),
        ("start", "its last call has not returned"),
        ("compensate", "its last call has not returned"),
    ]
    assert done(handle) == ["start"]
    gate.set()
    wait_for(lambda: done(handle) == ["start", "stop"])
    wait_for(lambda: not rollout._driver._running[0].running)
    assert rollout.start_profile(step=3) is True
    rollout.stop_profile()
    rollout.close_profile()
    assert done(handle) == ["start", "stop", "stop", "start", "stop"]


@pytest.mark.usefixtures("lenient")
def test_an_asynchronous_stop_that_takes_too_long_is_not_cut_off(tmp_path: Path) -> None:
    ended: list[str] = []

    class Slow(AsyncLLM033):
        async def stop_profile(self) -> None:
            try:
                await asyncio.sleep(0.6)
                ended.append("done")
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

    async def main() -> None:
        rollout = profiler(tmp_path, Slow(), stop_timeout=0.1)
        await rollout.start_profile_async(step=1)
        await rollout.stop_profile_async()
        assert rollout.results[-1].error == "no answer within 0.1 s"
        while not ended:
            await asyncio.sleep(0.02)
        await rollout.close_profile_async()

    asyncio.run(main())
    assert ended[0] == "done"


def test_an_awaiting_task_may_be_cancelled(tmp_path: Path) -> None:
    handle = AsyncLLM033()

    async def main() -> None:
        rollout = profiler(tmp_path, handle)
        task = asyncio.create_task(rollout.start_profile_async(step=1))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        while done(handle) != ["start"]:
            await asyncio.sleep(0.02)
        await rollout.close_profile_async()

    asyncio.run(main())
    assert done(handle) == ["start", "stop"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_forward_count_is_asked_at_each_start(tmp_path: Path, asynchronous: bool) -> None:
    counts = iter([100, 300])

    async def later() -> int:
        return next(counts)

    handle = TokenizerManager0523()
    replica = Replica(0, handle, forward_count=later if asynchronous else lambda: next(counts))
    with profiler(tmp_path, replica, engine="sglang", options={"profile_token_start": 4}) as rollout:
        for n in (1, 2):
            rollout.start_profile(step=n)
            rollout.stop_profile()
    starts = [given.start_step for name, given in handle.calls if name == "start"]
    assert starts == [105, 305]


# Many.


def test_many_replicas_are_called_at_once_and_not_all_at_once(tmp_path: Path) -> None:
    lock = threading.Lock()
    now = most = 0

    class Counts(LLM033):
        def start_profile(self, profile_prefix: str | None = None) -> None:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.02)
            with lock:
                now -= 1

    handles = [Counts() for _ in range(150)]
    with profiler(tmp_path, *handles, start_timeout=60.0) as rollout:
        assert rollout.start_profile(step=1) is True
        rollout.stop_profile()
        assert len(rollout.results) == 300
    assert 1 < most <= MOST_AT_ONCE
    assert all(done(handle) == ["stop"] for handle in handles)


def test_what_had_no_turn_in_time_is_told_apart() -> None:
    gate = threading.Event()
    outcomes = FanOut([lambda _: gate.wait(30)] * (MOST_AT_ONCE + 2), 0.3).run()
    assert {outcome.error for outcome in outcomes[:MOST_AT_ONCE]} == {"no answer within 0.3 s"}
    assert [outcome.began for outcome in outcomes[MOST_AT_ONCE:]] == [False, False]
    assert "the others took all the time" in outcomes[-1].error
    gate.set()
    wait_for(lambda: not any(outcome.running for outcome in outcomes))
    assert outcomes[0].error == "no answer within 0.3 s"


def test_outcomes_stand_in_the_order_of_the_calls() -> None:
    def fails(_: float) -> None:
        raise ValueError("broken")

    outcomes = FanOut([lambda _: 1, fails, lambda seconds: seconds > 4], 5.0).run()
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [
        (1, ""),
        (None, "ValueError: broken"),
        (True, ""),
    ]
    assert FanOut([], 1.0).run() == []


def test_where_no_thread_can_be_started_only_bounded_calls_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    outcomes = FanOut([lambda _: 1, lambda _: 2], 5.0, bounded=[True, False]).run()
    assert [outcome.error for outcome in outcomes] == ["", "RuntimeError: the interpreter is on its way out"]


def test_in_thread_hands_results_and_errors_on() -> None:
    async def main() -> None:
        assert await in_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 / 0)

    asyncio.run(main())


# HTTP.


def test_a_proxy_of_the_environment_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with servers(tmp_path, {}) as engines:
        post(f"{engines[0].url}/start_profile", None, {}, 5)
        assert engines[0].paths == ["start"]


def test_errors_of_a_server_carry_its_words(tmp_path: Path) -> None:
    with servers(tmp_path, {"start": ["500"]}) as engines:
        with pytest.raises(HttpError, match="HTTP 500: it is broken") as caught:
            post(f"{engines[0].url}/start_profile", None, {}, 5)
        assert caught.value.status == 500
        with pytest.raises(HttpError, match="HTTP 404"):
            post(f"{engines[0].url}/other", None, {}, 5)
    with pytest.raises(OSError, match="refused"):
        post(f"{engines[0].url}/start_profile", None, {}, 5)


class Chatty(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(500)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"x" * 10_000_000)

    def log_message(self, *_: Any) -> None:
        """Silent."""


def test_an_endless_answer_is_cut() -> None:
    server = HTTPServer(("127.0.0.1", 0), Chatty)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    try:
        with pytest.raises(HttpError) as caught:
            post(f"http://127.0.0.1:{server.server_address[1]}/", None, {}, 5)
        assert len(str(caught.value)) < 5000
    finally:
        thread.join()
        server.server_close()
