"""msprobe's own config file: read and checked before training, without importing msprobe.

The keys are those of mindstudio-probe 26.2.0, ``msprobe/core/dump/common_config.py`` and
``msprobe/pytorch/dump/pt_config.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope import OptionError
from rankscope.errors import did_you_mean, listing

TASKS = ("statistics", "tensor", "structure", "nan_check")
"""Tasks of msprobe that dump what a stage computes."""

LEVELS = ("L0", "L1", "mix", "debug")
"""Levels of msprobe that belong to a stage: modules, operators, both, or what the code itself saves."""

_NOT_DUMPS = {
    "acc_check": "it checks operators by themselves",
    "diff_check": "it is not a dump",
    "exception_dump": "it belongs to MindSpore",
    "free_benchmark": "it is not a dump",
    "overflow_check": "msprobe gave it up; nan_check took its place",
}
_DATA_MODES = ("all", "input", "output", "forward", "backward")
_PLAIN_PATH = re.compile(r"[a-zA-Z0-9_.:/-]+\Z")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How msprobe is to dump.

    Attributes:
        file: absolute path of the config file; empty for the one that msprobe brings along.
        task: what is written: ``statistics``, ``tensor``, ``structure`` or ``nan_check``.
        level: of what: ``L0`` (modules), ``L1`` (operators), ``mix`` (both) or ``debug`` (what the code saves).
        own_task, own_level: as given in place of the file's, or empty.
        ranks, steps: msprobe's own filters; empty ones let everything through.
        dump_path: of the file; not used.
    """

    file: str = ""
    task: str = "statistics"
    level: str = "L1"
    own_task: str = ""
    own_level: str = ""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    dump_path: str = ""

    @property
    def needs_model(self) -> bool:
        """Whether msprobe has to be given the module whose layers it dumps."""
        return self.level in {"L0", "mix"}


def read_settings(config_path: str | None, task: str | None = None, level: str | None = None) -> Settings:
    """Read and check msprobe's config file.

    Args:
        config_path: the file, with ``~`` and ``$VARIABLES``; None for the one that msprobe brings along.
        task: in place of the file's.
        level: in place of the file's.

    Raises:
        OptionError: everything that is wrong with the three.
    """
    wrong: list[tuple[str, str]] = []
    values, file = _read(config_path, wrong)
    chosen_task = _choice(task or values.get("task") or "statistics", TASKS, "task", task is not None, wrong)
    chosen_level = _choice(level or values.get("level") or "L1", LEVELS, "level", level is not None, wrong)
    if chosen_task == "structure" and chosen_level not in {"L0", "mix"}:
        chosen_level = "mix"  # so does msprobe
    if chosen_task == "nan_check" and chosen_level != "L1":
        wrong.append(("level", f"must be L1 for task nan_check, got {chosen_level}"))
    ranks, steps = (_numbers(values.get(key), key, wrong) for key in ("rank", "step"))
    if "load" in values:
        wrong.append(
            ("config_path", f"{file}: 'load' replaces the inputs of modules, which changes the training; take it out")
        )
    _check_block(values.get(chosen_task), chosen_task, file, wrong)
    if not isinstance(values.get("dump_enable"), bool | None):
        wrong.append(("config_path", f"{file}: 'dump_enable' is {values['dump_enable']!r}, neither true nor false"))
    if wrong:
        raise OptionError(wrong)
    return Settings(
        file=file,
        task=chosen_task,
        level=chosen_level,
        own_task=task or "",
        own_level=level or "",
        ranks=ranks,
        steps=steps,
        dump_path=str(values.get("dump_path") or ""),
    )


def plain_path(path: Path | str) -> bool:
    """Whether msprobe accepts the path: it refuses blanks, letters with accents and most signs."""
    return _PLAIN_PATH.match(os.path.realpath(path)) is not None


def _read(config_path: str | None, wrong: list[tuple[str, str]]) -> tuple[Mapping[str, Any], str]:
    """The content of the file, and its absolute path."""
    if not config_path:
        return {}, ""
    path = Path(os.path.expandvars(config_path)).expanduser().absolute()
    problem = _why_unusable(path)
    if problem:
        wrong.append(("config_path", problem))
        return {}, str(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        wrong.append(("config_path", f"{path} cannot be read as JSON: {error}"))
        return {}, str(path)
    if not isinstance(values, dict):
        wrong.append(("config_path", f"{path} holds {type(values).__name__}, not a JSON object with msprobe's keys"))
        return {}, str(path)
    return values, str(path)


def _why_unusable(path: Path) -> str:
    if path.suffix != ".json":
        return f"must be a .json file of msprobe, got {str(path)!r}"
    if not path.is_file():
        near = did_you_mean(path.name, [other.name for other in path.parent.glob("*.json")])
        return f"there is no file {path}.{near} A relative path starts at {Path.cwd()}"
    if not plain_path(path):
        return f"msprobe refuses paths with other signs than letters, digits and _ . : / -, got {str(path)!r}"
    return ""


def _choice(value: Any, choices: tuple[str, ...], key: str, is_option: bool, wrong: list[tuple[str, str]]) -> str:
    """One of the choices; what is wrong is said of the option, or of the file."""
    if value in choices:
        return str(value)
    why = f": {_NOT_DUMPS[value]}" if isinstance(value, str) and value in _NOT_DUMPS else ""
    if value == "L2":
        why = ": it dumps the kernels of one NPU operator, not a stage"
    hint = did_you_mean(str(value), choices)
    text = f"{value!r} cannot be used around stages{why}; choices: {listing(choices)}.{hint}"
    wrong.append((key, text) if is_option else ("config_path", f"{key} {text}"))
    return choices[0]


def _numbers(value: Any, key: str, wrong: list[tuple[str, str]]) -> tuple[int, ...]:
    """A list of whole numbers and of texts like ``"0-3"``, as msprobe reads it."""
    numbers: set[int] = set()
    good = isinstance(value, list | None)
    for item in value if isinstance(value, list) else ():
        match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", item) if isinstance(item, str) else None
        if match is not None and int(match[1]) <= int(match[2]):
            numbers.update(range(int(match[1]), int(match[2]) + 1))
        elif isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            numbers.add(item)
        else:
            good = False
    if not good:
        message = f'{key} is {value!r}; msprobe wants a list of numbers and of ranges like "0-3"'
        wrong.append(("config_path", message))
        return ()
    return tuple(sorted(numbers))


def _check_block(block: Any, task: str, file: str, wrong: list[tuple[str, str]]) -> None:
    """The part of the file that belongs to the task: its lists of texts."""
    if block is None:
        return
    if not isinstance(block, dict):
        wrong.append(("config_path", f"{file}: {task!r} is {block!r}, not a mapping of options"))
        return
    for key in ("scope", "list", "data_mode", "tensor_list"):
        texts = block.get(key)
        if texts is not None and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            wrong.append(("config_path", f"{file}: {task}.{key} is {texts!r}, not a list of texts"))
        elif key == "data_mode":
            for text in texts or ():
                if text not in _DATA_MODES:
                    hint = did_you_mean(text, _DATA_MODES)
                    message = f"{file}: {task}.data_mode has no choice {text!r}; choices: {listing(_DATA_MODES)}.{hint}"
                    wrong.append(("config_path", message))
