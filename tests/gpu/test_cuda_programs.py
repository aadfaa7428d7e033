"""The C++ programs that check the streaming kernels: each against a plain one, each launch of a cycle delayed, each
product without its last block, and whole cycles of every width.

They are built with EAGLEX_BENCH=ON (`make cuda`), and looked for where that leaves them or in EAGLEX_BENCH_DIR.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.gpu


def find(name: str) -> Path | None:
    """EAGLEX_BENCH_DIR, where it is set, is the only place."""
    named = os.environ.get("EAGLEX_BENCH_DIR")
    folders = [Path(named)] if named else [ROOT / "build-cuda", *sorted((ROOT / "build").glob("*"))]
    return next((path for folder in folders if (path := folder / name).is_file()), None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [
    "bench_delays", "bench_delays fp8", "bench_delays int4", "bench_lost_block bf16", "bench_lost_block int4",
    "bench_lost_block one", "bench_small_cycles", "bench_steps small", "bench_steps small fp8",
    "bench_steps small int4", "bench_steps check", "bench_steps check fp8", "bench_steps check int4"])
def test_it_ends_well(command) -> None:
    name, *arguments = command.split()
    program = find(name)
    if program is None:
        leave = pytest.fail if "EAGLEX_BENCH_DIR" in os.environ else pytest.skip
        leave(f"{name} is not built: EAGLEX_BENCH=ON builds it")
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=570, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
