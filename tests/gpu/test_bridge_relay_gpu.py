"""A dedicated drafter on a GPU, in a process of its own: rows out of one GPU's memory into the other's, drafts back."""

from __future__ import annotations

import pytest
import torch
from support import relay_faults

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("where", ["one", "two"])
@pytest.mark.parametrize("case", relay_faults.CASES, ids=relay_faults.CASES.keys())
def test_ranks_agree_whatever_becomes_of_the_drafter(case, where, tmp_path):
    if where == "two" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    relay_faults.check(case, tmp_path, device="cuda", shared_device=where == "one")


def test_many_cycles_with_stalls(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    relay_faults.check("well", tmp_path, device="cuda", cycles=1000, most_stall=0.002)
