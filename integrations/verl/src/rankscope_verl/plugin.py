"""What verl imports. Importing it puts rankscope in place; it never raises, since verl would swallow that silently."""

from __future__ import annotations

from rankscope_verl.install import install

install()
