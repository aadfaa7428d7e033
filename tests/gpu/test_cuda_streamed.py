"""The fast chain is held to the tests of the plain one: bf16 drafts in sizes that it streams, judged by float64.

`StreamedRig` maps each test's draft; `compare` becomes the judge of support/judge.py. Tests that compare bits run with
every batch padded to the same graph, because between graphs the order of sums differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import test_cuda_engine
import test_early_stop
import test_engine
import test_engine_isolation
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.judge import depths
from support.models import random_weights
from support.rig import Ask, Layout
from support.streamed import STREAMS, PaddedRig, PlainChainRig, StreamedRig, make_streamed_config, streamed
from test_cuda_engine import (  # noqa: F401
    test_a_row_that_is_not_finite_costs_its_own_draft_only,
    test_bad_indices_touch_nothing,
    test_rows_are_written_where_the_host_says,
)
from test_early_stop import (  # noqa: F401
    test_a_stop_cuts_the_chain_and_nothing_else,
    test_a_stopped_lane_keeps_its_own_rows,
    test_cycles_without_a_live_request,
    test_neighbours_do_not_matter,
)
from test_engine import (  # noqa: F401
    test_a_draft_of_one_token_vocabulary_and_one_head,
    test_a_prompt_in_chunks_is_the_prompt,
    test_each_switch,
    test_positions_without_a_slot_are_absent,
    test_up_to_the_last_position,
)
from test_engine_isolation import (  # noqa: F401
    test_a_reused_slot_knows_nothing_of_its_past,
    test_a_shared_prefix_is_shared,
)

from eaglex.config import SpeculationConfig
from eaglex.errors import ConfigError

pytestmark = pytest.mark.gpu

CHAIN = SpeculationConfig(num_steps=4)
TREE = SpeculationConfig(num_steps=4, topk=4, num_draft_tokens=16)


@pytest.fixture(autouse=True, scope="module")
def _streamed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_engine, "Rig", StreamedRig)
        patch.setattr(test_cuda_engine, "CudaRig", StreamedRig)
        for module in (test_early_stop, test_engine_isolation):
            patch.setattr(module, "Rig", PaddedRig)
        yield


def started(speculation: SpeculationConfig, requests: int, *, rows: int = 6, kind: type[StreamedRig] = StreamedRig,
            **changes: object) -> StreamedRig:
    """Requests past a prompt of some rows each, judged."""
    rig = kind(make_streamed_config(**changes), speculation,
               layout=Layout(num_slots=requests + 2, max_batch=requests, max_rows=max(requests * rows, 64)))
    for request in range(requests):
        rig.join(request, 1 + request)
    rig.compare(rig.cycle([Ask(r, rows) for r in range(requests)]))
    return rig


# In place of those that take longest: fewer examples.
@given(data=st.data(), config=test_engine.configs(), speculation=test_engine.speculations(), seed=st.integers(0, 999),
       page=st.sampled_from([1, 16, 64]))
@settings(max_examples=16)
def test_equals_the_reference(data, config, speculation, seed, page) -> None:
    """Any draft, any schedule, int32 and int64 ids, pages, graphs and raw launches."""
    test_engine.test_equals_the_reference.hypothesis.inner_test(data, config, speculation, seed, page)


@given(data=st.data(), layers=st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_permuted_joined_late_dropped_padded(data, layers) -> None:
    test_engine_isolation.test_permuted_joined_late_dropped_padded.hypothesis.inner_test(data, layers)


def test_other_slots_are_left_alone() -> None:
    """A cycle writes the results of its own slots only, and a padded lane those of nobody, slot 0 included."""
    rig = started(TREE, 3, kind=PaddedRig)
    before = [rig.snapshot(slot) for slot in range(5)]
    rig.engine.run(rig.batch([None, Ask(1, 4, 2)]))
    after = [rig.snapshot(slot) for slot in range(5)]
    assert [slot for slot in range(5) if not test_engine_isolation.same(before[slot], after[slot])] == [2]


SIZES = [  # steps, topk, nodes, requests
    (1, 1, 2, 64), (2, 1, 3, 33), (16, 1, 17, 3), (1, 16, 17, 4), (2, 16, 64, 4), (16, 4, 64, 4), (16, 16, 64, 3),
    (5, 8, 40, 8), (8, 3, 30, 21), (3, 2, 6, 32), (4, 4, 16, 20), (3, 16, 20, 6), (2, 1, 3, 100), (2, 4, 8, 80),
]


@pytest.mark.parametrize(("steps", "topk", "nodes", "requests"), SIZES)
def test_every_size_of_a_draft(steps, topk, nodes, requests) -> None:
    """Up to 64 nodes and 100 requests; the last four have more rows than one launch streams, 480 and 400 of them in
    extends that the plain chain begins.
    """
    rig = started(SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=nodes), requests)
    outcomes = rig.cycle([Ask(r, 5, 1 + r % 5) for r in range(requests)])
    rig.compare(outcomes[:: max(1, requests // 12)])
    assert rig.engine.counters()["drafted"] == 2 * requests
    rig.compare_pool()


@pytest.mark.parametrize(("steps", "topk", "nodes"), [*((k, 1, k + 1) for k in range(1, 17)),
                                                      *((3, k, min(64, 2 + 4 * k)) for k in range(2, 17))])
def test_every_k_and_every_topk(steps, topk, nodes) -> None:
    rig = started(SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=nodes), 3)
    assert rig.compare(rig.cycle([Ask(r, 5, 1 + r) for r in range(3)])) == 3
    rig.compare_pool()


def test_three_requests_padded_to_four() -> None:
    """By the host, at each place of the batch: those who are there get the bits of the full batch, slot 0 nothing."""
    rig = started(TREE, 4)
    asks = [Ask(r, 5, 1 + r) for r in range(4)]
    rig.engine.run(rig.batch(asks))
    expected = [rig.snapshot(1 + r) for r in range(4)]
    for place in range(4):
        before = rig.engine.counters()
        rig.engine.results.scores.zero_()
        rig.engine.run(rig.batch([None if r == place else ask for r, ask in enumerate(asks)]))
        assert all(test_engine_isolation.same(rig.snapshot(1 + r), expected[r]) for r in range(4) if r != place)
        after = rig.engine.counters()
        assert (after["drafted"], after["padded"]) == (before["drafted"] + 3, before["padded"] + 1)
        assert int(rig.results.num_nodes[0]) == 0


@pytest.mark.parametrize("kind", ["run", "enqueue"])
def test_ids_of_either_width(kind) -> None:
    """input_ids, req_pool_indices and seq_lens as int32 and int64 in every mix: the same bits."""
    rig = started(TREE, 3)
    batch = rig.batch([Ask(r, 5, 1 + r) for r in range(3)])
    expected = None
    for types in itertools.product((torch.int64, torch.int32), repeat=3):
        names = ("input_ids", "req_pool_indices", "seq_lens")
        changed = {name: getattr(batch, name).to(dtype) for name, dtype in zip(names, types, strict=True)}
        rig.engine.results.scores.zero_()
        getattr(rig.engine, kind)(dataclasses.replace(batch, **changed))
        now = [rig.snapshot(1 + r) for r in range(3)]
        expected = expected or now
        assert all(map(test_engine_isolation.same, now, expected)), types
        assert [int(snapshot[0]) for snapshot in now] == [15] * 3


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_turns_nan_in_a_later_step_is_no_draft(speculation, depth) -> None:
    """The embedding of a token that one request goes on from at that depth is NaN: it has no draft, others do."""
    rig = started(speculation, 4)
    batch = rig.batch([Ask(r, 5) for r in range(4)])
    rig.engine.run(batch)
    drafts = [rig.drafted(1 + r) for r in range(4)]
    deep = depths(drafts[0].parents)
    others = {int(t) for draft in drafts[1:] for t in draft.tokens} | set(batch.input_ids.tolist())
    token = next(t for node in sorted(set(drafts[0].parents.tolist())) if deep[node] == depth
                 and (t := int(drafts[0].tokens[node - 1])) not in others)
    embedding = next(t for t in rig.engine._bound if t.shape == (rig.config.vocab_size, rig.config.hidden_size))
    embedding[token] = math.nan
    rig.engine.embeddings_changed()  # steps take their half of q, k and v from a table of it
    before = rig.engine.counters()
    rig.engine.run(batch)
    assert int(rig.results.num_nodes[1]) == 0
    alive = [r for r in range(1, 4) if int(rig.results.num_nodes[1 + r])]
    assert len(alive) >= (3 if speculation.topk == 1 else 2), "a tree may have tried the token in a node that lost"
    assert rig.engine.counters()["not_finite"] == before["not_finite"] + 4 - len(alive)
    for request in alive:
        now = rig.drafted(1 + request)
        assert torch.equal(now.tokens, drafts[request].tokens)
        assert torch.equal(now.scores, drafts[request].scores)


@pytest.mark.parametrize("topk", [1, 4])
def test_long_contexts(topk) -> None:
    """131,000 positions beside 33 and 2,049, in one batch; the same bits each time."""
    config = make_streamed_config(num_heads=2, num_kv_heads=1, max_positions=131_072)
    speculation = SpeculationConfig(num_steps=3, topk=topk, num_draft_tokens=4 if topk == 1 else 12)
    rig = StreamedRig(config, speculation, layout=Layout(num_slots=4, page_size=64))
    for request, length in enumerate((131_000, 33, 2049)):
        rig.fill(request, 1 + request, length, seed=request)
    asks = [Ask(r, 4, 1 + r) for r in range(3)]
    batch = rig.batch(asks)
    assert rig.compare(rig.cycle(asks)) == 3
    first = [rig.snapshot(1 + r) for r in range(3)]
    for _ in range(100):
        rig.engine.run(batch)
        assert all(map(test_engine_isolation.same, [rig.snapshot(1 + r) for r in range(3)], first))


def test_holes_between_live_keys() -> None:
    """Entries of req_to_token below 0 anywhere in the prefix: nothing attends to those positions."""
    rig = started(TREE, 4, rows=24)
    for request, holes in enumerate(([0], [3, 4, 5, 17], list(range(1, 24, 2)), [])):
        kept = [i for i in range(24) if i not in holes]
        rig.table[1 + request, holes] = -1
        for cache in (rig.requests[request].cache, rig.plain[request]):
            # The positions of the rows that are left do not matter any more: RoPE is in the keys already. The cache's
            # own start makes up for those that are gone, so that new rows come to the same positions.
            cache.k, cache.v = ([t[kept] for t in tensors] for tensors in (cache.k, cache.v))
            cache.start = len(holes)
    assert rig.compare(rig.cycle([Ask(r, 5, 1 + r) for r in range(4)])) == 4
    assert rig.compare(rig.cycle([Ask(r, 5, 4) for r in range(4)])) == 4


@pytest.mark.parametrize("stop_below", [0.3, 0.05, 0.01])
@pytest.mark.parametrize("kind", [test_early_stop.CHAIN, test_early_stop.TREE], ids=["chain", "tree"])
def test_as_the_reference_stops(kind, stop_below) -> None:
    """The number of nodes is the reference's unless a score was within rounding of the threshold."""
    rig = started(SpeculationConfig(**kind, stop_below=stop_below), 8)
    clear = 0
    for rows in (5, 4, 3):
        outcomes = rig.cycle([Ask(r, rows, 1 + r % rows) for r in range(8)])
        rig.compare(outcomes)
        for outcome in outcomes:
            if outcome.margin > 0.16:
                clear += 1
                assert int(rig.results.num_nodes[outcome.slot]) == len(outcome.drafted.tokens)
    counters = rig.engine.counters()
    assert counters["drafted"] + counters["stopped"] == 32
    if stop_below >= 0.05:
        assert counters["stopped"] >= 1


def test_ties_go_to_the_lowest_index() -> None:
    """All logits equal: a head of zeros. Tokens in id order, frontier and selection in grid order."""
    config = make_streamed_config(vocab_size=700)
    weights = random_weights(config, dtype=torch.bfloat16)
    weights.lm_head.zero_()
    rig = StreamedRig(config, SpeculationConfig(num_steps=3, topk=4, num_draft_tokens=9), weights=weights)
    rig.join(0, 1)
    rig.cycle([Ask(0, 3)])
    assert rig.drafted(1).tokens.tolist() == [0, 1, 2, 3] * 2
    assert rig.drafted(1).parents.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("enqueue", [False, True])
def test_a_graph_of_more_lanes_serves_fewer_requests(enqueue) -> None:
    """Nine requests run in the graph of ten lanes, or raw: judged alike, and a lane that is not there touches nothing.
    """
    rig = StreamedRig(make_streamed_config(), TREE, layout=Layout(num_slots=14, max_batch=12, max_rows=400))
    for request in range(9):
        rig.join(request, 1 + request)
    for rows in (7, 5):
        rig.compare(rig.cycle([Ask(r, rows, rows if rows == 7 else 1 + r % 5) for r in range(9)], enqueue=enqueue))
    rig.compare_pool()
    assert rig.engine.counters()["drafted"] == 18
    assert int(rig.results.num_nodes[0]) == 0


def test_a_key_that_overflows_bf16_is_zero() -> None:
    """Beyond bf16's largest number an infinity would enter a pool that other requests share."""
    weights = random_weights(make_streamed_config(), dtype=torch.bfloat16)
    weights.layers[0].k_proj[3].fill_(3e38)
    weights.layers[0].v_proj[2].fill_(3e38)
    rig = StreamedRig(make_streamed_config(), CHAIN, weights=weights)
    rig.join(0, 1)
    rig.engine.run(rig.batch([Ask(0, 40)]))
    rig.fetch_pool()
    at = rig.table[1, :40].long()
    assert bool(rig.draft_k[0][at].isfinite().all())
    assert bool(rig.draft_v[0][at].isfinite().all())


class HalfRig(PlainChainRig):
    """The same in fp16, which the plain chain runs."""

    dtype = torch.float16


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_fp16_is_judged_alike(head_dim, speculation) -> None:
    rig = started(speculation, 6, kind=HalfRig, head_dim=head_dim, num_heads=4)
    assert rig.compare(rig.cycle([Ask(r, 5, 1 + r % 5) for r in range(6)])) == 6
    rig.compare_pool()


def test_the_mapped_drafts_stream() -> None:
    """What `streamed` makes of a small config is the same draft in all that is no width."""
    config = streamed(test_engine.make_config(num_layers=2, rotary_dim=4))
    assert (config.num_layers, config.rotary_dim, config.head_dim, config.num_heads) == (2, 32, 64, 4)
    assert StreamedRig(config, CHAIN).engine.backend_name == STREAMS
    with pytest.raises(ConfigError, match="head_dim"):
        test_engine.make_config(head_dim=0)
