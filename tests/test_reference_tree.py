"""The spec's drafting loop, selection and tree against SGLang's way of building them, over a model without cache or
mask.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import sglang_tree
from support.margin import recorded
from support.models import configs, make_config, random_weights, speculations, widened
from support.torch_head import Teacher, TorchHead

from eaglex import reference
from eaglex.config import SpeculationConfig


def both(config, speculation, seed: int = 0, count: int = 5, start: int = 0):
    """(reference draft, SGLang draft, margin) of the same rows."""
    weights = widened(random_weights(config, seed=seed), config)
    generator = torch.Generator().manual_seed(seed + 1)
    aux = torch.randn(count, config.aux_width, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, config.vocab_size, (count,), generator=generator)
    cache = reference.DraftCache.empty(config, torch.float64, start)
    before = None
    with recorded() as margin:
        logits, hidden = reference.extend(config, weights, cache, aux, ids)
        before = [t.clone() for t in cache.k + cache.v]
        drafted = reference.draft(config, weights, cache, logits, hidden, speculation)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.k + cache.v, strict=True)), "draft changed the cache"
    head = TorchHead(config, weights)
    teacher = Teacher(head, aux, ids, start)
    expected = sglang_tree.draft(
        teacher.log_probs,
        head.to_target,
        steps=speculation.num_steps,
        topk=speculation.topk,
        num_draft_tokens=speculation.num_draft_tokens,
    )
    return drafted, expected, margin.gap


@given(config=configs(max_layers=2), speculation=speculations(), seed=st.integers(0, 99), start=st.integers(0, 9))
@settings(max_examples=40)
def test_drafts_and_trees_are_sglangs(config, speculation, seed, start) -> None:
    """Same tokens, scores, parents, positions, links and masks, node by node. Every path is run alone, so the
    tree mask is judged too.
    """
    drafted, expected, margin = both(config, speculation, seed, start=start)
    assume(margin > 1e-4)
    assert drafted.tokens.tolist() == expected.tokens
    torch.testing.assert_close(drafted.scores, torch.tensor(expected.scores, dtype=torch.float64), rtol=0, atol=3e-5)
    n = speculation.num_draft_tokens
    links = sglang_tree.build(expected, lane=0, seq_len=40, topk=speculation.topk)
    tree = reference.tree(drafted, bonus_token=3, seq_len=40, num_draft_tokens=n)
    assert tree.draft_tokens.tolist() == [3, *expected.tokens]
    assert tree.positions.tolist() == links.positions
    assert tree.retrieve_next_token.tolist() == links.retrieve_next_token
    assert tree.retrieve_next_sibling.tolist() == links.retrieve_next_sibling
    assert [set(row.nonzero().flatten().tolist()) for row in tree.mask] == links.visible
    assert reference.full_mask([tree, tree], [40, 2]).tolist() == sglang_tree.full_mask([links, links], [40, 2])
    assert reference.packed_mask([tree])[0].tolist() == sglang_tree.packed_mask(links)


@pytest.mark.parametrize("n", [2, 8, 9, 16, 17, 32, 33, 64])
def test_packed_mask_widths(n) -> None:
    """1, 2, 4 or 8 bytes per row, at both sides of each edge, the last bit in place."""
    chain = reference.Draft(torch.arange(n - 1), torch.arange(n - 1), torch.zeros(n - 1))
    tree = reference.tree(chain, bonus_token=0, seq_len=1, num_draft_tokens=n)
    packed = reference.packed_mask([tree])
    assert packed.shape == (1, n, {2: 1, 8: 1, 9: 2, 16: 2, 17: 4, 32: 4, 33: 8, 64: 8}[n])
    for i in range(n):
        assert int.from_bytes(packed[0, i].tolist(), "little") == (1 << (i + 1)) - 1


@given(config=configs(max_layers=2), steps=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_a_chain_is_the_tree_with_one_branch(config, steps, seed) -> None:
    """topk 1: the greedy continuation, one node per depth, each the child of the one before."""
    drafted, _, _ = both(config, SpeculationConfig(num_steps=steps), seed)
    assert drafted.parents.tolist() == list(range(steps))
    weights = widened(random_weights(config, seed=seed), config)
    generator = torch.Generator().manual_seed(seed + 1)
    aux = torch.randn(5, config.aux_width, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, config.vocab_size, (5,), generator=generator)
    head = TorchHead(config, weights)
    teacher, path, score = Teacher(head, aux, ids), (), 0.0
    for i in range(steps):
        logs = teacher.log_probs(path)
        best = int(logs.argmax())
        score += float(logs[best])
        assert int(drafted.tokens[i]) == int(head.to_target[best])
        assert float(drafted.scores[i]) == pytest.approx(score, abs=3e-5)
        path = (*path, int(head.to_target[best]))


def test_every_candidate_and_the_smallest_tree() -> None:
    """N at both ends of its range: all candidates kept, and K + 1, which the K best of each depth must fill."""
    config = make_config()
    for n in (5, 2 + 3 * 4 + 1):
        drafted, expected, _ = both(config, SpeculationConfig(num_steps=4, topk=2, num_draft_tokens=n))
        assert len(drafted.tokens) == n - 1
        assert drafted.tokens.tolist() == expected.tokens


def test_select_keeps_the_best_and_puts_them_in_grid_order() -> None:
    """By hand: k = 2, K = 2. Grid: 10 (-1), 11 (-2); then 12 (-3), 13 (-5) below 10 and 14 (-2.5), 15 (-9) below 11."""
    tokens = torch.tensor([10, 11, 12, 13, 14, 15])
    scores = torch.tensor([-1.0, -2.0, -3.0, -5.0, -2.5, -9.0])
    parents = torch.tensor([0, 0, 1, 1, 2, 2])
    kept = reference.select(tokens, parents, scores, 4)
    assert kept.tokens.tolist() == [10, 11, 12, 14]
    assert kept.parents.tolist() == [0, 0, 1, 2]
    kept = reference.select(tokens, parents, scores, 3)
    assert kept.tokens.tolist() == [10, 11, 14]
    assert kept.parents.tolist() == [0, 0, 2]


def test_ties_go_to_the_lowest_index() -> None:
    values, indices = reference.top_k(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]), 4)
    assert values.tolist() == [[3, 3, 3, 1]]
    assert indices.tolist() == [[1, 2, 4, 0]]
    kept = reference.select(torch.arange(6), torch.tensor([0, 0, 1, 1, 2, 2]), torch.zeros(6), 3)
    assert kept.tokens.tolist() == [0, 1, 2]


def test_no_room_no_steps_no_draft() -> None:
    """K more tokens must fit below max_positions, K = 0 drafts nothing, and neither runs the model."""
    config = make_config(max_positions=10)
    weights = random_weights(config)
    for length, steps, nodes in ((5, 4, 4), (6, 4, 0), (6, 3, 3), (9, 1, 0), (5, 0, 0)):
        cache = reference.DraftCache.empty(config, torch.float32)
        logits, hidden = reference.extend(
            config, weights, cache, torch.randn(length, config.aux_width), torch.zeros(length, dtype=torch.int64)
        )
        drafted = reference.draft(config, weights, cache, logits, hidden, SpeculationConfig(num_steps=steps))
        assert len(drafted.tokens) == nodes, (length, steps)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_give_no_draft(value) -> None:
    """NaN, +infinity anywhere or -infinity everywhere; a single -infinity is a token of probability 0."""
    config = make_config()
    weights = random_weights(config)
    cache = reference.DraftCache.empty(config, torch.float32)
    logits, hidden = reference.extend(
        config, weights, cache, torch.randn(3, config.aux_width), torch.zeros(3, dtype=torch.int64)
    )
    logits[7:] = value
    whole = torch.full_like(logits, value)
    speculation = SpeculationConfig(num_steps=2)
    drafted = reference.draft(config, weights, cache, logits, hidden, speculation)
    assert len(drafted.tokens) == (2 if value == float("-inf") else 0)
    assert len(reference.draft(config, weights, cache, whole, hidden, speculation).tokens) == 0


def test_temperature_needs_a_chain_and_uniforms() -> None:
    config = make_config()
    cache = reference.DraftCache.empty(config, torch.float32)
    for speculation, uniforms in itertools.product(
        [SpeculationConfig(num_steps=2, topk=2, num_draft_tokens=4), SpeculationConfig(num_steps=2)], [None]
    ):
        with pytest.raises(ValueError, match=r"temperature: expected 0 unless topk=1 and uniforms are given, got 0.5"):
            reference.draft(
                config, random_weights(config), cache, torch.zeros(45), torch.zeros(24), speculation, 0.5, uniforms
            )
