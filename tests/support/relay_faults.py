"""What may become of a dedicated drafter, and what must be true then."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from support.bridge_world import Plan, World

NONE = {"late": 0, "gone": 0, "refused": 0, "bad_reply": 0, "own_failure": 0, "returns": 0}
CYCLES, ENDS = 12, 4  # the drafter's request in which it ends

# Seconds that rank 0 waits for a reply where none may be late, since processors are few and a machine may be fresh, and
# where one is: each of those cases takes as long.
PATIENT = 10.0
DEADLINE = {"cuda": 4.0, "emulated": 2.5}

# The plan's changes, the counter that says so, and what the warning says.
CASES: dict[str, tuple[dict[str, object], str, str]] = {
    "well": ({}, "", ""),
    "killed-resting": ({"drafter_ends": (ENDS, signal.SIGKILL, "before")}, "gone", "its process has ended"),
    "killed-drafting": ({"drafter_ends": (ENDS, signal.SIGKILL, "within")}, "gone", "its process has ended"),
    "stopped-resting": ({"drafter_ends": (ENDS, signal.SIGSTOP, "before")}, "late", "no reply within "),
    "stopped-drafting": ({"drafter_ends": (ENDS, signal.SIGSTOP, "within")}, "late", "no reply within "),
    "late": ({}, "late", "no reply within "),
    "failing": ({"drafter_fails_at": ENDS, "pause_at": (CYCLES - 3, 0.5)}, "own_failure", "its engine failed"),
    "two-out": ({"ahead_at": ENDS}, "", ""),
    "two-out-killed": ({"ahead_at": ENDS, "drafter_ends": (ENDS, signal.SIGKILL, "within")}, "gone", "its process"),
    "two-out-stopped": ({"ahead_at": ENDS, "drafter_ends": (ENDS, signal.SIGSTOP, "within")}, "late", "no reply "),
    "two-out-late": ({"ahead_at": ENDS}, "late", "no reply within "),
    "rows-late": ({}, "bad_reply", "its reply is for another batch"),
    "other-sizes": ({"drafter_terms": {"max_rows": 64}}, "refused", "max_rows: expected 128"),
    "other-version": ({"drafter_terms": {"version": 1}}, "refused", "version: expected"),
}
COMES_BACK = ("late", "failing", "rows-late", "two-out-late")


def ran(plan: Plan, folder: Path, emulated: Path | None = None) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What both ranks found, and the drafter's last word, an error where it could not even join."""
    with World(3, plan, folder, emulated=emulated) as world:
        for rank in (0, 1):
            world.hear(rank, "open")
        found = [world.hear(rank, "done") for rank in (0, 1)]
        told = world.pipes[2].recv() if world.pipes[2].poll() else None
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(world.processes[2].pid, signal.SIGKILL)
    return found[0], found[1], told


def check(name: str, folder: Path, *, device: str, emulated: Path | None = None, **changes: object) -> None:
    fields, fault, why = CASES[name]
    deadline = DEADLINE[device] if fault == "late" else PATIENT
    if fault == "late" and name in COMES_BACK:  # it comes back while rank 0 pauses
        fields = fields | {"drafter_late": (ENDS, 1.5 * deadline), "pause_at": (CYCLES - 3, deadline)}
    if name == "rows-late":  # than the drafter waits for them
        fields = {"rows_deadline": 2.0, "rows_late": (ENDS, 3.5), "pause_at": (CYCLES - 3, 1.0)}
    plan = Plan(**{  # type: ignore[arg-type]
        "device": device, "transport": "p2p", "ranks": 2, "cycles": CYCLES, "drafter_deadline": deadline,
        **fields, **changes})  # fmt: skip
    first, second, told = ran(plan, folder, emulated)
    assert first["digest"] == second["digest"]
    assert first["drafts"] == second["drafts"]
    assert first["wrong"] == 0
    returns = 1 if name in COMES_BACK else 0
    assert first["faults"] == ({**NONE, fault: 1, "returns": returns} if fault else NONE), (first, second, told)
    if not fault:
        assert first["drafts"] == first["expected"] > plan.cycles, told
        assert first["warnings"] == []
        return
    assert len(first["warnings"]) == 1
    assert why in first["warnings"][0]
    assert first["longest"] < deadline + 1
    if fault == "gone" and device == "emulated":  # there a launch returns when its kernel has ended
        assert first["longest"] < deadline / 2
    if fault == "refused":
        assert first["drafts"] == 0
    else:
        assert 0 < first["drafts"] < first["expected"]
        assert (first["last"] > 0) == (name in COMES_BACK)
