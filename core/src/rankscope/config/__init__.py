"""The config: what it may hold, how it is read, and one role's settings in it."""

from rankscope.config.load import load_config
from rankscope.config.options import CommonOptions, build_options, split_common
from rankscope.config.roles import Config, intersect_roles, merge_roles
from rankscope.config.schema import GlobalConfig, RoleConfig, RoleSection
from rankscope.config.tools import check_tools, inspect_tools, tool_options
from rankscope.config.values import FrozenMapping, OptionError
from rankscope.errors import ConfigError, Problem

__all__ = [
    "CommonOptions",
    "Config",
    "ConfigError",
    "FrozenMapping",
    "GlobalConfig",
    "OptionError",
    "Problem",
    "RoleConfig",
    "RoleSection",
    "build_options",
    "check_tools",
    "inspect_tools",
    "intersect_roles",
    "load_config",
    "merge_roles",
    "split_common",
    "tool_options",
]
