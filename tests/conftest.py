"""What all tests share: strict mode, no plugin discovery surprises, a clean process state."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of backends are raised in our own tests, unless a test asks for containment."""
    monkeypatch.setenv("RANKSCOPE_STRICT", "1")
