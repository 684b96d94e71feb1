"""The rules of a backend, for nsys in a process without nsys around it: rules about reports say so and are skipped."""

from __future__ import annotations

from rankscope.testing import BackendConformance


class TestNsysConformance(BackendConformance):
    tool = "nsys"
