"""Low-bit weights made at load time from those of a checkpoint, part by part: `--draft-quant`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eaglex.errors import ShapeError
from eaglex.packed import DraftQuant, PackedWeight, Precision, part_of
from eaglex.reference_low_bit import quantize_fp8, quantize_int4, unpacked
from eaglex.weights import DraftWeights

if TYPE_CHECKING:
    from eaglex.packed import Weight

_CHUNK = 2**25  # elements quantised at once: 128 MB of float32, and as much again for the quotients
_MAKERS: dict[Precision, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    Precision.FP8: quantize_fp8,
    Precision.INT4: quantize_int4,
}


def quantize(weights: DraftWeights, quant: DraftQuant, *, device: torch.device | None = None) -> DraftWeights:
    """The same draft with its matrices in those precisions; tensors that stay as they are are shared.

    `device` is where matrices are quantised and left (None: where they lie). Two CPU cores take about 50
    million weights per second in FP8, 25 in INT4. A matrix that is packed otherwise is unpacked first, which rounds
    twice. A head that becomes INT4 keeps the rows it was made from as lm_head_rows, which is the same memory where it
    was a tensor on `device` already; one that was INT4 before stays as it is.
    Raises ShapeError, naming the tensor, for NaN or infinity and for an odd width in INT4.
    """
    dtype = weights.fc.dtype

    def made(name: str, weight: Weight) -> Weight:
        wanted = quant.of(name)
        here = Precision.NONE if isinstance(weight, Tensor) else weight.precision
        if wanted is None or wanted is here:
            return weight
        weight = weight if device is None else weight.to(device)
        plain = weight if isinstance(weight, Tensor) else unpacked(weight)
        return plain.to(dtype) if wanted is Precision.NONE else pack(name, plain, wanted)

    layers = []
    for index, layer in enumerate(weights.layers):
        names = [f.name for f in dataclasses.fields(layer) if part_of(f.name) is not None]
        changed: dict[str, Any] = {name: made(f"layers.{index}.{name}", getattr(layer, name)) for name in names}
        layers.append(dataclasses.replace(layer, **changed))
    return dataclasses.replace(weights, layers=layers, **_head(weights, quant, made, device))


def _head(
    weights: DraftWeights, quant: DraftQuant, made: Callable[[str, Weight], Weight], device: torch.device | None
) -> dict[str, Any]:
    """lm_head in that precision and what becomes of lm_head_rows."""
    head, rows = weights.lm_head, weights.lm_head_rows
    four = not isinstance(head, Tensor) and head.precision is Precision.INT4
    if quant.head is None or (quant.head is Precision.INT4 and four):
        return {"lm_head": head, "lm_head_rows": rows}
    plain = head if rows is None else rows
    if quant.head is not Precision.INT4:
        return {"lm_head": made("lm_head", plain), "lm_head_rows": None}
    plain = plain if device is None else plain.to(device)
    plain = plain if isinstance(plain, Tensor) else unpacked(plain).to(weights.fc.dtype)
    return {"lm_head": made("lm_head", plain), "lm_head_rows": plain}


@torch.no_grad()
def pack(name: str, weight: Tensor, precision: Precision) -> PackedWeight:
    """One matrix [out, in] in FP8 or INT4, in slices of rows, so that memory stays bounded."""
    if precision is Precision.INT4 and weight.shape[1] % 2:
        raise ShapeError(f"{name}: expected an even width for INT4, got {list(weight.shape)}")
    step = max(1, _CHUNK // weight.shape[1])
    slices = [_MAKERS[precision](weight[first : first + step]) for first in range(0, weight.shape[0], step)]
    scales = torch.cat([s for _, s in slices])
    bad = (~scales.isfinite()).any(1).nonzero()
    if len(bad):
        raise ShapeError(f"{name}: expected finite weights to quantise, got NaN or infinity in row {int(bad[0])}")
    values = torch.cat([v.view(torch.uint8) for v, _ in slices])  # torch does not concatenate float8 everywhere
    return PackedWeight(
        values=values if precision is Precision.INT4 else values.view(torch.float8_e4m3fn), scales=scales
    )
