"""Rows of decodes after which nothing is drafted, until one launch writes their fc, K and V together.

Such a launch reads fc and the K and V projections whole, for a handful of rows: after every decode it would take 110 us
of the GPU at a batch of one, for a draft of the 8B shape, where a decode of the target's takes 1.4 ms. Nobody reads
what it writes before the next draft. So the rows of some decodes of one batch wait here. Hidden states are copied out
of what the next decode's graph writes to; all else is tensors of the host's own, and kept.

A launch may not come later than the first of these: another batch, as its tokens may get KV slots that this one has
given back; a prompt; a draft; an update of weights; a flush (which forgets them). That holds the order in which a KV
slot's owners write it.

Sizes: B requests, R rows of each request in one launch, W the width of the auxiliary hidden states.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from eaglex.hosts.sglang.translate import Verified

ROWS: Final = 32  # of a request in one launch: fewer cost the GPU and the CPU more per row, more cost memory (B*R*W)


def rows_that_fit(*, num_layers: int, max_batch: int, max_rows: int) -> int:
    """R, for an engine of these limits. 1 for drafts of several layers: below the last they attend to the request's
    prefix by its row of `req_to_token`, which another request may have by the time of a later launch.
    """
    return 1 if num_layers > 1 else max(1, min(ROWS, max_rows // max_batch))


class KeptRows:
    """Rows that wait, of one batch; `take` gives them as the rows of one verification that accepted them all."""

    def __init__(self, *, rows: int, max_batch: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self._hidden = torch.zeros((max_batch, rows, width), dtype=dtype, device=device)
        ones = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._counts = [ones * count for count in range(rows + 1)]
        self._places: dict[int, list[Tensor]] = {}  # by B: where the hidden states of each decode go, [B, W]
        self._slots: Tensor | None = None
        self._seq_lens: Tensor | None = None
        self._tokens: list[Tensor] = []
        self._out_cache_loc: list[Tensor] = []

    def __len__(self) -> int:
        """Decodes whose rows wait."""
        return len(self._tokens)

    @property
    def full(self) -> bool:
        """No row may be added before these are taken."""
        return len(self._tokens) == self.rows

    def goes_on(self, req_pool_indices: Tensor) -> bool:
        """Whether a decode of these slots is the next one of the requests that wait; the host keeps one tensor for a
        batch until a request joins it or leaves it.
        """
        return self._slots is req_pool_indices

    def add(self, verified: Verified) -> None:
        """One row for each request, behind those that wait: enqueues a copy of the hidden states, on torch's stream."""
        requests = verified.seq_lens.shape[0]
        if not self._tokens:
            self._slots, self._seq_lens = verified.req_pool_indices, verified.seq_lens
        places = self._places.get(requests)
        if places is None:
            places = self._places[requests] = [self._hidden[:requests, row] for row in range(self.rows)]
        places[len(self._tokens)].copy_(verified.hidden_states)
        self._tokens.append(verified.next_token_ids)
        self._out_cache_loc.append(verified.out_cache_loc)

    def take(self) -> Verified | None:
        """All that wait, R rows for each request, those that are missing behind the others; None where none wait.

        The hidden states stay here: nothing may be added before the launch that reads them is ordered before it.
        """
        count, slots, seq_lens = len(self._tokens), self._slots, self._seq_lens
        if not count or slots is None or seq_lens is None:
            return None
        requests = slots.shape[0]

        def rows(found: list[Tensor]) -> Tensor:
            return torch.stack(found + found[-1:] * (self.rows - count), dim=1).view(-1)

        taken = Verified(
            hidden_states=self._hidden[:requests].view(requests * self.rows, -1),
            next_token_ids=rows(self._tokens),
            accept_lens=self._counts[count][:requests],
            req_pool_indices=slots,
            seq_lens=seq_lens,
            out_cache_loc=rows(self._out_cache_loc),
        )
        self.forget()
        return taken

    def forget(self) -> None:
        """None wait any more."""
        self._slots = self._seq_lens = None
        self._tokens, self._out_cache_loc = [], []
