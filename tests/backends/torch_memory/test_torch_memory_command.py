"""``rankscope memory``: what it says of a snapshot, and what it refuses to read."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli import main
from rankscope_torch_memory.analysis import by_stack, devices, sampled
from rankscope_torch_memory.reading import SnapshotError, load
from rankscope_torch_memory.text import NO_STACK, bars, shown
from rankscope_torch_memory.writing import write

MEBI = 1 << 20


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": f"/app/{name}.py", "line": 7} for name in names]


def event(action: str, addr: int, size: int, *names: str, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": frames(*names), **more}


def block(address: int, size: int, state: str = "active_allocated", *names: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames(*names)}


def segment(address: int, *blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": address,
        "total_size": sum(one["size"] for one in blocks),
        "segment_type": "large",
        "stream": 0,
        "blocks": list(blocks),
    }


@pytest.fixture
def snapshot() -> dict[str, Any]:
    """Weights from before; activations that come and go; gradients that stay."""
    trace = [
        event("alloc", 200, 3 * MEBI, "forward", "step"),
        event("alloc", 300, 4 * MEBI, "forward", "step"),
        event("alloc", 400, MEBI, "backward", "step"),
        event("free_requested", 300, 4 * MEBI, "step"),
        event("free_completed", 300, 4 * MEBI, "step"),
        event("free_requested", 50, MEBI, "step"),
        event("free_completed", 50, MEBI, "step"),
        event("free_requested", 200, 3 * MEBI, "step"),
        event("free_completed", 200, 3 * MEBI, "step"),
    ]
    return {
        "segments": [
            segment(
                100,
                block(100, 2 * MEBI),
                block(200, 3 * MEBI, "inactive"),
                block(300, 4 * MEBI, "inactive"),
                block(400, MEBI, "active_allocated", "backward", "step"),
                block(500, 2 * MEBI, "active_awaiting_free"),
            )
        ],
        "device_traces": [trace],
        "rankscope": {
            "role": "actor",
            "rank": 3,
            "world_size": 8,
            "step": 5,
            "steps": [4, 5],
            "max_entries": 9,
            "device": 0,
            "device_bytes": {"free": 60 * MEBI, "total": 100 * MEBI},
            "statistics": {"allocated_bytes.all.peak": 33 * MEBI},
        },
    }


@pytest.fixture
def saved(snapshot: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "one.pickle"
    write(snapshot, path)
    return path


def test_levels_peak_and_holders(snapshot: dict[str, Any]) -> None:
    (device,) = devices(snapshot)
    assert [level // MEBI for level in device.allocated_over_time] == [3, 6, 10, 11, 7, 7, 6, 6, 3, 3]
    assert (device.peak_allocated, device.peak_event) == (11 * MEBI, 3)
    assert (device.allocated, device.reserved) == (3 * MEBI, 12 * MEBI)
    assert (device.unused, device.largest_unused) == (7 * MEBI, 4 * MEBI)
    groups = by_stack(device.live_at(3))
    assert [(group.bytes // MEBI, group.blocks, [f[2] for f in group.frames]) for group in groups] == [
        (7, 2, ["forward", "step"]),
        (3, 2, []),
        (1, 1, ["backward", "step"]),
    ]
    assert sum(live.bytes for live in device.live_at(0)) == device.allocated_over_time[0]
    assert sorted(live.bytes for live in device.live_at(9)) == sorted(live.bytes for live in device.live_at_end())


def test_every_moment_adds_up_in_a_random_history() -> None:
    """The levels are counted back from the end, who is alive is followed from the start: they have to agree."""
    chance = random.Random(7)
    alive: dict[int, int] = {address: chance.randrange(1, 9999) for address in range(1, 40)}
    trace = []
    for number in range(100, 700):
        if alive and chance.random() < 0.55:
            address = chance.choice(sorted(alive))
            size = alive.pop(address)
            trace += [event("free_requested", address, size), event("free_completed", address, size)]
        else:
            address = chance.choice([number, *(e["addr"] for e in trace[-9:] if e["addr"] not in alive)])
            alive[address] = chance.randrange(1, 9999)
            trace.append(event("alloc", address, alive[address], f"f{number % 5}"))
    last = [segment(0, *(block(address, size) for address, size in alive.items()))]
    (device,) = devices({"segments": last, "device_traces": [trace]})
    for moment in range(0, len(trace) + 1, 13):
        assert sum(live.bytes for live in device.live_at(moment)) == device.allocated_over_time[moment]


def test_frees_are_counted_once_whatever_was_recorded(snapshot: dict[str, Any]) -> None:
    trace = snapshot["device_traces"][0]
    snapshot["device_traces"] = [[one for one in trace if one["action"] != "free_requested"]]
    (device,) = devices(snapshot)
    assert (device.peak_allocated, device.allocated_over_time[0]) == (11 * MEBI, 3 * MEBI)


def test_older_snapshots_without_addresses_devices_and_asked_sizes() -> None:
    old = {
        "segments": [
            {
                "address": 1000,
                "total_size": 3 * MEBI,
                "blocks": [
                    {"size": MEBI, "state": "inactive"},
                    {"size": 2 * MEBI, "state": "active_allocated", "frames": frames("f")},
                ],
            }
        ],
        "device_traces": [[event("alloc", 1000 + MEBI, 2 * MEBI, "f")]],
    }
    (device,) = devices(old)
    assert device.allocated_over_time == [0, 2 * MEBI]
    assert len(device.live_at_end()) == len(device.live_at(1)) == 1


def test_reserved_memory_over_time_and_expandable_segments() -> None:
    trace = [
        event("segment_alloc", 1, MEBI),
        event("segment_map", 2, 2 * MEBI),
        event("segment_unmap", 2, 2 * MEBI),
        event("segment_alloc", 3, 4 * MEBI),
        event("segment_free", 3, 4 * MEBI),
    ]
    (device,) = devices({"segments": [segment(1, block(1, MEBI))], "device_traces": [trace]})
    assert [level // MEBI for level in device.reserved_over_time] == [0, 1, 3, 1, 5, 1]
    assert device.peak_reserved == 5 * MEBI


def test_several_devices_and_those_without_anything() -> None:
    found = devices(
        {
            "segments": [segment(1, block(1, MEBI), device=2), segment(5, block(5, MEBI))],
            "device_traces": [[], [event("alloc", 1, 1)], []],
        }
    )
    assert [(device.index, device.events) for device in found] == [(0, 0), (1, 1), (2, 0)]


def test_the_page(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(saved)]) == 0
    page = capsys.readouterr().out
    for words in (
        "one.pickle",
        "role actor, rank 3 of 8, step 5",
        "covers the steps 4, 5",
        "allocated  3.0 MiB\n",
        "reserved   12.0 MiB in 1 segments; 7.0 MiB of it unused (58 %), the largest piece 4.0 MiB",
        "peak       11.0 MiB allocated, after event 3 of 9; 12.0 MiB reserved",
        "history    9 events: it was full, so older ones are lost (trace_alloc_max_entries)",
        "torch counts a peak of 33.0 MiB since its statistics were last reset",
        "device     40.0 MiB of 100.0 MiB in use, as its driver says",
        "28.0 MiB of that (70 %) is outside of this process's torch allocator",
        "3.0 MiB to 11.0 MiB",
        "at the peak: 11.0 MiB in 5 blocks",
        "7.0 MiB   63.6 %        2  forward (/app/forward.py:7)",
        NO_STACK,
        "at the end: 3.0 MiB in 2 blocks",
    ):
        assert words in page, words


def test_top_and_frames_limit_the_page(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(saved), "--top", "1", "--frames", "1"]) == 0
    page = capsys.readouterr().out
    assert "(2 more)" in page
    assert "… 1 more" in page
    assert "backward" not in page.split("at the end")[0]


def test_a_small_gap_is_not_pointed_out(
    snapshot: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot["rankscope"]["device_bytes"] = {"free": 87 * MEBI, "total": 100 * MEBI}
    write(snapshot, tmp_path / "s.pickle")
    assert main(["memory", str(tmp_path / "s.pickle")]) == 0
    page = capsys.readouterr().out
    assert "13.0 MiB of 100.0 MiB in use" in page
    assert "outside of this process" not in page


def test_stages_and_failures_are_shown(
    snapshot: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = snapshot["device_traces"][0]
    for number, stage in ((0, "log_prob"), (1, "update"), (2, "update")):
        trace[number]["user_metadata"] = stage
    trace.append({"action": "oom", "size": 9 * MEBI, "device_free": MEBI, "frames": frames("greedy")})
    write(snapshot, tmp_path / "s.pickle")
    assert main(["memory", str(tmp_path / "s.pickle")]) == 0
    page = capsys.readouterr().out
    lines = [line.split() for line in page.splitlines()]
    assert ["update", "5.0", "MiB", "2"] in lines
    assert ["log_prob", "3.0", "MiB", "1"] in lines
    assert "out of memory at event 10: 9.0 MiB were asked for, 1.0 MiB were free on the device" in page
    assert "greedy (/app/greedy.py:7)" in page


def test_json_holds_whole_stacks_and_numbers(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(saved), "--json", "--top", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == saved.stat().st_size
    assert document["rankscope"]["rank"] == 3
    (device,) = document["devices"]
    assert device["peak"]["allocated"] == 11 * MEBI
    assert device["peak"]["stacks"] == [
        {
            "bytes": 7 * MEBI,
            "blocks": 2,
            "frames": [{"file": f"/app/{name}.py", "line": 7, "function": name} for name in ("forward", "step")],
        }
    ]
    assert device["history_full"] is True
    assert device["outside_of_torch"] == 28 * MEBI
    assert device["timeline"]["allocated"] == [level * MEBI for level in (3, 6, 10, 11, 7, 7, 6, 6, 3, 3)]


def test_a_snapshot_that_torch_wrote_itself_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without our own facts, and in each protocol that a Python may have used."""
    plain = {"segments": [segment(1, block(1, MEBI, "active_allocated", "f"))], "device_traces": [[]]}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / f"{protocol}.pickle"
        path.write_bytes(pickle.dumps(plain, protocol))
        assert main(["memory", str(path)]) == 0
        assert "history    none: only the state at the end is known" in capsys.readouterr().out
    path.write_bytes(pickle.dumps(plain["segments"]))
    assert main(["memory", str(path)]) == 0


def test_frames_that_matter_are_chosen() -> None:
    packages = "/venv/lib/python3.11/site-packages"
    stack = [
        ("/build/aten/empty.cpp", 3, "at::empty"),
        ("??", 0, "_PyEval_EvalFrameDefault"),
        (f"{packages}/torch/nn/functional.py", 10, "linear"),
        (f"{packages}/torch/nn/modules/module.py", 20, "_call_impl"),
        ("/app/model.py", 30, "forward"),
        ("/repo/core/src/rankscope/annotate.py", 40, "wrapper"),
        ("/app/train.py", 50, "<module>"),
    ]
    assert shown(stack, 6) == [
        f"linear ({packages}/torch/nn/functional.py:10)",
        "forward (/app/model.py:30)",
        "<module> (/app/train.py:50)",
        "… 4 more",
    ]
    assert shown(stack[:2], 6) == ["at::empty (/build/aten/empty.cpp:3)", "_PyEval_EvalFrameDefault (??:0)"]
    assert shown((), 6) == [NO_STACK]
    assert shown([("/app/\x1b[31m.py", 1, "f\n")], 6) == ["f? (/app/?[31m.py:1)"]


def test_bars_and_samples() -> None:
    assert bars([0, 7, 3], width=10) == "▁█▄"
    assert bars([0, 7], width=10, plain=True) == "_#"
    assert bars([5], width=10) == "▁"
    assert sampled(range(100), 4) == [24, 49, 74, 99]
    assert len(bars(list(range(1000)), width=60)) == 60


def test_the_page_can_be_printed_in_ascii(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "memory", str(saved)],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"allocated  _" in done.stdout
    done.stdout.decode("ascii")


def test_torch_is_not_imported(saved: Path) -> None:
    program = (
        "import sys; from rankscope.cli import main; assert main(['memory', sys.argv[1]]) == 0; "
        "assert not {'torch', 'numpy', 'omegaconf', 'pluggy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(saved)], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# What is refused.


class Malicious:
    """Unpickled by a plain pickle.load, this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def refuse(path: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(path)]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert words in caught.err
    assert "Traceback" not in caught.err


def test_a_malicious_pickle_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim, proof = tmp_path / "victim", tmp_path / "proof"
    bad = pickle.dumps({"segments": [Malicious(victim)], "device_traces": []})
    pickle.loads(pickle.dumps([Malicious(proof)]))
    assert proof.exists(), "the fixture is harmless"
    path = tmp_path / "bad.pickle"
    path.write_bytes(bad)
    refuse(path, "refused: it asks for posix.system", capsys)
    assert not victim.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",  # no protocol at all: the oldest form
        b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x02(ibuiltins\neval\n.",
        b"\x80\x02(cbuiltins\neval\no.",
        b"\x80\x02\x82\x01.",  # a registered extension
        b"\x80\x02X\x01\x00\x00\x001Q.",  # a persistent id
        pickle.dumps(collections.OrderedDict(segments=[])),
        pickle.dumps({"segments": bytearray(b"1")}, 2),
    ],
)
def test_every_way_to_name_something_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError):
        load(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04rest", "zip archive, as torch.save writes it"),
        (b"\x1f\x8b\x08rest", "compressed"),
        (b"hello", "no pickle of a memory snapshot"),
        (pickle.dumps({"a": 1, "b": 2}), "no memory snapshot: a mapping with 'a', 'b'"),
        (pickle.dumps([1, 2]), "no memory snapshot: a list"),
        (pickle.dumps({"segments": 3}), "no memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": 3}), "'device_traces' are no list"),
        (pickle.dumps({"segments": [1]}), "'segments' are no list of mappings"),
        (pickle.dumps({"segments": [{"total_size": "x"}]}), "total_size is str, not a number of bytes"),
        (pickle.dumps({"segments": [{"total_size": 1 << 99}]}), "total_size is int, not a number of bytes"),
        (pickle.dumps({"segments": [{"total_size": 1, "blocks": 5}]}), "'blocks' are no list of mappings"),
        (pickle.dumps({"segments": [], "device_traces": [7]}), "'device_traces' are no list of mappings"),
        (b"\x80\x04K\x01K\x02a.", "no whole pickle"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.", "no whole pickle"),
        (b"\x80\x63}.", "no whole pickle"),
    ],
)
def test_other_files_are_told_apart(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.pickle"
    path.write_bytes(content)
    refuse(path, words, capsys)


def test_a_missing_file_and_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(tmp_path / "none.pickle", "No such file or directory", capsys)
    refuse(tmp_path, "Is a directory", capsys)
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "it is no file", capsys)


def test_a_file_cut_anywhere_is_told(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    path = tmp_path / "cut.pickle"
    for end in range(1, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(SnapshotError):
            load(path)


def test_damaged_files_end_in_words_or_are_read(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    chance = random.Random(3)
    path = tmp_path / "damaged.pickle"
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            for device in devices(load(path)):
                by_stack(device.live_at(device.peak_event))
                device.failures()
        except SnapshotError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x3f.",  # a place in the memo that asks for 16 GiB
        b"\x80\x04\x8e\x00\x00\x00\x00\x10\x00\x00\x00.",  # 64 GiB of bytes, of which none is there
    ],
)
def test_a_few_bytes_cannot_take_all_memory(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bomb.pickle"
    path.write_bytes(content)
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert main(["memory", str(path)]) == 2
    assert "it needs more memory than a snapshot of its size" in capsys.readouterr().err
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_facts_of_any_form_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    facts: dict[Any, Any] = {
        "ring": ring,
        "deep": deep,
        (1, 2): 3,
        "rank": 1 << 20_000,
        "role": "r\x1b]0;x\x07",
        "host": "\udc80",
        "steps": [[1], ring],
        "statistics": {"allocated_bytes.all.peak": "much"},
        "device": 0,
        "device_bytes": {"free": None, "total": "x"},
        "max_entries": "many",
    }
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment(1, block(1, 1))], "rankscope": facts}))
    assert main(["memory", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["memory", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rankscope"]["max_entries"] == "many"


def test_shared_lists_are_looked_at_once(tmp_path: Path) -> None:
    """A small file can name one long stack very often."""
    stack = frames(*(f"f{number}" for number in range(900)))
    many = [block(number, 1) | {"frames": stack} for number in range(1, 20_001)]
    stream = io.BytesIO()
    pickle.dump({"segments": [segment(0, *many)]}, stream)
    path = tmp_path / "shared.pickle"
    path.write_bytes(stream.getvalue())
    (device,) = devices(load(path))
    (group,) = by_stack(device.live_at_end())
    assert (group.bytes, group.blocks, len(group.frames)) == (20_000, 20_000, 900)


def test_a_file_that_holds_one_list_a_million_times_is_refused(tmp_path: Path) -> None:
    blocks = [block(number, 1) for number in range(2000)]
    path = tmp_path / "many.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment(0, *blocks)] * 20_000}))
    with pytest.raises(SnapshotError, match="more than 20000000 blocks"):
        devices(load(path))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("stats", "total_reserved"),
        ("trace", "alloc("),
        ("segment_plot", "MemoryViz"),
        ("trace_plot", "MemoryViz"),
    ],
)
def test_torchs_own_reader_reads_what_we_write(
    device: Any, profiler: Callable[..., Any], files: Callable[..., Any], tmp_path: Path, action: str, words: str
) -> None:
    """In a process of its own: in this one torch is the simulated one."""
    prof = profiler()
    prof.start(step=2)
    addresses = [device.alloc(3 * MEBI) for _ in range(3)]
    device.free(addresses[1])
    prof.stop()
    (path,) = files()
    plot = ["-o", str(tmp_path / "plot.html")] if action.endswith("plot") else []
    done = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", action, str(path), *plot],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert words in ((tmp_path / "plot.html").read_text() if plot else done.stdout)
