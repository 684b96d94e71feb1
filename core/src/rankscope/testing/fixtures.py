"""Fixtures for tests of a backend, for those who ask for them: ``pytest_plugins = ["rankscope.testing.fixtures"]``.

There is no ``pytest11`` entry point: a run of pytest that has nothing to do with rankscope imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.testing.fakes import FakeClock
from rankscope.testing.isolation import IsolatedRegistry, close_everything, isolated_registry
from rankscope.testing.recording import record


@pytest.fixture
def rankscope_tools() -> Iterator[IsolatedRegistry]:
    """Exactly the tools that the test adds exist: ``rankscope_tools.add("mytool", MyBackend)``.

    Afterwards every handle is closed, and what recording backends noted is forgotten.
    """
    record.clear()
    with isolated_registry() as tools:
        yield tools
        close_everything()
    record.clear()


@pytest.fixture
def rankscope_clock() -> Iterator[FakeClock]:
    """Handles that the test makes go by this clock; ``rankscope_clock.advance(1.5)`` lets time pass."""
    with FakeClock().installed() as clock:
        yield clock
