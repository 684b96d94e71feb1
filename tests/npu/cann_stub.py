"""Build stand-ins for the libraries of CANN, so that the real torch_npu can be imported and profiles on a CPU.

``python tests/npu/cann_stub.py FOLDER`` prints the environment that a process needs before it starts. The names of the
functions are read from the installed wheel, which is not imported for it; ``cann_stub.c`` has the few functions with
results, and says what its own variables do. Kernels and copies to a device do not work, allocations do.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("cann_stub.c")

LIBRARIES = (
    "ascendcl",
    "acl_op_compiler",
    "acl_tdt_channel",
    "ascend_hal",
    "ge_runner",
    "graph",
    "hccl",
    "ms_tools_ext",
    "msprofiler",
    "profapi",
)
"""Libraries that torch_npu links against or opens; one file under all their names, so they share their state."""

PARTS = ("opp", "runtime", "compiler")
"""Folders of an installation that torch_npu wants to see."""

_LOOKED_FOR = re.compile(
    rb"(?<=\0)(?:acl(?:[a-z]*)[A-Z]|H(?:ccl|comm)[A-Z]|Msprof[A-Z]|mstx[A-Z]|hal[A-Z]|rt[A-Z])\w*(?=\0)"
)
_ANSWER = "__attribute__((weak)) long {}(void) {{ return 0; }}\n"
"""Weak: a function of the same name in cann_stub.c counts instead."""


def torch_npu_folder() -> Path:
    """Where torch_npu is installed.

    Raises:
        FileNotFoundError: it is not.
    """
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        raise FileNotFoundError("torch_npu is not installed in this environment")
    return Path(found.origin).parent


def names_in(library: Path) -> set[str]:
    """Every function of CANN whose name stands in a library: what it links against, and what it looks up by name."""
    return {name.decode() for name in _LOOKED_FOR.findall(library.read_bytes())}


def build(folder: Path) -> dict[str, str]:
    """Compile the stand-ins into a folder.

    Returns:
        The environment variables of a process that uses them.

    Raises:
        subprocess.CalledProcessError: gcc refuses.
    """
    names = names_in(torch_npu_folder() / "lib" / "libtorch_npu.so")
    folder = folder.resolve()
    libraries = folder / "lib64"
    for below in (libraries, *(folder / name for name in PARTS)):
        below.mkdir(parents=True, exist_ok=True)
    rest = folder / "rest.c"
    rest.write_text("".join(_ANSWER.format(name) for name in sorted(names)), encoding="utf-8")
    one = libraries / "libcann_stub.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", SOURCE, rest, "-o", one], check=True)
    for name in LIBRARIES:
        link = libraries / f"lib{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(one.name)
    return environment(folder)


def environment(folder: Path) -> dict[str, str]:
    """What a process needs before it starts, so that it finds the stand-ins in this folder."""
    folder = folder.resolve()
    return {
        "LD_LIBRARY_PATH": str(folder / "lib64"),
        "ASCEND_HOME_PATH": str(folder),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    for variable, value in build(parser.parse_args().folder).items():
        print(f"export {variable}={shlex.quote(value)}")
