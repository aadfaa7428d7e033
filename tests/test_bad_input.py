"""Values that a host should never send: no draft for that request alone, counted, no crash, and the pool keeps what
it had.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.models import make_config, random_weights, rejection
from support.rig import Ask, Layout, Rig

from eaglex.config import SpeculationConfig
from eaglex.engine import DraftBatch

TREE = SpeculationConfig(num_steps=3, topk=3, num_draft_tokens=9)
CONFIGS = {layers: make_config(num_layers=layers) for layers in (1, 2)}
WEIGHTS = {layers: random_weights(config) for layers, config in CONFIGS.items()}
ASKS = [Ask(0, 5), Ask(1, 4, 3), Ask(2, 4)]
SLOTS = {0: 2, 1: 5, 2: 3}


def make_rig(layers: int = 1, speculation: SpeculationConfig = TREE) -> Rig:
    rig = Rig(CONFIGS[layers], speculation, weights=WEIGHTS[layers], layout=Layout(num_slots=7))
    for request, slot in SLOTS.items():
        rig.join(request, slot)
    rig.compare(rig.cycle([Ask(0, 6), Ask(1, 7), Ask(2, 8)]))
    return rig


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


Spoil = Callable[[DraftBatch, Rig], None]


def item(name: str, index: int, value: int) -> Spoil:
    def spoil(batch: DraftBatch, rig: Rig) -> None:
        getattr(batch, name)[index] = value

    return spoil


def table(offset: int, value: int) -> Spoil:
    def spoil(batch: DraftBatch, rig: Rig) -> None:
        rig.table[5, 7 + offset] = value

    return spoil


# What is done to the batch of ASKS, and which of the requests must lose their draft by it. Request 1 has rows 5..8.
BAD = {
    "id below 0": (item("input_ids", 6, -1), {1}),
    "id beyond the vocabulary": (item("input_ids", 7, 60), {1}),
    "id far beyond": (item("input_ids", 5, 2**40), {1}),
    "no valid row": (item("num_valid", 1, 0), {1}),
    "fewer than no valid rows": (item("num_valid", 1, -2), {1}),
    "more valid rows than there are": (item("num_valid", 1, 5), {1}),
    "far more valid rows": (item("num_valid", 1, 2**31 - 1), {1}),
    "length below 0": (item("seq_lens", 1, -1), {1}),
    "length at the context's end": (item("seq_lens", 1, 128), {1}),
    "length far beyond": (item("seq_lens", 1, 2**40), {1}),
    "request slot below 0": (item("req_pool_indices", 1, -1), {1}),
    "request slot beyond": (item("req_pool_indices", 1, 7), {1}),
    "request slot far beyond": (item("req_pool_indices", 1, 2**40), {1}),
    "rows that start below 0": (item("row_start", 0, -1), {0}),
    "rows that end beyond": (item("row_start", 3, 14), {2}),
    "rows that run backwards": (item("row_start", 1, 11), {1, 2}),
    "rows that start beyond all": (item("row_start", 2, 99), {1, 2}),
    "no KV slot for a row": (table(1, -1), {1}),
    "KV slot beyond the pool": (table(0, 2**31 - 1), {1}),
    "KV slot just beyond the pool": (table(2, 7 * 128 + 3), {1}),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("what", BAD)
def test_bad_index(what, layers) -> None:
    """The others' drafts are what they are without it, bit by bit; nothing of the bad request is written."""
    spoil, lost = BAD[what]
    clean, rig = make_rig(layers), make_rig(layers)
    clean.engine.run(clean.batch(ASKS))
    batch = rig.batch(ASKS)
    spoil(batch, rig)
    before = [pool.clone() for pool in (*rig.draft_k, *rig.draft_v)]
    slots_before = {slot: rig.snapshot(slot) for slot in range(7)}
    rig.engine.run(batch)
    assert rig.engine.counters()["bad_index"] == len(lost)
    assert rig.engine.counters()["drafted"] == 3 + 3 - len(lost)
    for request, slot in SLOTS.items():
        if request not in lost:
            assert same(rig.snapshot(slot), clean.snapshot(slot)), f"request {request}"
        elif "request slot" in what:
            assert same(rig.snapshot(slot), slots_before[slot])
        else:
            assert int(rig.results.num_nodes[slot]) == 0
    for slot in set(range(7)) - set(SLOTS.values()):
        assert same(rig.snapshot(slot), slots_before[slot]), f"slot {slot} belongs to nobody here"
    kept = torch.ones(len(before[0]), dtype=torch.bool)
    for request, slot in SLOTS.items():
        if request not in lost:
            length = rig.requests[request].length
            kept[rig.table[slot, length : length + ASKS[request].count].long()] = False
    for pool, old in zip((*rig.draft_k, *rig.draft_v), before, strict=True):
        assert torch.equal(pool[kept].view(torch.int32), old[kept].view(torch.int32)), (
            "the bad request wrote to the pool"
        )


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_hidden_states_that_are_not_finite(value, row, layers) -> None:
    """Zeros in the pool for that row; no draft where it reaches the logits; the others untouched; later cycles
    draft again.
    """
    clean, rig = make_rig(layers), make_rig(layers)
    clean.engine.run(clean.batch(ASKS))
    aux = rig.rows_of(ASKS[1])[0]
    aux[row, 5] = value
    asks = [ASKS[0], Ask(1, 4, 3, aux=aux), ASKS[2]]
    outcomes = rig.cycle(asks)
    for request in (0, 2):
        assert same(rig.snapshot(SLOTS[request]), clean.snapshot(SLOTS[request]))
    # Row 2 is the one that is drafted from; row 0 reaches it through attention, as zeros.
    assert len(outcomes[1].drafted.tokens) == (0 if row == 2 else 8)
    assert rig.compare(outcomes, clear=1e-3) >= 1
    assert int(rig.results.num_nodes[SLOTS[1]]) == len(outcomes[1].drafted.tokens)
    assert rig.engine.counters()["not_finite"] == (1 if row == 2 else 0)
    at = int(rig.table[SLOTS[1], 7 + row])
    assert all(bool((pool[at] == 0).all()) for pool in (*rig.draft_k, *rig.draft_v))
    compared = 0
    for _ in range(3):
        outcomes = rig.cycle([Ask(1, 4, 2), Ask(0, 3)])
        assert int(rig.results.num_nodes[SLOTS[1]]) == 8
        compared += rig.compare(outcomes)
    assert compared >= 3
    rig.compare_pool()


def test_nan_in_a_prompt_chunk_that_is_not_drafted_from() -> None:
    rig = make_rig()
    aux = torch.randn(4, rig.config.aux_width)
    aux[1:3] = float("nan")
    rig.cycle([Ask(0, 4, aux=aux, draft_from=False)])
    assert rig.engine.counters()["held"] == 1
    assert rig.compare(rig.cycle([Ask(0, 5, 4)])) == 1
    rig.compare_pool()


@pytest.mark.parametrize("layers", [1, 2])
def test_without_steps_keys_and_values_are_kept(layers) -> None:
    """num_steps 0 is plain decoding: nothing is drafted, and an engine with steps that takes over the pool
    continues.
    """
    rig = make_rig(layers, SpeculationConfig(num_steps=0))
    rig.cycle([Ask(1, 1), Ask(0, 1)])
    assert rig.results.num_nodes.tolist() == [0] * 7
    rig.compare_pool()
    for steps in (TREE, SpeculationConfig(num_steps=0), SpeculationConfig(num_steps=5)):
        rig = Rig(rig.config, steps, share=rig)
        outcomes = rig.cycle([Ask(0, 4, 2), Ask(2, 4, 4), Ask(1, 1)])
        assert rig.compare(outcomes) >= 2
        assert rig.results.num_nodes[[2, 3, 5]].tolist() == [steps.num_draft_tokens - 1] * 3
    rig.compare_pool()


def test_rejection_sampling_without_steps() -> None:
    rig = make_rig(1, rejection(0))
    assert rig.results.draft_probs.shape == (7, 0, 45)
    rig.compare_pool()


@pytest.mark.parametrize("temperature", [float("nan"), -1.0, 1e-30, 1e30, float("inf")])
def test_temperatures_that_make_no_sense(temperature) -> None:
    """A draft or none, but ids in range and the neighbour as without it."""
    clean, rig = make_rig(1, rejection(3)), make_rig(1, rejection(3))
    for r, heat in ((clean, 0.5), (rig, temperature)):
        r.engine.run(r.batch([Ask(0, 3, temperature=0.5), Ask(1, 3, temperature=heat)]))
    assert same(rig.snapshot(2), clean.snapshot(2))
    tokens = rig.drafted(5).tokens
    assert bool(((tokens >= 0) & (tokens < 60)).all())
    assert not bool(rig.drafted(5).scores.isnan().any())


@pytest.mark.parametrize("uniform", [float("nan"), -1.0, 1.0, 7.0])
def test_uniforms_out_of_range(uniform) -> None:
    rig = make_rig(1, rejection(3))
    batch = rig.batch([Ask(0, 3, temperature=0.5)])
    batch.uniforms.fill_(uniform)
    rig.engine.run(batch)
    tokens = rig.drafted(2).tokens
    assert bool(((tokens >= 0) & (tokens < 60)).all())


def test_d2t_out_of_range_behind_pythons_back() -> None:
    """Weights that change after they were checked: every token is looked at again before it becomes a result."""
    weights = random_weights(CONFIGS[1])
    rig = Rig(CONFIGS[1], TREE, weights=weights, layout=Layout(num_slots=7))
    rig.join(0, 2)
    weights.d2t.fill_(60)
    rig.engine.run(rig.batch([Ask(0, 3)]))
    assert int(rig.results.num_nodes[2]) == 0
    assert rig.engine.counters()["bad_index"] == 1
