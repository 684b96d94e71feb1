"""A hook of MkDocs: pages that live elsewhere in the checkout, and links to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "readme.md", "bench/README.md": "bench.md", "examples/ppo/README.md": "ppo.md"}
"""Path in the checkout -> page of the site."""

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add them."""
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_links(text, Path(path).parent)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ at their pages."""
    return markdown if page.file.src_uri in PAGES.values() else _links(markdown, Path("docs"))


def _links(text: str, folder: Path) -> str:
    """Links as they are on the site; one to a file that has no page stays as plain text."""

    def replaced(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = (ROOT / folder / target).resolve()
        if not path.is_relative_to(ROOT):
            return link[0]
        inside = path.relative_to(ROOT).as_posix()
        if inside in PAGES:
            return f"[{label}]({PAGES[inside]}{anchor})"
        if inside.startswith("docs/"):
            return f"[{label}]({inside.removeprefix('docs/')}{anchor})"
        return f"{label} (`{inside}`)"

    return _LINK.sub(replaced, text)
