"""Why would there be no trace? Looks at this machine, and at what a config asks of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rankscope import environment, registry
from rankscope.errors import ConfigError
from rankscope.table import human_size

Verdict = Literal["ok", "note", "warning", "problem"]

_LITTLE = 1 << 30
"""Bytes of free disk below which a warning is due."""

_PATIENCE = 120.0
"""Seconds for one program that is asked something."""

_INJECTIONS = (environment.NVTX_INJECTION, "CUDA_INJECTION64_PATH")

_ASK_TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch
found = {"torch": torch.__version__, "devices": {}}
for kind in ("cuda", "xpu", "npu", "mps"):
    module = getattr(torch, kind, None)
    try:
        count = module.device_count() if module is not None and module.is_available() else 0
    except Exception:
        count = 0
    if count:
        name = getattr(module, "get_device_name", lambda *_: "")
        found["devices"][kind] = [count, str(name(0))]
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what it is about: ``host``, ``save_path``, a tool, a role …
        verdict: ``problem`` keeps something from working; ``warning`` may.
        text: what was found.
        hint: the way out.
    """

    subject: str
    verdict: Verdict
    text: str
    hint: str = ""


def examine(
    config: Any = None,
    *,
    overrides: Iterable[str] = (),
    world_size: int = 1,
    selftest: bool = True,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[Finding]:
    """Look at the machine and, with a config, at what it asks of it.

    Args:
        config: as of `DistProfiler`; None looks at every installed tool.
        overrides: ``key=value`` texts on top of the config.
        world_size: number of ranks that the plan is made for.
        selftest: also make a small capture with each tool.
        progress: is told what takes long.
    """
    yield from _host()
    yield from _torch(progress)
    yield from _injection()
    yield from _ptrace()
    yield from _nsys()
    loaded = None
    if config is not None:
        try:
            loaded = _loaded(config, overrides)
        except ConfigError as error:
            yield from (Finding("config", "problem", str(problem)) for problem in error.problems)
    if loaded is not None:
        yield from _config(loaded, world_size)
        yield from _save_path(Path(loaded.global_profiler.save_path))
    else:
        yield from _save_path(Path.cwd())
    if config is None or loaded is not None:
        yield from _tools(loaded, selftest=selftest, progress=progress)


def _loaded(config: Any, overrides: Iterable[str]) -> Any:
    from rankscope.config import load_config

    return load_config(config, tuple(overrides))


def _host() -> Iterator[Finding]:
    from rankscope.host import host_name

    version = importlib.metadata.version("rankscope")
    yield Finding("host", "note", f"{host_name()}, Python {platform.python_version()}, rankscope {version}")
    disabled = environment.names(environment.DISABLE)
    if disabled:
        yield Finding("host", "warning", f"{environment.DISABLE} is set: {', '.join(sorted(disabled))}", "unset it")


def _torch(progress: Callable[[str], object]) -> Iterator[Finding]:
    """Asked in a process of its own: importing torch takes long, and a broken one may end the process."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        yield Finding("torch", "note", "not installed")
        return
    progress("asking torch for its devices")
    done = _asked([sys.executable, "-c", _ASK_TORCH])
    lines = done.stdout.strip().splitlines() if done is not None else []
    if done is None or done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [""])[-1] if done is not None else "it did not answer in time"
        yield Finding("torch", "problem", f"cannot be imported: {last}", "reinstall torch, or mend its libraries")
        return
    found = json.loads(lines[-1])
    devices = ", ".join(f"{count} x {kind} {name}".strip() for kind, (count, name) in found["devices"].items())
    yield Finding("torch", "ok", f"torch {found['torch']}; {devices or 'no accelerator: the CPU alone is recorded'}")


def _injection() -> Iterator[Finding]:
    """Who may have CUPTI already."""
    for name in _INJECTIONS:
        path = os.environ.get(name, "")
        if path and Path(path).exists():
            yield Finding(
                "cupti",
                "warning",
                f"{name}={path}: it may take CUPTI, and torch would record no device events",
                "start processes with `rankscope launch`, or unset it",
            )
    if "NSYS_PROFILING_SESSION_ID" in os.environ:
        yield Finding("cupti", "warning", "this runs under nsys, which has CUPTI", "start it without nsys")


def _ptrace() -> Iterator[Finding]:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        scope = 0
    if scope >= 2 and os.geteuid() != 0:
        text = f"kernel.yama.ptrace_scope is {scope}: tools that look into the process from outside cannot"
        yield Finding("ptrace", "warning", text, "give the process the capability SYS_PTRACE")


def _nsys() -> Iterator[Finding]:
    program = shutil.which("nsys")
    if program is None:
        return
    done = _asked([program, "--version"])
    if done is None or done.returncode:
        yield Finding("nsys", "warning", f"{program} does not answer --version", "reinstall it")
        return
    version = re.search(r"\d+(\.\d+)+", done.stdout)
    yield Finding("nsys", "ok", f"nsys {version[0] if version else done.stdout.strip()} at {program}")
    python = shutil.which("python")
    if python is None or Path(python).resolve() != Path(sys.executable).resolve():
        yield Finding(
            "nsys",
            "note",
            f"Ray starts workers under nsys with `python` of PATH ({python or 'there is none'}), not {sys.executable}",
            "put the environment's bin directory first on PATH before `ray start`",
        )


def _save_path(path: Path) -> Iterator[Finding]:
    """Whether a file can be written there; directories that do not exist yet are not made."""
    where = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".rankscope-doctor-"):
            pass
        free = shutil.disk_usage(where).free
    except OSError as error:
        yield Finding("save_path", "problem", f"{path} cannot be written: {error.strerror}", "choose another save_path")
        return
    verdict: Verdict = "warning" if free < _LITTLE else "ok"
    hint = "traces may not fit; choose another save_path" if verdict == "warning" else ""
    yield Finding("save_path", verdict, f"{path} can be written, {human_size(free)} free", hint)


def _config(config: Any, world_size: int) -> Iterator[Finding]:
    from rankscope.plan import make_plan

    try:
        plan = make_plan(config, world_size=world_size)
    except ConfigError as error:
        yield from (Finding("config", "problem", str(problem)) for problem in error.problems)
        return
    for warning in plan.warnings:
        yield Finding("config", "warning", warning)
    profiled = sorted({row.role for row in plan.rows if row.profiled})
    for role in sorted({row.role for row in plan.rows} - set(profiled)):
        reasons = dict.fromkeys(row.reason for row in plan.rows if row.role == role and not row.profiled)
        yield Finding(f"role {role}", "note", f"is not profiled: {'; '.join(list(reasons)[:3])}")
    if profiled:
        yield Finding("config", "ok", f"profiled with {world_size} ranks: {', '.join(profiled)}")


def _tools(config: Any, *, selftest: bool, progress: Callable[[str], object]) -> Iterator[Finding]:
    wanted: Mapping[str, Any] = (
        dict.fromkeys(registry.providers())
        if config is None
        else {tool: role for role in config.roles() if role.enable for tool in role.tools}
    )
    asked: Verdict = "note" if config is None else "problem"
    for tool, role in wanted.items():
        try:
            factory = registry.load(tool)
        except ConfigError as error:
            yield Finding(tool, asked, str(error))
            continue
        answer = registry.availability(factory)
        if not answer.available:
            yield Finding(tool, asked, f"cannot work here: {answer.reason}", answer.hint)
            continue
        info = registry.installed()[tool]
        yield Finding(
            tool, "ok", f"{info.provider}; {', '.join(_requirements(info.distribution)) or 'requires no other package'}"
        )
        if answer.reason:
            yield Finding(tool, "warning", answer.reason, answer.hint)
        yield from _advice(tool, factory, role)
        if selftest and not answer.reason:
            yield _selftest(tool, dict(role.options(tool)) if role is not None else {}, asked, progress)


def _requirements(distribution: str) -> list[str]:
    """What the tool's distribution needs, with the versions that are installed."""
    found = []
    for line in importlib.metadata.requires(distribution) or ():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name is None or "extra ==" in line or name[0] == "rankscope":
            continue
        try:
            found.append(f"{name[0]} {importlib.metadata.version(name[0])}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name[0]} is missing")
    return found


def _advice(tool: str, factory: Any, role: Any) -> Iterator[Finding]:
    if role is None:
        return
    from rankscope.config import tool_options

    options, _ = tool_options(factory, role, tool)
    yield from (Finding(tool, "note", text) for text in registry.advice(factory, options))


def _selftest(tool: str, options: dict[str, Any], asked: Verdict, progress: Callable[[str], object]) -> Finding:
    from rankscope.selftest import config, outcome

    progress(f"a small capture with {tool}")
    with tempfile.TemporaryDirectory(prefix="rankscope-doctor-") as folder:
        save_path = Path(folder)
        (save_path / "profile.json").write_text(json.dumps(config(tool, options, save_path / "out")), encoding="utf-8")
        command = [sys.executable, "-m", "rankscope.selftest", tool, json.dumps(options), str(save_path / "out")]
        launch = [sys.executable, "-m", "rankscope", "launch", "--config", str(save_path / "profile.json"), "--"]
        done = _asked([*launch, *command])
        if done is None:
            return Finding(tool, asked, f"self-test: not done within {_PATIENCE:g} s")
        worked, text = outcome(save_path / "out")
        if not worked and done.returncode:
            text = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Finding(tool, "ok" if worked else asked, f"self-test: {text}")


def _asked(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """The answer of a program; None when it gave none in time, or cannot be started."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
