"""Progress bars on stderr: only on a terminal, and only for work that lasts."""

from __future__ import annotations

import importlib
from typing import Any


def bar(total: int | None, what: str, *, unit: str = " tokens", shown: bool = True) -> Any:
    """A tqdm bar over `total` tokens or bytes (None: unknown); `update(n)` and use as a context manager.

    Of several ranks only one shows it.
    """
    disable = None if shown else True
    return importlib.import_module("tqdm").tqdm(
        total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False, disable=disable, delay=0.5
    )
