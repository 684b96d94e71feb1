from __future__ import annotations

import os
import socket
import sys
import types

import pytest

from rankscope import log, topology
from rankscope.topology import Topology, detect, dimensions_for_name, host_name, run_id

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE"),
)


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("torch.distributed", "ray", *topology._MEGATRON_MODULES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(log, "_said", {})
    monkeypatch.setattr(topology, "_providers", {})


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    module = types.ModuleType(name)
    for function, value in functions.items():
        setattr(module, function, value if callable(value) else lambda value=value: value)
    monkeypatch.setitem(sys.modules, name, module)


def _group(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    _module(
        monkeypatch,
        "torch.distributed",
        is_available=True,
        is_initialized=True,
        get_rank=rank,
        get_world_size=world,
    )


def test_nothing_known_is_rank_0_of_an_unknown_world() -> None:
    assert detect() == Topology(0, None, {}, {}, None, None, None, "default")


def test_given_wins_over_group_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _group(monkeypatch, 1, 4)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = detect(rank=5, world_size=6)
    assert (found.rank, found.world_size, found.group_rank, found.group_world_size) == (5, 6, 1, 4)
    assert found.source == "given"


def test_group_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _group(monkeypatch, 1, 4)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = detect()
    assert (found.rank, found.world_size, found.source) == (1, 4, "process group")


def test_world_size_comes_from_a_source_that_agrees_about_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _group(monkeypatch, 1, 4)
    assert detect(rank=1).world_size == 4
    assert detect(rank=0).world_size is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert detect(rank=0).world_size == 2


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (("RANK", "WORLD_SIZE", "LOCAL_RANK"), "RANK"),
        (("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), "SLURM_PROCID"),
        (
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
            "OMPI_COMM_WORLD_RANK",
        ),
    ],
)
def test_launchers(names: tuple[str, str, str], source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(names, ("9", "16", "1"), strict=True):
        monkeypatch.setenv(name, value)
    found = detect()
    assert (found.rank, found.world_size, found.local_rank, found.source) == (9, 16, 1, source)


def test_torchrun_inside_slurm_means_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "9", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    assert (detect().rank, detect().world_size) == (9, 16)


def test_nonsense_in_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "0")
    assert (detect().rank, detect().world_size) == (0, None)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (detect().rank, detect().world_size) == (3, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": -1}, "rank=-1 is not a whole number of at least 0"),
        ({"rank": 1.0}, "rank=1.0"),
        ({"rank": True}, "rank=True"),
        ({"rank": "1"}, "rank='1'"),
        ({"world_size": 0}, "world_size=0 is not a whole number of at least 1"),
        ({"rank": 2, "world_size": 2}, r"rank 2 \(given\) does not fit world_size=2: ranks are 0 to 1"),
        ({"topology": {"tp": -1}}, r"topology\['tp'\]=-1"),
        ({"topology": {"tp": (2, 2)}}, "rank 2 does not fit size 2"),
        ({"topology": {"tp": (1, 2, 3)}}, "neither a rank nor"),
    ],
)
def test_what_is_given_must_make_sense(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect(**arguments)  # type: ignore[arg-type]


def test_megatron_dimensions_with_a_lookup_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise AssertionError("context parallel group is not initialized")

    monkeypatch.setenv("RANKSCOPE_LOG_LEVEL", "debug")
    _module(
        monkeypatch,
        "megatron.core.parallel_state",
        model_parallel_is_initialized=True,
        get_tensor_model_parallel_rank=1,
        get_tensor_model_parallel_world_size=2,
        get_pipeline_model_parallel_rank=0,
        get_pipeline_model_parallel_world_size=1,
        get_data_parallel_rank=3,
        get_data_parallel_world_size=4,
        get_context_parallel_rank=fail,
        get_context_parallel_world_size=fail,
        get_expert_model_parallel_rank=1,
        get_expert_model_parallel_world_size=fail,
    )
    found = detect()
    detect()
    assert found.dimensions == {"tp": 1, "pp": 0, "dp": 3, "ep": 1}
    assert found.sizes == {"tp": 2, "pp": 1, "dp": 4}
    assert dimensions_for_name(found) == {"tp": 1, "dp": 3, "ep": 1}
    assert capsys.readouterr().err.count("Megatron does not tell cp") == 1


def test_megatron_before_its_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    _module(monkeypatch, "megatron.core.parallel_state", model_parallel_is_initialized=False)
    assert detect().dimensions == {}


def test_names_have_every_dimension_that_tells_ranks_apart_in_a_fixed_order() -> None:
    given = {"zz": 1, "sp": (0, 2), "ep": (1, 2), "cp": (0, 1), "dp": (0, 8), "pp": (3, 4), "tp": 0}
    assert list(dimensions_for_name(detect(topology=given)).items()) == [
        ("tp", 0),
        ("pp", 3),
        ("dp", 0),
        ("ep", 1),
        ("sp", 0),
        ("zz", 1),
    ]


def test_providers_add_dimensions_and_a_failing_one_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("mesh is gone")

    topology.add_provider("mesh", fail)
    topology.add_provider("ulysses", lambda: {"sp": (1, 2), "dp": 0})
    assert detect(topology={"dp": 7}).dimensions == {"sp": 1, "dp": 7}
    assert detect().dimensions == {"sp": 1, "dp": 0}
    out = capsys.readouterr().err
    assert out.count("topology provider failed") == 1
    assert "provider=mesh" in out
    assert "RuntimeError: mesh is gone" in out
    topology.remove_provider("ulysses")
    topology.remove_provider("ulysses")
    assert detect().dimensions == {}


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("node7.cluster.example", "node7"),
        ("10.0.0.12", "10-0-0-12"),
        ("fe80::1", "fe80-1"),
        ("my_host!", "my-host"),
        ("工", "host"),
        ("", "host"),
        ("x" * 100, "x" * 63),
    ],
)
def test_host_name(full: str, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: full)
    assert host_name() == short


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "exp 1/a", "MASTER_PORT": "4711", "MASTER_ADDR": "n0"}, "exp-1-a-4711"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "4711", "MASTER_ADDR": "n0"}, "master-n0-4711"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "4711", "SLURM_JOB_ID": "55"}, "slurm-55-4711"),
        ({"RAY_JOB_ID": "01000000", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}, "ray-01000000"),
        ({"RAY_JOB_ID": "01000000", "SLURM_JOB_ID": "55", "SLURM_STEP_ID": "2"}, "ray-01000000-slurm-55"),
        ({"SLURM_JOB_ID": "55", "SLURM_STEP_ID": "0"}, "slurm-55-0"),
        ({"SLURM_JOB_ID": "55", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}, "slurm-55-1-0"),
        ({"PMIX_NAMESPACE": "prterun-n0-77@1"}, "prterun-n0-77-1"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}, "master-n0-29500"),
    ],
)
def test_run_id_of_a_launcher(environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run_id() == expected


def test_run_id_is_the_drivers_in_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    context = types.SimpleNamespace(get_job_id=lambda: "02000000")
    _module(monkeypatch, "ray", is_initialized=True, get_runtime_context=lambda: context)
    assert run_id() == "ray-02000000"


def test_run_id_without_a_launcher_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_id() == run_id()
    assert f"-{os.getpid()}-" in run_id()
    mine = run_id()
    monkeypatch.setattr(topology, "_own_run_id", (os.getpid() + 1, mine))  # what a forked child inherits
    assert run_id() != mine


def test_a_broken_process_group_is_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("destroyed meanwhile")

    _module(monkeypatch, "torch.distributed", is_available=True, is_initialized=True, get_rank=fail)
    assert topology.process_group() is None
    monkeypatch.setitem(sys.modules, "torch.distributed", types.ModuleType("half imported"))
    assert topology.distributed() is None
