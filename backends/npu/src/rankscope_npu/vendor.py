"""The installed torch_npu: what it can do, and what this process is doing with it.

Sources: torch_npu 2.13.0, ``torch_npu/profiler/profiler.py`` (``profile``, ``tensorboard_trace_handler``),
``experimental_config.py``, ``_profiler_path_creator.py`` (``ProfPathCreator``) and ``check_msprof_env`` in
``analysis/prof_common_func/_utils.py``. Options are looked up in the installed signatures: other versions have others.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from rankscope import BackendError
from rankscope_npu.options import LEVELS, NpuOptions

_OTHER_TOOLS = ("PROFILER_SAMPLECONFIG", "PROFILING_MODE")
"""Variables by which the msprof command takes the profiler for itself; torch_npu's then does nothing, in silence."""

_CONTENTS = {
    "shapes": "record_shapes",
    "memory": "profile_memory",
    "stack": "with_stack",
    "flops": "with_flops",
    "module": "with_modules",
}
"""Each content and the argument of ``torch_npu.profiler.profile`` that records it."""


def load() -> Any:
    """Import torch_npu.

    Raises:
        BackendError: it cannot be imported, with what helps.
    """
    try:
        import torch_npu
        import torch_npu.profiler
    except Exception as error:
        raise BackendError(
            f"torch_npu cannot be imported: {error}. It needs the libraries of CANN: source the set_env.sh of a CANN "
            "toolkit that fits this torch_npu"
        ) from error
    return torch_npu


def out_of_order(torch_npu: Any) -> str:
    """Why torch_npu would record nothing in this process; empty when nothing speaks against it."""
    for name in _OTHER_TOOLS:
        if os.environ.get(name):
            return f"the variable {name} is set, with which torch_npu leaves profiling to the msprof command"
    if not torch_npu.npu.is_available():
        return "no NPU can be used by this process, and without one torch_npu profiles nothing"
    return ""


def stop_recording() -> None:
    """What torch_npu's own stop does after it has waited for the device: where that wait fails, nothing else does it.

    Raises:
        Exception: whatever torch_npu raises.
    """
    from torch_npu._C._profiler import _stop_profiler

    _stop_profiler()


class Offer:
    """What the installed torch_npu offers of what the options ask for.

    Attributes:
        missing: what it does not, in words.
        contents: what is recorded.
    """

    def __init__(self, torch_npu: Any, options: NpuOptions) -> None:
        self.missing: list[str] = []
        self._profiler = torch_npu.profiler
        self._options = options
        self._profile_parameters = _parameters(self._profiler.profile)
        self._config_parameters = _parameters(self._profiler._ExperimentalConfig)  # noqa: SLF001 - the documented name
        self.records_device = options.wants_device
        self._settings = self._look_up()
        self._flags = self._look_up_flags()
        self.contents = ("cpu", *(["npu"] if self.records_device else []), *(name for name, _ in self._flags))

    @property
    def has_mstx(self) -> bool:
        """Whether mstx ranges are recorded; torch_npu records them with the device only."""
        return self.records_device and bool({"mstx", "msprof_tx"} & set(self._settings))

    def profile(self, folder: Path, schedule: Any = None) -> Any:
        """A new profiler that writes into a folder. To be made just before it is started.

        The handler sets the folder of the whole process when it is made; see `HandlerPlace`.
        """
        profiler = self._profiler
        activities = [profiler.ProfilerActivity.CPU]
        if self.records_device:
            activities.append(profiler.ProfilerActivity.NPU)
        arguments: dict[str, Any] = {
            "activities": activities,
            "on_trace_ready": profiler.tensorboard_trace_handler(str(folder), analyse_flag=False),
            **{argument: True for _, argument in self._flags},
        }
        if self.records_device:
            arguments["experimental_config"] = profiler._ExperimentalConfig(**self._settings)  # noqa: SLF001 - as above
        if schedule is not None:
            arguments["schedule"] = schedule
        return profiler.profile(**arguments)

    def _look_up_flags(self) -> list[tuple[str, str]]:
        found = []
        for content, argument in _CONTENTS.items():
            if self._options.wants(content):
                if argument in self._profile_parameters:
                    found.append((content, argument))
                else:
                    self.missing.append(f"contents {content}")
        return found

    def _look_up(self) -> dict[str, Any]:
        """Arguments of ``_ExperimentalConfig``, as far as this one takes them."""
        options = self._options
        include, exclude = options.domains if options.mstx else ((), ())
        exports = [name.capitalize() for name in options.export_type]
        wanted: dict[str, Any] = {
            "profiler_level": self._members("ProfilerLevel", [LEVELS[options.level]], "level"),
            "aic_metrics": self._members("AiCMetrics", [options.metrics], "aic_metrics"),
            "export_type": self._members("ExportType", exports, "export_type"),
            "data_simplification": options.data_simplification,
            "mstx": options.mstx,
            "mstx_domain_include": list(include),
            "mstx_domain_exclude": list(exclude),
            "l2_cache": options.l2_cache,
            "record_op_args": options.record_op_args,
            "op_attr": options.op_attr,
            "gc_detect_threshold": options.gc_detect_threshold,
            "host_sys": self._members("HostSystem", [name.upper() for name in options.host_sys], "host_sys"),
            "sys_io": options.sys_io,
            "sys_interconnection": options.sys_interconnection,
        }
        for name in ("profiler_level", "aic_metrics", "export_type"):
            if len(wanted[name]) == 1:  # older ones take no list of exports
                wanted[name] = wanted[name][0]
        if "mstx" not in self._config_parameters and "msprof_tx" in self._config_parameters:
            wanted["msprof_tx"] = wanted.pop("mstx")  # its older name
        settings = {}
        for name, value in wanted.items():
            if name in self._config_parameters:
                # What is off or unset is left to torch_npu's own default, which says the same.
                if name == "data_simplification" or not (value is None or value is False or value == []):
                    settings[name] = value
            elif not (value is None or value is False or value == [] or name == "data_simplification"):
                self.missing.append(name)
        return settings

    def _members(self, group: str, names: list[str], option: str) -> list[Any]:
        known = getattr(self._profiler, group, None)
        found = []
        for name in names:
            if hasattr(known, name):
                found.append(getattr(known, name))
            else:
                self.missing.append(f"{option} {name}")
        return found


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


class HandlerPlace:
    """The one place of the process where torch_npu's trace handlers write to.

    A handler sets it when it is made, and the profiler that is started next writes there, whosever it is. So it is
    remembered before ours is made, and put back afterwards: a handler that the user made keeps its folder.
    """

    _FIELDS = ("_dir_path", "_worker_name", "_export_only_mode", "_prof_path")

    def __init__(self) -> None:
        self._creator: Any = None
        try:
            from torch_npu.profiler._profiler_path_creator import ProfPathCreator

            self._creator = ProfPathCreator()
        except Exception:  # noqa: BLE001 - private to torch_npu: another version may not have it
            self._creator = None
        self._before: dict[str, Any] = {}
        self._ours: str | None = None

    @property
    def running(self) -> Path | None:
        """The folder of the capture that runs in this process, whosever it is; None when none does."""
        if self._creator is None or not getattr(self._creator, "is_prof_inited", False):
            return None
        return Path(str(getattr(self._creator, "_prof_path", "")))

    @property
    def latest(self) -> Path | None:
        """The folder of the capture that was begun last; None where torch_npu does not tell."""
        found = getattr(self._creator, "_prof_path", None)
        return None if found is None else Path(found)

    def free(self) -> None:
        """After a capture of ours that torch_npu could not end (a full disk): it would refuse every later one."""
        if self._creator is not None and hasattr(self._creator, "is_prof_inited"):
            self._creator.is_prof_inited = False

    def remember(self, ours: Path) -> None:
        """Before a handler for our folder is made."""
        state = vars(self._creator) if self._creator is not None else {}
        self._before = {name: state[name] for name in self._FIELDS if name in state}
        self._ours = os.path.realpath(ours)

    def put_back(self) -> None:
        """After our capture: unless somebody made another handler meanwhile, whose place it then is."""
        before, self._before = self._before, {}
        if self.running is not None:  # where a capture that did not end writes to is not ours to change
            before.pop("_prof_path", None)
        if before and getattr(self._creator, "_dir_path", None) == self._ours:
            vars(self._creator).update(before)
