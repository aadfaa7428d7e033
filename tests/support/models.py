"""Random draft models: configurations and speculation settings from hypothesis, weights of a scale that keeps logits
apart.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st
from torch import Tensor

from eaglex.config import (
    AuxNorm,
    DraftConfig,
    EmbeddingNorm,
    NextHidden,
    Residual,
    RopeConfig,
    RopeScaling,
    Sampling,
    SpeculationConfig,
)
from eaglex.packed import PackedWeight
from eaglex.weights import DraftWeights, LayerWeights, expected_shapes

if TYPE_CHECKING:
    from eaglex.packed import Weight

ROPES = {
    "default": RopeConfig(theta=10000.0),
    "linear": RopeConfig(theta=5000.0, scaling=RopeScaling.LINEAR, factor=4.0),
    "llama3": RopeConfig(
        theta=500.0,
        scaling=RopeScaling.LLAMA3,
        factor=8.0,
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": RopeConfig(theta=1000.0, scaling=RopeScaling.YARN, factor=4.0, original_max_position_embeddings=32),
    "yarn, mscale": RopeConfig(
        theta=1000.0,
        scaling=RopeScaling.YARN,
        factor=8.0,
        original_max_position_embeddings=64,
        mscale=0.8,
        mscale_all_dim=0.5,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=False,
    ),
}


EVERY_INT4 = "head=int4,mlp=int4,qkv=int4,o=int4"  # `int4`
EVERY_FP8 = "head=fp8,mlp=fp8,qkv=fp8,o=fp8"  # `fp8` itself is INT4 in the head

# Logits with a standard deviation of 2; residual branches that do not outgrow the stream, or rounding errors would.
GAINS = {"lm_head": 2.0, "o_proj": 0.5, "down_proj": 0.5}


def make_config(**changes: object) -> DraftConfig:
    """A small GQA draft with a reduced vocabulary and a hidden size other than the target's; any field may be
    changed.
    """
    values: dict[str, object] = {
        "hidden_size": 24,
        "target_hidden_size": 16,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 60,
        "draft_vocab_size": 45,
        "max_positions": 128,
    }
    return DraftConfig(**(values | changes))  # type: ignore[arg-type]


@st.composite
def configs(draw: st.DrawFn, *, max_layers: int = 3) -> DraftConfig:
    """Any draft model: all numeric switches, GQA and MHA, explicit head_dim, partial rotary, own or full vocabulary."""
    head_dim = draw(st.sampled_from([4, 8, 10]))
    kv_heads = draw(st.integers(1, 3))
    vocab = draw(st.integers(20, 70))
    hidden = draw(st.sampled_from([8, 24, 36]))
    return DraftConfig(
        hidden_size=hidden,
        target_hidden_size=draw(st.sampled_from([hidden, 8, 20])),
        intermediate_size=draw(st.sampled_from([12, 40])),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=draw(st.sampled_from([0, 2, head_dim - 2])),
        vocab_size=vocab,
        draft_vocab_size=draw(st.sampled_from([vocab, max(17, vocab // 2)])),
        max_positions=draw(st.sampled_from([64, 100])),
        num_layers=draw(st.integers(1, max_layers)),
        num_aux=draw(st.integers(1, 4)),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        aux_norm=draw(st.sampled_from(AuxNorm)),
        residual=draw(st.sampled_from(Residual)),
        next_hidden=draw(st.sampled_from(NextHidden)),
        embedding_norm=draw(st.sampled_from(EmbeddingNorm)),
        rope=ROPES[draw(st.sampled_from(sorted(ROPES)))],
    )


@st.composite
def speculations(draw: st.DrawFn, *, min_steps: int = 1, max_steps: int = 5, max_topk: int = 4) -> SpeculationConfig:
    """Any chain or tree that fits: N from K + 1 to all candidates."""
    steps = draw(st.integers(min_steps, max_steps))
    topk = draw(st.integers(1, max_topk))
    most = SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=steps + 1).num_candidates + 1
    return SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=draw(st.integers(steps + 1, min(most, 64))))


def rejection(num_steps: int) -> SpeculationConfig:
    """A chain that is drawn, not chosen."""
    return SpeculationConfig(num_steps=num_steps, sampling=Sampling.REJECTION)


def random_weights(config: DraftConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> DraftWeights:
    """Weights that keep activations near 1 and give logits a standard deviation of about 2, in the canonical names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name == "embed_tokens":
            tensors[name] = noise
        elif len(shape) == 1:
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise * (GAINS.get(name.split(".")[-1], 1.0) / shape[1] ** 0.5)
    d2t = None
    if config.draft_vocab_size != config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        d2t = ids - torch.arange(config.draft_vocab_size)
    return assemble({name: tensor.to(dtype) for name, tensor in tensors.items()}, config, d2t)


def assemble(tensors: dict[str, Weight], config: DraftConfig, d2t: Tensor | None) -> DraftWeights:
    """DraftWeights from canonical names."""
    names = [field.name for field in dataclasses.fields(LayerWeights)]
    layers = [
        LayerWeights(**{name: tensors.get(f"layers.{i}.{name}") for name in names})  # type: ignore[arg-type]
        for i in range(config.num_layers)
    ]
    norms = [tensors[name] for name in sorted(tensors) if name.startswith("aux_norms.")]
    return DraftWeights(
        embed_tokens=tensors["embed_tokens"],
        fc=tensors["fc"],
        aux_norms=norms,
        layers=layers,
        norm=tensors["norm"],
        lm_head=tensors["lm_head"],
        lm_head_rows=tensors.get("lm_head_rows"),
        d2t=d2t,
    )


def widened(weights: DraftWeights, config: DraftConfig, dtype: torch.dtype = torch.float64) -> DraftWeights:
    """The same values in a wider type: what the reference computes with when it judges the engine. Packed matrices
    stay: the reference widens their numbers itself.
    """
    tensors = {
        name: weight if isinstance(weight, PackedWeight) else weight.to(dtype)
        for name, weight in weights.named()
        if name != "d2t"
    }
    return assemble(tensors, config, weights.d2t)
