from __future__ import annotations

from dataclasses import dataclass

import pytest

from rankscope.config import CommonOptions, ConfigError, Problem, check_tools, inspect_tools, load_config, tool_options


@dataclass(frozen=True)
class WallOptions:
    unit: str = "s"
    depth: int = 1


class Wall:
    Options = WallOptions
    owns = frozenset({"clock"})
    suffix = ".txt"


class Sun(Wall):
    owns = frozenset({"clock", "sky"})


class FakeRegistry:
    """Two installed tools, one that could be installed; notes what is imported."""

    def __init__(self):
        self.tools = {"wall": Wall, "sun": Sun}
        self.loaded = []

    def installed(self):
        return dict.fromkeys(self.tools)

    def known(self, tool):
        return tool in self.tools or tool == "nsys"

    def check(self, tool, path):
        if tool in self.tools:
            return None
        return Problem(path, f"tool {tool!r} is not installed" if self.known(tool) else f"no tool named {tool!r}")

    def load(self, tool, path=""):
        problem = self.check(tool, path)
        if problem is not None:
            raise ConfigError([problem])
        self.loaded.append(tool)
        return self.tools[tool]


@pytest.fixture
def registry():
    return FakeRegistry()


def load(**sections):
    common = {"steps": [1], "tool": "wall", **sections.pop("common", {})}
    source = {"global_profiler": common, **{name: {"profiler": values} for name, values in sections.items()}}
    return load_config(source, check_tools=False)


def wrong(registry, **sections):
    return {problem.path: problem.message for problem in check_tools(load(**sections), registry)}


def test_a_good_config_imports_only_what_is_used(registry):
    config = load(
        actor={"enable": True, "tool_config": {"wall": {"unit": "ms"}, "nsys": {"nonsense": 1}}},
        critic={"enable": False, "tool": "sun", "tool_config": {"sun": {"nonsense": 1}}},
    )
    assert inspect_tools(config, registry) == ([], [])
    assert registry.loaded == ["wall"]


@pytest.mark.parametrize("common", [{"steps": None}, {}])
def test_nothing_is_imported_where_nothing_is_profiled(registry, common):
    enable = common == {"steps": None}
    assert wrong(registry, common=common, actor={"enable": enable, "tool_config": {"wall": {"nonsense": 1}}}) == {}
    assert registry.loaded == []


def test_a_name_that_nobody_knows_is_wrong_even_where_it_is_off(registry):
    assert wrong(registry, actor={"enable": False, "tool": "wal"}) == {"actor.profiler.tool": "no tool named 'wal'"}
    assert wrong(registry, common={"tool": "wal"}) == {"global_profiler.tool": "no tool named 'wal'"}


def test_a_tool_that_is_not_installed_matters_only_where_it_is_used(registry):
    assert wrong(registry, common={"tool": "nsys"}, actor={"enable": False}) == {}
    assert wrong(registry, common={"tool": "nsys", "steps": []}, actor={"enable": True}) == {}
    found = wrong(registry, common={"tool": "nsys"}, actor={"enable": True}, critic={"enable": True})
    assert found == {"global_profiler.tool": "tool 'nsys' is not installed"}


def test_enabled_without_a_tool(registry):
    found = wrong(registry, common={"tool": None}, actor={"enable": True}, critic={"enable": False})
    assert list(found) == ["actor.profiler.tool"]
    assert "Installed: wall, sun" in found["actor.profiler.tool"]


def test_the_allow_list(registry):
    found = wrong(registry, common={"allow_tools": ["wall"]}, actor={"enable": True}, critic={"tool": "sun"})
    assert list(found) == ["critic.profiler.tool"]
    assert "allow_tools (wall)" in found["critic.profiler.tool"]


def test_options_are_wrong_where_they_were_set(registry):
    found = wrong(
        registry,
        common={"global_tool_config": {"wall": {"depth": "x", "deep": 1}}},
        actor={"enable": True, "tool_config": {"wall": {"uint": "s", "discrete": 3}}},
        critic={"enable": True, "tool_config": {"wall": {"depth": True}}},
    )
    assert set(found) == {
        "global_profiler.global_tool_config.wall.depth",
        "global_profiler.global_tool_config.wall.deep",
        "actor.profiler.tool_config.wall.uint",
        "actor.profiler.tool_config.wall.discrete",
        "critic.profiler.tool_config.wall.depth",
    }
    assert "Did you mean 'unit'?" in found["actor.profiler.tool_config.wall.uint"]


def test_two_tools_that_need_the_same_thing(registry):
    found = wrong(registry, actor={"enable": True, "tool": ["wall", "sun"]})
    assert list(found) == ["actor.profiler.tool"]
    assert "'wall' and 'sun'" in found["actor.profiler.tool"]
    assert "'clock'" in found["actor.profiler.tool"]


def test_continuous_steps_with_discrete_is_a_warning(registry):
    config = load(
        common={"profile_continuous_steps": True}, actor={"enable": True, "tool_config": {"wall": {"discrete": True}}}
    )
    problems, warnings = inspect_tools(config, registry)
    assert problems == []
    assert "actor.profiler: wall has discrete true" in warnings[0]


def test_options_of_a_tool_that_nobody_knows_are_told(registry):
    config = load(actor={"enable": True, "tool_config": {"wal": {"unit": "s"}}})
    problems, warnings = inspect_tools(config, registry)
    assert problems == []
    assert "actor.profiler.tool_config.wal has no effect" in warnings[0]
    assert "Did you mean 'wall'?" in warnings[0]


def test_tool_options():
    role = load(actor={"tool_config": {"wall": {"depth": "4", "discrete": True}}}).role("actor")
    assert tool_options(Wall, role, "wall") == (WallOptions(depth=4), CommonOptions(discrete=True))
    bad = load(actor={"tool_config": {"wall": {"depth": "x", "uint": 1}}}).role("actor")
    with pytest.raises(ConfigError) as caught:
        tool_options(Wall, bad, "wall")
    assert [problem.path for problem in caught.value.problems] == [
        "actor.profiler.tool_config.wall.depth",
        "actor.profiler.tool_config.wall.uint",
    ]


def test_loading_reports_parsing_and_tools_in_one_error():
    with pytest.raises(ConfigError) as caught:
        load_config({"global_profiler": {"steps": [0]}, "actor": {"profiler": {"tool": "no_such_tool_anywhere"}}})
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["global_profiler.steps", "actor.profiler.tool"]


def test_a_loaded_config_is_checked_when_asked():
    config = load(actor={"enable": True, "tool": "no_such_tool_anywhere"}, common={"tool": None})
    with pytest.raises(ConfigError, match="no_such_tool_anywhere"):
        load_config(config)
