"""Progress bars on stderr: only on a terminal, and only for work that lasts."""

from __future__ import annotations

import importlib
from typing import Any


def bar(total: int, what: str, *, shown: bool = True) -> Any:
    """A tqdm bar over `total` tokens; `update(n)` and use as a context manager. Several ranks show only one."""
    return importlib.import_module("tqdm").tqdm(
        total=total, desc=what, unit=" tokens", leave=False, disable=None if shown else True, delay=0.5
    )
