"""A dedicated drafter whose rows and drafts go from device to device, on the emulated one: whatever becomes of it, both
ranks have the same drafts, and what there is of them is right. tests/gpu/test_bridge_relay_gpu.py does this on GPUs.
"""

from __future__ import annotations

import pytest
from support import emulated, relay_faults

# An emulated engine takes 20 ms of a processor for each request of a cycle, and there are two.
FEW = 2


@pytest.fixture(scope="module")
def module():
    return emulated.require()


@pytest.mark.parametrize("case", relay_faults.CASES, ids=relay_faults.CASES.keys())
def test_ranks_agree_whatever_becomes_of_the_drafter(case, tmp_path, module):
    relay_faults.check(case, tmp_path, device="emulated", emulated=module, most_lanes=FEW)


@pytest.mark.parametrize("case", ["well", "killed-drafting", "late", "failing"])
def test_a_drafter_in_the_hosts_kv_slots(case, tmp_path, module):
    """It forgets its table before each request: rows of the host's, and the rows' own KV slots, are all it has."""
    relay_faults.check(case, tmp_path, device="emulated", emulated=module, most_lanes=FEW, pooled=True)
