"""What can be said of a backend before it captures anything."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
import threading
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rankscope import Availability, ConfigError, Launch, registry
from rankscope.config.options import build_options
from rankscope.dispatch import HOOKS, bind
from rankscope.errors import BackendError, error_text
from rankscope.hookspecs import PROJECT, BackendSpecs
from rankscope.testing.absence import OnlyThese, packages
from rankscope.testing.life import Life
from rankscope.testing.rules import RuleBroken, rule
from rankscope.testing.surroundings import Surroundings

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_NONSENSE: tuple[Any, ...] = ("nonsense", "", -1, 0.5, True, [], ["nonsense"], {}, {"nonsense": 1})


# Registration.


@rule(light=True)
def registers(life: Life) -> None:
    """The tool is known by one valid name, and what that names makes an object with hooks."""
    infos = registry.providers().get(life.tool, [])
    if not infos:
        raise RuleBroken(
            f"no installed distribution has an entry point {life.tool!r} in the group {registry.GROUP!r}",
            "install the tool in this environment (pip install -e .), or set `factory` in the test class",
        )
    if len(infos) > 1:
        names = ", ".join(info.provider for info in infos)
        raise RuleBroken(f"{life.tool!r} is claimed by {names}", "uninstall one, or take another name")
    if not _NAME.fullmatch(life.tool):
        raise RuleBroken(f"the name is {life.tool!r}", "use small letters, digits and underscores: [a-z][a-z0-9_]*")
    life.require_available()
    with life.seen_made() as made:
        life.handle().close()
        life.handle("critic").close()
    if made[0].backend is made[1].backend:
        raise RuleBroken(
            "the factory returned the same object twice",
            "make one for each call: roles of one process have contexts of their own",
        )
    backend = made[0].backend
    for name in dir(type(backend)):
        if isinstance(inspect.getattr_static(type(backend), name), property):
            try:
                getattr(backend, name)
            except Exception as error:
                raise RuleBroken(
                    f"the property {name!r} raised {error_text(error)}",
                    "make it a method: older versions of pluggy evaluate every property when they register an object",
                ) from error
    if not any(_marked(backend, hook) for hook in HOOKS):
        raise RuleBroken("the object implements no hook", "put @hookimpl on its start, stop, …")


def _marked(owner: Any, name: str) -> Any:
    return getattr(getattr(owner, name, None), f"{PROJECT}_impl", None)


@rule(light=True)
def signatures(life: Life) -> None:
    """Hooks are plain functions: known names, positional arguments without defaults, no wrapper, nothing awaited."""
    owner = _hooks_of(life)
    for name in HOOKS:
        function = getattr(owner, name, None)
        if function is None:
            continue
        if not _marked(owner, name):
            raise RuleBroken(f"{name}() carries no @hookimpl", "core never calls it: decorate it, or rename it")
        if _marked(owner, name).get("wrapper") or _marked(owner, name).get("hookwrapper"):
            raise RuleBroken(f"{name}() is a hook wrapper", "make it a plain hook: core calls each tool by itself")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(inspect.unwrap(function)):
            kind = "a coroutine function" if inspect.iscoroutinefunction(function) else "a generator function"
            raise RuleBroken(
                f"{name}() is {kind}, so its body never runs",
                "make it a plain function; annotate() returns a context manager",
            )
        _check_parameters(name, function)
    try:
        bind([(life.tool, owner)] if not inspect.isclass(owner) else [])
    except BackendError as error:
        raise RuleBroken(str(error), "see rankscope.hookspecs for the hooks and their arguments") from error


def _hooks_of(life: Life) -> Any:
    """The object, before core looks at its hooks; or the class where the tool cannot work here."""
    if not life.availability().available:
        if inspect.isclass(life.factory):
            return life.factory
        life.require_available()
    with life.seen_made() as made:
        try:
            life.handle().close()
        except RuleBroken:
            if not made:
                raise
    return made[0].backend


def _check_parameters(name: str, function: Callable[..., Any]) -> None:
    known = [argument for argument in inspect.signature(getattr(BackendSpecs, name)).parameters if argument != "self"]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise RuleBroken(f"{name}() has {parameter}, which is no plain argument", f"ask for any of: {_list(known)}")
        if parameter.default is not parameter.empty:
            raise RuleBroken(
                f"{name}() has a default in {parameter}",
                "leave it out: some versions of pluggy fill in defaults and others do not",
            )
        if parameter.name not in known:
            raise RuleBroken(
                f"{name}() asks for {parameter.name!r}, which no core gives", f"ask for any of: {_list(known)}"
            )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


# Options and declarations.


@rule(light=True)
def options(life: Life) -> None:
    """Options is a frozen dataclass, each field with a default; every wrong value is a problem that names its key."""
    kind = getattr(life.factory, "Options", None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise RuleBroken(f"Options is {kind!r}", "make it a frozen dataclass, also when it has no fields")
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise RuleBroken(f"{kind.__name__} can be changed", "use @dataclass(frozen=True): roles share it")
    fields = [field for field in dataclasses.fields(kind) if field.init]
    bare = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if bare:
        raise RuleBroken(f"no default: {_list(bare)}", "give one: `tool: mytool` alone must be enough")
    try:
        typing.get_type_hints(kind)
    except (NameError, TypeError) as error:
        raise RuleBroken(
            f"the annotations cannot be read here: {error_text(error)}",
            "import what they name at run time, and use words of Python 3.10; else core checks no type",
        ) from error
    for values in ({}, life.facts.options):
        problems = _problems(kind, values)
        if problems:
            raise RuleBroken(
                f"{dict(values)} is refused: {_list(problems)}", "mend the defaults, or `options` of the test"
            )
    key = "no_such_option_at_all"
    if not any(f"{life.tool}.{key}" in problem for problem in _problems(kind, {key: 1}, life.tool)):
        raise RuleBroken(f"the unknown key {key!r} is accepted", "declare every option as a field")
    for field in fields:
        for value in _NONSENSE:
            _problems(kind, {field.name: value})


def _problems(kind: type, values: Mapping[str, Any], path: str = "options") -> list[str]:
    own = {key: value for key, value in values.items() if key not in {"discrete", "max_seconds"}}
    try:
        return [str(problem) for problem in build_options(kind, own, path)[1]]
    except Exception as error:
        raise RuleBroken(
            f"{dict(values)} made {kind.__name__} raise {error_text(error)}",
            "raise rankscope.OptionError([(field, message)]), or ValueError; check values before they are used",
        ) from error


@rule(light=True)
def declarations(life: Life) -> None:
    """What core reads from the class is of the right type, and launch() changes nothing in the launcher's process."""
    factory = life.factory
    for name in ("owns", "available", "advice", "launch", "collect"):
        if inspect.isclass(factory) and inspect.isfunction(inspect.getattr_static(factory, name, None)):
            raise RuleBroken(f"{name}() needs an object", "make it a static or a class method: core has none to ask")
    defaults = build_options(factory.Options, {}, life.tool)[0]
    owns: Any = getattr(factory, "owns", frozenset())
    if callable(owns):
        owns = owns(defaults)
    if not _texts(owns):
        raise RuleBroken(f"owns is {owns!r}", 'make it a set of names, e.g. frozenset({"cupti"})')
    suffix = getattr(factory, "suffix", "")
    if not isinstance(suffix, str) or (suffix and not suffix.startswith(".")):
        raise RuleBroken(f"suffix is {suffix!r}", 'begin it with a dot: ".json.gz"')
    bound = getattr(factory, "thread_bound", False)
    if not isinstance(bound, (bool, property)):
        raise RuleBroken(f"thread_bound is {bound!r}", "make it True or False")
    advice = factory.advice(defaults) if hasattr(factory, "advice") else ()
    if not _texts(advice):
        raise RuleBroken(f"advice() returned {advice!r}", "return a list of texts, empty where there is nothing to say")
    if hasattr(factory, "launch") and life.availability().available:
        _check_launch(life)


def _check_launch(life: Life) -> None:
    with life.seen_made() as made:
        life.handle().close()
    before = Surroundings.now()
    try:
        launch = life.factory.launch(made[0].options, made[0].context)
    except ConfigError:  # a program that it needs is missing here, which is an answer
        launch = Launch()
    before.require_same("after launch()")
    if not isinstance(launch, Launch):
        raise RuleBroken(f"launch() returned {launch!r}", "return a rankscope.Launch")
    if not (_texts(launch.env) and _texts(launch.env.values()) and _texts(launch.command_prefix)):
        raise RuleBroken(f"launch() returned {launch}", "variables and words of the command are texts")


def _texts(values: Any) -> bool:
    """Whether it is a collection of texts, and not a text itself, which is one of letters."""
    try:
        return not isinstance(values, str) and all(isinstance(value, str) for value in values)
    except TypeError:
        return False


@rule(light=True)
def available(life: Life) -> None:
    """A tool says clearly whether it works here, imports nothing heavy for that, and never raises, come what may."""
    own = {life.module.partition(".")[0], *life.facts.light_imports}
    _without_libraries(life, own)
    before = set(sys.modules)
    answer = life.availability()
    _clear(answer)
    heavy = packages(set(sys.modules) - before) - own
    if heavy:
        raise RuleBroken(
            f"importing the tool and asking available() imported {_list(sorted(heavy))}",
            "import the library in start(), and ask importlib.util.find_spec here; what is light can be listed in the "
            "test class's light_imports",
        )
    if life.availability() != answer:
        raise RuleBroken(f"the second answer differs: {life.availability()}", "answer from what is installed")


def _without_libraries(life: Life, own: set[str]) -> None:
    """Ask in a process that can import the tool and rankscope, and nothing else."""
    path = life.folder / "without_libraries.txt"

    def ask() -> None:
        OnlyThese(own)
        try:
            _clear(life.availability())
        except RuleBroken as broken:
            path.write_text(broken.seen, encoding="utf-8")

    ended = life.process(ask)
    seen = path.read_text(encoding="utf-8") if path.exists() else ""
    if seen or ended.code != 0:
        raise RuleBroken(
            f"where nothing but rankscope and the tool is installed: {seen or f'the process {ended}'}",
            "import the tool's libraries where they are used, not at the top of its modules; ask "
            "importlib.util.find_spec and importlib.metadata in available(), and expect that they find nothing",
        )


def _clear(answer: Availability) -> None:
    if not isinstance(answer.available, bool) or not isinstance(answer.reason, str) or not isinstance(answer.hint, str):
        raise RuleBroken(f"available() returned {answer}", "a bool, a text and a text")
    if not answer.available and not (answer.reason and answer.hint):
        raise RuleBroken(
            f"available() returned {answer}",
            "a no needs a reason, and a hint what helps: Availability(False, 'x is not installed', 'pip install x')",
        )


@rule(light=True)
def construction(life: Life) -> None:
    """Making the object opens no file, starts no thread and no process, and touches no device."""
    life.require_available()
    found: list[str] = []

    def watch() -> Callable[[], object]:
        before = _held()

        def compare() -> None:
            found.extend(sorted((_held() - before).elements()))

        return compare

    with life.seen_made(watch):
        life.handle().close()
    if found:
        raise RuleBroken(f"making the object left {_list(found)}", "do it in start(): many handles are never used")
    files = [path.name for path in life.save_path.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    if files:
        raise RuleBroken(f"making the object wrote {_list(files)}", "write in stop()")


def _held() -> Counter[str]:
    """What this process holds, and how often: files, threads, children, devices."""
    held = Counter(f"the thread {thread.name!r}" for thread in threading.enumerate())
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            held[f"the open file {entry.readlink()}"] += 1
    for task in Path("/proc/self/task").iterdir():
        held.update(f"the process {child}" for child in (task / "children").read_text().split())
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        held["an initialised CUDA"] += 1
    return held
