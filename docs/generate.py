"""Rewrite the generated parts of the pages in this folder from the code that they describe.

``python docs/generate.py`` rewrites them in place; ``--check`` changes nothing and exits with 1 when one is stale. A
generated part lies between ``<!-- generated:begin NAME -->`` and ``<!-- generated:end -->``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import rankscope
from rankscope import environment, hookspecs, registry
from rankscope.artifacts.status import FINE
from rankscope.config import schema
from rankscope_npu.options import NpuOptions
from rankscope_nsys.options import NsysOptions
from rankscope_precision_debugger.options import PrecisionDebuggerOptions
from rankscope_torch.options import TorchOptions
from rankscope_torch_memory.options import TorchMemoryOptions

DOCS = Path(__file__).resolve().parent
PARTS = re.compile(r"(<!-- generated:begin (\S+) -->\n)(.*?)(<!-- generated:end -->)", re.DOTALL)

TYPES = {
    "bool": "true or false",
    "int": "whole number",
    "float": "seconds",
    "str": "text",
    "str | None": "path",
    "Optional[str]": "text",
    "Optional[int]": "whole number",
    "Optional[float]": "number",
    "bool | None": "true or false",
    "tuple[str, ...]": "name or list of names",
    "tuple[str, ...] | None": "name or list of names",
    "Optional[tuple[str, ...]]": "name or list of names",
    "dict": "mapping",
    "dict[str, Any]": "mapping",
    "tuple[int, ...]": "[steps](#steps)",
    "str | tuple[str, ...] | None": "text or list of words",
    "tuple[int | str, ...]": "[ranks](#ranks)",
    "tuple[int | str, ...] | None": "[ranks](#ranks)",
    "RankSelector | None": "[ranks](#ranks)",
    "FrozenMapping": "mapping",
    "ScheduleOptions": "mapping",
}
"""How an annotation is shown; one that is missing here stops the generator, so that somebody chooses the words."""

KINDS = {"save_path": "path", "stage": "stage"}
"""The same by key, where the annotation says too little."""


def attributes(owner: type) -> dict[str, str]:
    """The ``Attributes`` of a class's docstring: name -> meaning, on one line and as Markdown."""
    lines = inspect.cleandoc(owner.__doc__ or "").splitlines()
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines[lines.index("Attributes:") + 1 :]:
        if line and not line.startswith(" "):
            break
        entry = re.match(r"    ([a-z0-9_]+(?:, [a-z0-9_]+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found.update({name: [entry[2]] for name in names})
        elif line.strip():
            for name in names:
                found[name].append(line.strip())
    return {name: markdown(" ".join(words)) for name, words in found.items()}


def markdown(text: str) -> str:
    """Marks of our docstrings as marks of Markdown."""
    text = text.replace("``", "`")
    return text.replace("as in `GlobalConfig`", "as in `global_profiler`").replace("None", "null")


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(headers)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def default(field: dataclasses.Field[object]) -> str:
    """The default as it would be written in YAML."""
    if field.name == "save_path" and field.default is dataclasses.MISSING:
        return f"`{schema.DEFAULT_SAVE_PATH}`"
    if field.default is dataclasses.MISSING:
        return "`{}`"
    value = field.default
    if isinstance(value, tuple) and value:
        return f"`[{', '.join(map(str, value))}]`"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`"


def kind(field: dataclasses.Field[object]) -> str:
    """The type in words."""
    found = KINDS.get(field.name) or TYPES.get(str(field.type))
    if found is None:
        raise SystemExit(f"docs/generate.py has no words for the type {field.type} of {field.name!r}: add it to TYPES")
    return found


def keys(owner: type, *, without: tuple[str, ...] = ()) -> str:
    """The reference of a config class."""
    meanings = attributes(owner)
    rows = [
        (f"`{field.name}`", kind(field), default(field), meanings[field.name])
        for field in dataclasses.fields(owner)
        if field.name not in without and not field.name.startswith("_")
    ]
    return table(("key", "type", "default", "meaning"), rows)


def constants(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Each text constant of a module that has a docstring below it: value, meaning."""
    for node, after in itertools.pairwise(ast.parse(inspect.getsource(module)).body):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            value, meaning = (
                each.value if isinstance(each, ast.Constant) else None for each in (node.value, after.value)
            )
            if isinstance(value, str) and isinstance(meaning, str):
                yield value, " ".join(meaning.split())


def variables() -> str:
    rows = [
        (f"`{value}…`" if value.endswith("_") else f"`{value}`", markdown(meaning))
        for value, meaning in constants(environment)
    ]
    return table(("variable", "meaning"), rows)


def literal_blocks(text: str) -> Iterator[str]:
    """The code after each ``::``."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not line.endswith("::"):
            continue
        block: list[str] = []
        for below in lines[at + 1 :]:
            if below and not below.startswith(" "):
                break
            block.append(below)
        yield textwrap.dedent("\n".join(block)).strip("\n")


def sample() -> str:
    """The whole backend of the hook specifications' docstring."""
    code = next(block for block in literal_blocks(hookspecs.__doc__ or "") if "class WallclockBackend" in block)
    return f"<!-- sample: backend -->\n```python\n{code}\n```\n"


def entry_point() -> str:
    """The lines of a ``pyproject.toml``, from the same docstring."""
    code = next(block for block in literal_blocks(hookspecs.__doc__ or "") if registry.GROUP in block)
    return f"<!-- sample: entry-point -->\n```toml\n{code}\n```\n"


def hooks() -> str:
    """Each hook with its arguments, contract and example."""
    parts = []
    for name, function in vars(hookspecs.BackendSpecs).items():
        if not inspect.isfunction(function):
            continue
        signature = inspect.signature(function)
        names = [parameter for parameter in signature.parameters if parameter != "self"]
        text = inspect.cleandoc(function.__doc__ or "")
        example = "\n\n".join(literal_blocks(text))
        words = text.partition("::")[0].strip()
        returns = str(signature.return_annotation)
        gives = "" if returns == "None" else f" → `{returns}`"
        heading = f"### `{name}({', '.join(names)})`{gives}"
        parts.append(f"{heading}\n\n{markdown_text(words)}:\n\n```python\n{example}\n```\n")
    return "\n".join(parts)


def markdown_text(text: str) -> str:
    """Prose of a docstring; None stays None, for it is about Python."""
    return text.replace("``", "`")


def facts(owner: type) -> str:
    """What the objects that a backend gets know."""
    lines = inspect.cleandoc(owner.__doc__ or "").splitlines()
    found = []
    for line in lines[lines.index("Attributes:") + 1 :]:
        entry = re.match(r"    ([a-z0-9_]+(?:, [a-z0-9_]+)*): (.*)", line)
        if entry:
            found.append([", ".join(f"`{name}`" for name in entry[1].split(", ")), entry[2]])
        elif line.strip():
            found[-1][1] += f" {line.strip()}"
    return table(("field", "meaning"), ((name, markdown_text(text)) for name, text in found))


def names() -> str:
    """Every public name with the first line of its docstring."""
    rows = []
    for name in sorted(rankscope.__all__, key=str.lower):
        value = getattr(rankscope, name)
        text = inspect.getdoc(value) or ""
        if name == "hookimpl":
            text = "Marks a method of a backend as the implementation of a hook."
        elif name == "hookspec":
            text = "Marks the specification of a hook; only core's own are called."
        first = text.split("\n\n")[0]
        if not first or first.startswith("Decorator helper"):
            raise SystemExit(f"rankscope.{name} has no docstring of its own")
        kind = "class" if inspect.isclass(value) else "function"
        if inspect.isclass(value) and issubclass(value, BaseException):
            kind = "exception"
        rows.append((f"`{name}`", kind, markdown_text(" ".join(first.rstrip(":").split()))))
    return table(("name", "kind", "what it is"), rows)


def states() -> str:
    """What a row of ``rankscope status`` can say."""
    from rankscope.artifacts import status

    tree = ast.parse(inspect.getsource(status)).body
    for node, after in itertools.pairwise(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RowStatus":
            text = ast.literal_eval(after.value)  # type: ignore[attr-defined]
            break
    else:
        raise SystemExit("artifacts/status.py has no RowStatus")
    prose = " ".join(text.split("\n\n", 1)[1].split())
    rows = []
    for entry in re.finditer(r"((?:``[a-z ]+``(?:, )?)+): (.*?)(?= ``[a-z ]+``(?:, ``|:)|$)", prose):
        words = re.findall(r"``([a-z ]+)``", entry[1])
        rows += [(f"`{word}`", "yes" if word in FINE else "no", markdown_text(entry[2])) for word in words]
    return table(("status", "counts as there", "meaning"), rows)


GENERATED: dict[str, Callable[[], str]] = {
    "global_profiler": lambda: keys(schema.GlobalConfig),
    "role": lambda: keys(schema.RoleSection, without=("path", "role")),
    "torch": lambda: keys(TorchOptions),
    "torch_memory": lambda: keys(TorchMemoryOptions),
    "nsys": lambda: keys(NsysOptions),
    "npu": lambda: keys(NpuOptions),
    "precision_debugger": lambda: keys(PrecisionDebuggerOptions),
    "torch.schedule": lambda: keys(rankscope.ScheduleOptions),
    "environment": variables,
    "backend-sample": sample,
    "backend-entry-point": entry_point,
    "hooks": hooks,
    "context": lambda: facts(rankscope.Context),
    "window": lambda: facts(rankscope.Window),
    "span": lambda: facts(rankscope.Span),
    "names": names,
    "states": states,
}


def rewritten(text: str) -> str:
    """A page with its generated parts as they should be."""

    def fill(part: re.Match[str]) -> str:
        if part[2] not in GENERATED:
            raise SystemExit(f"nothing generates {part[2]!r}; known: {', '.join(GENERATED)}")
        return f"{part[1]}\n{GENERATED[part[2]]()}\n{part[4]}"

    return PARTS.sub(fill, text)


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a part is stale")
    arguments = parser.parse_args(argv)
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = rewritten(before)
        if before != after:
            stale.append(page)
            if not arguments.check:
                page.write_text(after, encoding="utf-8")
    for page in stale:
        print(f"{page.name}: {'stale; run: python docs/generate.py' if arguments.check else 'rewritten'}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
