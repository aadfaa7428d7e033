"""The drafter's process apart from what it drafts: how its job reaches it, what it does with a device, when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eaglex import drafter
from eaglex.errors import CheckpointError
from eaglex.hosts import dedicated

READER = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
print(child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import sys, time
from eaglex.drafter import end_with
end_with(int(sys.argv[1]), every=0.05)
time.sleep(60)  # loads
"""


def soon(done: Any, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_job_is_not_in_the_command_line_and_is_given_again(tmp_path: Path) -> None:
    got, job = tmp_path / "job", '{"secret": "' + "x" * 9000 + '"}'
    process = dedicated.DrafterProcess((sys.executable, "-c", READER, str(got)), job)
    try:
        for _ in range(2):
            soon(lambda: got.is_file() and got.read_text() == job)
            assert b"secret" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            got.unlink()
            os.kill(process.pid, signal.SIGKILL)
            soon(lambda: process.exit_code() is not None)
            process._pause = 0.0
            soon(lambda: process.keep() or process.exit_code() is None)
    finally:
        process.close()


def test_one_that_ends_at_once_is_no_error_of_the_caller() -> None:
    process = dedicated.DrafterProcess((sys.executable, "-c", "raise SystemExit(3)"), "x" * (1 << 20))
    soon(lambda: process.exit_code() == 3)


def test_it_ends_with_its_parent_while_it_loads() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    soon(lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text())


def test_its_device_is_torchs_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    def load(*_: Any, **__: Any) -> None:
        raise CheckpointError("enough")

    monkeypatch.setattr("torch.cuda.set_device", lambda device: entered.append(str(device)))
    monkeypatch.setattr(drafter.checkpoint, "load", load)
    names = ("draft", "target", "aux_layer_ids", "convention", "revision", "target_revision")
    fields = dict.fromkeys(names) | {"dtype": "bfloat16", "max_length": 64}
    invitation = SimpleNamespace(terms={"num_kv_slots": 0, "table_width": 0})
    for device in ("cuda:1", "cpu"):
        with pytest.raises(CheckpointError):
            drafter.serve(SimpleNamespace(device=device, invitation=invitation, **fields))  # type: ignore[arg-type]
    assert entered == ["cuda:1"]
