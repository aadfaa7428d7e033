"""Progress bars on stderr: only on a terminal, and only for work that lasts."""

from __future__ import annotations

import importlib
from typing import Any


def bar(total: int | None, what: str, *, unit: str = " tokens") -> Any:
    """A tqdm bar over `total` tokens or bytes (None: unknown); `update(n)` and use as a context manager."""
    return importlib.import_module("tqdm").tqdm(
        total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False, disable=None, delay=0.5
    )
