"""What may become of a dedicated drafter, and what must be true then."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from support.bridge_world import Plan, World

NONE = {"late": 0, "gone": 0, "refused": 0, "bad_reply": 0, "own_failure": 0, "returns": 0}
CYCLES, ENDS = 14, 5  # the drafter's request in which it ends
DEADLINE = 4.0  # long enough for emulated engines on few processors

# The plan's changes, the counter that says so, and what the warning says.
CASES: dict[str, tuple[dict[str, object], str, str]] = {
    "well": ({}, "", ""),
    "killed-resting": ({"drafter_ends": (ENDS, signal.SIGKILL, "before")}, "gone", "its process has ended"),
    "killed-drafting": ({"drafter_ends": (ENDS, signal.SIGKILL, "within")}, "gone", "its process has ended"),
    "stopped-resting": ({"drafter_ends": (ENDS, signal.SIGSTOP, "before")}, "late", "no reply within 4000 ms"),
    "stopped-drafting": ({"drafter_ends": (ENDS, signal.SIGSTOP, "within")}, "late", "no reply within 4000 ms"),
    "other-sizes": ({"drafter_terms": {"max_rows": 64}}, "refused", "max_rows: expected 128"),
    "other-version": ({"drafter_terms": {"version": 1}}, "refused", "version: expected"),
}


def check(name: str, folder: Path, *, device: str, emulated: Path | None = None, **changes: object) -> None:
    fields, fault, why = CASES[name]
    plan = Plan(**{  # type: ignore[arg-type]
        "device": device, "transport": "p2p", "ranks": 2, "cycles": CYCLES, "drafter_deadline": DEADLINE,
        **fields, **changes})  # fmt: skip
    with World(3, plan, folder, emulated=emulated) as world:
        for rank in (0, 1):
            world.hear(rank, "open")
        found = [world.hear(rank, "done") for rank in (0, 1)]
        told = world.pipes[2].recv() if world.pipes[2].poll() else None  # an error, where it could not even join
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(world.processes[2].pid, signal.SIGKILL)
    first, second = found
    assert first["digest"] == second["digest"]
    assert first["drafts"] == second["drafts"]
    assert first["wrong"] == 0
    assert first["faults"] == ({**NONE, fault: 1} if fault else NONE), (first, second, told)
    if not fault:
        assert first["drafts"] > 0, told
        assert first["drafts"] == first["expected"] > 30
        assert first["warnings"] == []
        return
    assert len(first["warnings"]) == 1
    assert why in first["warnings"][0]
    assert first["longest"] < DEADLINE + 1
    if fault == "refused":
        assert first["drafts"] == 0
    else:
        assert 0 < first["drafts"] < first["expected"]
