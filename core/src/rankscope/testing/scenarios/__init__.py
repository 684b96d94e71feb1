"""The scenarios of all rules, by subject; importing this package fills ``rankscope.testing.rules.RULES``."""

from rankscope.testing.scenarios import declared, files, processes, spans, windows

__all__ = ["declared", "files", "processes", "spans", "windows"]
