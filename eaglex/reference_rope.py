"""Rotary frequencies in plain PyTorch: part of the spec, like reference.py, which turns by them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eaglex.config import RopeConfig


def rope_frequencies(rope: RopeConfig, rotary_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] float32 and the factor on cosine and sine.

    Formulas: Hugging Face `modeling_rope_utils` (default, linear, llama3, yarn). Its float32 rounding is kept, because
    models were trained with it and a position of 100,000 multiplies any difference.
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))
    kind = rope.scaling.value
    if kind == "linear":
        return inv_freq / rope.factor, 1.0 if rope.attention_factor is None else rope.attention_factor
    if kind == "llama3":
        wavelength = 2 * math.pi / inv_freq
        long = rope.original_max_position_embeddings / rope.low_freq_factor
        short = rope.original_max_position_embeddings / rope.high_freq_factor
        blend = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        middle = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
        short_or_middle = torch.where(wavelength < short, inv_freq, middle)
        scaled = torch.where(wavelength > long, inv_freq / rope.factor, short_or_middle)
        return scaled, 1.0 if rope.attention_factor is None else rope.attention_factor
    if kind == "yarn":
        return _yarn(rope, rotary_dim, inv_freq)
    return inv_freq, 1.0 if rope.attention_factor is None else rope.attention_factor


def _yarn(rope: RopeConfig, dim: int, inv_freq: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow frequencies, keep fast ones, ramp between; scale attention."""

    def dimension(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    scaled = inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return scaled, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scaled, mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return scaled, mscale(1.0)
