"""The rescored head: what a scan offers by a formula of its own, what becomes of its scores, the C++ engine with it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import make_config, random_weights, rejection
from support.raw import RawEngine
from support.rig import Ask, Layout, Rig
from test_low_bit_engine import play

from eaglex import reference
from eaglex.config import NextHidden, SpeculationConfig
from eaglex.engine import DraftEngine
from eaglex.errors import ShapeError
from eaglex.hosts.draft_slots import to_device
from eaglex.hot_vocab import Ranking, cut
from eaglex.packed import DraftQuant, PackedWeight, Precision, rescored
from eaglex.quantize import pack, quantize
from eaglex.reference_low_bit import RESCORE_GROUP, offered, product, unpacked, with_exact_best
from eaglex.reference_low_bit import rescored as reference_rescored

FOUR = DraftQuant.parse("head=int4")
CHAIN = SpeculationConfig(num_steps=3)


def tree(topk: int) -> SpeculationConfig:
    return SpeculationConfig(num_steps=3, topk=topk, num_draft_tokens=min(3 * topk + 1, 24))


def four_bits(vocab: int = 700, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object):
    """A config of that many draft ids and a draft whose head is rescored."""
    config = make_config(**({"vocab_size": vocab + 9, "draft_vocab_size": vocab} | changes))
    return config, quantize(random_weights(config, seed=seed, dtype=dtype), FOUR)


# ------------------------------------------------------------------------------------------------------------ the spec


def plainly_offered(scores: list[float], topk: int) -> list[int]:
    """One row, by sorting tuples."""
    groups: list[int] = []
    for first in range(0, len(scores), 64):
        ids = range(first, min(first + 64, len(scores)))
        groups += sorted(ids, key=lambda i: (-scores[i], i))[: max(2, topk)]
    return sorted(sorted(groups, key=lambda i: (-scores[i], i))[: max(8, 2 * topk)])


@given(
    vocab=st.integers(1, 270),
    topk=st.integers(1, 16),
    values=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 999),
)
def test_what_is_offered(vocab, topk, values, seed) -> None:
    """Few values: ties across and within groups."""
    topk = min(topk, vocab)
    scan = torch.randint(values, (3, vocab), generator=torch.Generator().manual_seed(seed)).float()
    scan[1, ::3] = -math.inf
    ids = offered(scan, topk)
    assert [row.tolist() for row in ids] == [plainly_offered(row, topk) for row in scan.tolist()]
    assert ids.shape[1] >= topk, "k tokens are drafted of every row"


def test_two_numbers_are_one() -> None:
    """`rescored` stands in packed.py too, which has no torch."""
    assert [rescored(k) for k in range(1, 17)] == [reference_rescored(k) for k in range(1, 17)]
    assert [rescored(k) for k in (1, 4, 5, 16)] == [8, 8, 10, 32]
    assert RESCORE_GROUP == 64


@pytest.mark.parametrize("next_hidden", NextHidden)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_those_of_the_head_unpacked(next_hidden, dtype) -> None:
    config, weights = four_bits(130, dtype=dtype, next_hidden=next_hidden)
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    scan, following = reference.head(config, weights, hidden)
    logits, ids = reference.rescore(config, weights, scan, following, 2)
    plain, _ = reference.head(config, dataclasses.replace(weights, lm_head=weights.lm_head_rows), hidden)
    assert torch.equal(logits.gather(1, ids), plain.gather(1, ids))
    others = torch.ones_like(scan, dtype=torch.bool).scatter(1, ids, False)
    assert torch.equal(logits[others], scan[others])
    assert not torch.equal(scan.gather(1, ids), plain.gather(1, ids)), "a scan that is exact would show nothing"


def test_all_ids_where_there_are_no_rows() -> None:
    config, weights = four_bits(70)
    weights = dataclasses.replace(weights, lm_head_rows=None)
    scan, hidden = reference.head(config, weights, torch.randn(2, config.hidden_size))
    logits, ids = reference.rescore(config, weights, scan, hidden, 3)
    assert logits is scan
    assert ids.tolist() == [list(range(70))] * 2


def test_only_what_was_rescored_is_drafted() -> None:
    """The scan's errors: an id that it puts first and that is worst, one that it overlooks, and one beside two better
    ones of the same group.
    """
    rows = torch.zeros(200, 4)
    x = torch.tensor([[1.0, 0, 0, 0]])
    scan = torch.zeros(1, 200)
    scan[0, [3, 10, 70, 71, 72, 140]] = torch.tensor([9.0, 8.0, 7.0, 7.5, 7.2, 6.0])
    rows[[3, 10, 70, 71, 72, 140, 150], 0] = torch.tensor([-5.0, 50.0, 40.0, 7.0, 2.0, 30.0, 99.0])
    logits, ids = with_exact_best(x, scan, rows, 1)
    assert ids.tolist() == [[3, 10, 71, 72, 128, 140, 192, 193]], "two of each group of 64, eight in all"
    assert logits[0, ids[0]].tolist() == [-5.0, 50.0, 7.0, 2.0, 0.0, 30.0, 0.0, 0.0]
    assert logits[0, [70, 150]].tolist() == [7.0, 0.0], "theirs are the scan's"
    logits, ids = with_exact_best(x, scan, rows, 3)
    assert {3, 10, 70, 71, 72, 140} < set(ids[0].tolist())
    assert 150 not in ids[0].tolist()
    assert logits[0, [3, 10, 70, 71, 72, 140]].tolist() == [-5.0, 50.0, 40.0, 7.0, 2.0, 30.0]


@pytest.mark.parametrize("topk", [1, 4])
def test_drafts_are_nearly_those_of_the_head_as_it_was(topk) -> None:
    """What it is for: the tokens of an unquantised head, and far more often than those of the scan alone."""
    config, weights = four_bits(700, hidden_size=64)
    plain = dataclasses.replace(weights, lm_head=weights.lm_head_rows, lm_head_rows=None)
    scan = dataclasses.replace(weights, lm_head_rows=None)
    hidden = torch.randn(400, 64, generator=torch.Generator().manual_seed(2))

    def best(made) -> torch.Tensor:
        logits, following = reference.head(config, made, hidden)
        logits, ids = reference.rescore(config, made, logits, following, topk)
        return ids.gather(1, reference.top_k(logits.gather(1, ids), topk)[1])

    wanted = best(plain)
    same, without = (float((best(made) == wanted).all(1).float().mean()) for made in (weights, scan))
    assert same > 0.9
    assert without < same - 0.1


# ---------------------------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_heads_own_memory(dtype) -> None:
    config = make_config()
    weights = random_weights(config, dtype=dtype)
    made = quantize(weights, FOUR)
    assert made.lm_head_rows is weights.lm_head
    assert made.lm_head.precision is Precision.INT4
    made.check(config)
    assert quantize(made, DraftQuant()).lm_head_rows is weights.lm_head
    assert quantize(made, FOUR).lm_head is made.lm_head
    assert to_device(made, torch.device("cpu")).lm_head_rows.data_ptr() == weights.lm_head.data_ptr()
    back = quantize(made, DraftQuant.parse("head=none"))
    assert back.lm_head is weights.lm_head, "from the rows, not from sixteen numbers"
    assert back.lm_head_rows is None
    eight = quantize(made, DraftQuant.parse("head=fp8"))
    assert torch.equal(unpacked(eight.lm_head), unpacked(pack("lm_head", weights.lm_head, Precision.FP8)))
    assert eight.lm_head_rows is None


def test_a_head_that_is_stored_in_four_bits_has_none() -> None:
    config, weights = four_bits(70)
    stored = dataclasses.replace(weights, lm_head_rows=None)
    made = quantize(stored, FOUR)
    assert made.lm_head is stored.lm_head
    assert made.lm_head_rows is None
    assert play(Rig(config, tree(3), weights=made)) >= 4


def test_a_head_that_is_stored_in_eight_bits_is_unpacked() -> None:
    config = make_config()
    stored = quantize(random_weights(config, dtype=torch.bfloat16), DraftQuant.parse("head=fp8"))
    made = quantize(stored, FOUR)
    made.check(config)
    assert torch.equal(made.lm_head_rows, unpacked(stored.lm_head).bfloat16())
    x = torch.randn(4, config.hidden_size)
    error = product(x, made.lm_head) - product(x, stored.lm_head)
    assert 0 < float(error.norm() / product(x, stored.lm_head).norm()) < 0.2


def test_a_smaller_head_keeps_its_rows() -> None:
    config, weights = four_bits(150)
    counts = torch.randint(100, (config.vocab_size,), generator=torch.Generator().manual_seed(0))
    ranking = Ranking(counts=counts, held_out=torch.zeros_like(counts), source="a test")
    after = cut(config, weights, ranking, 70)
    plain = dataclasses.replace(weights, lm_head=weights.lm_head_rows, lm_head_rows=None)
    before = cut(config, plain, ranking, 70)
    assert torch.equal(after.weights.lm_head_rows, before.weights.lm_head)
    assert torch.equal(after.weights.lm_head.values, quantize(before.weights, FOUR).lm_head.values)
    after.weights.check(after.config)
    assert play(Rig(after.config, tree(3), weights=after.weights)) >= 4


BAD = {
    "beside-plain": ({"lm_head": torch.zeros(45, 24)}, "lm_head_rows: expected none unless lm_head is int4"),
    "beside-fp8": (
        {"lm_head": pack("x", torch.ones(45, 24), Precision.FP8)}, "lm_head_rows: expected none unless lm_head is int4"
    ),
    "short": ({"lm_head_rows": torch.zeros(44, 24)}, r"lm_head_rows: expected .*\[45, 24\].*got.*\[44, 24\]"),
    "wide": ({"lm_head_rows": torch.zeros(45, 25)}, r"lm_head_rows: expected .*\[45, 24\].*got.*\[45, 25\]"),
    "type": ({"lm_head_rows": torch.zeros(45, 24).bfloat16()}, r"lm_head_rows: expected .*float32.*got.*bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_rows_that_do_not_fit(change, message) -> None:
    config, weights = four_bits(45)
    with pytest.raises(ShapeError, match=rf"^{message}"):
        dataclasses.replace(weights, **change).check(config)
    raw = RawEngine(Rig(config, CHAIN, weights=weights))
    for name, value in change.items():
        setattr(raw.weights, name, value)
    with pytest.raises(ShapeError, match=rf"^{message}"):
        raw.build()


def test_rows_that_are_packed_or_strided() -> None:
    config, weights = four_bits(45)
    packed = dataclasses.replace(weights, lm_head_rows=pack("x", torch.ones(45, 24), Precision.FP8))
    with pytest.raises(ShapeError, match=r"^lm_head_rows: expected a tensor, got a packed matrix"):
        packed.check(config)
    raw = RawEngine(Rig(config, CHAIN, weights=weights))
    raw.weights.lm_head_rows = torch.zeros(24, 45).t()
    with pytest.raises(ShapeError, match=r"^lm_head_rows: expected contiguous"):
        raw.build()


# ---------------------------------------------------------------------------------------------------- the C++ engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [1, 2, 4, 16])
@pytest.mark.parametrize("vocab", [700, 64, 129, 18])
def test_equals_the_reference(vocab, topk, dtype) -> None:
    """Vocabularies that 64 divides and does not, and one with fewer ids than are rescored."""
    config, weights = four_bits(vocab, seed=topk, dtype=dtype)
    rig = Rig(config, tree(topk), weights=weights, layout=Layout(kv_dtype=torch.float32))
    assert play(rig) >= 4
    rig.compare_pool()


@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_fewer_ids_than_are_rescored(vocab) -> None:
    config, weights = four_bits(vocab, next_hidden=NextHidden.NORMED)
    assert play(Rig(config, tree(min(2, vocab)), weights=weights)) >= (4 if vocab > 1 else 0)


def test_the_rows_count_in_the_engine() -> None:
    """Without them the same engine drafts other tokens; with the rows of another head, those of that head."""
    config, weights = four_bits(700, hidden_size=64)
    rows = weights.lm_head_rows.roll(1, 0)

    def drafted(made) -> list[int]:
        rig = Rig(config, CHAIN, weights=made)
        for request in range(4):
            rig.join(request, 1 + request)
        rig.cycle([Ask(request, 5) for request in range(4)])
        return [token for request in range(4) for token in rig.drafted(1 + request).tokens.tolist()]

    mine = drafted(weights)
    assert mine != drafted(dataclasses.replace(weights, lm_head_rows=None))
    assert mine != drafted(dataclasses.replace(weights, lm_head_rows=rows.contiguous()))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rejection_sampling(temperature) -> None:
    """Probabilities are those of the replaced scores; at temperature 0 all mass is on the best that was rescored."""
    config, weights = four_bits(300)
    rig = Rig(config, rejection(3), weights=weights)
    rig.join(0, 1)
    outcomes = rig.cycle([Ask(0, 6, temperature=temperature)])
    assert rig.compare(outcomes) == 1
    probs = rig.results.draft_probs[1]
    if temperature > 0:
        torch.testing.assert_close(probs.double(), outcomes[0].drafted.probs, rtol=1e-4, atol=1e-6)
        alone = outcomes[0].again(dataclasses.replace(rig.wide, lm_head_rows=None)).probs
        assert float((alone - probs.double()).abs().max()) > 1e-4, "a scan that is exact would show nothing"
    else:
        ids = [int(row.argmax()) for row in probs]
        assert probs.sum(1).tolist() == [1.0] * 3
        assert [i + int(weights.d2t[i]) for i in ids] == rig.drafted(1).tokens.tolist()


def one_hot_head(scores: dict[int, float], vocab: int = 200):
    """A head whose rows have one entry, a power of two, so that scan and rescoring are exact and ties are ties."""
    config = make_config(hidden_size=24, vocab_size=vocab, draft_vocab_size=vocab)
    weights = random_weights(config)
    weights.lm_head.zero_()
    for row, value in scores.items():
        weights.lm_head[row, 7] = value
    return config, quantize(weights, FOUR)


def test_ties_go_to_the_lowest_id() -> None:
    config, weights = one_hot_head({150: 4.0, 30: 4.0, 31: 4.0, 64: 4.0, 65: 4.0, 199: 4.0})
    rig = Rig(config, tree(4), weights=weights)
    tops: list[list[int]] = []
    for request in range(6):
        rig.join(request, 1 + request)
        rig.compare(rig.cycle([Ask(request, 3)]), clear=-math.inf)
        tops.append(rig.drafted(1 + request).tokens[:4].tolist())
    assert [30, 31, 64, 65] in tops, "where the entry is positive: both of two groups, then the lowest"
    assert [0, 1, 2, 3] in tops, "where it is negative: the zeros"


def test_a_zero_head() -> None:
    config, weights = one_hot_head({}, vocab=130)
    rig = Rig(config, SpeculationConfig(num_steps=3, topk=4, num_draft_tokens=9), weights=weights)
    rig.join(0, 1)
    rig.compare(rig.cycle([Ask(0, 3)]), clear=-math.inf)
    assert rig.drafted(1).tokens.tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_voids_the_draft_where_it_is_read(value) -> None:
    """In the scan's scales always; in a row only if that is rescored, as a row that is not read is not known."""
    config, weights = one_hot_head({5: 4.0, 70: 2.0})

    def outcome(made) -> dict[str, int]:
        rig = Rig(config, CHAIN, weights=made)
        rig.join(0, 1)
        rig.engine.run(rig.batch([Ask(0, 3)]))
        return {name: count for name, count in rig.engine.counters().items() if count}

    assert outcome(weights) == {"drafted": 1}
    scales = weights.lm_head.scales.clone()
    scales[9] = value
    spoilt = dataclasses.replace(weights, lm_head=PackedWeight(values=weights.lm_head.values, scales=scales))
    assert outcome(spoilt) == {"not_finite": 1}
    rows = weights.lm_head_rows.clone()
    rows[[9, 99, 199]] = value
    assert outcome(dataclasses.replace(weights, lm_head_rows=rows)) == {"drafted": 1}
    rows = weights.lm_head_rows.clone()
    rows[[5, 70, 0, 64, 128, 192]] = value
    assert outcome(dataclasses.replace(weights, lm_head_rows=rows)) == {"not_finite": 1}


def test_the_engine_keeps_the_rows_and_reads_them_where_they_lie() -> None:
    config, weights = four_bits(70)
    rig = Rig(config, CHAIN, weights=weights)
    assert any(kept is weights.lm_head_rows for kept in rig.engine._bound)
    rig.join(0, 1)
    rig.cycle([Ask(0, 3)])
    first = rig.drafted(1).scores.clone()
    weights.lm_head_rows.mul_(2)
    rig.engine.run(rig.batch([Ask(0, 3)]))
    assert not torch.equal(rig.drafted(1).scores, first)
    assert isinstance(rig.engine, DraftEngine)
