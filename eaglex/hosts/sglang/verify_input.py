"""The engine's `tree` into the tensors that the host verifies with, in its mask modes.

Sizes: B requests, N nodes per request, root included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from eaglex.config import MaskMode
from eaglex.engine import VerifyTensors

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


@dataclass(frozen=True)
class VerifyBuffers:
    """Tensors of one verification: the engine's view of them, and what the host reads flat."""

    tensors: VerifyTensors
    custom_mask: Tensor
    draft_tokens: Tensor
    positions: Tensor


class VerifyPool:
    """Buffers that are used again and again: making them costs more CPU time than the kernel that fills them.

    A verification reads its own on the stream on which the next one's are filled, so one set would do; with SETS of
    them, by turns, the host may still look at what the verification before was made of.
    """

    SETS: Final = 2

    def __init__(self, *, nodes: int, device: torch.device) -> None:
        self.nodes, self.device = nodes, device
        self._made: dict[tuple[int, MaskMode, int], list[VerifyBuffers]] = {}

    def take(self, place: MaskPlace, *, requests: int) -> VerifyBuffers:
        """Buffers for B requests. Where the mask has no place of its own they are new: its size changes always."""
        if place.buffer is None:
            return allocate(place, requests=requests, nodes=self.nodes, device=self.device)
        sets = self._made.setdefault((requests, place.mode, place.buffer.data_ptr()), [])
        if len(sets) < self.SETS:
            sets.insert(0, allocate(place, requests=requests, nodes=self.nodes, device=self.device))
        else:
            sets.insert(0, sets.pop())
        return sets[0]


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
