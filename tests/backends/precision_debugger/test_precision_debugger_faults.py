"""What goes wrong, strict and not: with a stand-in for msprobe that fails to order, and with missing models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope_precision_debugger.installed import availability

LOG_PROB, UPDATE = "actor_compute_log_prob", "actor_update"
IMPORT = "msprobe cannot be imported: ImportError: No module named 'pkg_resources' (stand-in)"
EXIT = "msprobe cannot be imported: SystemExit: torch_npu is not for this machine (stand-in)"
IN_STAGE = "precision_debugger.annotate failed in step {}: ProbeError: stage {!r}"
OLD = "this msprobe has no PrecisionDebugger.set_init_step; pip install -U mindstudio-probe"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("import", IMPORT),
        ("exit", EXIT),
        ("old", OLD),
        ("make", "ValueError: no debugger today (stand-in)"),
        ("start", "RuntimeError: start failed (stand-in)"),
        ("lost", "msprobe was told to write to"),
    ],
)
def test_a_stage_that_cannot_be_dumped_is_told_once_and_the_training_goes_on(
    scenarios: Any, kit: Any, fault: str, reason: str
) -> None:
    ended = scenarios.run_faulty(fault, "lenient")
    assert ended.code == 0, ended.err
    assert ended.facts == {"raised": [], "faults": []}
    for stage in (LOG_PROB, UPDATE):
        [said] = [message for message in ended.said(reason, "warning") if message.get("scope") == stage]
        assert said["step"] == 1
    records = kit.ledger(ended.path, "artifact")
    assert [(record["step"], record["scope"]) for record in records] == [
        (step, stage) for step in (1, 2) for stage in (LOG_PROB, UPDATE)
    ]
    assert all(record["reason"].startswith(reason) for record in records)
    assert kit.folders(ended.path) == []
    assert list(ended.path.glob("step_*")) == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("import", f"precision_debugger.start failed in step 1: ProbeError: {IMPORT}"),
        ("start@2:actor_update", f"{IN_STAGE.format(2, UPDATE)}: RuntimeError: start failed (stand-in)"),
        (
            "stop@2:actor_update",
            f"{IN_STAGE.format(2, UPDATE)}: RuntimeError: stop failed (stand-in); what came of it ",
        ),
        ("empty", f"{IN_STAGE.format(1, LOG_PROB)}: the dump is empty: the stage ran no layer"),
    ],
)
def test_strict_makes_each_of_them_a_fault(scenarios: Any, kit: Any, fault: str, reason: str) -> None:
    ended = scenarios.run_faulty(fault, "strict", strict=False)
    assert ended.code == 0, ended.err
    assert ended.facts["raised"] == []
    [told] = ended.facts["faults"]
    assert told.startswith(reason)
    before = [("published", 1, LOG_PROB), ("published", 1, UPDATE), ("published", 2, LOG_PROB)]
    published = [row for row in kit.artifacts(ended.path, "status", "step", "scope") if row[0] == "published"]
    assert published == (before if "@2" in fault else [])


def test_strict_here_and_in_rankscope_raises_in_the_training(scenarios: Any) -> None:
    ended = scenarios.run_faulty("start@1:actor_update", "strict")
    [raised] = ended.facts["raised"]
    assert raised.startswith(f"FaultError: precision_debugger.annotate failed in step 1: ProbeError: stage '{UPDATE}'")


@pytest.mark.parametrize("fault", ["stop@1:actor_update", "step@1:actor_update"])
def test_a_dump_that_could_not_be_written_is_set_aside_and_the_others_come(
    scenarios: Any, kit: Any, fault: str
) -> None:
    ended = scenarios.run_faulty(fault, "lenient")
    assert ended.code == 0, ended.err
    assert kit.artifacts(ended.path, "status", "step", "scope") == [
        ("published", 1, LOG_PROB),
        ("failed", 1, UPDATE),
        ("published", 2, LOG_PROB),
        ("published", 2, UPDATE),
    ]
    aside = ended.path / "step_1" / UPDATE / "step1" / "incomplete-rank0"
    assert (aside / "dump.json").is_file()
    assert kit.ledger(ended.path, "artifact", status="failed")[0]["reason"].endswith(f"what came of it lies in {aside}")


def test_a_debugger_that_keeps_its_first_folder_is_made_anew(scenarios: Any, kit: Any) -> None:
    ended = scenarios.run_faulty("stuck", "lenient")
    assert ended.code == 0, ended.err
    assert kit.folders(ended.path) == [
        f"step_{step}/{stage}/step{step}/rank0" for step in (1, 2) for stage in (LOG_PROB, UPDATE)
    ]
    assert ended.out.count("stand-in: made") == 5


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_a_stage_without_a_model(scenarios: Any, kit: Any, mode: str) -> None:
    ended = scenarios.run("no_model", mode, strict=False)
    assert ended.code == 0, ended.err
    reason = "no model was found: Bare.critic_module is dict, not a torch.nn.Module or a list of them"
    if mode == "strict":
        assert ended.facts["faults"] == [
            f"precision_debugger.annotate failed in step 1: ProbeError: stage 'critic_update': {reason}"
        ]
        return
    assert ended.facts == {"raised": [], "faults": []}
    assert len(ended.said(reason, "warning")) == 1
    records = kit.ledger(ended.path, "artifact")
    assert [(record["step"], record["scope"], record["status"]) for record in records] == [
        (1, "critic_update", "failed"),
        (1, LOG_PROB, "published"),
        (2, "critic_update", "missing"),
        (2, LOG_PROB, "published"),
    ]
    why = "Bare has none of: critic.engine.module, critic.critic_module, critic_module_fsdp, critic_module, "
    assert why in records[0]["reason"] or reason in records[0]["reason"]


# Whether msprobe is there at all.


def _install(site: Path, name: str, version: str | None, *, with_pytorch: bool) -> None:
    package = site / "msprobe"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported to look for it')\n")
    if with_pytorch:
        (package / "pytorch" / "__init__.py").touch()
    if version is not None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where something is installed: torch."""
    (tmp_path / "torch.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("msprobe", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_without_msprobe_it_names_the_package_to_install(site: Path) -> None:
    answer = availability()
    assert (answer.available, answer.reason) == (False, "msprobe is not installed")
    assert answer.hint == "pip install mindstudio-probe"


def test_another_package_of_that_name_is_told_apart(site: Path) -> None:
    _install(site, "msprobe", "0.3.1", with_pytorch=False)
    answer = availability()
    assert not answer.available
    assert "'msprobe' 0.3.1 is not the one of MindStudio, which PyPI calls mindstudio-probe" in answer.reason
    assert answer.hint == "pip uninstall msprobe && pip install mindstudio-probe"


@pytest.mark.parametrize(
    ("version", "available", "words"),
    [
        ("26.2.0", True, ""),
        ("26.0.0", True, ""),
        ("8.3.0", False, "mindstudio-probe 8.3.0 is too old"),
        (None, True, ""),
    ],
)
def test_versions(site: Path, version: str | None, available: bool, words: str) -> None:
    """An msprobe without metadata comes with a toolkit, and nobody knows its version."""
    _install(site, "mindstudio-probe", version, with_pytorch=True)
    answer = availability()
    assert (answer.available, words in answer.reason) == (available, True), answer


def test_without_torch_it_cannot_work(site: Path) -> None:
    _install(site, "mindstudio-probe", "26.2.0", with_pytorch=True)
    (site / "torch.py").unlink()
    importlib.invalidate_caches()
    answer = availability()
    assert (answer.available, answer.reason) == (False, "torch is not installed")


def test_a_tool_that_is_not_there_is_a_config_error_before_training(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankscope import Availability, ConfigError, DistProfiler
    from rankscope_precision_debugger import PrecisionDebuggerBackend

    monkeypatch.setattr(
        PrecisionDebuggerBackend,
        "available",
        staticmethod(lambda: Availability(False, "msprobe is not installed", "pip install mindstudio-probe")),
    )
    with pytest.raises(ConfigError, match=r"msprobe is not installed.*pip install mindstudio-probe"):
        DistProfiler(kit.config(tmp_path), role="actor", rank=0)
    values = kit.config(tmp_path)
    values["actor"]["profiler"]["ranks"] = [1]
    DistProfiler(values, role="actor", rank=0).close()
