"""A backend's life in one process, as a scenario plays it: real handles, real windows, and what came of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

from rankscope import Availability, ConfigError, annotate, registry
from rankscope.errors import BackendError, error_text
from rankscope.testing.configs import profile_config, read_ledger
from rankscope.testing.isolation import isolated_registry
from rankscope.testing.rules import NotHere, RuleBroken

if TYPE_CHECKING:
    from rankscope import Context, DistProfiler

ROLES = ("actor", "critic", "ref")
_READ_BY_CORE = ("Options", "owns", "thread_bound", "suffix", "available", "advice", "launch", "collect")
STEPS = tuple(range(1, 10))


class EndOfProcess(BaseException):
    """A process that a scenario forked ends in the ordinary way, with all that Python does then."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a test class says of its tool; see ``BackendConformance``."""

    tool: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    light_imports: Sequence[str] = ()
    must_capture: bool = False
    writes_files: bool = True
    seconds: float = 60.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: exit status; negative: the signal that ended it; None: it did not end in time and was killed.
    """

    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return "did not end and was killed"
        return f"died of signal {-self.code}" if self.code < 0 else f"ended with exit status {self.code}"


@dataclasses.dataclass(frozen=True)
class Made:
    """A backend, and what core gave to it."""

    backend: Any
    context: Context
    options: Any


class Life:
    """What a scenario works with.

    Args:
        facts: of the tool.
        folder: of this scenario alone.
        places: the user's folders (home, temporary, working directory), made for this scenario.
        subject: an instance of the test class, for its ``exercise``; None where nothing has to be captured.
        factory: the backend class that the test class names; None takes the installed tool.

    Attributes:
        save_path: where the tool's artifacts belong.
    """

    def __init__(
        self,
        facts: Facts,
        folder: Path,
        *,
        places: Mapping[str, Path] | None = None,
        subject: Any = None,
        factory: Any = None,
    ) -> None:
        self.facts = facts
        self.places = dict(places or {})
        self.tool = facts.tool
        self.folder = folder
        self.save_path = folder / "out"
        self._subject = subject
        self._given = factory

    # The tool.

    def registry(self) -> contextlib.AbstractContextManager[object]:
        """Around the scenario: the tool is known to core, as installed or as given."""
        return contextlib.nullcontext() if self._given is None else isolated_registry({self.tool: self._given})

    @property
    def module(self) -> str:
        """Name of the module that holds the factory; nothing is imported for it."""
        if self._given is not None:
            return str(self._given.__module__)
        infos = registry.providers().get(self.tool, [])
        return infos[0].value.partition(":")[0] if infos else ""

    @property
    def factory(self) -> Any:
        """What the entry point names."""
        try:
            return registry.load(self.tool)
        except ConfigError as error:
            raise RuleBroken(
                str(error), "install the tool in this environment, or set `factory` in the test class"
            ) from error

    def availability(self) -> Availability:
        """What the tool says of itself; a tool that says nothing works everywhere."""
        ask = getattr(self.factory, "available", None)
        try:
            answer = Availability(True) if ask is None else ask()
        except Exception as error:
            raise RuleBroken(
                f"available() raised {error_text(error)}", "return Availability(False, reason, hint) instead"
            ) from error
        if not isinstance(answer, Availability):
            raise RuleBroken(f"available() returned {answer!r}", "return a rankscope.Availability")
        return answer

    def require_available(self) -> None:
        """End the scenario where the tool says that it cannot work here."""
        answer = self.availability()
        if not answer.available:
            why = "; ".join(text for text in (answer.reason, answer.hint) if text)
            self.not_here(f"the tool is not available here: {why}")

    def not_here(self, reason: str) -> NoReturn:
        """The rule cannot be tried here; where the test class says that the tool works here, that is a failure.

        Raises:
            RuleBroken: with ``must_capture``.
            NotHere: else.
        """
        if self.facts.must_capture:
            raise RuleBroken(reason, "must_capture is set, so the tool has to work here and leave files")
        raise NotHere(reason)

    @contextlib.contextmanager
    def seen_made(self, watch: Callable[[], Callable[[], object]] | None = None) -> Iterator[list[Made]]:
        """In the block each backend that core makes is noted.

        Args:
            watch: called right before one is made; what it returns is called right after.
        """
        factory = self.factory
        made: list[Made] = []

        def make(context: Any, options: Any) -> Any:
            after = watch() if watch is not None else None
            backend = factory(context, options)
            if after is not None:
                after()
            made.append(Made(backend, context, options))
            return backend

        for name in _READ_BY_CORE:
            if hasattr(factory, name):
                setattr(make, name, getattr(factory, name))
        with isolated_registry({self.tool: make}):
            yield made

    # Handles and windows.

    def handle(
        self,
        role: str = "actor",
        *,
        rank: int = 0,
        world_size: int = 1,
        options: Mapping[str, Any] | None = None,
        save_path: Path | None = None,
        **common: Any,
    ) -> DistProfiler:
        """A handle of a role in this process, with the tool's options and these."""
        from rankscope import DistProfiler

        own = {**self.facts.options, **(options or {})}
        config = profile_config(
            save_path or self.save_path,
            self.tool,
            steps=STEPS,
            roles=ROLES,
            options={self.tool: own},
            **{"relocate_results": True, "close_timeout": self.facts.seconds / 3, **common},
        )
        try:
            return DistProfiler(config, role=role, rank=rank, world_size=world_size)
        except (ConfigError, BackendError) as error:
            raise RuleBroken(f"the tool cannot be set up: {error}", "mend this first: no rule can be tried") from error

    def exercise(self) -> None:
        """Do work that the tool can see."""
        if self._subject is not None:
            self._subject.exercise()

    def train(self, handle: DistProfiler) -> None:
        """One update stage with its mini-batches."""
        with annotate("actor_update", scheduled=True):
            for number in range(2):
                with annotate(f"mini_batch{number}"):
                    self.exercise()
                handle.step()

    def start(self, handle: DistProfiler, step: int) -> None:
        """Open a window, soundly."""
        handle.start(step=step)
        self.sound(handle, f"the start of step {step}")

    def stop(self, handle: DistProfiler, step: int | None = None, *, aborted: bool = False) -> None:
        """Close the window, soundly."""
        handle.stop(aborted=aborted)
        self.sound(handle, "the stop" if step is None else f"the stop of step {step}")

    def step(self, handle: DistProfiler, step: int) -> None:
        """One whole training step in a window of its own."""
        self.start(handle, step)
        self.train(handle)
        self.stop(handle, step)

    def end(self, *handles: DistProfiler) -> None:
        """The end of the handles, as a controller makes it: relocate, finish, close."""
        for handle in handles:
            handle.relocate()
        for handle in handles:
            handle.finish()
        for handle in handles:
            handle.close()
            self.sound(handle, "the end")

    def sound(self, handle: DistProfiler, doing: str) -> None:
        """Nothing went wrong so far.

        Raises:
            RuleBroken: the backend raised.
        """
        if handle.faults:
            faults = "; ".join(str(fault) for fault in handle.faults)
            raise RuleBroken(
                f"{faults} (found after {doing})",
                "the traceback is in the process's output; a hook that raises switches its tool off",
            )

    # What came of it.

    def opened(self) -> list[dict[str, Any]]:
        """The ledger's record of each window that was opened."""
        return read_ledger(self.save_path, "window", event="open", tool=self.tool)

    def artifacts(self) -> list[dict[str, Any]]:
        """The ledger's record of each file that came, or did not."""
        return [
            record
            for record in read_ledger(self.save_path, "artifact", tool=self.tool)
            if record["status"] != "exporting"
        ]

    def published(self) -> list[dict[str, Any]]:
        """The ledger's record of each file that came."""
        return [record for record in self.artifacts() if record["status"] == "published"]

    def outcomes(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Each window with what came of it."""
        told = self.artifacts()
        return [
            (window, [one for one in told if (one["pid"], one.get("window")) == (window["pid"], window["window"])])
            for window in self.opened()
        ]

    def told(self) -> None:
        """Every window left a file, or a word about why not.

        Raises:
            RuleBroken: one left nothing.
        """
        if not self.facts.writes_files:
            return
        for window, outcome in self.outcomes():
            if not outcome:
                raise RuleBroken(
                    f"{described(window)} left neither a file nor a word",
                    "publish a file; where there is none to come, say why with context.store.missing(window, reason) "
                    "or with reservation.empty(reason)",
                )
            for record in outcome:
                if record["status"] != "published" and not record.get("reason"):
                    raise RuleBroken(
                        f"{described(window)} left no file, and an empty reason",
                        "give store.missing(window, reason), file.fail(reason) or file.empty(reason) a reason in words",
                    )

    def require_files(self) -> list[dict[str, Any]]:
        """The files that came; where the tool said why none did, the rule cannot be tried here."""
        files = self.published()
        if not files:
            if not self.facts.writes_files:
                raise NotHere("the tool writes no files (writes_files is False)")
            reasons = dict.fromkeys(str(record.get("reason")) for record in self.artifacts())
            self.not_here(f"the tool left no file here: {'; '.join(reasons) or 'no reason given'}")
        return files

    # Processes.

    def process(self, body: Callable[[], object]) -> Ended:
        """Fork a process that runs this and ends in the ordinary way."""
        return self.processes([body])[0]

    def processes(self, bodies: Sequence[Callable[[], object]]) -> list[Ended]:
        """The same for several at once."""
        pids = []
        for body in bodies:
            pid = _fork()
            if pid == 0:
                try:
                    body()
                except Exception:  # noqa: BLE001 - told, and in the exit status
                    traceback.print_exc()
                    raise EndOfProcess(1) from None
                raise EndOfProcess(0)
            pids.append(pid)
        return [self.ended(pid) for pid in pids]

    def forked(self, body: Callable[[], object]) -> Ended:
        """Fork a process that ends like those of multiprocessing: by ``os._exit``, without Python's ordinary end."""
        pid = _fork()
        if pid == 0:
            code = 1
            try:
                body()
                code = 0
            except BaseException:  # noqa: BLE001 - as above
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return self.ended(pid)

    def ended(self, pid: int) -> Ended:
        """Wait for the end of a process that this one forked; one that does not end is killed."""
        descriptor = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            in_time = bool(poller.poll(self.facts.seconds / 3 * 1000))
        finally:
            os.close(descriptor)
        if not in_time:
            os.kill(pid, 9)
        status = os.waitpid(pid, 0)[1]
        return Ended(os.waitstatus_to_exitcode(status) if in_time else None)

    @contextlib.contextmanager
    def nowhere(self) -> Iterator[Path]:
        """In the block the temporary directory cannot be written either; yields a save path that cannot."""
        blocked = self.folder / "a_file"
        blocked.write_text("no directory can be made below this", encoding="utf-8")
        with mock.patch.object(tempfile, "tempdir", str(blocked / "tmp")):
            yield blocked / "out"


def described(window: Mapping[str, Any]) -> str:
    """A window of the ledger in words."""
    return f"window {window['window']} (step {window['step']}, scope {window['scope']!r}, role {window['role']})"


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there are threads
        return os.fork()
