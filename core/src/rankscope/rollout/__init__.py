"""Profiling of rollout engines: which replica, started and stopped how, and what becomes of their files."""

from __future__ import annotations

from rankscope.rollout.driver import ReplicaResult
from rankscope.rollout.engine import Engine, EngineFile, EngineLaunch, Place, Start
from rankscope.rollout.names import RelocatedName, parse_relocated
from rankscope.rollout.profiler import RolloutError, RolloutProfiler
from rankscope.rollout.replicas import Layout, Replica
from rankscope.rollout.wanted import Wanted

__all__ = [
    "Engine",
    "EngineFile",
    "EngineLaunch",
    "Layout",
    "Place",
    "RelocatedName",
    "Replica",
    "ReplicaResult",
    "RolloutError",
    "RolloutProfiler",
    "Start",
    "Wanted",
    "parse_relocated",
]
