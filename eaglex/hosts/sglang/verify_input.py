"""The engine's `tree` into the tensors that the host verifies with, in its mask modes.

Sizes: B requests, N nodes per request, root included.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Tensors of one verification: the engine's view of them, and the mask as the host reads it (flat)."""

    tensors: VerifyTensors
    custom_mask: Tensor


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
