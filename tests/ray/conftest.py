"""A real Ray cluster of three nodes for all tests of this folder: two of ``cluster_utils``, one of ``ray start``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CORE = HERE.parent / "core"
for folder in (HERE, CORE):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from ray_kit import kill_processes_of  # noqa: E402

from rankscope.testing import wait_for  # noqa: E402

KNOWN_WARNINGS = (
    # Ray leaves log files and sockets of a cluster to the garbage collector.
    "ignore:unclosed:ResourceWarning",
    "ignore:subprocess .* is still running:ResourceWarning",
    # Ray tells of a default that will change for workers without accelerators; there is nothing to be done about it.
    "ignore:Tip. In future versions of Ray:FutureWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("ray") is None
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker("ray")
        for text in KNOWN_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(text))
        if missing:
            item.add_marker(pytest.mark.skip(reason="Ray is not installed; install it with: pip install ray"))


class RayCluster:
    """Three nodes with the resources ``a``, ``b`` and ``c``, by which actors are sent to them.

    Attributes:
        address: for ``ray.init``.
        folder: where everything of it lies.
        disk: a directory that is another one on node ``c``, if this machine allows that.
        disk_of_c: what it is there, seen from here; None where it is the same.
        environ: environment of processes that belong to it.
    """

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.environ = environ
        self._started: list[subprocess.Popen[bytes]] = []
        facts = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 * 2**20}
        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**facts, "resources": {"a": 100}, "temp_dir": str(folder / "r"), "_system_config": quick},
        )
        self.address = self._cluster.address
        self._cluster.add_node(wait=False, num_cpus=2, object_store_memory=80 * 2**20, resources={"b": 100})
        self.disk = folder / "disk"
        self.disk.mkdir()
        private = folder / "private"
        private.mkdir()
        allowed = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
        self.disk_of_c = private if allowed else None
        self.start_node("c", mount=(private, self.disk) if allowed else None)

    def start_node(self, resource: str, mount: tuple[Path, Path] | None = None) -> subprocess.Popen[bytes]:
        """One more node, by the ``ray start`` that users type; with a directory of its own under a name of ours."""
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", f"--address={self.address}", "--num-cpus=2", "--block", "--disable-usage-stats"]
        command += [f"--resources={json.dumps({resource: 100})}", f"--object-store-memory={80 * 2**20}"]
        if mount is not None:
            bind = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", bind, "sh", str(mount[0]), str(mount[1]), *command]
        with (self.folder / f"start-{resource}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ, start_new_session=True
            )
        self._started.append(process)
        return process

    def wait_for_nodes(self, resources: str) -> None:
        import ray

        wait_for(lambda: set(resources) <= set(ray.cluster_resources()), 60)

    def close(self) -> None:
        """End all of it, and what Ray would leave."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        kill_processes_of(self.folder)
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        kill_processes_of(self.folder)


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """The cluster, and this process as its driver."""
    import ray
    import recording

    folder = Path(tempfile.mkdtemp(prefix="rs-"))  # a short path: Ray's sockets lie below it
    site = recording.install(folder / "site")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    environ |= {
        "PYTHONPATH": os.pathsep.join(map(str, (site, CORE, HERE))),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    before = dict(os.environ)
    os.environ.update(environ)
    os.environ.pop("RANKSCOPE_STRICT", None)
    made = None
    try:
        sys.path.append(str(site))
        made = RayCluster(folder, environ)
        ray.init(address=made.address, log_to_driver=False, logging_level="error", configure_logging=False)
        made.wait_for_nodes("abc")
        os.environ.clear()
        os.environ.update(before)
        yield made
    finally:
        os.environ.clear()
        os.environ.update(before)
        with contextlib.suppress(Exception):
            ray.shutdown()
        if made is not None:
            made.close()
        sys.path.remove(str(site))
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def actors(cluster: RayCluster) -> Iterator[Callable[..., Any]]:
    """Start an actor: ``actors(Worker, config, "actor", rank, world_size, on="a")``; all are killed in the end."""
    import ray

    started: list[Any] = []

    def start(kind: type, *arguments: Any, on: str = "a", **options: Any) -> Any:
        handle = ray.remote(kind).options(num_cpus=0, resources={on: 1}, **options).remote(*arguments)
        started.append(handle)
        return handle

    yield start
    for handle in started:
        with contextlib.suppress(Exception):
            ray.kill(handle)


@pytest.fixture
def groups() -> Iterator[Callable[..., Any]]:
    """Make a group; it is closed in the end, so that its exit handler goes."""
    from rankscope.integrations.ray import RayGroup

    made: list[Any] = []

    def make(actors: Any, **facts: Any) -> Any:
        made.append(RayGroup(actors, **facts))
        return made[-1]

    yield make
    for group in made:
        with contextlib.suppress(Exception):
            group.close(timeout=20)
