"""The stand-in of the tests without torch_npu is made from signatures: they are those of the real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any


def test_the_recorded_signatures_are_those_of_the_installed_torch_npu(torch_npu: Any) -> None:
    spec = importlib.util.spec_from_file_location("record_signatures", Path(__file__).with_name("record_signatures.py"))
    assert spec is not None
    assert spec.loader is not None
    recorder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    found = json.loads(json.dumps(recorder.offered(torch_npu)))
    assert found == json.loads(recorder.RECORDED.read_text(encoding="utf-8"))


def test_everything_of_torch_npu_that_is_private_and_used_is_there(torch_npu: Any, tmp_path: Path) -> None:
    """Without these the backend works on, with less: that must not go unnoticed."""
    from rankscope_npu.vendor import HandlerPlace

    place = HandlerPlace()
    assert place.running is None
    assert place._creator is not None
    assert set(HandlerPlace._FIELDS) | {"is_prof_inited"} <= set(vars(place._creator))
    from torch_npu._C._profiler import _stop_profiler

    assert callable(_stop_profiler)
