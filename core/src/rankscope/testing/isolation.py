"""Tools without pip: a registry that holds only what a test puts in, and the metadata of a distribution on disk."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from rankscope import registry

_numbers = itertools.count(1)
_DISTRIBUTION = "isolated-registry"


class _Factories:
    """What entry points of isolated registries name: ``rankscope.testing.isolation:factories.tool3``."""


factories = _Factories()


class IsolatedRegistry:
    """The tools of one isolated registry."""

    def __init__(self) -> None:
        self._found: dict[str, list[registry.ToolInfo]] = {}

    def add(self, tool: str, factory: Callable[..., Any]) -> None:
        """Make a tool known. A second one of the same name is what two distributions with one name would be."""
        number = next(_numbers)
        setattr(factories, f"tool{number}", factory)
        # The number as the version: core remembers what it loaded, and this must never be somebody else's.
        info = registry.ToolInfo(tool, _DISTRIBUTION, str(number), f"{__name__}:factories.tool{number}")
        self._found.setdefault(tool, []).append(info)

    def providers(self) -> dict[str, list[registry.ToolInfo]]:
        """As ``rankscope.registry.providers``."""
        return {tool: list(infos) for tool, infos in sorted(self._found.items())}


@contextlib.contextmanager
def isolated_registry(tools: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[IsolatedRegistry]:
    """In the block exactly these tools exist, whatever is installed.

    Everything else is real: names are checked, ``RANKSCOPE_DISABLE`` holds, the factory is loaded through an entry
    point::

        with isolated_registry({"mytool": MyBackend}):
            handle = DistProfiler(profile_config(tmp_path, "mytool"), role="actor", rank=0)

    Only this process knows them; for another one see `install_tools`.

    Args:
        tools: name and backend class (or other factory) of each.
    """
    isolated = IsolatedRegistry()
    for tool, factory in (tools or {}).items():
        isolated.add(tool, factory)
    with mock.patch.object(registry, "providers", isolated.providers):
        yield isolated


def install_tools(
    directory: Path, tools: Mapping[str, str], *, distribution: str = "tools-of-a-test", version: str = "1.0"
) -> Path:
    """Write the metadata of a distribution that brings these tools.

    With the directory on ``sys.path`` or in ``PYTHONPATH`` they exist as if pip had installed them.

    Args:
        directory: created if it is not there.
        tools: name and entry point (``module:object``) of each.
        distribution: its name.
        version: its version.

    Returns:
        The directory.
    """
    info = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = [f"[{registry.GROUP}]", *(f"{tool} = {entry}" for tool, entry in tools.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return directory


def close_everything() -> None:
    """Close every handle that is still watched, and end the helper process: nothing reaches the next test.

    Raises:
        AssertionError: a window is open even then.
    """
    from rankscope import FaultError, shutdown, windows
    from rankscope.artifacts.exports import exports

    for handle in list(shutdown._handles.values()):  # noqa: SLF001 - the kit is part of core
        with contextlib.suppress(FaultError):
            handle.close()
    exports().end()
    left = windows.opened()
    if left:
        raise AssertionError(f"still open: {', '.join(current.tool.name for current in left)}")
