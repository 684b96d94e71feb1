"""What msprobe changes in torch and in a model, taken back between dumps.

msprobe 26.2.0 replaces torch's functions when its debugger is made, and puts hooks on each module of a model at its
first dump. Both stay for good: each later step is slower, a deep copy of the model would compute with the weights of
the original, and ``torch.compile`` raises. So all of it that can be found is put away after a dump, and brought back
for the next.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

_PLACES = (
    ("torch.jit", "script"),
    ("torch._dynamo.convert_frame", "_compile"),
    ("torch.distributed", "Work.wait"),
    ("torch.nn.utils", "clip_grad_norm_"),
    ("torch.nn.utils", "clip_grad_norm"),
    ("torch.nn.utils", "clip_grad_value_"),
)
"""What msprobe replaces besides the operators, for which it has a registry of its own."""

_HOOKS = (
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
_MARKS = ("msprobe_hook", "msprobe_forward_hook")
_NOISE = "Full backward hook is firing"
"""Begin of a warning that torch gives for msprobe's hooks, and which may be an error in the user's program."""


def of_msprobe(function: object) -> bool:
    """Whether msprobe wrote the function, whatever name ``functools.wraps`` gave it."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("msprobe.")


class Patches:
    """The functions of torch that msprobe replaced. Make it before msprobe's debugger."""

    def __init__(self) -> None:
        self._originals = {place: vars(owner).get(place[1].rpartition(".")[2]) for place, owner in _owners()}
        self._replaced: dict[tuple[str, str], object] = {}
        self._registry: Any = None
        self._registered = False

    def put_away(self, registry: Any) -> None:
        """Torch is as it was.

        Args:
            registry: msprobe's registry of operators, which can take its own back.
        """
        if registry is not None:
            self._registry = registry
            self._registered = bool(registry.all_api_registered)
            if self._registered:
                registry.restore_all_api()
        for place, owner in _owners():
            name = place[1].rpartition(".")[2]
            now, original = vars(owner).get(name), self._originals.get(place)
            if original is not None and of_msprobe(now):  # else somebody else replaced it once more
                self._replaced[place] = now
                setattr(owner, name, original)

    def bring_back(self) -> None:
        """For the next dump."""
        if self._registered:
            self._registry.register_all_api()
        for place, owner in _owners():
            name = place[1].rpartition(".")[2]
            if place in self._replaced and vars(owner).get(name) is self._originals[place]:
                setattr(owner, name, self._replaced[place])


def _owners() -> Iterator[tuple[tuple[str, str], type | ModuleType]]:
    """Each place whose module is imported, with the module or class that holds it."""
    for place in _PLACES:
        owner: Any = sys.modules.get(place[0])
        for part in place[1].split(".")[:-1]:
            owner = getattr(owner, part, None)
        if owner is not None:
            yield place, owner


def unhook(models: Iterable[Any]) -> None:
    """Take msprobe's hooks off these modules and all below them."""
    for model in models:
        for module in model.modules():
            _unhook(module)
    manager = sys.modules.get("msprobe.core.dump.hook_manager")
    handles = getattr(getattr(manager, "BaseHookManager", None), "hook_handle_dict", None)
    if isinstance(handles, dict):  # hooks on the gradients of parameters
        for handle in handles.values():
            with contextlib.suppress(Exception):
                handle.remove()
        handles.clear()


def _unhook(module: Any) -> None:
    own = vars(module)
    for hooks, *companions in _HOOKS:
        for key in [key for key, hook in own.get(hooks, {}).items() if of_msprobe(hook)]:
            for name in (hooks, *companions):
                own.get(name, {}).pop(key, None)
    forward = own.get("forward")
    if forward is not None and of_msprobe(forward):
        original = _wrapped(forward)
        if getattr(original, "__func__", None) is getattr(type(module), "forward", None):
            del own["forward"]
        elif original is not None:
            own["forward"] = original
    for mark in _MARKS:
        own.pop(mark, None)


def _wrapped(forward: Any) -> Any:
    """The forward that msprobe's wrapper calls."""
    names = forward.__code__.co_freevars
    cells = dict(zip(names, forward.__closure__ or (), strict=False))
    cell = cells.get("original_forward")
    original = cell.cell_contents if cell is not None else None
    return _wrapped(original) if of_msprobe(original) else original


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While a dump runs: compiled modules run as they are written, since hooks are no code that can be compiled."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    stance = getattr(compiler, "set_stance", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=_NOISE, category=UserWarning)
        if stance is not None:
            stack.enter_context(stance("force_eager"))
        yield
