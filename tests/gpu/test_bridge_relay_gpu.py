"""A dedicated drafter on a GPU, in a process of its own: rows out of one GPU's memory into the other's, drafts back.

On one device, which the processes share, and on two where there are two. EAGLEX_BRIDGE_CYCLES as in test_bridge_gpu.py.
"""

from __future__ import annotations

import pytest
from support import relay_faults
from support.bridge_places import ONE, WHERE, cycles_of, needs
from support.bridge_world import Plan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", relay_faults.CASES, ids=relay_faults.CASES.keys())
def test_ranks_agree_whatever_becomes_of_the_drafter(case, where, tmp_path):
    needs(where)
    relay_faults.check(case, tmp_path, device="cuda", shared_device=where == ONE)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", ["well", "killed-drafting", "stopped-resting", "late", "failing"])
def test_a_drafter_in_the_hosts_kv_slots(case, where, tmp_path):
    """It forgets its table before each request: rows of the host's, and the rows' own KV slots, are all it has."""
    needs(where)
    relay_faults.check(case, tmp_path, device="cuda", shared_device=where == ONE, pooled=True)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("transport", ["p2p", "mailbox", "nccl", "shm"])
@pytest.mark.parametrize("where", WHERE)
def test_many_cycles_with_stalls(transport, where, captured, tmp_path):
    """Whatever carries the drafts on to the other rank, and with shm the rows too; every draft is compared."""
    needs(where, transport)
    if transport == "shm" and captured:
        pytest.skip("through host memory nothing is captured")
    plan = Plan(
        device="cuda", transport=transport, ranks=2, cycles=cycles_of(where), captured=captured, most_stall=0.002,
        drafter_deadline=relay_faults.PATIENT, shared_device=where == ONE, patience=310,
    )  # fmt: skip
    first, second, told = relay_faults.ran(plan, tmp_path)
    assert first["digest"] == second["digest"]
    assert (first["wrong"], first["faults"]) == (0, relay_faults.NONE), told
    assert first["drafts"] == first["expected"] > plan.cycles
    print(f"\n{plan.cycles} cycles, {first['drafts']} drafts")
