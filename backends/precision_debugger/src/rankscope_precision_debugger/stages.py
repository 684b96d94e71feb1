"""Stages: which of them are dumped, and where their model is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rankscope.errors import error_text, listing

Resolver = Callable[[Any, str, str], Any]
"""``(instance, stage, role)`` -> the model, a list of its chunks, or None for the usual places."""

STAGES: Mapping[str, str] = {
    "actor_update": "actor",
    "actor_compute_log_prob": "actor",
    "ref_compute_log_prob": "ref",
    "critic_update": "critic",
    "critic_compute_values": "critic",
    "compute_values": "critic",
    "compute_rm_score": "reward",
}
"""The stages that are dumped where no other are chosen, and whose model they run."""

OTHERS: Mapping[str, str] = {
    "reward_score": "reward",
    "train_batch": "",
    "infer_batch": "",
    "forward_backward": "",
}
"""Stages that are known but dumped only where they are chosen: they may have no model, or run many times a step."""

GENERATION = ("rollout_generate", "rollout", "generate_sequences", "async_rollout")
"""Stages of the rollout engine: its model is elsewhere and samples token by token; never dumped."""

PLACES: Mapping[str, tuple[str, ...]] = {
    "actor": (
        "actor.engine.module",
        "actor.actor_module",
        "actor.actor_module_fsdp",
        "actor_module_fsdp",
        "actor_module",
    ),
    "ref": (
        "ref.engine.module",
        "ref.actor_module",
        "ref_policy.actor_module",
        "ref_module_fsdp",
        "ref_module",
        "ref_policy.ref_module",
    ),
    "critic": (
        "critic.engine.module",
        "critic.critic_module",
        "critic_module_fsdp",
        "critic_module",
    ),
    "reward": (
        "reward_model.engine.module",
        "reward_model_module_fsdp",
        "reward_model_module",
        "rm.reward_model_module",
    ),
}
"""Attributes of a worker under which its model is looked for, in this order: those of verl's workers."""

ANYWHERE = ("engine.module", "module", "model")
"""Looked for after them, for every stage."""


class NoModelError(Exception):
    """The model of a stage was not found, or what was found is none."""


def known(stage: str) -> bool:
    """Whether the stage has a meaning here."""
    return stage in STAGES or stage in OTHERS


def load_resolver(text: str) -> Resolver:
    """Import ``module:function`` and check that it can be called with instance, stage and role.

    Raises:
        ValueError: it cannot be imported, or not be called so.
    """
    module_name, _, name = text.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(f"{text!r} cannot be imported: {error_text(error)}") from error
    if not callable(found):
        raise ValueError(f"{text!r} is {found!r}, not a function")
    try:
        inspect.signature(found).bind(None, "stage", "role")
    except TypeError as error:
        raise ValueError(f"{text!r} cannot be called with (instance, stage, role): {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    return found  # type: ignore[no-any-return]


def find_model(instance: Any, stage: str, role: str, *, resolver: Resolver | None, chosen: Iterable[str] = ()) -> Any:
    """The model of a stage: a module, or the list of all its chunks.

    Args:
        instance: the object whose method runs the stage, or None.
        stage: its label.
        role: role of the worker.
        resolver: asked first.
        chosen: attributes to look at instead of the usual ones.

    Raises:
        NoModelError: there is none, with what was looked at.
    """
    if resolver is not None:
        try:
            found = resolver(instance, stage, role)
        except Exception as error:
            raise NoModelError(f"resolve_model raised {error_text(error)}") from error
        if found is not None:
            return _as_model(found, "resolve_model gave")
    if instance is None:
        raise NoModelError(
            "no object is bound to the stage (it is no method with self); set resolve_model, or level L1, which needs "
            "no model"
        )
    names = tuple(chosen) or (*PLACES.get(STAGES.get(stage) or OTHERS.get(stage, ""), ()), *ANYWHERE)
    for name in names:
        found = _attribute(instance, name)
        if found is not None:
            return _as_model(found, f"{type(instance).__name__}.{name} is")
    raise NoModelError(
        f"{type(instance).__name__} has none of: {listing(names)}; name the attribute in models, or set resolve_model"
    )


def _as_model(found: Any, what: str) -> Any:
    chunks = list(found) if isinstance(found, list | tuple) else [found]
    wrong = [chunk for chunk in chunks if not _is_module(chunk)]
    if wrong or not chunks:
        kind = type(wrong[0]).__name__ if wrong else "an empty list"
        raise NoModelError(f"{what} {kind}, not a torch.nn.Module or a list of them")
    return chunks[0] if len(chunks) == 1 else chunks


def _is_module(value: Any) -> bool:
    """By what it can do: a class of its own, and torch need not be imported to look."""
    return callable(getattr(value, "forward", None)) and callable(getattr(value, "named_modules", None))


def _attribute(instance: Any, path: str) -> Any:
    """The attribute, or None; what a property of the user's object raises counts as none."""
    current = instance
    for part in path.split("."):
        try:
            current = getattr(current, part, None)
        except Exception:  # noqa: BLE001 - whatever lies there is not the model
            return None
        if current is None:
            return None
    return current
