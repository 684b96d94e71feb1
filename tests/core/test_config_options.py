from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from rankscope.config import CommonOptions, OptionError, build_options, split_common


@dataclass(frozen=True)
class Schedule:
    wait: int = 0
    active: int = 0

    def __post_init__(self):
        bad = [(name, "must be 0 or more") for name in ("wait", "active") if getattr(self, name) < 0]
        if bad:
            raise OptionError(bad)


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Options:
    contents: tuple[str, ...] = ("cpu",)
    ranks: list[int] = field(default_factory=lambda: [1])
    depth: int = 32
    rate: float = 1.0
    verbose: bool = False
    label: str = "x"
    mode: Literal["fast", "slow", 2] = "fast"
    end: int | None = None
    path: Path | None = None
    level: Level = Level.LOW
    pair: tuple[int, str] = (0, "")
    sizes: dict[str, int] = field(default_factory=dict)
    extra: Any = None
    schedule: Schedule = Schedule()
    maybe: Schedule | None = None

    def __post_init__(self):
        if "gpu" in self.contents:
            raise OptionError([("contents", "'gpu' is not one of: cpu, cuda")])
        if self.depth == 13:
            raise ValueError("thirteen is not allowed")


def build(values):
    instance, problems = build_options(Options, values, "a.torch")
    assert (instance is None) == bool(problems)
    return instance


def wrong(values, options=Options):
    instance, problems = build_options(options, values, "a.torch")
    assert instance is None
    return {problem.path: problem.message for problem in problems}


def test_nothing_given_means_the_defaults():
    assert build({}) == Options()
    assert build(dict.fromkeys(("contents", "depth", "end", "schedule", "mode"))) == Options()
    assert build({"_target_": "x.Y", "name": "torch"}) == Options()


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("contents", "cpu, cuda", ("cpu", "cuda")),
        ("contents", ["cpu"], ("cpu",)),
        ("contents", (), ()),
        ("contents", "", ()),
        ("ranks", [3, "4"], (3, 4)),
        ("ranks", "5,6", (5, 6)),
        ("depth", "7", 7),
        ("rate", 2, 2.0),
        ("rate", "1e-3", 0.001),
        ("verbose", "true", True),
        ("label", 5, "5"),
        ("label", "${not.an.interpolation}", "${not.an.interpolation}"),
        ("mode", "slow", "slow"),
        ("mode", "2", 2),
        ("end", 9, 9),
        ("path", "/tmp/x", Path("/tmp/x")),
        ("level", "HIGH", Level.HIGH),
        ("pair", [1, "b"], (1, "b")),
        ("sizes", {"a": 1}, {"a": 1}),
        ("extra", {"a": [1, {"b": [2]}]}, {"a": (1, {"b": (2,)})}),
        ("schedule", {"active": 2, "_target_": "x.Y"}, Schedule(active=2)),
        ("maybe", {"wait": 1}, Schedule(wait=1)),
    ],
)
def test_values(key, value, result):
    made = getattr(build({key: value}), key)
    assert made == result
    assert type(made) is type(result)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("contents", 5, "5 is not a list"),
        ("contents", [["cpu"]], "['cpu'] is not a text"),
        ("contents", [True], "True is not a text"),
        ("ranks", ["x"], "'x' is not a whole number"),
        ("ranks", [True], "True is not a whole number"),
        ("depth", True, "True is not a whole number"),
        ("depth", 1.5, "1.5 is not a whole number"),
        ("depth", "deep", "'deep' is not a whole number"),
        ("rate", True, "True is not a number"),
        ("rate", [1], "[1] is not a number"),
        ("verbose", 1, "1 is neither true nor false"),
        ("label", {"a": 1}, "is not a text"),
        ("mode", "fsat", "Did you mean 'fast'?"),
        ("mode", True, "is not one of: fast, slow, 2"),
        ("end", False, "False is not a whole number"),
        ("level", "MID", "one of: LOW, HIGH"),
        ("pair", [1], "2 are wanted"),
        ("sizes", {"a": "b"}, "is not a mapping of that kind"),
        ("schedule", 5, "5 is not a mapping of options (wait, active)"),
    ],
)
def test_wrong_values(key, value, message):
    found = wrong({key: value})
    assert list(found) == [f"a.torch.{key}"]
    assert message in found[f"a.torch.{key}"]


def test_every_problem_has_its_dotted_key():
    found = wrong({"dpeth": 1, "depth": "x", "schedule": {"wait": True, "actve": 1}, "contents": ["gpu"], "verbose": 3})
    assert set(found) == {
        "a.torch.dpeth",
        "a.torch.depth",
        "a.torch.schedule.wait",
        "a.torch.schedule.actve",
        "a.torch.contents",
        "a.torch.verbose",
    }
    assert "Did you mean 'depth'? Known: contents, ranks" in found["a.torch.dpeth"]
    assert "Did you mean 'active'?" in found["a.torch.schedule.actve"]


def test_what_the_dataclass_itself_refuses():
    assert wrong({"depth": 13}) == {"a.torch": "thirteen is not allowed"}
    assert wrong({"schedule": {"wait": -1, "active": -2}}) == {
        "a.torch.schedule.wait": "must be 0 or more",
        "a.torch.schedule.active": "must be 0 or more",
    }


def test_a_required_field_and_a_class_that_is_no_dataclass():
    @dataclass(frozen=True)
    class Needs:
        file: str

    assert "required" in wrong({}, Needs)["a.torch.file"]
    assert "not a dataclass" in wrong({}, None)["a.torch"]


def test_the_same_from_omegaconf_containers():
    tree = OmegaConf.create({"contents": ["cpu"], "schedule": {"active": 1}})
    assert build(OmegaConf.to_container(tree)) == Options(contents=("cpu",), schedule=Schedule(active=1))


def test_option_error_says_all_and_survives_pickling():
    import pickle

    error = OptionError([("a", "is bad"), ("b.c", "is worse")])
    assert str(error) == "a: is bad; b.c: is worse"
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_discrete_is_common_to_all_tools():
    values = {"discrete": "true", "depth": 3}
    assert split_common(Options, values, "p") == (CommonOptions(True), {"depth": 3}, [])
    assert values == {"discrete": "true", "depth": 3}
    assert split_common(Options, {"discrete": None}, "p") == (CommonOptions(False), {}, [])
    common, rest, problems = split_common(Options, {"discrete": 2}, "p")
    assert (common, rest) == (CommonOptions(False), {})
    assert problems[0].path == "p.discrete"


def test_a_tools_own_discrete_counts():
    @dataclass(frozen=True)
    class Own:
        discrete: bool = True

    assert split_common(Own, {}, "p") == (CommonOptions(True), {}, [])
    assert split_common(Own, {"discrete": False}, "p") == (CommonOptions(False), {"discrete": False}, [])
    assert wrong({"discrete": 5}, Own) == {"a.torch.discrete": "5 is neither true nor false"}
