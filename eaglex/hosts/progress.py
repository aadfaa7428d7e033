"""Progress bars on stderr: only on a terminal, and only for work that lasts."""

from __future__ import annotations

import importlib
from typing import Any


def bar(total: int, what: str) -> Any:
    """A tqdm bar over `total` tokens; `update(n)` and use as a context manager."""
    return importlib.import_module("tqdm").tqdm(
        total=total, desc=what, unit=" tokens", leave=False, disable=None, delay=0.5
    )
