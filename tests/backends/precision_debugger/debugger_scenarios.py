"""Programs that the tests run in processes of their own: ``python debugger_scenarios.py NAME SAVE_PATH [ARGUMENT]``.

Most hold several captures, each in a folder of its own below the save path, since importing msprobe takes seconds. The
last line that one prints is JSON: what the test cannot see from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from debugger_kit import config, msprobe_json, own_options
from torch import nn

from rankscope import DistProfiler, ProfileController, ProfiledWorker, annotate

if TYPE_CHECKING:
    from typing_extensions import Self

torch.set_num_threads(1)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)  # of what msprobe imports


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(number: int = 1) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4) * number


class Worker(ProfiledWorker):
    """One role and its model, under the attribute that verl gives it."""

    def __init__(self, settings: dict[str, Any], role: str = "actor", rank: int = 0, model: Any = None) -> None:
        self.profiler = DistProfiler(settings, role=role, rank=rank, world_size=rank + 1)
        self.actor_module = net() if model is None else model
        self.critic_module = net(1)
        self.seen: list[tuple[str, str, tuple[torch.Tensor, torch.Tensor]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.close()

    @annotate("actor_update", scheduled=True)
    def update(self, x: torch.Tensor) -> None:
        self.forward(x).square().sum().backward()

    @annotate("actor_compute_log_prob")
    @torch.no_grad()
    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    @annotate("critic_update", scheduled=True)
    def critic_update(self, x: torch.Tensor) -> None:
        self.critic_module(x).sum().backward()

    @annotate("rollout_generate")
    def generate(self, x: torch.Tensor) -> None:
        self.forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chunks = self.actor_module if isinstance(self.actor_module, list) else [self.actor_module]
        for chunk in chunks:
            x = chunk(x)
        return x


@contextlib.contextmanager
def window(worker: Worker, step: int | None = 1) -> Iterator[None]:
    worker.profiler.start(step=step)
    try:
        yield
    finally:
        worker.profiler.stop()


def finish(**facts: Any) -> None:
    print(json.dumps(facts))


# What is in a dump.


def content(path: Path, level: str, task: str) -> None:
    """Two stages in two steps of four, and what torch itself saw meanwhile."""
    settings = config(path, common={"steps": [2, 3]}, config_path=msprobe_json(path / "c.json", task=task, level=level))
    environ = dict(os.environ)
    worker = Worker(settings)
    controller = ProfileController(settings, workers=[worker], total_steps=4)
    seen: dict[str, dict[str, torch.Tensor]] = {}
    now = [""]

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen.setdefault(now[0], {})[f"{name}.forward.input"] = args[0].detach().clone()
            seen[now[0]][f"{name}.forward.output"] = output.detach().clone()

        return hook

    for name, layer in worker.actor_module.named_children():
        layer.register_forward_hook(watch(name))
    for step in range(1, 5):
        with controller.step(step):
            worker.actor_module.zero_grad()
            now[0] = f"{step}/actor_compute_log_prob"
            worker.log_prob(batch(step))
            now[0] = f"{step}/actor_update"
            worker.update(batch(step))
            for name, parameter in worker.actor_module.named_parameters():
                seen[now[0]][f"{name}.gradient"] = parameter.grad.clone()
    controller.close()
    worker.profiler.close()
    torch.save(seen, path / "seen.pt")
    finish(environ=sorted(set(os.environ.items()) ^ set(environ.items())))


# Which stretch is dumped.


def stretches(path: Path) -> None:
    facts: dict[str, Any] = {}
    mix = {"level": "mix"}

    with Worker(config(path / "raising", **mix)) as worker:
        try:
            with window(worker):
                worker.update("no tensor")  # type: ignore[arg-type]
        except TypeError as error:
            facts["raised"] = str(error)
        with window(worker, 2):
            worker.update(batch())

    class Nesting(Worker):
        @annotate("actor_update")
        def update(self, x: torch.Tensor) -> None:
            self.log_prob(x)
            super().update(x)

    with Worker(config(path / "plain", **mix)) as worker, window(worker):
        worker.log_prob(batch())
        worker.update(batch())
    with Nesting(config(path / "nested", **mix)) as worker, window(worker):
        worker.update(batch())
    with Worker(config(path / "inside", stages=["actor_update"], **mix)) as worker, window(worker):

        @annotate("ref_compute_log_prob")
        def around() -> None:
            with annotate("micro_batch0"):
                worker.update(batch())

        around()

    with Worker(config(path / "twice", **mix)) as worker, window(worker):
        worker.log_prob(batch())
        worker.log_prob(batch())

    for _ in range(2):  # two jobs with one save path
        with Worker(config(path / "again", **mix)) as worker, window(worker):
            worker.log_prob(batch())

    with Worker(config(path / "manual", **mix)) as worker, window(worker, None):
        worker.log_prob(batch())

    settings = config(path / "continuous", common={"profile_continuous_steps": True, "steps": [2, 3]}, **mix)
    worker = Worker(settings)
    controller = ProfileController(settings, workers=[worker], total_steps=4)
    for step in range(1, 5):
        with controller.step(step):
            worker.log_prob(batch(step))
    controller.close()
    worker.profiler.close()

    with Worker(config(path / "discrete", discrete=True, stages=["actor_compute_log_prob"], **mix)) as worker:
        for step in (1, 2):
            with window(worker, step):
                worker.log_prob(batch())
                worker.update(batch())

    class Halved(Worker):
        @annotate("actor_update")
        def update(self, x: torch.Tensor) -> None:
            self.forward(x)
            self.middle()
            with annotate("micro_batch1"):
                self.forward(x)

        def middle(self) -> None:
            self.profiler.stop()

    with Halved(config(path / "stopped", **mix)) as worker:
        worker.profiler.start(step=1)
        worker.update(batch())

    class Late(Halved):
        def middle(self) -> None:
            over = time.monotonic() + 1.0
            while time.monotonic() < over:
                time.sleep(0.01)

    with Late(config(path / "early", max_seconds=1.0, **mix)) as worker, window(worker):
        worker.update(batch())

    class Coroutine(Worker):
        @annotate("actor_update")
        async def update_later(self, x: torch.Tensor) -> None:
            await asyncio.sleep(0)
            self.forward(x)

        @annotate("actor_compute_log_prob")
        def pieces(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield self.forward(x)
            yield self.forward(x)

    with Coroutine(config(path / "kinds", **mix)) as worker, window(worker):
        asyncio.run(worker.update_later(batch()))
        facts["pieces"] = len(list(worker.pieces(batch())))

    with Worker(config(path / "nothing", **mix)) as worker, window(worker):
        worker.generate(batch())
    finish(**facts)


def resolver(instance: Any, stage: str, role: str) -> Any:
    """For ``resolve_model``."""
    return {"own_function": FREE, "own_method": [instance.left, instance.right] if instance else None}.get(stage)


FREE = net(3)


def models(path: Path) -> None:
    """Where the model is, and models of several chunks."""
    level = {"level": "L0"}
    with Worker(config(path / "chunks", **level), model=[net(), nn.Linear(2, 3)]) as worker, window(worker):
        worker.log_prob(batch())  # a chunk that is one layer has no module below it
    with Worker(config(path / "two", **level), model=[net(), nn.Sequential(nn.Linear(2, 3))]) as worker, window(worker):
        worker.log_prob(batch())
        worker.update(batch())
    with Worker(config(path / "one", **level), model=[net()]) as worker, window(worker):
        worker.log_prob(batch())

    class Own(Worker):
        left, right = net(4), nn.Sequential(nn.Linear(2, 2))

        @annotate("own_method")
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.right(self.left(x))

        @annotate("other_stage")
        def other(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x)

    @annotate("own_function")
    def function(x: torch.Tensor) -> torch.Tensor:
        return FREE(x)

    with Own(config(path / "attribute", models={"own_method": ["missing", "left"]}, **level)) as worker, window(worker):
        worker.run(batch())
    chosen = {"stages": ["own_method", "own_function"], "resolve_model": "debugger_scenarios:resolver"}
    with Own(config(path / "resolved", **chosen, **level)) as worker, window(worker):
        worker.run(batch())
        function(batch())
        worker.other(batch())
    with Own(config(path / "operators", stages=["own_method", "own_function"])) as worker, window(worker):
        worker.run(batch())
        function(batch())
    with Own(config(path / "unknown", **level)) as worker, window(worker):
        worker.log_prob(batch())
        for _ in range(3):
            worker.other(batch())
    finish()


# Settings of msprobe.


def settings(path: Path) -> None:
    """Levels and tasks besides the usual ones."""
    facts: dict[str, Any] = {}
    with Worker(config(path / "structure", task="structure", level="L0")) as worker, window(worker):
        worker.log_prob(batch())

    class Saving(Worker):
        saves = True

        @annotate("actor_update")
        def update(self, x: torch.Tensor) -> None:
            from msprobe.pytorch import PrecisionDebugger

            if self.saves:
                PrecisionDebugger.save(x, "x", False)

    with Saving(config(path / "debug", task="tensor", level="debug")) as worker:
        for step in (1, 2):
            with window(worker, step):
                worker.update(batch(step))
                worker.saves = False

    off = msprobe_json(path / "off.json", dump_enable=False)
    with Worker(config(path / "off", config_path=off)) as worker, window(worker):
        worker.log_prob(batch())
    on = msprobe_json(path / "on.json", dump_enable=True)
    with Worker(config(path / "on", config_path=on)) as worker:
        for step in (1, 2):
            with window(worker, step):
                worker.log_prob(batch())
    listed = msprobe_json(path / "listed.json", statistics={"list": ["Module.2.Linear"], "data_mode": ["output"]})
    with Worker(config(path / "listed", config_path=listed)) as worker, window(worker):
        worker.log_prob(batch())
    none = msprobe_json(path / "none.json", statistics={"list": ["Module.9.Linear"]})
    with Worker(config(path / "none", config_path=none)) as worker, window(worker):
        worker.log_prob(batch())
    same = msprobe_json(path / "same.json", rank=["0-1"], step=[1, "2-3"])
    with Worker(config(path / "same", config_path=same)) as worker, window(worker, 3):
        worker.log_prob(batch())
    finish(**facts)


# Several roles in a process.


def roles(path: Path) -> None:
    """Two handles with options of their own; whoever starts first owns the window."""
    statistics = msprobe_json(path / "statistics.json")
    tensors = msprobe_json(path / "tensors.json", task="tensor")
    for name, order in (("actor_first", ("actor", "critic")), ("critic_first", ("critic", "actor"))):
        values = config(path / name, "actor", "critic")
        own_options(values, "actor", config_path=statistics, stages=["actor_update"])
        own_options(values, "critic", config_path=tensors, stages=["critic_update"])
        values["critic"]["profiler"]["save_path"] = str(path / f"{name}_critic")
        workers = {role: Worker(values, role) for role in order}
        for step in (1, 2):
            for role in order:
                workers[role].profiler.start(step=step)
            workers["actor"].log_prob(batch(step))  # not chosen
            workers["actor"].update(batch(step))
            workers["critic"].critic_update(batch(step))
            workers["actor"].critic_update(batch(step))  # not chosen by this role
            for role in order:
                workers[role].profiler.stop()
        for worker in workers.values():
            worker.profiler.close()
    values = config(path / "unselected", "actor", "critic", level="L0")
    values["critic"]["profiler"]["ranks"] = [1]
    with Worker(values) as actor, Worker(values, "critic") as critic, window(actor):
        critic.critic_update(batch())
        actor.log_prob(batch())
    finish()


# What stays behind.


def _signature() -> dict[str, str]:
    """The functions of torch that msprobe replaces."""
    import torch._dynamo.convert_frame as frames

    functions = {
        "linear": nn.functional.linear,
        "add": torch.add,
        "Tensor.add": torch.Tensor.add,
        "all_reduce": torch.distributed.all_reduce,
        "wait": vars(torch.distributed.Work)["wait"],
        "script": torch.jit.script,
        "compile": frames._compile,
        "clip": nn.utils.clip_grad_norm_,
    }
    return {name: repr(function) for name, function in functions.items()}


def _train(worker: Worker, steps: int, profiled: bool) -> list[float]:
    optimizer = torch.optim.SGD(worker.actor_module.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(7)
    for step in range(1, steps + 1):
        with window(worker, step) if profiled else contextlib.nullcontext():
            x = torch.randn(3, 4)
            losses.append(float(worker.log_prob(x).sum()))
            worker.update(x)
            nn.utils.clip_grad_norm_(worker.actor_module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def traces(path: Path) -> None:
    """Torch, the model and the process are after a dump as they were before it."""
    before = _signature()
    environ, folder = dict(os.environ), os.getcwd()
    expected = _train(Worker(config(path / "off", common={"steps": None})), 4, profiled=False)
    forward = list(vars(net()[0]))
    facts: dict[str, Any] = {}
    with Worker(config(path / "on", level="mix")) as worker:
        with window(worker):
            worker.update(batch())
            facts["between_stages"] = _signature() == before
            inside: dict[str, Any] = {}

            @annotate("actor_update")
            def look(self: Worker) -> None:
                inside["replaced"] = sum(_signature()[name] != before[name] for name in before)
                inside["hooked"] = list(vars(self.actor_module[0])) != forward
                self.forward(batch())

            look(worker)
            facts |= inside
        facts["after"] = _signature() == before
        facts["module"] = list(vars(worker.actor_module[0])) == forward
        facts["hooks"] = sum(
            len(value) for layer in worker.actor_module for key, value in vars(layer).items() if key.endswith("_hooks")
        )
        twin = copy.deepcopy(worker.actor_module)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        facts["twin"] = float(twin(batch()).abs().sum().detach())

    with Worker(config(path / "numbers", level="mix")) as worker:
        facts["same_numbers"] = _train(worker, 4, profiled=True) == expected
    facts["cwd"] = os.getcwd() == folder
    facts["environ"] = sorted(set(os.environ.items()) ^ set(environ.items()))

    class Compiled(Worker):
        compiled: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.compiled(x)

    with Compiled(config(path / "compiled", level="mix")) as worker:
        worker.compiled = torch.compile(worker.actor_module, backend="eager")
        worker.log_prob(batch())
        with window(worker):
            worker.log_prob(batch())
            facts["compiled_between"] = worker.forward(batch(2)[:2]).shape[0]
        facts["compiled_after"] = worker.forward(batch(3)[:1]).shape[0]
    original = nn.utils.clip_grad_norm_

    def own(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    nn.utils.clip_grad_norm_ = own
    with Worker(config(path / "patched", level="mix")) as worker, window(worker):
        worker.update(batch())
    facts["own_patch"] = nn.utils.clip_grad_norm_ is own
    finish(**facts)


def foreign(path: Path) -> None:
    """The script uses msprobe itself."""
    from msprobe.pytorch import PrecisionDebugger

    theirs = PrecisionDebugger(config_path=msprobe_json(path / "c.json"), dump_path=str(path / "theirs"))
    model = net()
    with Worker(config(path / "ours", level="L0")) as worker:
        with window(worker):
            worker.log_prob(batch())
        theirs.start(model)
        model(batch())
        theirs.stop()
    sys.stdout.flush()
    finish(same=PrecisionDebugger._instance is theirs)


def stuck(path: Path) -> None:
    """An msprobe that keeps the folder of its first dump, whatever it is told."""
    from msprobe.pytorch.dump.pytorch_service import PytorchService

    made: list[str] = []

    def create_dirs(self: Any, original: Any = PytorchService.create_dirs) -> None:
        if not hasattr(self, "born_with"):
            self.born_with = self.config.dump_path
            made.append(self.born_with)
        told, self.config.dump_path = self.config.dump_path, self.born_with
        original(self)
        self.config.dump_path = told

    PytorchService.create_dirs = create_dirs
    with Worker(config(path, level="L0")) as worker:
        for step in (1, 2):
            with window(worker, step):
                worker.log_prob(batch(step))
                worker.update(batch(step))
    finish(debuggers=len(made))


def full_disk(path: Path) -> None:
    """A disk that is full in the first step, and has room again in the second."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Worker(config(path, level="mix")) as worker:
        for step in (1, 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, unlimited[1]) if step == 1 else unlimited)
            with window(worker, step):
                worker.update(batch(step))
    finish()


# Ways out.


def leave(path: Path, how: str) -> None:
    """The process ends inside of a stage."""
    worker = Worker(config(path, common={"flush_on_sigterm": True}, level="L0"))

    class Leaving(Worker):
        @annotate("actor_update")
        def update(self, x: torch.Tensor) -> None:
            self.forward(x)
            if how == "raise":
                raise ValueError("the training failed")
            if how == "exit":
                sys.exit(3)
            if how == "interrupt":
                raise KeyboardInterrupt
            os.kill(os.getpid(), 15)

    worker.__class__ = Leaving
    worker.profiler.start(step=1)
    worker.update(batch())


def threads(path: Path) -> None:
    """Stages of two threads at once, a stop from another thread, and a fork."""
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(Worker):
        @annotate("actor_update")
        def update(self, x: torch.Tensor) -> None:
            self.forward(x)
            inside.set()
            assert go_on.wait(30)

    with Waiting(config(path / "at_once", level="L0")) as worker, window(worker):
        thread = threading.Thread(target=worker.update, args=(batch(),))
        thread.start()
        assert inside.wait(30)
        worker.log_prob(batch())
        go_on.set()
        thread.join()
    inside.clear()
    go_on.clear()
    with Waiting(config(path / "foreign_stop", level="L0")) as worker:
        worker.profiler.start(step=1)
        thread = threading.Thread(target=worker.update, args=(batch(),))
        thread.start()
        assert inside.wait(30)
        worker.profiler.stop()
        go_on.set()
        thread.join()
        with window(worker, 2):
            worker.log_prob(batch())

    class Forking(Worker):
        child = False

        @annotate("actor_update")
        def update(self, x: torch.Tensor) -> None:
            self.forward(x)
            pid = os.fork()
            if pid == 0:
                self.child = True
                return
            assert os.waitpid(pid, 0)[1] == 0

    with Forking(config(path / "forking", level="L0")) as worker:
        with window(worker):
            worker.update(batch())
        if worker.child:
            with Worker(config(path / "child", level="L0")) as own, window(own):
                own.log_prob(batch())
            os._exit(0)
    finish()


# What goes wrong.


def no_model(path: Path, strict: str) -> None:
    """One stage has no model, or one that is none; the other has."""
    raised: list[str] = []

    class Bare(Worker):
        @annotate("critic_update")
        def critic_update(self, x: torch.Tensor) -> None:
            self.critic_module = x

    with Bare(config(path, strict=strict == "strict", level="L0")) as worker:
        worker.critic_module = {"not": "a model"}  # type: ignore[assignment]
        for step in (1, 2):
            try:
                with window(worker, step):
                    worker.critic_update(batch())
                    worker.log_prob(batch())
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
    finish(raised=raised, faults=[str(fault) for fault in worker.profiler.faults])


def job(path: Path) -> None:
    """One rank of torchrun: a gradient all-reduce inside the dumped stage."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values = config(path, common={"steps": [2]}, level="mix")
    worker = Worker(values, rank=rank)
    worker.actor_module = DistributedDataParallel(worker.actor_module)
    controller = ProfileController(values, workers=[worker], total_steps=2)
    for step in (1, 2):
        with controller.step(step):
            worker.update(batch(rank + 1))
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work.wait() is True
    controller.close()
    worker.profiler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["debugger_scenarios"] = sys.modules["__main__"]
    arguments = list(sys.argv[1:])
    globals()[arguments[0]](Path(arguments[1]), *arguments[2:])
