"""The engine's `tree` into the tensors that the host verifies with, in its mask modes.

Sizes: B requests, N nodes per request, root included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eaglex.config import MaskMode
from eaglex.engine import VerifyTensors
from eaglex.hosts.sglang import compat
from eaglex.hosts.sglang.copies import Copies
from eaglex.repeated import Again, RepeatedTree

MODES = {  # TreeMaskMode of the host, by name
    "FULL_MASK": MaskMode.FULL,
    "QLEN_ONLY": MaskMode.QLEN_ONLY,
    "QLEN_ONLY_BITPACKING": MaskMode.QLEN_ONLY_BITPACK,
}
_PACKED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@dataclass(frozen=True)
class MaskPlace:
    """Where the mask goes: the attention backend's own flat buffer, or None to allocate one.

    `total_length` bounds the sum of the batch's lengths; it sizes a FULL mask that is allocated here.
    """

    mode: MaskMode
    buffer: Tensor | None
    total_length: int = 0


class Trees(Protocol):
    """What makes trees of drafts: an engine, or the follower of one on another rank."""

    def tree(
        self, out: VerifyTensors, *, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor, stream: int = 0
    ) -> None:
        """Fill the verifier's tensors."""

    def repeated_tree(
        self, out: VerifyTensors, *, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor
    ) -> RepeatedTree:
        """The same for later calls of one shape."""


def _not_filled(*_: Any) -> bool:
    return False


@dataclass(slots=True)
class VerifyBuffers:
    """Tensors of one verification: the engine's view of them, and what the host reads flat.

    `kept` is what the host's attention backend says of its mask, which these are over. `again` fills them as `fill` has
    filled them the first time, if what it is given has the same shape; `inputs` makes the host's own object of them.
    """

    tensors: VerifyTensors
    custom_mask: Tensor
    draft_tokens: Tensor
    positions: Tensor
    kept: Any = None
    again: Again = _not_filled
    inputs: Copies | None = None
    repeated: RepeatedTree | None = None  # whose `again` that is

    def fill(self, trees: Trees, req_pool_indices: Tensor, seq_lens: Tensor, bonus_tokens: Tensor, stream: int) -> None:
        """With the drafts of these slots, in this order. The host keeps the arguments until its verification is over,
        which runs behind this on `stream`.
        """
        ids = {"req_pool_indices": req_pool_indices, "seq_lens": seq_lens, "bonus_tokens": bonus_tokens}
        trees.tree(self.tensors, **ids, stream=stream)
        if self.kept is None:
            return  # made for one verification
        self.repeated = trees.repeated_tree(self.tensors, **ids)
        self.again = self.repeated.again


class VerifyPool:
    """Buffers that are used again and again: making them costs more CPU time than the kernel that fills them.

    A verification reads its own on the stream on which the next one's are filled, so one set would do; with two of
    them, by turns, the host may still look at what the verification before was made of.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[tuple[int, int], tuple[VerifyBuffers, VerifyBuffers]] = {}

    def take(self, backend: Any, *, requests: int, nodes: int, seq_lens_sum: int | None) -> VerifyBuffers:
        """Buffers for B requests of N nodes, the mask where the host's attention backend wants it, as its own
        `build_eagle_verify_input` decides it. Where that has no place for it they are new: their size changes always.
        """
        kept, key = backend.verify_mask, (requests, nodes)
        found = self._made.get(key)
        if found is not None and found[0].kept is kept:  # the host makes another where it resizes the buffer
            self._made[key] = found[::-1]
            return found[0]
        if kept is None or not kept.fits(requests):
            mode = compat.symbol("default_tree_mask_mode")() if kept is None else kept.mode
            total = requests * backend.max_context_len if seq_lens_sum is None else seq_lens_sum
            new = MaskPlace(MODES[mode.name], None, total)
            return allocate(new, requests=requests, nodes=nodes, device=self.device)
        here = MaskPlace(MODES[kept.mode.name], kept.buffer)
        one, other = (allocate(here, requests=requests, nodes=nodes, device=self.device) for _ in range(2))
        one.kept = other.kept = kept
        self._made[key] = (other, one)
        return one

    def forget(self) -> None:
        """Let go of how buffers are filled: another engine fills them from now on."""
        self._made.clear()


def allocate(place: MaskPlace, *, requests: int, nodes: int, device: torch.device) -> VerifyBuffers:
    """Buffers for B requests of N nodes. One allocation beside the mask; nothing is filled, as `tree` writes it all."""
    ids = torch.empty((5, requests, nodes), dtype=torch.int64, device=device)
    view, flat = _mask(place, requests, nodes, device)
    return VerifyBuffers(
        VerifyTensors(
            draft_tokens=ids[0],
            positions=ids[1],
            retrieve_index=ids[2],
            retrieve_next_token=ids[3],
            retrieve_next_sibling=ids[4],
            mask=view,
            mask_mode=place.mode,
        ),
        flat,
        ids[0].view(-1),
        ids[1].view(-1),
    )


def _mask(place: MaskPlace, requests: int, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The engine's view and the host's: one memory."""
    cells = requests * nodes * nodes
    if place.mode is MaskMode.FULL:
        flat = place.buffer
        if flat is None:
            flat = torch.empty(nodes * place.total_length + cells, dtype=torch.bool, device=device)
        return flat, flat
    if place.mode is MaskMode.QLEN_ONLY:
        flat = torch.empty(cells, dtype=torch.bool, device=device) if place.buffer is None else place.buffer
        return flat[:cells].view(requests, nodes, nodes), flat
    width = next(w for w in _PACKED if 8 * w >= nodes)
    flat = place.buffer
    if flat is None:
        flat = torch.empty(requests * nodes, dtype=_PACKED[width], device=device)
    return flat[: requests * nodes].view(torch.uint8).view(requests, nodes, width), flat
