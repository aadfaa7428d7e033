"""Properties of what the engine drafts: what any result must satisfy, said without the reference's loop."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import configs, make_config, random_weights, speculations
from support.rig import Ask, Rig

from eaglex.config import SpeculationConfig


def depths_of(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


@given(config=configs(), speculation=speculations(max_topk=5), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_results_are_trees(config, speculation, seed) -> None:
    """Full, parents first, no deeper than K, no child above its parent, siblings apart and among the k best of
    their row.
    """
    rig = Rig(config, speculation, weights=random_weights(config, seed=seed))
    rig.join(0, 2)
    rig.engine.run(rig.batch([Ask(0, 6)]))
    drafted = rig.drafted(2)
    assert len(drafted.tokens) == speculation.num_draft_tokens - 1
    parents = drafted.parents.tolist()
    assert all(0 <= parent <= node for node, parent in enumerate(parents))
    depths = depths_of(parents)
    assert max(depths) <= speculation.num_steps
    scores = [0.0, *drafted.scores.tolist()]
    assert all(scores[parent] >= score for parent, score in zip(parents, scores[1:], strict=True))
    pairs = list(zip(parents, drafted.tokens.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "two siblings of one token"
    assert max(parents.count(node) for node in range(len(scores))) <= speculation.topk
    sayable = torch.arange(config.draft_vocab_size) + (0 if rig.weights.d2t is None else rig.weights.d2t)
    assert set(drafted.tokens.tolist()) <= set(sayable.tolist())
    assert depths == sorted(depths), "grid order is by depth"


@given(seed=st.integers(0, 99), steps=st.integers(2, 5), topk=st.integers(2, 4), layers=st.integers(1, 2))
@settings(max_examples=20)
def test_smaller_trees_are_parts_of_larger_ones(seed, steps, topk, layers) -> None:
    """N only cuts: each smaller tree's nodes are the best of a larger one, with the same scores bit by bit."""
    config = make_config(num_layers=layers)
    weights = random_weights(config, seed=seed)
    whole = SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=steps + 1).num_candidates + 1
    kept = []
    for n in (steps + 1, min(whole, 64)):
        rig = Rig(config, SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=n), weights=weights)
        rig.join(0, 2)
        rig.engine.run(rig.batch([Ask(0, 6)]))
        kept.append(sorted(rig.drafted(2).scores.tolist(), reverse=True))
    assert kept[0] == kept[1][:steps]


@given(seed=st.integers(0, 99), steps=st.integers(1, 4))
@settings(max_examples=10)
def test_a_longer_chain_begins_with_the_shorter(seed, steps) -> None:
    config = make_config()
    weights = random_weights(config, seed=seed)
    chains = []
    for k in (steps, steps + 2):
        rig = Rig(config, SpeculationConfig(num_steps=k), weights=weights)
        rig.join(0, 1)
        rig.engine.run(rig.batch([Ask(0, 6)]))
        chains.append(rig.drafted(1))
    assert chains[1].tokens[:steps].tolist() == chains[0].tokens.tolist()
    assert torch.equal(chains[1].scores[:steps], chains[0].scores)
    assert chains[1].parents.tolist() == list(range(steps + 2))
