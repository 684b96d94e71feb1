"""What is the same in every distribution: the version of the root's pyproject.toml, the licence, complete metadata.

``python release/members.py`` puts it right; ``--check`` changes nothing and exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)
OURS = re.compile(r'"(rankscope[a-z-]*)>=[0-9.]+,<[0-9.]+"')


def members() -> list[Path]:
    """The folder of each distribution that is released."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    line = re.search(r"^MEMBERS := (.*)$", makefile, re.MULTILINE)
    if line is None:
        raise SystemExit("Makefile has no MEMBERS")
    return [ROOT / word for word in line[1].split()]


def files() -> dict[Path, str]:
    """Every file that depends on the root, with the text that it should have."""
    found = VERSION.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit("pyproject.toml has no version")
    version = found[1]
    major, minor = version.split(".")[:2]
    wanted = f'"\\1>={major}.{minor},<{major}.{int(minor) + 1}"'
    texts = {}
    for member in members():
        project = member / "pyproject.toml"
        text = VERSION.sub(f'version = "{version}"', project.read_text(encoding="utf-8"), count=1)
        texts[project] = OURS.sub(wanted, text)
        texts[member / "LICENSE"] = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return texts


def main(argv: list[str] | None = None) -> int:
    """Put right, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something differs")
    arguments = parser.parse_args(argv)
    stale = [
        (path, text) for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'run: python release/members.py' if arguments.check else 'rewritten'}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
