"""The table through which drafted tokens get KV slots that the host does not know."""

from __future__ import annotations

import pytest
import torch

from eaglex.hosts.sglang.scratch import Scratch, ScratchPlan

PLAN = ScratchPlan(lanes=3, steps=2, topk=2, table_width=10, first_slot=1000)


def host_table() -> torch.Tensor:
    return torch.arange(50, dtype=torch.int32).view(5, 10) + 100


def test_prefix_from_the_host_then_scratch() -> None:
    scratch = Scratch(PLAN, "cpu")
    lanes, slots = scratch.bind(host_table(), torch.tensor([4, 2]), torch.tensor([7, 0]))
    assert lanes.tolist() == [1, 2]
    assert slots.tolist() == list(range(1000, 1008))
    assert scratch.table[1].tolist() == [*range(140, 147), 1000, 1001, 1002, 1003, 0, 0, 0]
    assert scratch.table[2, :4].tolist() == [1004, 1005, 1006, 1007]


def test_a_full_row_still_has_room() -> None:
    scratch = Scratch(PLAN, "cpu")
    scratch.bind(host_table(), torch.tensor([1]), torch.tensor([10]))
    assert scratch.table[1].tolist() == [*range(110, 120), 1000, 1001, 1002, 1003]


def test_the_padding_lane_stays_zero_and_no_slot_is_shared() -> None:
    scratch = Scratch(PLAN, "cpu")
    _, slots = scratch.bind(host_table(), torch.tensor([1, 2, 3]), torch.tensor([5, 5, 5]))
    assert not scratch.table[0].any()
    assert slots.unique().numel() == PLAN.slots
    assert int(slots.min()) == PLAN.first_slot


def test_more_requests_than_lanes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 3 requests .* got 4"):
        Scratch(PLAN, "cpu").bind(host_table(), torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 1, 1]))
