"""``rankscope doctor``: what it finds on this machine and in a config, and what it makes of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope import doctor
from rankscope.cli import main
from rankscope.doctor import Finding, examine

HERE = Path(__file__).parent


@pytest.fixture
def tools(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recording tools, also for the processes that the doctor starts; and nothing else that takes long."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(HERE)]))
    monkeypatch.setattr(doctor, "_torch", lambda _: iter(()))
    return site


def config(tmp_path: Path, tool: str = "rec", **section: Any) -> dict[str, Any]:
    common = {"steps": [1], "tool": tool, "save_path": str(tmp_path / "out")}
    return {"global_profiler": common, "actor": {"profiler": {"enable": True, **section}}}


def about(findings: list[Finding], subject: str) -> list[tuple[str, str]]:
    return [(finding.verdict, finding.text) for finding in findings if finding.subject == subject]


def test_a_tool_that_works_makes_a_capture_that_is_read_back(tools: Path, tmp_path: Path) -> None:
    found = list(examine(config(tmp_path)))
    first, test = about(found, "rec")
    assert first == ("ok", "recording-tools 1.0; requires no other package")
    assert test[0] == "ok"
    assert test[1].startswith("self-test: selftest_train_step1_rank0-of-1_")
    assert not (tmp_path / "out").exists()
    assert not [finding for finding in found if finding.verdict == "problem"]


def test_a_capture_that_fails_is_a_problem_with_its_reason(tools: Path, tmp_path: Path) -> None:
    options = {"tool_config": {"rec": {"fail": "start"}}}
    [_, (verdict, text)] = about(list(examine(config(tmp_path, **options))), "rec")
    assert verdict == "problem"
    assert "broken start" in text
    [_, (verdict, text)] = about(list(examine(config(tmp_path, tool_config={"rec": {"write": "never"}}))), "rec")
    assert (verdict, "self-test" in text) == ("problem", True)


def test_without_a_self_test_nothing_is_started(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_selftest", lambda *_: pytest.fail("started"))
    assert len(about(list(examine(config(tmp_path), selftest=False)), "rec")) == 1


def test_a_wrong_config_is_a_problem_for_each_mistake(tools: Path, tmp_path: Path) -> None:
    found = about(list(examine(config(tmp_path, tool="recc", rank=3), selftest=False)), "config")
    assert [verdict for verdict, _ in found] == ["problem", "problem"]
    assert any("Did you mean 'ranks'?" in text for _, text in found)
    assert any("Did you mean 'rec'?" in text for _, text in found)


def test_roles_that_yield_nothing_are_named(tools: Path, tmp_path: Path) -> None:
    source = config(tmp_path, ranks=[9])
    source["critic"] = {"profiler": {"enable": False}}
    found = list(examine(source, world_size=2, selftest=False))
    assert ("warning", "actor: rank 9 does not exist: the world size is 2 (ranks 0-1)") in about(found, "config")
    assert about(found, "role actor")[0][0] == "note"
    assert about(found, "role critic")[0][0] == "note"


def test_a_save_path_that_cannot_be_written(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    source = config(tmp_path)
    source["global_profiler"]["save_path"] = str(tmp_path / "file" / "below")
    [(verdict, text)] = about(list(examine(source, selftest=False)), "save_path")
    assert (verdict, "cannot be written" in text) == ("problem", True)


def test_little_room_is_a_warning(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LITTLE", 1 << 60)
    [(verdict, _)] = about(list(examine(config(tmp_path), selftest=False)), "save_path")
    assert verdict == "warning"


def test_injections_and_nsys(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib.so"
    library.touch()
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho NVIDIA Nsight Systems version 2025.1.3.140-x\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(library))
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/does/not/exist")
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    found = list(examine(config(tmp_path), selftest=False))
    assert [verdict for verdict, _ in about(found, "cupti")] == ["warning", "warning"]
    assert str(library) in about(found, "cupti")[0][1]
    assert about(found, "nsys")[0] == ("ok", f"nsys 2025.1.3.140 at {program}")


def test_an_nsys_that_does_not_answer(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nsys"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert about(list(examine(config(tmp_path), selftest=False)), "nsys")[0][0] == "warning"


@pytest.mark.torch
def test_torch_is_asked_in_its_own_process() -> None:
    [finding] = doctor._torch(lambda _: None)
    assert finding.verdict == "ok"
    assert finding.text.startswith("torch 2.")


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [finding] = doctor._torch(lambda _: None)
    assert (finding.verdict, "libtorch.so is missing" in finding.text) == ("problem", True)


def test_a_program_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE", 0.2)
    assert doctor._asked([sys.executable, "-c", "input() or __import__('time').sleep(60)"]) is not None  # no stdin
    assert doctor._asked([sys.executable, "-c", "import time; time.sleep(60)"]) is None
    assert doctor._asked(["/no/such/program"]) is None


def test_the_command(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(json.dumps(config(tmp_path)))
    assert main(["doctor", str(file), "--no-selftest"]) == 0
    said = capsys.readouterr()
    assert "ok rec: recording-tools 1.0; requires no other package\n" in said.out
    assert said.out.endswith("\nno problems\n")
    assert main(["doctor", str(file), "--no-selftest", "--json", "actor.profiler.tool=recc"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [finding["subject"] for finding in findings if finding["verdict"] == "problem"] == ["config"]
    monkeypatch.setenv("RANKSCOPE_DISABLE", "rec")
    assert main(["doctor", str(file), "--no-selftest"]) == 1
    assert "RANKSCOPE_DISABLE" in capsys.readouterr().out
