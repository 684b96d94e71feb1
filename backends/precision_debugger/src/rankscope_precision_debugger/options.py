"""What ``tool_config.precision_debugger`` may hold."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import field
from typing import Any, Optional

from rankscope import OptionError
from rankscope.errors import did_you_mean, listing
from rankscope_precision_debugger import stages as known_stages
from rankscope_precision_debugger.settings import Settings, read_settings

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")


@dataclasses.dataclass(frozen=True)
class PrecisionDebuggerOptions:
    """Options of the precision_debugger backend.

    Attributes:
        config_path: msprobe's config file (JSON); null for the one that msprobe brings along. Its ``dump_path`` is not
            used, and its ``rank`` and ``step`` must not exclude what is profiled.
        task: what is written, in place of the file's task: ``statistics``, ``tensor``, ``structure`` or ``nan_check``.
        level: of what, in place of the file's level: ``L0`` (modules), ``L1`` (operators), ``mix`` (both) or ``debug``
            (what the code saves itself).
        stages: labels of the stages to dump; null for the usual ones of a step that run a model.
        models: stage -> attribute of the worker that holds its model (``policy``, ``engine.module``), or a list of
            them, of which the first that is there counts.
        resolve_model: ``module:function``, called with ``(instance, stage, role)`` for the model of a stage. It returns
            a module, a list of all its chunks, or null for the usual places.
        strict: what cannot be dumped is an error instead of a warning: the tool is switched off by it.
        discrete: no effect on what is dumped: every stage has a dump of its own in any case. With true, each stage is
            also a window of its own.
        steps: not used; accepted since verl's configs have it. ``global_profiler.steps`` says which steps are profiled.
    """

    config_path: Optional[str] = None  # noqa: UP045 - OmegaConf reads this annotation on Python 3.10
    task: Optional[str] = None  # noqa: UP045 - as above
    level: Optional[str] = None  # noqa: UP045 - as above
    stages: Optional[tuple[str, ...]] = None  # noqa: UP045 - as above
    models: dict[str, Any] = field(default_factory=dict)
    resolve_model: Optional[str] = None  # noqa: UP045 - as above
    strict: bool = False
    discrete: bool = False
    steps: Optional[tuple[str, ...]] = None  # noqa: UP045 - as above

    def __post_init__(self) -> None:
        wrong = [*self._wrong_stages(), *self._wrong_models()]
        if self.resolve_model is not None and not _FUNCTION.match(self.resolve_model):
            wrong.append(("resolve_model", f"must be module:function, got {self.resolve_model!r}"))
        try:
            self.settings()
        except OptionError as error:
            wrong += error.problems
        if wrong:
            raise OptionError(wrong)

    def settings(self) -> Settings:
        """How msprobe is to dump, read from its file.

        Raises:
            OptionError: everything that is wrong with it.
        """
        return read_settings(self.config_path, self.task, self.level)

    def attributes(self, stage: str) -> tuple[str, ...]:
        """Where ``models`` says that the model of a stage is."""
        value = self.models.get(stage, ())
        return (value,) if isinstance(value, str) else tuple(value)

    @property
    def unknown_stages(self) -> dict[str, str]:
        """Chosen stages that have no meaning here -> the nearest one, in words, or an empty text."""
        if self.resolve_model is not None:
            return {}  # the function knows the stages of its workers
        names = [*known_stages.STAGES, *known_stages.OTHERS, *self.models]
        never = known_stages.GENERATION
        return {
            stage: did_you_mean(stage, names)
            for stage in self.stages or ()
            if stage not in names and stage not in never
        }

    def _wrong_stages(self) -> list[tuple[str, str]]:
        if self.stages is not None and not self.stages:
            return [("stages", "is empty, so nothing would be dumped; null means the usual stages")]
        if not self.strict:
            return []
        names = [*known_stages.STAGES, *known_stages.OTHERS]
        way_out = "Name the model of a stage of your own in models, or set resolve_model"
        return [
            ("stages", f"nobody knows the stage {stage!r}.{hint} Known: {listing(names)}. {way_out}")
            for stage, hint in self.unknown_stages.items()
        ]

    def _wrong_models(self) -> list[tuple[str, str]]:
        wrong = []
        for stage, value in self.models.items():
            names = [value] if isinstance(value, str) else value
            good = isinstance(names, list | tuple) and all(
                isinstance(name, str) and _ATTRIBUTE.match(name) for name in names
            )
            if not good or not names:
                wrong.append(
                    (f"models.{stage}", f"must be an attribute like engine.module or a list of them, got {value!r}")
                )
        return wrong
