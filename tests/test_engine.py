"""The C++ engine on the CPU equals the reference: ids and structure exactly, scores to 1e-5 where weights and pool
are float32.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.models import ROPES, configs, make_config, random_weights, rejection, speculations
from support.rig import Ask, Layout, Rig

from eaglex.config import AuxNorm, EmbeddingNorm, NextHidden, Residual, SpeculationConfig

TREE = SpeculationConfig(num_steps=4, topk=3, num_draft_tokens=12)


@st.composite
def schedules(draw: st.DrawFn, *, room: int) -> list[list[Ask]]:
    """Two to four cycles of up to four requests: prompts in one or several chunks, then verified windows, some
    skipping cycles.
    """
    lengths = dict.fromkeys(range(draw(st.integers(1, 4))), 0)
    cycles = []
    for index in range(draw(st.integers(2, 4))):
        asks = []
        for request, length in lengths.items():
            if index > 0 and draw(st.integers(0, 4)) == 0:
                continue
            rows = draw(st.integers(1, 9 if index == 0 else 5))
            valid = draw(st.integers(1, rows))
            if length + valid > room:
                continue
            asks.append(Ask(request, rows, valid, draft_from=draw(st.integers(0, 4)) > 0))
            lengths[request] += valid
        if asks:
            cycles.append(draw(st.permutations(asks)))
    return cycles


def play(rig: Rig, cycles: list[list[Ask]], *, scores: float = 1e-5, clear: float = 1e-4, enqueue: bool = False) -> int:
    slots = torch.randperm(rig.layout.num_slots - 1, generator=torch.Generator().manual_seed(rig.layout.seed)) + 1
    compared = 0
    for cycle in cycles:
        for ask in cycle:
            if ask.request not in rig.requests:
                rig.join(ask.request, int(slots[ask.request]))
        compared += rig.compare(rig.cycle(list(cycle), enqueue=enqueue), scores=scores, clear=clear)
    return compared


@given(
    data=st.data(),
    config=configs(),
    speculation=speculations(),
    seed=st.integers(0, 999),
    page=st.sampled_from([1, 16, 64]),
)
@settings(max_examples=50)
def test_equals_the_reference(data, config, speculation, seed, page) -> None:
    layout = Layout(
        page_size=page,
        seed=seed,
        id_dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
        aux_gap=data.draw(st.sampled_from([0, 5])),
        context=data.draw(st.sampled_from([0, config.max_positions + 7])),
    )
    rig = Rig(config, speculation, layout=layout, weights=random_weights(config, seed=seed))
    compared = play(rig, data.draw(schedules(room=40)), enqueue=data.draw(st.booleans()))
    assume(compared > 0)
    rig.compare_pool()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"aux_norm": AuxNorm.WHOLE},
        {"aux_norm": AuxNorm.EACH},
        {"residual": Residual.NORMED},
        {"next_hidden": NextHidden.NORMED},
        {"embedding_norm": EmbeddingNorm.NONE},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"rotary_dim": 4},
        {"draft_vocab_size": 60},
        {"target_hidden_size": 24},
        {"num_aux": 1},
        {"rope": ROPES["yarn, mscale"]},
    ],
    ids=str,
)
def test_each_switch(changes, layers) -> None:
    """Not left to chance: every numeric switch at every depth, in a schedule with chunks, partial acceptance and
    a pause.
    """
    rig = Rig(make_config(num_layers=layers, **changes), TREE)
    compared = play(
        rig,
        [
            [Ask(0, 7, draft_from=False), Ask(1, 5)],
            [Ask(1, 5, 2), Ask(0, 4)],
            [Ask(0, 5, 1)],
            [Ask(0, 5, 5), Ask(1, 5, 3)],
        ],
    )
    assert compared >= 4
    rig.compare_pool()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [1, 2])
def test_16_bit_weights_and_rows(dtype, layers) -> None:
    """Sums are in float32, so against the same values widened only the order of additions differs."""
    config = make_config(num_layers=layers, aux_norm=AuxNorm.EACH)
    rig = Rig(config, TREE, weights=random_weights(config, dtype=dtype), layout=Layout(aux_dtype=dtype))
    assert play(rig, [[Ask(0, 9), Ask(1, 4)], [Ask(1, 5, 2), Ask(0, 5, 3)], [Ask(0, 5, 5)]]) >= 3
    rig.compare_pool()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [1, 2])
def test_16_bit_pool(dtype, layers) -> None:
    """K and V are rounded to the pool's type, the prefix and the drafted nodes alike; a value at an edge may
    round the other way.
    """
    speculation = SpeculationConfig(num_steps=4, topk=2, num_draft_tokens=6)
    rig = Rig(make_config(num_layers=layers), speculation, layout=Layout(kv_dtype=dtype))
    cycles = [[Ask(r, 9) for r in range(5)], [Ask(r, 5, 1 + r) for r in range(5)], [Ask(r, 5, 5) for r in range(5)]]
    assert play(rig, cycles, scores=2e-3, clear=5e-3) >= 5
    rig.compare_pool(atol=0.02)


@pytest.mark.parametrize("steps", [1, 4])
@given(heat=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=2, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_rejection_sampling_draws_the_same_chain(steps, heat, seed) -> None:
    """Tokens by inverse CDF of the given uniforms, with the distributions they came from; temperature 0 is the
    argmax, all mass on it.
    """
    config = make_config(num_layers=1 + seed % 2)
    rig = Rig(config, rejection(steps), weights=random_weights(config, seed=seed))
    for request in range(len(heat)):
        rig.join(request, 1 + request)
    rig.cycle([Ask(r, 6, temperature=t) for r, t in enumerate(heat)])
    outcomes = rig.cycle([Ask(r, steps + 1, 1 + r % (steps + 1), temperature=t) for r, t in enumerate(heat)])
    coldest = min([1.0, *(t for t in heat if t > 0)])  # a logit's rounding error is divided by the temperature
    assume(rig.compare(outcomes, scores=1e-5 / coldest) > 0)
    for outcome in outcomes:
        if outcome.margin < 1e-4:
            continue
        probs = rig.results.draft_probs[outcome.slot].double()
        if heat[outcome.request] > 0:
            torch.testing.assert_close(probs, outcome.drafted.probs, rtol=0, atol=1e-5)
        else:
            ids = torch.arange(config.draft_vocab_size) + rig.weights.d2t
            assert torch.equal(ids[probs.argmax(-1)], outcome.drafted.tokens)
            assert bool((probs.max(-1).values == 1).all() and (probs.sum(-1) == 1).all())


def test_a_prompt_in_chunks_is_the_prompt() -> None:
    """Chunks that are not drafted from leave K and V only, and the last one drafts what the whole would have."""
    rig = Rig(make_config(), TREE)
    rig.join(0, 3)
    for rows in (11, 7, 13):
        outcome = rig.cycle([Ask(0, rows, draft_from=False)])[0]
        assert rig.drafted(3).tokens.numel() == 0
        assert int(rig.results.drafted_for[3]) == outcome.new_len
    assert rig.compare(rig.cycle([Ask(0, 2)]), clear=0) == 1
    assert rig.engine.counters() == dict.fromkeys(rig.engine.counters(), 0) | {"held": 3, "drafted": 1}
    rig.cycle([Ask(0, 4, draft_from=False)])
    assert int(rig.results.num_nodes[3]) == 0, "the draft of the cycle before is left behind for the new length"
    rig.compare_pool()


def test_positions_without_a_slot_are_absent() -> None:
    """A negative entry of req_to_token is no K and V: nothing attends there, as with a DraftCache that starts later."""
    rig = Rig(make_config(num_layers=2), TREE)
    rig.join(0, 2, start=9)
    rig.join(1, 5, start=0)
    rig.join(2, 6, start=30)
    assert rig.compare(rig.cycle([Ask(0, 4), Ask(1, 4), Ask(2, 1)])) >= 2
    assert rig.compare(rig.cycle([Ask(1, 5, 2), Ask(0, 5, 4), Ask(2, 5, 5)])) >= 2
    rig.compare_pool()


def test_up_to_the_last_position() -> None:
    """The context fills up: drafts until K more tokens do not fit, K and V until the end."""
    config = make_config(max_positions=24)
    rig = Rig(config, SpeculationConfig(num_steps=4, topk=2, num_draft_tokens=6))
    rig.join(0, 1)
    rig.cycle([Ask(0, 17)])
    sizes = []
    for _ in range(7):  # lengths 18..24
        outcomes = rig.cycle([Ask(0, 5, 1)])
        rig.compare(outcomes, clear=0)
        sizes.append(int(rig.results.num_nodes[1]))
    assert sizes == [5, 5, 0, 0, 0, 0, 0]
    assert rig.engine.counters()["no_room"] == 5
    rig.compare_pool()


def test_a_draft_of_one_token_vocabulary_and_one_head() -> None:
    """The smallest model there can be; every distribution is certain, every score 0, every tie goes to the lowest
    index.
    """
    config = make_config(
        hidden_size=1,
        target_hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=1,
        draft_vocab_size=1,
        num_aux=1,
    )
    rig = Rig(config, SpeculationConfig(num_steps=3))
    rig.join(0, 1)
    outcome = rig.cycle([Ask(0, 3)])[0]
    drafted = rig.drafted(1)
    assert drafted.tokens.tolist() == outcome.drafted.tokens.tolist() == [0, 0, 0]
    assert drafted.parents.tolist() == outcome.drafted.parents.tolist() == [0, 1, 2]
    assert drafted.scores.tolist() == [0, 0, 0]


def test_ties_go_to_the_lowest_index() -> None:
    """All logits equal: a head of zeros. Tokens in id order, frontier and selection in grid order."""
    config = make_config(draft_vocab_size=60)
    weights = random_weights(config)
    weights.lm_head.zero_()
    rig = Rig(config, SpeculationConfig(num_steps=3, topk=4, num_draft_tokens=9), weights=weights)
    rig.join(0, 1)
    rig.compare(rig.cycle([Ask(0, 3)]), clear=-math.inf)
    assert rig.drafted(1).tokens.tolist() == [0, 1, 2, 3] * 2
    assert rig.drafted(1).parents.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_keys_and_values_beyond_the_pools_type_are_zero() -> None:
    """float16 ends at 65504: what would round to infinity must not enter a pool that other requests share."""
    config = make_config()
    weights = random_weights(config)
    weights.layers[0].k_proj[3] *= 1e6
    weights.layers[0].v_proj[2] *= 1e6
    rig = Rig(config, TREE, weights=weights, layout=Layout(kv_dtype=torch.float16))
    rig.join(0, 1)
    rig.cycle([Ask(0, 6)])
    rig.fetch_pool()
    at = rig.table[1, :6].long()
    assert bool(rig.draft_k[0][at].isfinite().all())
    assert bool(rig.draft_v[0][at].isfinite().all())
    assert rig.engine.counters()["drafted"] == 1
