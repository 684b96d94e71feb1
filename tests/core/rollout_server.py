"""A rollout engine's HTTP server, as its profiler behaves: a program of its own, for the tests.

``python rollout_server.py CONFIG`` prints its port. CONFIG is JSON:

``engine``      ``vllm``, ``sglang`` or ``trtllm``
``directory``   where it writes, for vLLM (SGLang and TensorRT-LLM are told)
``gpus``        workers, each of which writes a file
``start``, ``stop``   how the calls are answered, one word a call, the last one for all others:
                ``ok``, ``slow`` (after ``seconds``), ``500``, ``404``, ``409``, ``422`` (a body is refused), ``never``,
                ``drip`` (bytes, one by one, without an end), ``partial`` (500, and yet it records)
``seconds``     of a slow answer
``late``        seconds after the answer of a stop until the files appear
``names``       file names instead of the engine's own, one a worker; ``{ns}`` is the time, ``{prefix}`` as it was asked
``traces``      folder with ``rank<r>.json.gz``: real traces to write; without it small ones are made up
``torch``       record with the real torch profiler; requests are then answered one after the other
``log``         file that gets one JSON line for each call

``POST /forward`` with ``{"n": 5}`` is what generating is for the profiler: five forward passes.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Refused(Exception):
    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Engine:
    """What the engines have in common: one window at a time, files at its end."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.directory = Path(config.get("directory", "."))
        self.passes = 0
        self.running: Any = None
        self.prefix = ""
        self.lock = threading.RLock()

    def begin(self) -> None:
        if self.config.get("torch"):
            import torch

            self.running = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.running.start()
        else:
            self.running = True

    def forward(self, n: int) -> None:
        for _ in range(n):
            self.before_pass()
            if self.config.get("torch"):
                import torch

                torch.ones(8, 8) @ torch.ones(8, 8)
            self.after_pass()

    def before_pass(self) -> None:
        self.passes += 1

    def after_pass(self) -> None:
        """For vLLM."""

    def finish(self) -> None:
        profile, self.running = self.running, None
        if profile is not None and profile is not True:
            profile.stop()
        names = [self.name(rank) for rank in range(self.config.get("gpus", 1))]
        if self.config.get("late"):
            threading.Timer(self.config["late"], self.write, (names, profile)).start()
        else:
            self.write(names, profile)

    def name(self, rank: int) -> str:
        given = self.config.get("names")
        if given:
            return str(given[rank]).format(ns=time.time_ns(), prefix=self.prefix)
        return self.own_name(rank)

    def own_name(self, rank: int) -> str:
        raise NotImplementedError

    def write(self, names: list[str], profile: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for rank, name in enumerate(names):
            path = self.directory / name
            if profile is not None and profile is not True:
                if rank == 0:
                    profile.export_chrome_trace(str(path))
                else:
                    shutil.copyfile(self.directory / names[0], path)
            elif self.config.get("traces"):
                shutil.copyfile(Path(self.config["traces"]) / f"rank{rank}.json.gz", path)
            else:
                path.write_bytes(made_up(rank, self.config.get("gpus", 1), compressed=name.endswith(".gz")))


def made_up(rank: int, world_size: int, *, compressed: bool = True) -> bytes:
    trace = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size},
        "traceEvents": [{"ph": "X", "name": "generate", "pid": 1, "tid": 1, "ts": 1, "dur": 2}],
    }
    text = json.dumps(trace).encode()
    return gzip.compress(text) if compressed else text


class Vllm(Engine):
    """As ``AsyncLLM`` and ``WorkerProfiler`` of vLLM 0.33."""

    active = False

    def start(self, body: dict[str, Any]) -> None:
        if self.active:
            raise Refused(409, "A profiling session is already active. Call /stop_profile before starting another.")
        self.prefix = body.get("profile_prefix") or ""
        self.active, self.iterations, self.recorded = True, 0, 0
        self.delay, self.most = body.get("delay_iterations") or 0, body.get("max_iterations") or 0
        if not self.delay:
            self.begin()

    def before_pass(self) -> None:
        super().before_pass()
        if not self.active:
            return
        self.iterations += 1
        if not self.running and self.delay and self.iterations == self.delay:
            self.begin()
        if self.running:
            self.recorded += 1
            if self.most and self.recorded > self.most:
                self.finish()

    def stop(self) -> None:
        self.active = False
        if self.running:
            self.finish()

    def own_name(self, rank: int) -> str:
        prefix = f"{self.prefix}_" if self.prefix else ""
        return f"{prefix}dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{time.time_ns()}.pt.trace.json.gz"


class Sglang(Engine):
    """As the scheduler's profiler of SGLang 0.5.23; a RuntimeError of the manager is a 500 without a word."""

    first: int | None = None
    target: int | None = None

    def start(self, body: dict[str, Any]) -> None:
        if self.running:
            raise Refused(500)
        self.directory = Path(body["output_dir"])
        self.prefix = body.get("profile_prefix") or ""
        self.id = str(time.time())
        if body.get("start_step"):
            self.first = max(body["start_step"], self.passes + 1)
        n = body.get("num_steps")
        self.target = None if not n else (self.first + n if body.get("start_step") else self.passes + n + 1)
        if not body.get("start_step"):
            self.begin()

    def before_pass(self) -> None:
        super().before_pass()
        if self.target and self.target <= self.passes and self.running:
            self.finish()
            self.first = None
        if self.first and self.first == self.passes:
            self.begin()

    def stop(self) -> None:
        if not self.running:
            raise Refused(500)
        self.finish()
        self.first = None

    def own_name(self, rank: int) -> str:
        prefix = f"{self.prefix}-" if self.prefix else ""
        return f"{prefix}{self.id}-TP-{rank}.trace.json.gz"


class Trtllm(Engine):
    """As ``PyExecutorProfileManager``: uncompressed files, an id of its own."""

    def start(self, body: dict[str, Any]) -> None:
        if self.running:
            raise Refused(500, "Profiling is already in progress")
        self.directory = Path(body["output_dir"])
        self.begin()

    def stop(self) -> None:
        if self.running:
            self.finish()

    def own_name(self, rank: int) -> str:
        return f"trtllm-trace-{int(time.time())}-0badcafe-rank-{rank}.json"


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    config: dict[str, Any]
    calls: dict[str, int]

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        self.note(body)
        if self.path == "/forward":
            with self.engine.lock:
                self.engine.forward(body["n"])
            self.answer(200, json.dumps({"passes": self.engine.passes}))
            return
        action = {"/start_profile": "start", "/stop_profile": "stop"}.get(self.path)
        if action is None:
            self.answer(404, '{"detail":"Not Found"}')
            return
        script = self.config.get(action, ["ok"])
        word = script[min(self.calls.get(action, 0), len(script) - 1)]
        self.calls[action] = self.calls.get(action, 0) + 1
        self.act(action, word, body)

    def act(self, action: str, word: str, body: dict[str, Any]) -> None:
        if word == "422" and body:
            self.answer(422, '{"detail":"Extra inputs are not permitted"}')
        elif word in {"500", "404", "409"}:
            self.answer(int(word), "it is broken")
        elif word == "never":
            time.sleep(3600)
        elif word == "drip":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b".")
                self.wfile.flush()
                time.sleep(0.05)
        else:
            if word == "slow":
                time.sleep(self.config["seconds"])
            try:
                with self.engine.lock:
                    if action == "start":
                        self.engine.start(body)  # type: ignore[attr-defined]
                    else:
                        self.engine.stop()  # type: ignore[attr-defined]
            except Refused as refused:
                self.answer(refused.status, refused.text or "Internal Server Error")
                return
            self.answer(500 if word == "partial" else 200, "Internal Server Error" if word == "partial" else "")

    def note(self, body: dict[str, Any]) -> None:
        if self.config.get("log"):
            line = {"path": self.path, "body": body, "auth": self.headers.get("Authorization")}
            with Path(self.config["log"]).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def answer(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Silent."""


def main() -> None:
    config = json.loads(sys.argv[1])
    Handler.config, Handler.calls = config, {}
    Handler.engine = {"vllm": Vllm, "sglang": Sglang, "trtllm": Trtllm}[config["engine"]](config)
    if config.get("torch"):
        import torch  # noqa: F401 - the first call shall not wait for it
    # torch's profiler wants to be started and stopped by the thread that it records.
    server = (HTTPServer if config.get("torch") else ThreadingHTTPServer)(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
