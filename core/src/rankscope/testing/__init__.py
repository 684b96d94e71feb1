"""For authors of backends: the rules of a backend as tests, a backend that notes its calls, and stand-ins.

``BackendConformance`` needs pytest, which rankscope itself does not; the rest works without. Nothing of rankscope
imports this package. In a test file of your tool::

    from rankscope.testing import BackendConformance


    class TestMyTool(BackendConformance):
        tool = "mytool"
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.testing.configs import profile_config, read_ledger, wait_for
    from rankscope.testing.conformance import BackendConformance
    from rankscope.testing.fakes import FakeClock, FakeWorld
    from rankscope.testing.isolation import close_everything, install_tools, isolated_registry
    from rankscope.testing.recording import RecordingBackend, RecordingOptions

_HOME = {
    "rankscope.testing.configs": ("profile_config", "read_ledger", "wait_for"),
    "rankscope.testing.conformance": ("BackendConformance",),
    "rankscope.testing.fakes": ("FakeClock", "FakeWorld"),
    "rankscope.testing.isolation": ("close_everything", "install_tools", "isolated_registry"),
    "rankscope.testing.recording": ("RecordingBackend", "RecordingOptions"),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BackendConformance",
    "FakeClock",
    "FakeWorld",
    "RecordingBackend",
    "RecordingOptions",
    "close_everything",
    "install_tools",
    "isolated_registry",
    "profile_config",
    "read_ledger",
    "wait_for",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the recording backend also runs in processes without pytest."""
    if name not in _WHERE:
        raise AttributeError(f"module 'rankscope.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
