"""FP8 and INT4 weights on the device: PyTorch's error twice at most, the same bits however launched and packed.

bench/steps.cu (`bench_steps check fp8`, `check int4`) holds each streaming kernel to a plain one, which reads weights
one by one.
"""

from __future__ import annotations

import dataclasses

import pytest
import test_rescored_head
import torch
from support.cuda_rig import CudaRig
from support.models import EVERY_FP8, EVERY_INT4, random_weights
from support.rig import Ask, Layout
from support.streamed import STREAMS, StreamedRig, make_streamed_config
from test_cuda_fast import CHAIN, SHAPES, TREE, drive, schedule

from eaglex.config import DraftConfig, SpeculationConfig
from eaglex.packed import DraftQuant, PackedWeight, Precision
from eaglex.quantize import pack, quantize
from eaglex.weights import DraftWeights

pytestmark = pytest.mark.gpu

# With "half rotary, odd sizes" INT4's groups straddle the halves of qkv's inputs, which then streams in bf16.
QUANTS = (EVERY_FP8, EVERY_INT4, "fp8", "head=fp8,mlp=int4,qkv=int4,o=fp8", "qkv=int4,o=int4")
LAYOUT = {"num_slots": 40, "max_batch": 32, "max_rows": 512}


def packed_weights(config: DraftConfig, quant: str) -> DraftWeights:
    return quantize(random_weights(config, dtype=torch.bfloat16), DraftQuant.parse(quant))


def make_rig(config: DraftConfig, speculation: SpeculationConfig, weights: DraftWeights) -> StreamedRig:
    return StreamedRig(config, speculation, weights=weights, layout=Layout(**LAYOUT))


def play(rig: StreamedRig) -> int:
    """Prompts of up to 102 rows, then batches of 1 to 32; the judge holds every draft to float64."""
    for request in range(32):
        rig.join(request, 1 + request)
    return sum(rig.compare(rig.cycle(list(asks))) for asks in schedule(rig.speculation.num_draft_tokens))


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", SHAPES)
def test_error_is_at_most_twice_pytorchs(name, quant, speculation) -> None:
    config = make_streamed_config(**SHAPES[name])
    rig = make_rig(config, speculation, packed_weights(config, quant))
    assert rig.engine.backend_name == STREAMS
    assert play(rig) > 100


WIDE = SpeculationConfig(num_steps=3, topk=16, num_draft_tokens=24)
MANY_IDS = {"vocab_size": 36_000, "draft_vocab_size": 35_001}


@pytest.mark.parametrize("speculation", [CHAIN, TREE, WIDE], ids=["chain", "topk 4", "topk 16"])
@pytest.mark.parametrize("ids", [{}, MANY_IDS], ids=["700 ids", "35,001 ids"])
def test_a_rescored_head_in_every_batch(ids, speculation) -> None:
    """1 to 64 rows of a step, beside lanes that are padded and others that are held."""
    config = make_streamed_config(**SHAPES["gqa"], **ids)
    lanes = 64 // speculation.topk
    rig = StreamedRig(config, speculation, weights=packed_weights(config, "head=int4"),
                      layout=Layout(num_slots=70, max_batch=lanes, max_rows=1600))
    assert rig.engine.backend_name == STREAMS
    for request in range(64):
        rig.join(request, 1 + request)
    drafted = 0
    for size in sorted({1, 2, 3, lanes // 4, lanes // 2 + 1, lanes - 1, lanes} & set(range(1, lanes + 1))):
        asks: list[Ask | None] = [Ask(r, 5, draft_from=r % 5 != 3) for r in range(size)]
        if size > 3:
            asks[1] = None
        drafted += rig.compare(rig.cycle(asks))
    assert drafted > lanes
    rig.judge.check()


def test_a_head_of_four_bits_without_its_rows() -> None:
    """As a checkpoint brings it that is stored so: the scan's scores are the draft's."""
    config = make_streamed_config(**SHAPES["gqa"])
    weights = dataclasses.replace(packed_weights(config, "head=int4"), lm_head_rows=None)
    rig = make_rig(config, CHAIN, weights)
    assert rig.engine.backend_name == STREAMS
    assert play(rig) > 100


def test_the_rows_count() -> None:
    """Rows of another head, other drafts: scores come from them, wherever the scan's come from."""
    config = make_streamed_config(**SHAPES["gqa"])
    weights = packed_weights(config, "head=int4")
    cycles = schedule(CHAIN.num_draft_tokens)[:9]
    first = drive(make_rig(config, CHAIN, weights), cycles)
    other = dataclasses.replace(weights, lm_head_rows=weights.lm_head_rows.roll(1, 0).contiguous())
    assert not torch.equal(first[-1][0], drive(make_rig(config, CHAIN, other), cycles)[-1][0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_void_the_draft_where_they_are_read(value) -> None:
    config = make_streamed_config(**SHAPES["gqa"])
    weights = packed_weights(config, "head=int4")
    rows = weights.lm_head_rows.clone()
    rows[::2, 5] = value
    rig = make_rig(config, CHAIN, dataclasses.replace(weights, lm_head_rows=rows))
    rig.join(0, 1)
    rig.engine.run(rig.batch([Ask(0, 5)]))
    assert rig.engine.counters()["not_finite"] == 1


class TestRescoredByThePlainChain:
    """tests/test_rescored_head.py in float32 on the device: ids and trees are the reference's."""

    @pytest.fixture(autouse=True)
    def _on_the_device(self, monkeypatch) -> None:
        monkeypatch.setattr(test_rescored_head, "Rig", CudaRig)

    @pytest.mark.parametrize("topk", [1, 4, 16])
    @pytest.mark.parametrize("vocab", [18, 129, 5000])
    def test_equals_the_reference(self, vocab, topk) -> None:
        test_rescored_head.test_equals_the_reference(vocab, topk, torch.float32)

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_rejection_sampling(self, temperature) -> None:
        test_rescored_head.test_rejection_sampling(temperature)

    def test_ties_go_to_the_lowest_id(self) -> None:
        test_rescored_head.test_ties_go_to_the_lowest_id()
        test_rescored_head.test_a_zero_head()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, value) -> None:
        test_rescored_head.test_what_is_not_finite_voids_the_draft_where_it_is_read(value)


def other_scales(weights: DraftWeights) -> DraftWeights:
    """As checkpoints may bring them: FP8 scales per 128 inputs, INT4 scales in float16 and float32."""
    generator = torch.Generator().manual_seed(0)

    def changed(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
        rows, width = weight.shape
        if weight.precision is Precision.INT4:
            return dataclasses.replace(weight, scales=(weight.scales.float() * 1.01).to(dtype))
        grouped = weight.scales * (0.5 + torch.rand(rows, -(-width // 128), generator=generator))
        return dataclasses.replace(weight, scales=grouped)

    layers = [dataclasses.replace(layer, down_proj=changed(layer.down_proj, torch.float16),
                                  gate_proj=changed(layer.gate_proj, torch.float32),
                                  o_proj=changed(layer.o_proj, torch.float16)) for layer in weights.layers]
    return dataclasses.replace(weights, layers=layers, lm_head=changed(weights.lm_head, torch.float32))


@pytest.mark.parametrize("quant", [EVERY_FP8, EVERY_INT4])
def test_scales_without_tiles_of_their_own_stream_in_bf16(quant) -> None:
    config = make_streamed_config(**SHAPES["gqa"])
    rig = make_rig(config, CHAIN, other_scales(packed_weights(config, quant)))
    assert rig.engine.backend_name == STREAMS
    assert play(rig) > 100


@pytest.mark.parametrize("quant", QUANTS[:3])
def test_the_same_bits_with_and_without_dependent_launch(quant, monkeypatch) -> None:
    config = make_streamed_config(**SHAPES["half rotary, odd sizes"])
    weights = packed_weights(config, quant)
    cycles = schedule(TREE.num_draft_tokens)
    first, again = (drive(make_rig(config, TREE, weights), cycles) for _ in range(2))
    monkeypatch.setenv("EAGLEX_PDL", "0")
    serial = drive(make_rig(config, TREE, weights), cycles)
    for cycle, states in enumerate(zip(first, again, serial, strict=True)):
        for x, y, z in zip(*states, strict=True):
            assert torch.equal(x, y), f"two engines differ in cycle {cycle}"
            assert torch.equal(x, z), f"with EAGLEX_PDL=0 cycle {cycle} differs"


def test_a_nan_voids_the_draft() -> None:
    """FP8 becomes bf16 by moving bits, which know no NaN: it must not become a number."""
    config = make_streamed_config(**SHAPES["gqa"])
    weights = packed_weights(config, "head=fp8")
    values = weights.lm_head.values.view(torch.uint8).clone()
    values[3, 5] = 0x7F
    weights.lm_head = dataclasses.replace(weights.lm_head, values=values.view(torch.float8_e4m3fn))
    rig = make_rig(config, CHAIN, weights)
    rig.join(0, 1)
    rig.engine.run(rig.batch([Ask(0, 5)]))
    assert rig.engine.counters()["not_finite"] == 1


def test_the_engine_lets_go_of_packed_matrices() -> None:
    config = make_streamed_config(**SHAPES["gqa"])
    rig = make_rig(config, CHAIN, packed_weights(config, EVERY_INT4))
    assert not [held for held in rig.engine._bound if isinstance(held, PackedWeight)]


@pytest.mark.parametrize("precision", [Precision.FP8, Precision.INT4])
def test_packed_on_the_gpu_it_has_the_same_bits(precision) -> None:
    """Normal weights, heavy tails, rows of zeros, tiny and large ones; a width that 128 does not divide."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(4096, 2 * 2880, generator=generator)
    weight[1::2] *= torch.randn(2048, 5760, generator=generator).square()
    weight[::7] *= 1e-3
    weight[5], weight[6], weight[8] = 0, 1e30, weight[8] * 1e-30
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        matrix = weight[9:].to(dtype) if dtype is torch.float16 else weight.to(dtype)
        here, there = pack("w", matrix, precision), pack("w", matrix.cuda(), precision).to("cpu")
        assert torch.equal(here.values.view(torch.uint8), there.values.view(torch.uint8))
        assert torch.equal(here.scales.view(torch.uint8), there.scales.view(torch.uint8))
