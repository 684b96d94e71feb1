"""Every environment variable that rankscope reads or sets, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping

STRICT = "RANKSCOPE_STRICT"
"""``1``: faults of backends are raised instead of contained. Overrides ``global_profiler.strict``."""

DISABLE = "RANKSCOPE_DISABLE"
"""Comma-separated tools that must not be loaded, or ``*`` for all. Read before any plugin is imported."""

LOG_LEVEL = "RANKSCOPE_LOG_LEVEL"
"""Least level of rankscope's messages: ``debug``, ``info`` (default), ``warning``, ``error``."""

LOG_FORMAT = "RANKSCOPE_LOG_FORMAT"
"""``text`` (default) or ``json``: one JSON object a line."""

PROFILE_PREFIX = "RANKSCOPE_PROFILE_"
"""Prefix of the variables that the finish command gets (SAVE_PATH, TOOL, RANK, … MANIFEST)."""

VERL_PROFILE_PREFIX = "VERL_PROFILE_"
"""verl's prefix; the same values, for scripts that exist today."""

NVTX_INJECTION = "NVTX_INJECTION64_PATH"
"""Library that NVTX loads at the first range. Set by ``rankscope launch`` to a path that does not exist for processes
whose device torch records: CUPTI serves one tool in a process."""

KEEP_NVTX_INJECTION = "RANKSCOPE_KEEP_NVTX_INJECTION"
"""``1``: ``NVTX_INJECTION64_PATH`` is left as it is."""

VERL_KEEP_NVTX_INJECTION = "VERL_KEEP_NVTX_INJECTION"
"""The same under verl's name."""

_TRUE = frozenset({"1", "true", "yes", "on"})


def flag(name: str, environ: Mapping[str, str] | None = None) -> bool | None:
    """The truth of a 0/1 variable; None when it is unset or empty."""
    text = (os.environ if environ is None else environ).get(name, "").strip().lower()
    return None if not text else text in _TRUE


def names(name: str, environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """The comma-separated words of a variable, without blanks."""
    text = (os.environ if environ is None else environ).get(name, "")
    return frozenset(word.strip() for word in text.split(",") if word.strip())
