from __future__ import annotations

import inspect
import sys
import types

import pluggy
import pytest

from rankscope import Span, Window, hookspecs
from rankscope.dispatch import HOOKS
from rankscope.hookspecs import PROJECT, BackendSpecs

ARGUMENTS = {
    "start": ("window",),
    "step": ("window", "span"),
    "stop": ("window",),
    "annotate": ("span",),
    "relocate": ("window", "last"),
    "finish": ("artifacts",),
}


def specs() -> dict[str, object]:
    return {name: value for name, value in vars(BackendSpecs).items() if not name.startswith("_")}


def test_the_hooks_and_their_arguments_are_frozen() -> None:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(BackendSpecs)
    assert {name: tuple(getattr(manager.hook, name).spec.argnames) for name in specs()} == ARGUMENTS
    assert tuple(ARGUMENTS) == HOOKS


@pytest.mark.parametrize("hook", ARGUMENTS)
def test_every_hook_is_plain_and_explained_with_an_example(hook: str) -> None:
    spec = specs()[hook]
    options = getattr(spec, f"{PROJECT}_spec")
    assert (options["firstresult"], options["historic"], options["warn_on_impl_args"]) == (False, False, None)
    text = inspect.getdoc(spec)
    assert text is not None
    prose, _, example = text.partition("::")
    assert len(prose.split()) >= 10
    assert "@hookimpl" in example
    assert f"def {hook}(self, {', '.join(ARGUMENTS[hook])})" in example
    compile(inspect.cleandoc(example), hook, "exec")


def test_the_page_shows_a_whole_backend_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    text = inspect.getdoc(hookspecs)
    assert text is not None
    lines = text.split("A whole backend::\n")[1].splitlines()
    code = "\n".join(line[4:] for line in lines[: next(i for i, line in enumerate(lines) if line[:1].strip())])
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their module up
    exec(compile(code, "example", "exec"), vars(module))
    backend = module.WallclockBackend
    assert {name for name in dir(backend) if hasattr(getattr(backend, name), f"{PROJECT}_impl")} == {"start", "stop"}


def test_new_facts_break_nobody() -> None:
    """Fields that a backend or a test may have built by hand keep their places and defaults."""
    assert list(inspect.signature(Window).parameters)[:6] == [
        "id",
        "role",
        "step",
        "steps",
        "scope",
        "reason",
    ]
    parameters = inspect.signature(Span).parameters
    assert next(iter(parameters)) == "stage"
    assert all(parameter.default is not parameter.empty for parameter in list(parameters.values())[1:])
