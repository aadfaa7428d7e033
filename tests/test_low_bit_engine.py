"""The C++ engine with packed matrices equals the reference, and refuses those that do not fit."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.models import EVERY_FP8, EVERY_INT4, configs, make_config, random_weights, rejection, speculations
from support.raw import RawEngine
from support.rig import Ask, Layout, Rig

from eaglex.config import AuxNorm, SpeculationConfig
from eaglex.errors import ShapeError
from eaglex.packed import DraftQuant, PackedWeight
from eaglex.quantize import quantize

TREE = SpeculationConfig(num_steps=4, topk=3, num_draft_tokens=12)
SCHEDULE = [
    [Ask(0, 7, draft_from=False), Ask(1, 5)],
    [Ask(1, 5, 2), Ask(0, 4)],
    [Ask(0, 5, 1)],
    [Ask(0, 5, 5), Ask(1, 5, 3)],
]
# Groups of 128 with a shorter last one in every product: 320, 160, 176 and 200 inputs.
WIDE = {"hidden_size": 160, "intermediate_size": 200, "num_heads": 22, "num_kv_heads": 2}


def play(rig: Rig, cycles=SCHEDULE) -> int:
    for slot, request in enumerate({ask.request for cycle in cycles for ask in cycle}, start=2):
        rig.join(request, slot)
    return sum(rig.compare(rig.cycle(list(cycle))) for cycle in cycles)


@pytest.mark.parametrize(
    "quant", ["fp8", EVERY_FP8, EVERY_INT4, "head=int4,mlp=fp8", "mlp=int4,qkv=fp8", "o=int4", "qkv=int4,o=fp8"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 2])
def test_each_part(quant, dtype, layers) -> None:
    config = make_config(num_layers=layers, aux_norm=AuxNorm.EACH, **WIDE)
    weights = quantize(random_weights(config, dtype=dtype), DraftQuant.parse(quant))
    rig = Rig(config, TREE, weights=weights, layout=Layout(kv_dtype=torch.float32))
    assert play(rig) >= 4
    rig.compare_pool()


@given(
    config=configs(),
    speculation=speculations(),
    quant=st.sampled_from([",".join(f"{p}={w}" for p, w in zip(("head", "mlp", "qkv", "o"), words, strict=True))
                           for words in itertools.product(("none", "fp8", "int4"), repeat=4)]),
    seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=40)
def test_equals_the_reference(config, speculation, quant, seed) -> None:
    weights = quantize(random_weights(config, seed=seed), DraftQuant.parse(quant))
    rig = Rig(config, speculation, weights=weights)
    assume(play(rig) > 0)
    rig.compare_pool()


@pytest.mark.parametrize("quant", [EVERY_FP8, EVERY_INT4])
def test_rejection_sampling(quant) -> None:
    config = make_config(**WIDE)
    rig = Rig(config, rejection(3), weights=quantize(random_weights(config), DraftQuant.parse(quant)))
    rig.join(0, 1)
    assert rig.compare(rig.cycle([Ask(0, 6, temperature=0.8)])) + rig.compare(rig.cycle([Ask(0, 4, 2)])) > 0


def with_scales(weights, dtype):
    """INT4 as checkpoints may bring it: scales in another type."""
    def changed(weight):
        return dataclasses.replace(weight, scales=(weight.scales.float() * 1.01).to(dtype))

    layers = [dataclasses.replace(layer, down_proj=changed(layer.down_proj)) for layer in weights.layers]
    return dataclasses.replace(weights, layers=layers, lm_head=changed(weights.lm_head))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_int4_scales_of_other_types(dtype) -> None:
    config = make_config(**WIDE)
    weights = with_scales(quantize(random_weights(config), DraftQuant.parse(EVERY_INT4)), dtype)
    assert play(Rig(config, TREE, weights=weights)) >= 4


def test_fp8_scales_by_groups() -> None:
    """What a block-FP8 checkpoint brings: one scale per 128 inputs."""
    config = make_config(**WIDE)
    weights = quantize(random_weights(config), DraftQuant.parse(EVERY_FP8))
    layer = weights.layers[0]
    grouped = {}
    for name, groups in (("q_proj", 3), ("gate_proj", 2), ("down_proj", 2)):
        packed = getattr(layer, name)
        scales = packed.scales * (0.5 + torch.rand(packed.shape[0], groups))
        grouped[name] = PackedWeight(values=packed.values, scales=scales)
    weights.layers[0] = dataclasses.replace(layer, **grouped)
    assert play(Rig(config, TREE, weights=weights)) >= 4


def test_all_256_bytes_of_fp8() -> None:
    """Each value of e4m3 as C++ reads it, through a head of one input; NaN voids the draft."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    config = make_config(vocab_size=256, draft_vocab_size=256, hidden_size=2)
    weights = random_weights(config)
    finite = values.clone()
    finite.view(torch.uint8)[[127, 255]] = 0
    for column, counted in ((values, False), (finite, True)):
        pair = torch.stack([column.view(torch.uint8), torch.zeros(256, dtype=torch.uint8)], 1)
        weights.lm_head = PackedWeight(values=pair.view(torch.float8_e4m3fn), scales=torch.full((256, 1), 0.01))
        rig = Rig(config, SpeculationConfig(num_steps=1, topk=16, num_draft_tokens=17), weights=weights)
        rig.join(0, 1)
        if counted:
            assert rig.compare(rig.cycle([Ask(0, 3)]), clear=-1) == 1
        else:
            rig.engine.run(rig.batch([Ask(0, 3)]))
            assert rig.engine.counters()["not_finite"] == 1


# ----------------------------------------------------------------------------------------------------- refused by C++

BAD = {
    "scales-absent": (lambda w: (w.values, None), r"lm_head\.scales: expected contiguous .* on cpu, got nothing"),
    "scales-type": (lambda w: (w.values, w.scales.double()), r"lm_head\.scales: expected float32.*, got torch.float64"),
    "scales-short": (lambda w: (w.values, w.scales[:-1]), r"lm_head\.scales: expected contiguous \[45, 2\]"),
    "scales-stride": (lambda w: (w.values, w.scales.t().contiguous().t()), r"lm_head\.scales: expected contiguous"),
    "values-short": (lambda w: (w.values[:-1], w.scales), r"lm_head: expected contiguous .*got \[44, 160\] int4"),
    "values-narrow": (
        lambda w: (w.values[:, :-1].contiguous(), w.scales),
        r"lm_head: expected contiguous \[45, 160\] .*got \[45, 158\] int4",
    ),
    "values-stride": (lambda w: (w.values.t().contiguous().t(), w.scales), r"lm_head: expected .*with strides"),
    "values-type": (lambda w: (w.values.to(torch.int32), w.scales), r"lm_head: expected contiguous .*int32"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_packed_matrix_that_does_not_fit(change, message) -> None:
    config = make_config(**WIDE)
    raw = RawEngine(Rig(config, TREE, weights=quantize(random_weights(config), DraftQuant.parse(EVERY_INT4))))
    values, scales = change(raw.rig.weights.lm_head)
    with pytest.raises(ShapeError, match=rf"^{message}"):
        raw.weights.lm_head = PackedWeight(values=values, scales=scales)
        raw.build()


def test_fp8_needs_float_scales_and_plain_matrices_none() -> None:
    config = make_config(**WIDE)
    raw = RawEngine(Rig(config, TREE))
    eight = torch.zeros(45, 160).to(torch.float8_e4m3fn)
    raw.weights.lm_head = PackedWeight(values=eight, scales=torch.ones(45, 1).bfloat16())
    with pytest.raises(ShapeError, match=r"^lm_head\.scales: expected contiguous \[45, 1\] float32 .*got .*bfloat16"):
        raw.build()
    raw.weights.lm_head = eight
    with pytest.raises(ShapeError, match=r"^lm_head\.scales: expected contiguous \[45, 2\] float32 .*got nothing"):
        raw.build()
    raw.weights.lm_head = PackedWeight(values=torch.zeros(45, 160), scales=torch.ones(45, 1))
    with pytest.raises(ShapeError, match=r"^lm_head\.scales: expected to be absent for float32, got \[45, 1\] float32"):
        raw.build()


def test_what_is_read_is_told() -> None:
    config = make_config(**WIDE)
    raw = RawEngine(Rig(config, TREE, weights=quantize(random_weights(config), DraftQuant.parse("head=int4"))))
    assert raw.weights.lm_head == "[45, 160] int4 on cpu with scales [45, 2] bfloat16 on cpu"
    assert re.fullmatch(r"\[160, 48\] float32 on cpu", raw.weights.fc)
