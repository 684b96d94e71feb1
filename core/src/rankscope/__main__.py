"""``python -m rankscope``: the same as the ``rankscope`` command."""

from __future__ import annotations

import sys

from rankscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
