"""Low-bit weights in plain PyTorch: the spec, like reference.py, of how a matrix is packed and multiplied.

W [out, in] is stored as values q and scales s over groups of the inputs, W[o, k] = s[o, g(k)] · q[o, k]:

    FP8   q e4m3, one byte each; s float32, one group: a scale per output row
    INT4  q in -8..7, two per byte; s bfloat16, groups of 128

The last group is shorter where 128 does not divide `in`. Activations are never quantised. Scales stay outside the sums
over a group, so that a kernel converts q alone and multiplies by s in its epilogue (FP8) or once per group (INT4).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eaglex.packed import PackedWeight, Weight

GROUP = 128  # inputs that share a scale where a row has several
E4M3_MAX = 448.0
# Scales that INT4 tries. A signed scale makes all 16 numbers count, a shorter one cuts the largest entry off for finer
# steps elsewhere: together 17 % less error on normal weights than max |W| / 7, at six times the work at load.
STRETCHES = (1.0, 1.1, 0.95, 0.9, 0.85, 0.8)
RESCORE_GROUP = 64  # draft ids that offer their best together: the rows of a kernel's tile
_LEAST_SCALE = 2.0**-126  # below it a division by the scale would not be exact; also what a row of zeros gets


def product(x: Tensor, weight: Weight) -> Tensor:
    """x Wᵀ: [T, in] → [T, out] in x's dtype.

    Packed: y_o = Σ_g s_og · (Σ_{k in g} x_k q_ok), groups in ascending order, all in at least float32, rounded once.
    """
    if isinstance(weight, Tensor):
        return x @ weight.T
    wide = x if x.dtype == torch.float64 else x.float()
    values, scales = numbers(weight).to(wide.dtype), weight.scales.to(wide.dtype)
    total = wide.new_zeros(x.shape[0], values.shape[0])
    size = group_size(weight)
    for g in range(scales.shape[1]):
        total += (wide[:, g * size : (g + 1) * size] @ values[:, g * size : (g + 1) * size].T) * scales[:, g]
    return total.to(x.dtype)


def rescored(topk: int) -> int:
    """How many scores R of a row are made exact: the fewest of 4, 8, 16 and 2·k, 4·k that cost no acceptance
    (docs/precision.md).
    """
    return max(8, 2 * topk)


def offered(scan: Tensor, topk: int) -> Tensor:
    """The ids [T, R] whose scores in the scan [T, Vd] are to be made exact, ascending.

    Each 64 consecutive ids offer their max(2, k) best, the last ones too where 64 does not divide Vd; of what is
    offered the R best are taken, or all where they are fewer. Ties go to the lowest id. Two for a chain: of one alone,
    the best token would be lost wherever the scan puts a neighbour before it.
    """
    starts = range(0, scan.shape[1], RESCORE_GROUP)
    ids = torch.cat([start + _best(scan[:, start : start + RESCORE_GROUP], max(2, topk)) for start in starts], 1)
    return ids.gather(1, _best(scan.gather(1, ids), rescored(topk))).sort(1).values


def _best(scores: Tensor, count: int) -> Tensor:
    """Where in each row the `count` best (or all) are, ascending: ties go to the lowest, here and in what follows."""
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count].sort(1).values


def with_exact_best(x: Tensor, scan: Tensor, rows: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Normed x [T, H] and its scan [T, Vd] by an INT4 head made from `rows` [Vd, H] → logits [T, Vd], ids [T, R].

    s[id] = x · rows[id] for the ids of `offered`, as that head would have it unpacked, rounding included; all others
    keep the scan's. INT4's error reorders only what lies close together, so the best are among these R, and they alone
    may be drafted.
    """
    ids = offered(scan, topk)
    return scan.scatter(1, ids, (x @ rows.T).gather(1, ids)), ids


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W [out, in] → values [out, in] float8_e4m3fn, scales [out, 1] float32.

    s = max |W_o| / 448; q = W / s to the nearest, ties to even.
    """
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    # By a tensor: by a number a GPU multiplies with its reciprocal, which rounds otherwise.
    scales = (largest / torch.full_like(largest, E4M3_MAX)).clamp(min=_LEAST_SCALE)
    return (wide / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W [out, in], `in` even → values [out, in / 2] uint8, scales [out, ceil(in / 128)] bfloat16.

    Per group s = c · m / -8 rounded to bfloat16, where m is the entry of largest magnitude with its sign (the positive
    one of two) and c that of STRETCHES that leaves the least squared error, the first of equals; q = W / s to the
    nearest, ties to even, cut to -8..7. Byte j holds q[2j] + 8 in its low half, q[2j + 1] + 8 above.
    """
    rows, width = weight.shape
    groups = math.ceil(width / GROUP)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * GROUP - width)).view(rows, groups, GROUP)
    high, low = padded.amax(2), padded.amin(2)
    largest = torch.where(high >= -low, high, low) / -8
    scales, least = largest, torch.full_like(largest, math.inf)
    for stretch in STRETCHES:
        candidate = (stretch * largest).bfloat16().float()
        candidate = torch.where(candidate == 0, torch.ones_like(candidate), candidate)
        error = _total(_nearest(padded, candidate).mul_(candidate[:, :, None]).sub_(padded).square_())
        scales, least = torch.where(error < least, candidate, scales), torch.minimum(error, least)
    codes = (_nearest(padded, scales) + 8).to(torch.uint8).flatten(1)[:, :width]
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales.bfloat16()


def _total(values: Tensor) -> Tensor:
    """Sums over the last 128 of [out, G, 128], halves onto each other: one order, so the same bits on every device."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _nearest(padded: Tensor, scales: Tensor) -> Tensor:
    """q of the groups [out, G, 128] for those scales [out, G]."""
    return (padded / scales[:, :, None]).round_().clamp_(-8, 7)


def numbers(weight: PackedWeight) -> Tensor:
    """The values q [out, in] as float32."""
    if weight.values.dtype != torch.uint8:
        return weight.values.float()
    codes = torch.stack([weight.values & 15, weight.values >> 4], -1).flatten(1)
    return codes.float() - 8


def unpacked(weight: PackedWeight) -> Tensor:
    """s · q [out, in] as float32."""
    values = numbers(weight)
    scales = weight.scales.float().repeat_interleave(group_size(weight), 1)
    return values * scales[:, : values.shape[1]]


def group_size(weight: PackedWeight) -> int:
    """Inputs that share a scale: all of a row, or 128."""
    return weight.shape[1] if weight.scales.shape[1] == 1 else GROUP
