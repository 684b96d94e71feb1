"""Programs that the tests run in processes of their own: ``python scenarios.py NAME SAVE_PATH [ARGUMENT]``.

Most hold several captures, each in a folder of its own below the save path, since importing torch takes long.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kit import config, op, outcomes, until

from rankscope import DistProfiler, annotate
from rankscope.artifacts.exports import exports


def handle(path: Path, role: str = "actor", *roles: str, **options: Any) -> DistProfiler:
    return DistProfiler(config(path, role, *roles, **options), role=role, rank=0)


def in_thread(work: Callable[[], None], name: str = "side") -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


class Helper(threading.Thread):
    """A thread that lives on and runs what it is given."""

    def __init__(self) -> None:
        super().__init__(name="helper", daemon=True)
        self._work: list[Callable[[], Any]] = []
        self._wake = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        while True:
            self._wake.acquire()
            self._work.pop()()
            self._done.release()

    def do(self, work: Callable[[], Any]) -> None:
        self._work.append(work)
        self._wake.release()
        assert self._done.acquire(timeout=30)


@contextlib.contextmanager
def window(profiler: DistProfiler, step: int) -> Iterator[None]:
    profiler.start(step=step)
    try:
        yield
    finally:
        profiler.stop()


# Start, stop and nesting.


def lifecycle(path: Path) -> None:
    """What a plain program does, and what it should not do but does."""
    with handle(path / "twice") as profiler:
        profiler.start(step=1)
        op("cos")
        profiler.stop()
        profiler.stop()
        profiler.start(step=2)
        op("sin")
        profiler.stop()
        profiler.stop()

    @annotate("inner")
    def inner() -> None:
        op("cos")

    @annotate("middle")
    def middle() -> None:
        inner()
        op("sin")

    @annotate("outer")
    def outer(deep: bool) -> None:
        (middle if deep else inner)()
        op("tan")

    with handle(path / "nested", discrete=True) as profiler, window(profiler, 1):
        outer(False)
        outer(True)

    for number, (first, last) in enumerate(itertools.product(("actor", "ref"), repeat=2)):
        place = path / f"colocated{number}"
        settings = config(place, "actor", "ref")
        handles = {role: DistProfiler(settings, role=role, rank=0) for role in ("actor", "ref")}
        second = "ref" if first == "actor" else "actor"
        for step in (1, 2):
            handles[first].start(step=step)
            handles[second].start(step=step)
            op("cos")
            handles["ref" if last == "actor" else "actor"].stop()
            op("sin")
            handles[last].stop()
        for profiler in handles.values():
            profiler.close()

    with handle(path / "never_stopped") as profiler:
        profiler.start(step=1)
        op("cos")
        profiler.start(step=2)
        op("sin")
        profiler.stop()

    with handle(path / "early_return") as profiler:

        def train() -> None:
            with window(profiler, 1):
                op("cos")
                return

        train()
        assert not torch.autograd.profiler._is_profiler_enabled

    for number in range(5):
        with handle(path / "again", common={"steps": [1, 2, 3, 4, 5]}) as profiler, window(profiler, number + 1):
            op("cos")
    assert "rankscope_torch.trace" not in sys.modules, "a file was finished in the training process"


def foreign(path: Path) -> None:
    """The user profiles by hand, around or inside of our window."""
    profile = torch.profiler.profile

    def seen(by_hand: Any) -> set[str]:
        return {event.name for event in by_hand.events()}

    with handle(path / "around") as profiler:
        with profile() as by_hand, window(profiler, 1):
            op("cos")
        assert "aten::cos" in seen(by_hand)
        with window(profiler, 2):
            op("sin")
    with handle(path / "within") as profiler:
        with window(profiler, 1):
            op("cos")
            with profile() as by_hand:
                op("sin")
            op("tan")
        assert {"aten::sin"} == seen(by_hand) & {"aten::cos", "aten::sin", "aten::tan"}
        with window(profiler, 2):
            op("sin")
    with handle(path / "beyond") as profiler:
        by_hand = profile()
        with window(profiler, 1):
            by_hand.start()
            op("cos")
        with window(profiler, 2):
            op("sin")
        by_hand.stop()
        assert {"aten::cos", "aten::sin"} <= seen(by_hand)
        with window(profiler, 3):
            op("tan")


def threads(path: Path) -> None:
    """Windows that begin on one thread and end on another."""
    with handle(path / "ended") as profiler:
        in_thread(lambda: (profiler.start(step=1), op("cos")), "short-lived")
        profiler.stop()
        with window(profiler, 2):
            op("sin")
    helper = Helper()

    @annotate("stage")
    def stage(name: str) -> None:
        op(name)

    with handle(path / "alive") as profiler:
        helper.do(lambda: (profiler.start(step=1), stage("cos")))
        profiler.stop()
        assert not outcomes(path / "alive"), "a stop elsewhere must be left to the thread that started"
        helper.do(lambda: stage("sin"))
        assert outcomes(path / "alive")["exporting"] == 1
        with window(profiler, 2):
            op("tan")
    with handle(path / "alive_next") as profiler:
        # The next window begins, on the same thread, while the stop of the first still waits for that thread.
        helper.do(lambda: (profiler.start(step=1), op("cos")))
        profiler.stop()
        helper.do(lambda: (profiler.start(step=2), op("sin"), profiler.stop()))
    with handle(path / "alive_next_elsewhere") as profiler:
        helper.do(lambda: (profiler.start(step=1), op("cos")))
        profiler.stop()
        with window(profiler, 2):
            op("sin")
        helper.do(lambda: stage("tan"))
    with handle(path / "pre_existing") as profiler, window(profiler, 1):
        helper.do(lambda: stage("cos"))
        helper.do(lambda: stage("cos"))
        stage("sin")


def exit_while_waiting(path: Path, kind: str) -> None:
    """The process ends while a stop still waits for the thread that started, which has ended or lives on."""
    profiler = handle(path)
    leave = threading.Event()

    def record() -> None:
        profiler.start(step=1)
        op("cos")
        started.set()
        leave.wait(60)

    started = threading.Event()
    threading.Thread(target=record, name="recorder", daemon=kind == "daemon").start()
    started.wait(60)
    profiler.stop()
    if kind == "ended":
        leave.set()


def all_threads(path: Path) -> None:
    helper = Helper()

    @annotate("stage")
    def stage(name: str) -> None:
        op(name)

    with handle(path / "ended", all_threads=True) as profiler:
        in_thread(lambda: (profiler.start(step=1), op("cos")), "short-lived")
        profiler.stop()
    with handle(path / "pre_existing", all_threads=True) as profiler, window(profiler, 1):
        helper.do(lambda: stage("cos"))
        stage("sin")
    with handle(path / "memory", all_threads=True, contents=["memory"]) as profiler, window(profiler, 1):
        op("cos")


# The end of a process.


def leave(path: Path, how: str = "end", setting: str = "") -> None:
    """Recording, and then the process ends."""
    common = {"flush_on_sigterm": setting != "off"}
    if setting == "previous":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    profiler = handle(path, common=common)
    if how == "wait" and setting == "off":
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    profiler.start(step=1)
    with annotate("done"):
        op("cos")
    with annotate("busy"):
        op("sin")
        if how == "wait":
            print("ready", flush=True)
            time.sleep(60)
        elif how == "exit":
            sys.exit(3)
        elif how == "raise":
            raise ValueError("the training failed")
        elif how == "os_exit":
            os._exit(4)


def killed_after_stop(path: Path) -> None:
    profiler = handle(path)
    with window(profiler, 1):
        op("cos")
    print("ready", flush=True)
    time.sleep(60)


# Children.


def _child(results: Any) -> None:
    with annotate("in_child"):
        op("tan")
    results.put("done")


def children(path: Path) -> None:
    profiler = handle(path)
    profiler.start(step=1)
    op("cos")
    pid = os.fork()
    if pid == 0:
        with annotate("in_child"):
            op("tan")
        profiler.step()
        profiler.stop()
        profiler.close()
        os._exit(0 if not profiler.recording else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        results = context.Queue()
        process = context.Process(target=_child, args=(results,))
        process.start()
        assert results.get(timeout=60) == "done"
        process.join(60)
        assert process.exitcode == 0
    with annotate("in_parent"):
        op("sin")
    profiler.stop()
    profiler.close()


def forked_exit(path: Path) -> None:
    """A forked child leaves by the front door while its parent records, where torch alone hangs or crashes."""
    profiler = handle(path)
    profiler.start(step=1)
    op("cos")
    pid = os.fork()
    if pid == 0:
        sys.exit(5)
    deadline = time.monotonic() + 30
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print("child", os.waitstatus_to_exitcode(status) if ended else "hung", flush=True)
    op("sin")
    profiler.stop()
    profiler.close()


# What models do.


def swapping(path: Path) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    for name, options in (("drop", {}), ("keep", {"on_swap_tensors": "keep"})):
        with handle(path / name, contents=["shapes", "stack"], **options) as profiler, window(profiler, 1):
            model = torch.nn.Linear(4, 4)
            with annotate("stage"):
                model(torch.ones(1, 4))
                try:
                    model.to(torch.bfloat16)
                except RuntimeError as error:
                    print(name, "failed:", error)
                else:
                    print(name, "swapped")


def depths(path: Path) -> None:
    """Stacks are followed by a tracer that knows the frame it was started in."""
    for contents in (["stack"], ["stack", "shapes", "memory", "flops"]):
        place = path / "-".join(contents)
        profiler = handle(place, contents=contents)

        def deeper(levels: int, action: Callable[[], object]) -> None:
            if levels:
                deeper(levels - 1, action)
            else:
                action()

        deeper(5, lambda p=profiler: p.start(step=1))
        op("cos")
        file = place / "tensor.pt"
        torch.save(torch.ones(2), file)
        torch.load(file)
        file.unlink()
        profiler.stop()
        profiler.start(step=2)
        op("sin")
        deeper(7, profiler.stop)

        @contextlib.contextmanager
        def around(p: DistProfiler = profiler) -> Iterator[None]:
            p.start(step=3)
            yield
            p.stop()

        with around():
            op("tan")
        profiler.close()


# Disks and helpers.


def full_disk(path: Path, disk: str) -> None:
    place = Path(disk) / "profile"
    profiler = handle(place)
    profiler.start(step=1)
    for _ in range(2000):
        op("cos")
    profiler.stop()
    assert exports().drain(30)
    profiler.start(step=2)
    op("sin")
    filler = Path(disk) / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    profiler.stop()
    filler.unlink()
    profiler.start(step=3)
    op("tan")
    profiler.stop()
    profiler.close()


def _helper_pid() -> int:
    process = exports()._process
    assert process is not None
    return process.pid


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def helper_killed(path: Path) -> None:
    """The helper process dies: once with nothing to do, once with files in its hands."""
    profiler = handle(path)
    with window(profiler, 1):
        op("cos")
    assert exports().drain(30)
    first = _helper_pid()
    os.kill(first, signal.SIGKILL)
    until(lambda: _state(first) in {"", "Z"})
    with window(profiler, 2):
        op("sin")
    assert exports().drain(30)
    second = _helper_pid()
    assert second != first
    os.kill(second, signal.SIGSTOP)
    with window(profiler, 3):
        op("tan")
    assert exports().pending == 1
    os.kill(second, signal.SIGKILL)
    assert exports().drain(30)
    assert _helper_pid() not in {first, second}
    profiler.close()


# Ranks.


def distributed(path: Path, rank: str, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    with DistProfiler(config(path), role="actor") as profiler, window(profiler, 1), annotate("exchange"):
        torch.distributed.all_reduce(torch.ones(4))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
