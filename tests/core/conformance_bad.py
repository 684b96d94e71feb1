"""Backends that break one rule each, as their authors might; and the test classes that would find them out."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from rankscope import Availability, Context, Launch, Span, Window, hookimpl
from rankscope.testing import BackendConformance, RecordingBackend, RecordingOptions

BAD: dict[str, tuple[str, str]] = {}
"""Name of each test class here: the rule that its backend breaks, and words of what is seen."""


def breaks(rule: str, seen: str, **facts: Any) -> Callable[[Any], Any]:
    """A backend that breaks a rule; ``facts`` are attributes of its test class."""

    def note(factory: Any) -> Any:
        name = f"On{factory.__name__}"
        body = {"factory": staticmethod(factory), "tool": "bad", "__module__": __name__, "seconds": 30.0, **facts}
        globals()[name] = type(name, (BackendConformance,), body)
        BAD[name] = (rule, seen)
        return factory

    return note


def missing_class(options: Any = RecordingOptions) -> type[RecordingBackend]:
    return type("Backend", (RecordingBackend,), {"Options": options})


# Before a capture.


@breaks("registers", "the name is 'Bad-Tool'", tool="Bad-Tool")
class OddName(RecordingBackend):
    pass


@breaks("registers", "has an entry point 'not_installed_at_all'", tool="not_installed_at_all", factory=None)
class NotInstalled(RecordingBackend):
    pass


@breaks("registers", "the same object twice")
class Singleton(RecordingBackend):
    only: Any = None

    def __new__(cls, context: Context, options: RecordingOptions) -> Any:
        cls.only = cls.only or super().__new__(cls)
        return cls.only


@breaks("registers", "got the class RecordingBackend, not an object")
def a_class_instead_of_an_object(context: Context, options: Any) -> Any:
    return RecordingBackend


a_class_instead_of_an_object.Options = RecordingOptions  # type: ignore[attr-defined]


@breaks("registers", "implements no hook")
class NoHooks:
    Options = RecordingOptions

    def __init__(self, context: Context, options: RecordingOptions) -> None:
        self.context = context


@breaks("registers", "the property 'temperature' raised OSError: no device")
class Property(RecordingBackend):
    @property
    def temperature(self) -> float:
        raise OSError("no device")


@breaks("signatures", "start() has a default in attempts: 'int' = 1")
class Default(RecordingBackend):
    @hookimpl
    def start(self, window: Window, attempts: int = 1) -> None:
        pass


@breaks("signatures", "stop() has *, window: 'Window', which is no plain argument".replace("*, ", ""))
class KeywordOnly(RecordingBackend):
    @hookimpl
    def stop(self, *, window: Window) -> None:
        pass


@breaks("signatures", "start() asks for 'rank', which no core gives")
class UnknownArgument(RecordingBackend):
    @hookimpl
    def start(self, window: Window, rank: int) -> None:
        pass


@breaks("signatures", "stop() carries no @hookimpl")
class Undecorated(RecordingBackend):
    def stop(self, window: Window) -> None:
        pass


@breaks("signatures", "does not exist: 'begin'")
class Misspelt(RecordingBackend):
    @hookimpl
    def begin(self, window: Window) -> None:
        pass


@breaks("signatures", "start() is a coroutine function")
class Awaited(RecordingBackend):
    @hookimpl
    async def start(self, window: Window) -> None:
        pass


@breaks("signatures", "annotate() is a generator function")
class Generating(RecordingBackend):
    @hookimpl
    def annotate(self, span: Span) -> Iterator[None]:  # without @contextmanager
        yield


@breaks("signatures", "start() is a hook wrapper")
class Wrapper(RecordingBackend):
    @hookimpl(wrapper=True)
    def start(self, window: Window) -> Any:
        return (yield)


@breaks("options", "Options is <class 'dict'>")
class DictOptions(missing_class(dict)):  # type: ignore[misc]
    pass


@dataclasses.dataclass
class _Changeable:
    level: int = 1


@dataclasses.dataclass(frozen=True)
class _Bare:
    level: int


@dataclasses.dataclass(frozen=True)
class _Unreadable:
    level: NoSuchType = 1  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass(frozen=True)
class _Careless:
    level: Any = "low"

    def __post_init__(self) -> None:
        self.level.upper()


@breaks("options", "_Changeable can be changed")
class ChangeableOptions(missing_class(_Changeable)):  # type: ignore[misc]
    pass


@breaks("options", "no default: level")
class BareOptions(missing_class(_Bare)):  # type: ignore[misc]
    pass


@breaks("options", "cannot be read here: NameError")
class UnreadableOptions(missing_class(_Unreadable)):  # type: ignore[misc]
    pass


@breaks("options", "made _Careless raise AttributeError")
class CarelessOptions(missing_class(_Careless)):  # type: ignore[misc]
    pass


@breaks("options", "{'level': 'high'} is refused", options={"level": "high"})
class OtherOptions(RecordingBackend):
    pass


@breaks("declarations", "owns is 'cupti'")
class OwnsAText(RecordingBackend):
    owns = "cupti"  # type: ignore[assignment]


@breaks("declarations", "suffix is 'txt'")
class SuffixWithoutADot(RecordingBackend):
    suffix = "txt"


@breaks("declarations", "owns() needs an object")
class OwnsOfAnObject(RecordingBackend):
    def owns(self, options: Any) -> set[str]:  # type: ignore[override]
        return set()


@breaks("declarations", "advice() returned 'use it with care'")
class AdviceIsAText(RecordingBackend):
    @staticmethod
    def advice(options: Any) -> Any:
        return "use it with care"


@breaks("declarations", "launch() needs an object")
class LaunchOfAnObject(RecordingBackend):
    def launch(self, options: Any, context: Context) -> Launch:
        return Launch()


@breaks("declarations", "os.environ is another one after launch(): BAD_TOOL")
class LaunchSetsEnvironment(RecordingBackend):
    @staticmethod
    def launch(options: Any, context: Context) -> Launch:
        os.environ["BAD_TOOL"] = "1"
        return Launch()


@breaks("declarations", "launch() returned {'BAD_TOOL': '1'}")
class LaunchGivesADict(RecordingBackend):
    @staticmethod
    def launch(options: Any, context: Context) -> Any:
        return {"BAD_TOOL": "1"}


@breaks("available", "raised OSError: no driver")
class AvailableRaises(RecordingBackend):
    @staticmethod
    def available() -> Availability:
        raise OSError("no driver")


@breaks("available", "available() returned True")
class AvailableIsABool(RecordingBackend):
    @staticmethod
    def available() -> Any:
        return True


@breaks("available", "available() returned Availability(available=False, reason='', hint='')")
class NotAvailableWithoutAWord(RecordingBackend):
    @staticmethod
    def available() -> Availability:
        return Availability(False)


@breaks("available", "asking available() imported hypothesis")
class AvailableImports(RecordingBackend):
    @staticmethod
    def available() -> Availability:
        with contextlib.suppress(ImportError):
            import hypothesis  # noqa: F401
        return Availability(True)


@breaks("available", "nothing but rankscope and the tool is installed: available() raised ModuleNotFoundError")
class AvailableNeedsItsLibrary(RecordingBackend):
    @staticmethod
    def available() -> Availability:
        import hypothesis

        return Availability(bool(hypothesis.__version__))


@breaks("construction", "left the open file")
class OpensAFile(RecordingBackend):
    def __init__(self, context: Context, options: RecordingOptions) -> None:
        super().__init__(context, options)
        self.descriptor = os.open(os.devnull, os.O_RDONLY)


@breaks("construction", "left the thread 'sampler'")
class StartsAThread(RecordingBackend):
    def __init__(self, context: Context, options: RecordingOptions) -> None:
        super().__init__(context, options)
        threading.Thread(target=time.sleep, args=(60,), name="sampler", daemon=True).start()


# Windows.


@breaks("lifecycle", "bad.step failed in step 3: AttributeError")
class StepNeedsASpan(RecordingBackend):
    @hookimpl
    def step(self, window: Window, span: Span) -> None:
        self.note("step", span.stage)


@breaks("outcome", "window 1 (step 1, scope 'train', role actor) left neither a file nor a word", must_capture=True)
class Silent(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        pass


@breaks("outcome", "left no file, and an empty reason")
class WordWithoutText(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        self.context.store.missing(window, "")


@breaks("outcome", "when it was published")
class WritesOn(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        with self.context.store.reserve(window, suffix=".txt") as file:
            file.temporary.write_text("half")
            path = file.publish().path
        path.write_text("the whole of it")


@breaks("outcome", "the tool left no file here: no data", must_capture=True)
class NoDataWhereThereHasToBe(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        self.context.store.missing(window, "no data")


class Library:
    """A library that one window at a time can use."""

    busy = False


@breaks("restart", "window 2 (step 2, scope 'train', role actor) 0 files: the library is busy")
class NeverLetsGo(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        if Library.busy:
            self.context.store.missing(window, "the library is busy")
            return
        Library.busy = True
        super().stop(window)


@breaks("discrete", "(step 2, scope 'generate', role actor) 0 files: seen before")
class KnowsAStageOnce(RecordingBackend):
    known: ClassVar[set[str]] = set()

    @hookimpl
    def stop(self, window: Window) -> None:
        if window.scope in self.known:
            self.context.store.missing(window, "seen before")
            return
        self.known.add(window.scope)
        super().stop(window)


@breaks("discrete", "bad.start failed in step 1: KeyError: 'generate'")
class KnowsWholeStepsOnly(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        {"train": 1}[window.scope]


class _Counted:
    running = 0

    def __enter__(self) -> None:
        type(self).running += 1

    def __exit__(self, *error: object) -> None:
        type(self).running -= 1


@breaks("early_end", "bad.stop failed in step 1: ValueError: a span is running")
class SpansMustHaveEnded(RecordingBackend):
    def row(self, span: Span) -> Any:
        return None if span.step else _Counted()

    @hookimpl
    def stop(self, window: Window) -> None:
        if _Counted.running:
            raise ValueError("a span is running")
        super().stop(window)


@breaks("exit", "at the end of Python bad.stop raised RuntimeError")
class StopsInAPool(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(1)

    @hookimpl
    def stop(self, window: Window) -> None:
        self.pool.submit(super().stop, window).result()


@breaks("exit", "the process ended with exit status 7")
class OwnExitStatus(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        atexit.register(os._exit, 7)


@breaks("faults", "before a failed save a window left 1 file, after it 0 files: the library is busy")
class KeepsTheLibraryOnFailure(RecordingBackend):
    mine = False

    @hookimpl
    def start(self, window: Window) -> None:
        self.mine = not Library.busy
        Library.busy = True

    @hookimpl
    def stop(self, window: Window) -> None:
        if not self.mine:
            self.context.store.missing(window, "the library is busy")
            return
        super().stop(window)
        Library.busy = False


# Spans.


class _Row:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass


class _Dressing(_Row):
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.args = (*error.args, "seen by the tool")


class _Chaining(_Row):
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.__cause__ = LookupError("the tool's own")


class _Raising(_Row):
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            raise RuntimeError("a span that failed")


def shows(row: type[_Row]) -> type[RecordingBackend]:
    return type("Shows", (RecordingBackend,), {"row": lambda self, span: row(self)})


@breaks("exceptions", "was changed: args ('from the training', 1, 'seen by the tool'")
class ChangesArguments(shows(_Dressing)):  # type: ignore[misc]
    pass


@breaks("exceptions", "cause LookupError(")
class SetsTheCause(shows(_Chaining)):  # type: ignore[misc]
    pass


@breaks("exceptions", "bad.annotate failed in step 1: RuntimeError: a span that failed")
class RaisesOnErrors(shows(_Raising)):  # type: ignore[misc]
    pass


class _Only(_Row):
    def __enter__(self) -> None:
        if getattr(self.backend, "inside", False):
            raise ValueError("already in a span")
        self.backend.inside = True

    def __exit__(self, *error: object) -> None:
        self.backend.inside = False


@breaks("nesting", "ValueError: already in a span")
class OneSpanAtATime(shows(_Only)):  # type: ignore[misc]
    pass


class _Stacked(_Row):
    """Expects that spans end in the reverse of the order in which they began."""

    def stack(self) -> list[Any]:
        stack: list[Any] = self.backend.__dict__.setdefault("stack", [])
        return stack

    def __enter__(self) -> None:
        self.stack().append(self)

    def __exit__(self, *error: object) -> None:
        if self.stack().pop() is not self:
            raise ValueError("not the innermost span")


_on_this_thread = threading.local()


class _StackedByThread(_Stacked):
    def stack(self) -> list[Any]:
        stack: list[Any] = _on_this_thread.__dict__.setdefault("stack", [])
        return stack


@breaks("threads", "ValueError: not the innermost span")
class OneStackForAllThreads(shows(_Stacked)):  # type: ignore[misc]
    pass


@breaks("async", "ValueError: not the innermost span")
class OneStackForAllTasks(shows(_StackedByThread)):  # type: ignore[misc]
    pass


@breaks("labels", "UnicodeEncodeError")
class AsciiOnly(RecordingBackend):
    @hookimpl
    def annotate(self, span: Span) -> None:
        span.stage.encode("ascii")


@breaks("labels", "found after a stage with unusual arguments")
class ShowsArguments(RecordingBackend):
    @hookimpl
    def annotate(self, span: Span) -> None:
        str(span.args)


@breaks("references", "an argument is still alive after the stop, held by: tuple")
class KeepsArguments(RecordingBackend):
    kept: Any = ()

    @hookimpl
    def annotate(self, span: Span) -> None:
        self.kept = span.args or self.kept


# The process and the others.


@breaks("surroundings", "os.environ is another one after start(): BAD_TOOL")
class SetsEnvironment(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        os.environ["BAD_TOOL"] = "1"

    @hookimpl
    def stop(self, window: Window) -> None:
        del os.environ["BAD_TOOL"]
        super().stop(window)


@breaks("surroundings", "the working directory is")
class ChangesDirectory(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        super().stop(window)
        os.chdir(self.context.save_path)


@breaks("surroundings", "SIGUSR1 is handled by")
class TakesASignal(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@breaks("surroundings", "other signals are blocked after start(): SIGUSR2")
class BlocksASignal(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])


@breaks("state", "the random numbers of random go on differently after the start of window 2")
class SeedsRandom(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        random.seed(0)


@breaks("state", "the random numbers of random go on differently after the stop of window 2")
class DrawsAName(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        super().stop(window)
        random.random()


@breaks("state", "sys.stdout is another one after the stop of window 2: <_io.StringIO")
class KeepsStandardOutput(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        sys.stdout = io.StringIO()


@breaks("state", "standard output got 'step 2 is done' after the stop of window 2")
class Prints(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        super().stop(window)
        print(f"step {window.step} is done")


@breaks("state", "sys.getrecursionlimit() is another one after the stop of window 2: ")
class RaisesALimit(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)


@breaks("state", "time.sleep is another one after the stop of window 2: functools.partial(<built-in")
class WrapsSleep(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        time.sleep = functools.partial(time.sleep)


@breaks("state", "each window leaves something behind: 1 more open files (/dev/null)")
class LeavesAFileOpen(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        os.open(os.devnull, os.O_RDONLY)


@breaks("state", "each window leaves something behind: 1 more threads ('sampler3')")
class LeavesAThread(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        name = f"sampler{window.step}"
        threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()


@breaks("state", "each window leaves something behind: 1 more child processes (")
class LeavesAChild(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        os.posix_spawn("/bin/true", ["true"], {})  # never waited for


@breaks("fork", "the forked child ended with exit status 1")
class WritesInTheChild(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        os.register_at_fork(after_in_child=self.flush)

    def flush(self) -> None:
        (self.context.save_path / "left_by_a_child.txt").write_text("x")


@breaks("fork", "the forked child did not end and was killed", seconds=9.0)
class HangsInTheChild(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        os.register_at_fork(after_in_child=threading.Event().wait)


@breaks("collectives", "a hook used a connection to MASTER_ADDR:MASTER_PORT")
class AsksTheMaster(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
            super().stop(window)


class TorchBarrier(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        super().stop(window)


class OnTorchBarrier(BackendConformance):
    factory = TorchBarrier


class SeedsTorch(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        import torch

        torch.manual_seed(0)


class OnSeedsTorch(BackendConformance):
    factory = SeedsTorch


class HooksAllModules(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        import torch

        torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


class OnHooksAllModules(BackendConformance):
    factory = HooksAllModules


# Files.


@breaks("places", "in the cwd directory there is now bad_tool.log")
class LogsToTheDirectory(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        Path("bad_tool.log").write_text("started")


@breaks("places", "in the home directory there is now .bad_tool")
class RemembersAtHome(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        (Path.home() / ".bad_tool").mkdir(exist_ok=True)


@breaks("places", "written outside of save_path: ")
class WritesBeside(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        (self.context.save_path.parent / "beside.txt").write_text("x")


@breaks("names", "written by more than one window: capture.txt")
class OneName(RecordingBackend):
    name = "capture.txt"

    @hookimpl
    def stop(self, window: Window) -> None:
        path = self.context.save_path / self.name
        path.write_text("x")
        self.context.store.keep(path, window)


@breaks("names", "does not say that it is of rank 0")
class NameWithoutRank(OneName):
    @hookimpl
    def stop(self, window: Window) -> None:
        self.name = f"{self.context.pid}-{window.id}.txt"
        super().stop(window)


@breaks("relocation", "FileNotFoundError")
class NamesWhatIsGone(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        path = self.context.save_path.parent / "report.bin"
        path.write_text("x")
        self.elsewhere.append(path)

    @hookimpl
    def relocate(self, window: Window) -> list[Path]:
        return self.elsewhere


@breaks("relocation", "no longer there: ")
class Deletes(RecordingBackend):
    @hookimpl
    def relocate(self, window: Window) -> None:
        for path in self.context.save_path.glob("*.txt"):
            path.unlink()


# What a process does not survive.


@breaks("lifecycle", "the process died of signal 11 in the middle of the rule")
class Crashes(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


@breaks("lifecycle", "the process did not end within 5 seconds", seconds=5.0)
class Hangs(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        threading.Event().wait()


@breaks("lifecycle", "the process ended with exit status 0 in the middle of the rule")
class EndsTheProcess(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        os._exit(0)


@breaks("faults", "the process ended with exit status 1 in the middle of the rule")
class ExitsOnFailure(RecordingBackend):
    @hookimpl
    def stop(self, window: Window) -> None:
        try:
            super().stop(window)
        except OSError:
            sys.exit(1)


@breaks("lifecycle", "the process ended with exit status 3 at its end")
class BreaksTheEnd(RecordingBackend):
    @hookimpl
    def start(self, window: Window) -> None:
        atexit.register(os._exit, 3)
