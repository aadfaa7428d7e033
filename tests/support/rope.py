"""Rotary frequencies from Hugging Face transformers, for a DraftConfig."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eaglex.config import DraftConfig, RopeConfig, RopeScaling


def parameters(rope: RopeConfig) -> dict[str, object]:
    """A RopeConfig in the words of a config.json; what is unset stays out."""
    values: dict[str, object] = {
        "rope_type": "default" if rope.scaling is RopeScaling.NONE else rope.scaling.value,
        "rope_theta": rope.theta,
    }
    if rope.scaling is not RopeScaling.NONE:
        values["factor"] = rope.factor
    if rope.scaling in (RopeScaling.LLAMA3, RopeScaling.YARN):
        values["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.scaling is RopeScaling.LLAMA3:
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling is RopeScaling.YARN:
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        values |= {
            name: getattr(rope, name)
            for name in ("mscale", "mscale_all_dim", "attention_factor")
            if getattr(rope, name)
        }
    return values


def llama_config(config: DraftConfig) -> LlamaConfig:
    """A Llama whose head is as wide as the part of ours that is turned."""
    return LlamaConfig(
        hidden_size=config.num_heads * config.rotary_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.rotary_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=parameters(config.rope),
    )


def inverse_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """[rotary_dim / 2] float32 and the factor on cosine and sine."""
    llama = llama_config(config)
    kind = llama.rope_parameters["rope_type"]
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    inv_freq, factor = compute(llama)
    return inv_freq.to(torch.float32), float(factor)
