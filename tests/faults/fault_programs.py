"""The programs of the matrix: small trainings of three steps in which something happens in the second.

Each runs in a process of its own, with profiling on, and once with profiling off. What the training itself computes,
sees and raises goes through ``say``, and is compared between the two.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_gate
from kit import until

from rankscope import DistProfiler, annotate

OPTIONS: dict[str, dict[str, Any]] = {
    "continuous": {},
    "discrete": {"discrete": True},
    "scheduled": {"schedule": {"skip_first": 1, "active": 1}},
}


class Over(BaseException):
    """The program returns from the middle of a step."""


class Run:
    """One cell: its handle, its training, and the log of what the training did."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.on: bool = request["on"]
        self.mode: str = request["mode"]
        self.contents: list[str] = request["contents"]
        self.arguments: dict[str, Any] = request["arguments"]
        self.folder = Path(request["folder"])
        self.save_path = Path(request["save_path"])
        self.flag = self.folder / "flag"
        self._said = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def say(self, *facts: Any) -> None:
        os.write(self._said, json.dumps(facts).encode() + b"\n")

    def note(self, **facts: Any) -> None:
        """What only the test wants to know; not compared."""
        (self.folder / "notes").write_text(json.dumps(facts))

    def handle(self, *tools: str, job: str = "", steps: int = 3, **common: Any) -> DistProfiler:
        options = {"contents": self.contents, "compression": 1, **OPTIONS[self.mode]}
        gate = {"discrete": self.mode == "discrete", "job": job, "flag": str(self.flag)}
        settings = {"torch": options, "gate": gate}
        chosen = tools or ("torch",)
        config = {
            "global_profiler": {
                "tool": list(chosen),
                "steps": list(range(1, steps + 1)),
                "save_path": str(self.save_path),
                "global_tool_config": {tool: settings[tool] for tool in chosen},
                **common,
            },
            "actor": {"profiler": {"enable": self.on, "ranks": "all"}},
        }
        self.profiler = DistProfiler(config, role="actor", rank=0, world_size=1)
        return self.profiler

    def arm(self, hook: str, action: Callable[[], object]) -> None:
        """Let the gate act in that hook in the second step; nothing where it is not loaded."""
        if self.on:
            fault_gate.armed[hook] = action

    @contextlib.contextmanager
    def window(self, step: int) -> Iterator[None]:
        self.profiler.start(step=step)
        try:
            yield
        except Exception:
            self.profiler.stop(aborted=True)
            raise
        self.profiler.stop()

    def train(self, step: int, inside: Callable[[], object] = lambda: None, size: int = 4) -> list[float]:
        """A rollout, and an update of three mini-batches; ``inside`` runs in the second of them."""
        import torch

        with annotate("rollout"):
            found = [float(torch.full((8,), float(step)).cos().sum())]

        @annotate("update", scheduled=True)
        def update() -> None:
            for number in range(3):
                with annotate(f"mini_batch{number}"):
                    weights = torch.eye(size) * (step + number)
                    found.append(float((weights @ weights).tan().sum()))
                    if number == 1:
                        inside()
                self.profiler.step()

        update()
        return found

    def step(self, step: int, inside: Callable[[], object] = lambda: None) -> None:
        with self.window(step):
            found = self.train(step, inside)
        self.say(step, found)

    def steps(self, inside: Callable[[], object] = lambda: None, last: int = 3) -> None:
        """Three steps; ``inside`` runs in the second."""
        for step in range(1, last + 1):
            self.step(step, inside if step == 2 else lambda: None)


def run(request: dict[str, Any]) -> None:
    """Run a program as the body of this process; its end is the process's."""
    program = Run(request)
    with contextlib.suppress(Over):
        globals()[request["program"]](program)


def thread(work: Callable[[], object], name: str = "side", daemon: bool = False) -> threading.Thread:
    made = threading.Thread(target=work, name=name, daemon=daemon)
    made.start()
    return made


class Helper:
    """A thread that lives on and does what it is given."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._wake, self._done = threading.Semaphore(0), threading.Semaphore(0)
        thread(self._run, "trainer", daemon=True)

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            self._work.pop()()
            self._done.release()

    def do(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._wake.release()
        assert self._done.acquire(timeout=fault_gate.BOUND)


# Start, stop, threads, nesting.


def stop_twice(r: Run) -> None:
    r.handle()
    for step in (1, 2, 3):
        r.step(step)
        r.profiler.stop()
        r.profiler.stop()


def not_stopped(r: Run) -> None:
    r.handle()
    for step in (1, 2, 3):
        r.profiler.start(step=step)
        r.say(step, r.train(step))
        if step != 2:
            r.profiler.stop()


def stopped_elsewhere(r: Run) -> None:
    """The thread that trains lives on; another one asks to stop."""
    r.handle()
    trainer = Helper()

    def begin(step: int) -> None:
        r.profiler.start(step=step)
        r.say(step, r.train(step))

    for step in (1, 2, 3):
        trainer.do(lambda step=step: begin(step))
        thread(r.profiler.stop).join()
    trainer.do(lambda: r.say(r.train(4)))


def thread_ended(r: Run) -> None:
    """The thread that began the window is over before another one stops it."""
    r.handle()
    r.step(1)
    if r.mode == "discrete":

        def in_stage() -> None:
            stage = annotate("update", scheduled=True)
            stage.__enter__()
            leave.append(stage)

        leave: list[Any] = []
        r.profiler.start(step=2)
        thread(in_stage, "short-lived").join()
        r.profiler.stop()
    else:
        thread(lambda: (r.profiler.start(step=2), r.say(2, r.train(2))), "short-lived").join()
        r.profiler.stop()
    r.step(3)


def nested(r: Run) -> None:
    r.handle()
    depth = r.arguments["depth"]

    def inside(level: int = 1) -> None:
        if level < depth:
            with annotate(f"level{level}"):
                inside(level + 1)
        else:
            r.say("inside", level)

    r.steps(inside)


def deep(r: Run) -> None:
    """Spans in each other: by calls, and by blocks."""
    r.handle()
    sys.setrecursionlimit(20_000)

    @annotate("call")
    def call(levels: int) -> int:
        return 1 + call(levels - 1) if levels else 0

    def block(levels: int) -> int:
        if not levels:
            return 0
        with annotate("block"):
            return 1 + block(levels - 1)

    def inside() -> None:
        r.say(call(1000), block(1000))

    r.steps(inside)


# Other profilers.


def by_hand(r: Run) -> None:
    """The user's own torch profiler in the second step: around the window, inside of it, or past its end."""
    import torch

    r.handle()
    r.step(1)
    profile = torch.profiler.profile()

    def seen() -> list[str]:
        return sorted({event.name for event in profile.events() if event.name in {"aten::cos", "aten::sin"}})

    def own() -> None:
        profile.start()
        torch.ones(4).sin()
        profile.stop()

    if r.arguments["where"] == "outside":
        with profile:
            r.step(2)
    elif r.arguments["where"] == "inside":
        r.step(2, own)
    else:
        r.profiler.start(step=2)
        with annotate("update", scheduled=True):
            r.profiler.step()
            profile.start()
            torch.ones(4).cos()
            torch.ones(4).sin()
        r.profiler.stop()
        profile.stop()
    r.say(seen())
    r.step(3)


# Errors.


def stage_raises(r: Run) -> None:
    r.handle()

    def fail() -> None:
        raise ValueError("the loss is not a number")

    for step in (1, 2, 3):
        try:
            r.step(step, fail if step == 2 else lambda: None)
        except ValueError as error:
            r.say(step, type(error).__name__, str(error), len(_frames(error)))


def _frames(error: BaseException) -> list[str]:
    """The training's own frames of a traceback."""
    found, at = [], error.__traceback__
    while at is not None:
        if Path(at.tb_frame.f_code.co_filename).name == Path(__file__).name:
            found.append(at.tb_frame.f_code.co_name)
        at = at.tb_next
    return found


def neighbour_raises(r: Run) -> None:
    """A handler of another tool raises."""

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    r.handle("torch", "gate")
    r.arm(r.arguments["hook"], fail)
    r.steps()


def start_raises(r: Run) -> None:
    """The torch tool itself cannot start."""
    from rankscope_torch.session import Capture

    original = Capture.start

    def start(self: Any, now_ns: int) -> None:
        if failing:
            raise RuntimeError("no profiler today")
        original(self, now_ns)

    Capture.start = start  # type: ignore[method-assign]
    failing: list[int] = []
    r.handle()
    r.step(1)
    failing.append(1)
    r.step(2)
    r.step(3)


def hanging_stop(r: Run) -> None:
    """A tool never comes back from its stop, on a thread that nobody waits for; the training goes on and ends."""

    from rankscope import transitions

    transitions.PATIENCE = 1.0
    r.handle("torch", "gate", close_timeout=1.0)
    hanging = threading.Event()

    def hang() -> None:
        hanging.set()
        threading.Event().wait()

    r.step(1)
    r.arm("stop", hang)
    r.profiler.start(step=2)
    r.say(2, r.train(2) if r.mode != "discrete" else 0)

    def stop() -> None:
        if r.mode == "discrete":
            with annotate("update", scheduled=True):
                pass
        r.profiler.stop()

    thread(stop, "stopper", daemon=True)
    if r.on:
        assert hanging.wait(fault_gate.BOUND)
    began = time.monotonic()
    r.step(3)
    r.note(seconds=time.monotonic() - began)


# Children.


def child(results: Any) -> None:
    with annotate("in_child"):
        results.put("done")


def forked(r: Run) -> None:
    """os.fork in the window; the child ends at once, or by the front door."""
    r.handle()

    def inside() -> None:
        import torch

        for how in ("_exit", "exit"):
            pid = os.fork()
            if pid == 0:
                with annotate("in_child"):
                    torch.ones(8).sin()
                r.profiler.step()
                r.profiler.stop()
                if how == "_exit":
                    os._exit(6)
                sys.exit(7)
            r.say(how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    r.steps(inside)


def processes(r: Run) -> None:
    """multiprocessing in the window."""
    r.handle()

    def inside() -> None:
        context = multiprocessing.get_context(r.arguments["method"])
        results = context.Queue()
        process = context.Process(target=child, args=(results,))
        process.start()
        r.say(results.get(timeout=fault_gate.BOUND))
        process.join(fault_gate.BOUND)
        r.say(process.exitcode)

    r.steps(inside)


def execs(r: Run) -> None:
    """The process becomes another program."""
    r.handle()
    program = f"import os; os.write({r._said}, b'[\"the new program\"]\\n')"
    os.set_inheritable(r._said, True)
    r.steps(lambda: os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", program]))


def loads(r: Run) -> None:
    """Workers of a DataLoader are forked in the window and live longer."""
    import torch

    r.handle()
    batches: list[Any] = []

    def inside() -> None:
        loader = torch.utils.data.DataLoader(
            list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="fork"
        )
        batches.append(iter(loader))
        r.say(next(batches[0]).tolist())

    r.step(1)
    r.step(2, inside)
    with r.window(3):
        found = r.train(3)
        found += [float(batch.sum()) for batch in batches[0]]
    r.say(3, found)


# The end of the process.


def leave(how: str) -> None:
    numbers = {"SIGTERM": signal.SIGTERM, "SIGTERM, saving": signal.SIGTERM, "SIGINT": signal.SIGINT}
    if how == "end":
        raise Over
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how == "exception":
        raise RuntimeError("the training failed")
    os.kill(os.getpid(), numbers.get(how, signal.SIGKILL))


def ends(r: Run) -> None:
    """The process ends in the second step: while a tool starts, in the window, in a stop, a save or an export."""
    how, phase = r.arguments["how"], r.arguments["phase"]
    common = {"flush_on_sigterm": how == "SIGTERM, saving"}
    r.handle("torch", "gate", job="finish_after_strike" if phase == "export" else "", **common)

    def strike() -> None:
        if phase == "export" and r.on:
            until(Path(f"{r.flag}.working").exists)
            if how in {"end", "sys.exit", "exception", "SIGINT", "SIGTERM, saving"}:
                r.flag.touch()
        leave(how)

    r.step(1)
    if phase == "save" and r.on:
        _save_half(strike)
    elif phase in {"start", "stop"}:
        r.arm(phase, strike)
    with r.window(2):
        r.train(2, strike if phase == "window" or not r.on else lambda: None)
    strike()
    r.say("is still there")


def _save_half(strike: Callable[[], object]) -> None:
    """Strike with half of the raw trace on disk; if the process lives on, the other half follows."""
    from rankscope_torch.session import Capture

    original = Capture.save

    def save(self: Any, path: Path) -> None:
        Capture.save = original  # type: ignore[method-assign]
        original(self, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        try:
            strike()
        finally:
            path.write_bytes(whole)

    Capture.save = save  # type: ignore[method-assign]


# Helpers and disks.


def _helper() -> int:
    from rankscope.artifacts.exports import exports

    process = exports()._process
    assert process is not None
    return process.pid


def _dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def helper_killed_idle(r: Run) -> None:
    from rankscope.artifacts.exports import exports

    r.handle()
    r.step(1)
    if r.on:
        assert exports().drain(fault_gate.BOUND)
        pid = _helper()
        os.kill(pid, signal.SIGKILL)
        until(lambda: _dead(pid))
    r.step(2)
    r.step(3)


def helper_killed_working(r: Run) -> None:
    r.handle("torch", "gate", job="die_once")
    r.steps()


def full_disk(r: Run) -> None:
    r.handle()
    for step in (1, 2, 3):
        with r.window(step):
            found = r.train(step, lambda step=step: [r.train(step) for _ in range(30)])
        r.say(step, found)


def directory_removed(r: Run) -> None:
    when = r.arguments["when"]
    r.handle("torch", "gate", job="finish_after_strike" if when == "export" else "")

    def remove() -> None:
        def gone() -> bool:
            shutil.rmtree(r.save_path, ignore_errors=True)  # fails when a file comes in meanwhile
            return not r.save_path.exists()

        until(gone)

    r.step(1)
    if r.on:
        from rankscope.artifacts.exports import exports

        assert exports().drain(fault_gate.BOUND)
    if when == "start":
        remove()
    r.step(2, remove if when == "window" else lambda: None)
    if when == "export":
        if r.on:
            until(Path(f"{r.flag}.working").exists)
        remove()
        r.flag.touch()
    r.step(3)


# Odd processes.


def clock_set_back(r: Run) -> None:
    """The clock loses a minute at each look, from the middle of the second step on."""
    from rankscope.artifacts.store import Store

    real, lost = time.time_ns, [0]

    def backwards() -> int:
        if losing:
            lost[0] += 60_000_000_000
        return real() - lost[0]

    losing: list[int] = []
    time.time_ns = backwards
    Store.__init__.__kwdefaults__["clock"] = backwards
    r.handle()
    r.steps(lambda: losing.append(1))


def many_sessions(r: Run) -> None:
    r.handle(steps=90)
    seen = []
    for step in range(1, 91):
        r.step(step)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append((pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))))
    r.note(resident=[size for size, _ in seen], files=[count for _, count in seen])


def without_gc(r: Run) -> None:
    gc.disable()
    r.handle()
    r.steps()
    r.say(gc.isenabled())


def compiled(r: Run) -> None:
    """A compiled function and a backward pass of the user's own, inside of spans."""
    import torch

    r.handle()

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            with annotate("forward"):
                return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with annotate("backward"):
                return gradient * 2

    @torch.compile(backend="eager")
    def model(value: Any) -> Any:
        return (value.sin() + 1).sum()

    def inside() -> None:
        leaf = torch.arange(4.0, requires_grad=True)
        with annotate("model"):
            loss = model(Double.apply(leaf))
        with annotate("gradients"):
            loss.backward()
        r.say(float(loss.detach()), leaf.grad.tolist())

    r.steps(inside)
