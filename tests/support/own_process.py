"""Tests that need a process to themselves."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 150


def own_process(test: Callable[..., None]) -> Callable[..., None]:
    """The test runs in a new pytest of its own.

    For those that profile (the profiler's hooks work once per process and leave every later launch slower, which
    other tests time) and for those where no kernel may have been loaded before.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        if os.environ.get("EAGLEX_OWN_PROCESS") == node:
            test(*args, **kwargs)
            return
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node], cwd=ROOT,
                              env=os.environ | {"EAGLEX_OWN_PROCESS": node}, timeout=SECONDS, capture_output=True,
                              text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "1 passed" in done.stdout, done.stdout

    return run
