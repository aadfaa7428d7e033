"""The spec's arithmetic against independent sources: transformers for RoPE, a torch module for the forward pass."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import ROPES, configs, make_config, random_weights, widened
from support.rope import inverse_frequencies, llama_config
from support.torch_head import TorchHead
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eaglex import reference
from eaglex.config import AuxNorm, EmbeddingNorm, NextHidden, Residual, RopeConfig, RopeScaling, SpeculationConfig
from eaglex.reference_rope import rope_frequencies

YARN = RopeConfig(theta=10000.0, scaling=RopeScaling.YARN, factor=16.0, original_max_position_embeddings=4096)
VARIANTS = ROPES | {
    "yarn, long": YARN,
    "yarn, no truncation": dataclasses.replace(YARN, truncate=False),
    "yarn, deepseek": dataclasses.replace(YARN, factor=40.0, mscale=1.0, mscale_all_dim=1.0),
    "yarn, unequal mscale": dataclasses.replace(YARN, mscale=0.707, mscale_all_dim=1.2),
    "yarn, mscale alone": dataclasses.replace(YARN, mscale=0.707),
    "yarn, attention_factor": dataclasses.replace(YARN, attention_factor=1.7),
    "yarn, betas": dataclasses.replace(YARN, beta_fast=64.0, beta_slow=4.0, theta=50000.0),
    "yarn, factor 1": dataclasses.replace(YARN, factor=1.0),
    "llama 3.1": RopeConfig(
        theta=500000.0,
        scaling=RopeScaling.LLAMA3,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
}


@pytest.mark.parametrize("rotary_dim", [128, 64, 8])
@pytest.mark.parametrize("name", VARIANTS)
def test_rope_frequencies(name, rotary_dim) -> None:
    config = make_config(head_dim=128, rotary_dim=rotary_dim, rope=VARIANTS[name], max_positions=131072)
    expected, expected_factor = inverse_frequencies(config)
    actual, factor = rope_frequencies(config.rope, rotary_dim)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=3e-7, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope(name, rotary_dim) -> None:
    """Halves paired, the rest left alone, at positions where a different pairing or rounding would show."""
    config = make_config(head_dim=16, rotary_dim=rotary_dim, rope=VARIANTS[name], max_positions=131072)
    positions = torch.tensor([0, 1, 77, 4095, 100_000])
    x, other = torch.randn(5, 4, 16), torch.randn(5, 4, 16)
    cos, sin = LlamaRotaryEmbedding(llama_config(config))(x, positions[None])
    turned = apply_rotary_pos_emb(x[None, ..., :rotary_dim], other[None, ..., :rotary_dim], cos, sin, unsqueeze_dim=2)[
        0
    ]
    actual = reference.rope(x, positions, config)
    # The frequencies may differ in their last bit; an angle of 1e5 makes 1e-2 of it.
    torch.testing.assert_close(actual[:4, :, :rotary_dim], turned[0, :4], rtol=0, atol=2e-3)
    torch.testing.assert_close(actual[:3, :, :rotary_dim], turned[0, :3], rtol=0, atol=5e-5)
    assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])


def rows(config, count: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(count, config.aux_width, generator=generator, dtype=torch.float64)
    return aux, torch.randint(0, config.vocab_size, (count,), generator=generator)


def check_extend(config, count: int, seed: int, start: int = 0) -> None:
    weights = widened(random_weights(config, seed=seed), config)
    aux, ids = rows(config, count, seed)
    head = TorchHead(config, weights)
    cache = reference.DraftCache.empty(config, torch.float64, start)
    logits, hidden = reference.extend(config, weights, cache, aux, ids)
    expected_logits, expected_hidden = head(head.fused(aux), ids, start)
    # 1e-6, not 1e-12: the frequencies' last float32 bit.
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden, expected_hidden, rtol=0, atol=1e-5)
    assert len(cache) == start + count
    assert float(logits.std()) > 0.5, "logits so flat that anything would pass"


@given(config=configs(), count=st.integers(1, 12), seed=st.integers(0, 99), start=st.integers(0, 20))
@settings(max_examples=60)
def test_forward(config, count, seed, start) -> None:
    check_extend(config, count, seed, start)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"aux_norm": AuxNorm.NONE},
        {"aux_norm": AuxNorm.WHOLE},
        {"aux_norm": AuxNorm.EACH},
        {"residual": Residual.NORMED},
        {"next_hidden": NextHidden.NORMED},
        {"embedding_norm": EmbeddingNorm.NONE},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"head_dim": 12},
        {"rotary_dim": 4},
        {"target_hidden_size": 24},
        {"draft_vocab_size": 60},
        {"num_aux": 5},
        {"rms_norm_eps": 0.1},
    ],
    ids=str,
)
def test_forward_with_each_switch(changes, layers) -> None:
    check_extend(make_config(num_layers=layers, **changes), 7, 1)


@given(config=configs(), data=st.data())
@settings(max_examples=25)
def test_chunks_are_the_whole(config, data) -> None:
    """extend in any chunks leaves the cache, logits and hidden state of extend in one go."""
    weights = widened(random_weights(config), config)
    aux, ids = rows(config, 12)
    whole, parts = (reference.DraftCache.empty(config, torch.float64) for _ in range(2))
    expected = reference.extend(config, weights, whole, aux, ids)
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, 11)))), 12]
    for low, high in itertools.pairwise(edges):
        actual = reference.extend(config, weights, parts, aux[low:high], ids[low:high])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.k + parts.v, whole.k + whole.v, rtol=0, atol=1e-12)


def blind_to_last(q, k, v, visible, attention, config):
    """Attention of every row but the last replaced by noise."""
    out = attention(config, q, k, v, visible)
    out[:-1] = torch.randn_like(out[:-1]) * 100
    return out


@pytest.mark.parametrize("layers", [1, 2])
def test_in_one_layer_only_the_last_query_matters(layers, monkeypatch) -> None:
    """The single-layer identity: attention of earlier rows may be anything at all. With two layers it may not."""
    config = make_config(num_layers=layers)
    weights = widened(random_weights(config), config)
    aux, ids = rows(config, 9)
    caches = [reference.DraftCache.empty(config, torch.float64) for _ in range(2)]
    expected = reference.extend(config, weights, caches[0], aux, ids)
    attention = reference.attention
    monkeypatch.setattr(
        reference, "attention", lambda config, q, k, v, visible: blind_to_last(q, k, v, visible, attention, config)
    )
    actual = reference.extend(config, weights, caches[1], aux, ids)
    equal = torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert equal == (layers == 1)
    assert torch.equal(caches[1].k[0], caches[0].k[0])


def test_a_row_that_is_not_finite_leaves_zeros_in_the_cache() -> None:
    """K and V of that row are zero; a draft from a later, clean row exists; a draft from the row itself does not."""
    config = make_config()
    weights = widened(random_weights(config), config)
    aux, ids = rows(config, 6)
    aux[3, 2] = torch.nan
    cache = reference.DraftCache.empty(config, torch.float64)
    speculation = SpeculationConfig(num_steps=2)
    for low, high, drafted in ((0, 3, 2), (3, 4, 0), (4, 6, 2)):
        logits, hidden = reference.extend(config, weights, cache, aux[low:high], ids[low:high])
        assert len(reference.draft(config, weights, cache, logits, hidden, speculation).tokens) == drafted
    zero = [bool((cache.k[0][i] == 0).all() and (cache.v[0][i] == 0).all()) for i in range(6)]
    assert zero == [False, False, False, True, False, False]


@pytest.mark.parametrize("shape", [(0, 48), (3, 47)])
def test_extend_refuses_misshapen_rows(shape) -> None:
    config = make_config()
    cache = reference.DraftCache.empty(config, torch.float32)
    with pytest.raises(ValueError, match=r"aux_hidden_states: expected \[\d+ >= 1, 48\], got"):
        reference.extend(
            config, random_weights(config), cache, torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64)
        )


def test_extend_refuses_rows_beyond_the_context() -> None:
    config = make_config(max_positions=8)
    cache = reference.DraftCache.empty(config, torch.float32, start=5)
    with pytest.raises(ValueError, match=r"input_ids: expected at most 3 rows \(max_positions=8\), got 4"):
        reference.extend(config, random_weights(config), cache, torch.zeros(4, 48), torch.zeros(4, dtype=torch.int64))
