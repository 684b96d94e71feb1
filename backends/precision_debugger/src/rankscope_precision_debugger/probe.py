"""msprobe in this process: one debugger, started around one stage at a time.

Written against mindstudio-probe 26.2.0, ``msprobe/pytorch/dump/debugger/precision_debugger.py`` and
``msprobe/core/dump/service.py``. Its ``PrecisionDebugger`` is a singleton that keeps the dump path of its first
construction in a copy of its config; what is changed there is read back, and looked for on disk after each start. Where
that does not help, a new debugger is made for each stage.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rankscope.errors import error_text
from rankscope.types import Logger
from rankscope_precision_debugger.dumps import Place
from rankscope_precision_debugger.patches import Patches, undisturbed, unhook
from rankscope_precision_debugger.settings import Settings
from rankscope_precision_debugger.talk import Talk

_ENVIRONMENT = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables that importing msprobe leaves behind, by way of torch; torch sets them again when it needs them."""


class ProbeError(Exception):
    """msprobe cannot be used, or did not do what it was told."""


class Probe:
    """The only user of msprobe's debugger in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._talk: Talk | None = None
        self._class: Any = None
        self._unusable = ""
        self._hears: bool | None = None
        self._debugger: Any = None
        self._settings: Settings | None = None
        self._patches: Patches | None = None
        self._running: object = None
        self._models: Sequence[Any] = ()
        self._undisturbed = contextlib.ExitStack()

    def claim(self, who: object) -> bool:
        """Take msprobe for one stage. False: another stage of this process has it."""
        with self._lock:
            if self._pid != os.getpid():
                self._forget()
            if self._running is not None:
                return False
            self._running = who
            return True

    @property
    def busy(self) -> bool:
        """Whether a stage of this process has it."""
        return self._running is not None and self._pid == os.getpid()

    def load(self, logger: Logger) -> None:
        """Import msprobe; takes seconds the first time.

        Raises:
            ProbeError: it cannot be imported, or is too old.
        """
        with self._lock:
            if self._class is not None:
                return
            if self._unusable:
                raise ProbeError(self._unusable)
            try:
                self._class = self._import()
            except ProbeError as error:
                self._unusable = str(error)  # trying again would take as long
                raise
            self._talk = Talk(logger)

    @staticmethod
    def _import() -> Any:
        before = {name for name in _ENVIRONMENT if name in os.environ}
        try:
            from msprobe.pytorch import PrecisionDebugger
        except (Exception, SystemExit) as error:
            raise ProbeError(f"msprobe cannot be imported: {error_text(error)}") from error
        finally:
            for name in _ENVIRONMENT:
                if name not in before:
                    os.environ.pop(name, None)
        for method in ("start", "stop", "step", "set_init_step"):
            if not hasattr(PrecisionDebugger, method):
                raise ProbeError(f"this msprobe has no PrecisionDebugger.{method}; pip install -U mindstudio-probe")
        return PrecisionDebugger

    def start(self, settings: Settings, place: Place, model: Any, rank: int, logger: Logger) -> None:
        """Begin to dump; only after a ``claim``.

        Args:
            settings: how.
            place: where to, checked afterwards.
            model: the module, a list of chunks, or None.
            rank: global rank of this process.
            logger: gets what msprobe says.

        Raises:
            ProbeError: msprobe refused, or writes elsewhere.
        """
        self.load(logger)
        assert self._talk is not None  # noqa: S101 - for the type checker
        self._talk.logger = logger
        with self._lock, self._talk.errors() as told:
            self._models = model if isinstance(model, list) else [model] if model is not None else []
            try:
                if self._hears is None:
                    self._hears = self._try(settings, place, model, rank)
                self._begin(settings, place, model, rank)
                if not self._took_effect(settings, place):
                    where = getattr(getattr(self._debugger, "service", None), "dump_iter_dir", None)
                    raise ProbeError(f"msprobe was told to write to {place.folder} and writes to {where}")
            except BaseException as error:
                with contextlib.suppress(Exception):
                    self._end()
                if isinstance(error, ProbeError) or not isinstance(error, Exception):
                    raise
                raise ProbeError(_explained(error, told())) from error

    def stop(self) -> None:
        """End the dump and write what is left of it. Nothing of msprobe stays on torch or on the model.

        Raises:
            ProbeError: msprobe could not write.
        """
        with self._lock:
            if self._talk is None or not self.busy:
                return
            with self._talk.errors() as told:
                try:
                    self._end()
                except Exception as error:
                    raise ProbeError(_explained(error, told())) from error

    def release(self, who: object) -> None:
        """The stage that claimed it is over."""
        with self._lock:
            if self._running is who:
                self._running = None

    # The debugger.

    def _forget(self) -> None:
        """In a forked child: what runs, runs in the parent, and msprobe's debugger works for the parent only."""
        self._pid, self._running, self._models = os.getpid(), None, ()
        self._undisturbed = contextlib.ExitStack()
        if self._class is not None and self._class._instance is self._debugger:  # noqa: SLF001
            self._class._instance = None  # noqa: SLF001
        self._debugger = None

    def _try(self, settings: Settings, place: Place, model: Any, rank: int) -> bool:
        """Whether a debugger that was made for one folder writes to another when it is told to.

        Found out once and in a folder aside, since one that does not hear would write over the dump before.
        """
        aside = place.root.parent.parent / ".rankscope" / f"msprobe-rank{rank}-{os.getpid()}"
        first, second = (
            Place(aside / name, place.step, aside / name / f"step{place.step}" / f"rank{rank}", 1) for name in "ab"
        )
        try:
            self._make(settings, first)
            self._start(settings, first, model, rank)
            self._end()
            if not self._redirect(second):
                return False
            self._bring_back()
            self._start(settings, second, model, rank)
            heard = self._took_effect(settings, second)
            self._end()
            return heard
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _begin(self, settings: Settings, place: Place, model: Any, rank: int) -> None:
        if self._debugger is None or settings != self._settings or not self._hears or not self._redirect(place):
            self._make(settings, place)
        else:
            self._bring_back()
        self._start(settings, place, model, rank)

    def _start(self, settings: Settings, place: Place, model: Any, rank: int) -> None:
        self._undisturbed.enter_context(undisturbed())
        self._class.set_init_step(place.step)
        self._class.start(model=model, rank_id=rank)
        if getattr(self._debugger.service.config, "dump_enable", None) is False:
            raise ProbeError(f"dump_enable is false in {settings.file}")

    def _end(self) -> None:
        """Everything that has to happen, whatever of it fails; then the first failure."""
        errors: list[Exception] = []
        service = getattr(self._debugger, "service", None)
        actions: list[Callable[[], object]] = [
            self._undisturbed.close,
            self._class.stop if self._debugger is not None else lambda: None,
            self._class.step if self._debugger is not None else lambda: None,
            lambda: self._put_away(service),
            lambda: unhook(self._models),
            lambda: _forget_models(service),
        ]
        for action in actions:
            try:
                action()
            except Exception as error:  # noqa: BLE001, PERF203 - raised below
                errors.append(error)
        if errors:
            with contextlib.suppress(Exception):
                _forget_data(service)
            raise errors[0]

    def _bring_back(self) -> None:
        if self._patches is not None:
            self._patches.bring_back()

    def _put_away(self, service: Any) -> None:
        if self._patches is not None:
            self._patches.put_away(getattr(service, "api_register", None))

    def _make(self, settings: Settings, place: Place) -> None:
        theirs = self._class._instance  # noqa: SLF001 - the singleton of msprobe
        if theirs is not None and theirs is not self._debugger:
            raise ProbeError("the training script uses msprobe's PrecisionDebugger itself; it is left alone")
        if self._patches is None:
            self._patches = Patches()
        if self._talk is not None:
            self._talk.take_over()
        self._put_away(getattr(self._debugger, "service", None))
        self._debugger = self._settings = self._class._instance = None  # noqa: SLF001
        try:
            self._debugger = self._class(
                config_path=settings.file or None,
                task=settings.own_task or None,
                level=settings.own_level or None,
                dump_path=str(place.root),
            )
        except BaseException:
            self._class._instance = None  # noqa: SLF001 - else the half-made one would count as made
            register = sys.modules.get("msprobe.pytorch.dump.api_dump.api_register")
            self._patches.put_away(getattr(register, "api_register", None))
            raise
        self._settings = settings

    def _redirect(self, place: Place) -> bool:
        """Tell the debugger where to write. False: nobody can know whether it heard."""
        if self._class._instance is not self._debugger:  # noqa: SLF001
            return False
        config: Any = getattr(getattr(self._debugger, "service", None), "config", None)
        overrides = getattr(self._debugger, "_overrides", None)
        if isinstance(overrides, dict):  # for when msprobe reads its file anew
            overrides["dump_path"] = str(place.root)
        for holder in (self._debugger.config, config):
            if hasattr(holder, "dump_path"):
                holder.dump_path = str(place.root)
        return getattr(config, "dump_path", None) == str(place.root)

    def _took_effect(self, settings: Settings, place: Place) -> bool:
        if settings.level == "debug":  # writes nothing before the code saves something
            return str(self._debugger.service.config.dump_path) == str(place.root)
        return (place.folder / "dump.json").is_file()


def _forget_models(service: Any) -> None:
    """Without hooks a model counts as new, and msprobe must not keep it alive."""
    if service is None:
        return
    if isinstance(getattr(service, "hooked_modules", None), list):
        service.hooked_modules.clear()
    service.model = None


def _forget_data(service: Any) -> None:
    """What it could not write it would write into the next dump, and try again when the process exits."""
    service.data_collector.reset_status()


def _explained(error: Exception, told: str) -> str:
    return f"{error_text(error)} ({told})" if told else error_text(error)


probe = Probe()
"""The one of this process."""
