"""KV slots of drafted tokens: the draft's own, past the end of those that the host hands out.

The host reserves slots for drafted tokens in the *next* cycle's preparation. At verification's end it has reserved,
with overlapped scheduling, up to `committed + 2 * alloc` where `committed` still lags by the accepted tokens of the
cycle before; after two cycles of full acceptance nothing is left past the new length, and after a prompt nothing ever
is (docs/sglang-socket.md). So a draft that starts at verification's end writes to slots that no table of the host's
names.

Sizes: B requests, R lanes (the host's largest batch), K steps, topk branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScratchPlan:
    """How large the scratch is and where it begins.

    `first_slot` is the first slot id that the host never hands out: pool size + page size.
    """

    lanes: int
    steps: int
    topk: int
    table_width: int
    first_slot: int

    @property
    def per_lane(self) -> int:
        return self.steps * self.topk

    @property
    def slots(self) -> int:
        return self.lanes * self.per_lane


class Scratch:
    """A table `position -> KV slot` of the batch that is drafted for: the host's rows, then slots of the scratch.

    Row 0 stays zero: padded lanes of a captured graph use it, as they use slot 0 in the host's table.
    table [R+1, table_width + steps * topk] int32.
    """

    def __init__(self, plan: ScratchPlan, device: torch.device | str) -> None:
        self.plan = plan
        width = plan.table_width + plan.per_lane
        self.table = torch.zeros((plan.lanes + 1, width), dtype=torch.int32, device=device)
        ids = torch.arange(plan.slots, dtype=torch.int64, device=device) + plan.first_slot
        self.slot_ids = ids.view(plan.lanes, plan.per_lane)
        self.entries = self.slot_ids.to(torch.int32)
        self.offsets = torch.arange(plan.per_lane, dtype=torch.int64, device=device)
        self.lanes = torch.arange(1, plan.lanes + 1, dtype=torch.int64, device=device)

    def bind(self, req_to_token: Tensor, req_pool_indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the table for a batch: lanes [B] int64 that stand for its request slots, and slots to write, flat.

        Position lengths[b] + branch * steps + step of lane b is scratch slot (b, branch, step), the layout that the
        host's draft attention reads for page size 1. The slots come as [B * topk * steps] int64 in the same order.
        """
        rows = req_pool_indices.shape[0]
        if rows > self.plan.lanes:
            raise ValueError(f"req_pool_indices: at most {self.plan.lanes} requests can be drafted for, got {rows}")
        lane_rows = self.table[1 : rows + 1]
        lane_rows[:, : self.plan.table_width] = req_to_token[req_pool_indices]
        lane_rows.scatter_(1, lengths[:, None].to(torch.int64) + self.offsets, self.entries[:rows])
        return self.lanes[:rows], self.slot_ids[:rows].reshape(-1)
