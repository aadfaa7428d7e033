"""Early stop: a draft ends with the step whose best node falls below `stop_below`, whatever its neighbours do."""

from __future__ import annotations

import math

import pytest
import torch
from support.models import make_config, random_weights, widened
from support.rig import Ask, Layout, Rig

from eaglex import reference
from eaglex.config import Sampling, SpeculationConfig

CHAIN = {"num_steps": 5}
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 12}
DRAWN = {"num_steps": 4, "sampling": Sampling.REJECTION}


def lengths_of(rig: Rig, requests: int) -> list[int]:
    return [int(rig.results.num_nodes[1 + r]) for r in range(requests)]


@pytest.mark.parametrize("kind", [CHAIN, TREE, DRAWN], ids=["chain", "tree", "drawn"])
@pytest.mark.parametrize("stop_below", [0.5, 0.1, 0.02, 1e-3])
def test_as_the_reference_stops(kind, stop_below) -> None:
    rig = Rig(make_config(), SpeculationConfig(**kind, stop_below=stop_below))
    heat = 0.7 if "sampling" in kind else 0.0
    for request in range(4):
        rig.join(request, 1 + request)
    compared = 0
    for rows, enqueue in ((5, False), (4, True), (3, False)):
        outcomes = rig.cycle([Ask(r, rows, 1 + r % rows, temperature=heat) for r in range(4)], enqueue=enqueue)
        compared += rig.compare(outcomes)
    assert compared >= 6
    counters = rig.engine.counters()
    assert counters["drafted"] + counters["stopped"] == 12
    if stop_below >= 0.1:
        assert counters["stopped"] >= 1


def test_a_stop_cuts_the_chain_and_nothing_else() -> None:
    """For every threshold the chain is a prefix of the unbounded one: to the first token below it, which is kept."""
    config = make_config()
    free = Rig(config, SpeculationConfig(**CHAIN))
    free.join(0, 1)
    free.cycle([Ask(0, 6)])
    whole = free.drafted(1)
    seen = set()
    for cut in (-1e-6, *(float(s) - 1e-3 for s in whole.scores)):
        rig = Rig(config, SpeculationConfig(**CHAIN, stop_below=math.exp(cut)), weights=free.weights)
        rig.join(0, 1)
        rig.cycle([Ask(0, 6)])
        below = [i for i, score in enumerate(whole.scores.tolist()) if score < cut]
        kept = min(below[0] + 1 if below else 5, 5)
        assert lengths_of(rig, 1) == [kept]
        assert torch.equal(rig.drafted(1).tokens, whole.tokens[:kept])
        assert torch.equal(rig.drafted(1).scores, whole.scores[:kept])
        seen.add(kept)
    assert len(seen) >= 4


@pytest.mark.parametrize("kind", [CHAIN, TREE], ids=["chain", "tree"])
def test_neighbours_do_not_matter(kind) -> None:
    """Bit for bit the same draft alone and beside requests that stop earlier, later, or draft nothing."""
    config = make_config()
    speculation = SpeculationConfig(**kind, stop_below=0.05)
    weights = random_weights(config)
    together = Rig(config, speculation, weights=weights)
    for request in range(4):
        together.join(request, 1 + request)
    together.cycle([Ask(0, 6), None, Ask(1, 3), Ask(2, 7, draft_from=False), Ask(3, 9)])
    lengths = lengths_of(together, 4)
    for request, rows in ((0, 6), (1, 3), (3, 9)):
        alone = Rig(config, speculation, weights=weights)
        alone.join(request, 1 + request)
        alone.cycle([Ask(request, rows)])
        n = lengths[request]
        for mine, theirs in zip(alone.snapshot(1 + request), together.snapshot(1 + request), strict=True):
            assert torch.equal(mine[:n] if mine.ndim else mine, theirs[:n] if theirs.ndim else theirs)


@pytest.mark.parametrize("kind", [CHAIN, TREE], ids=["chain", "tree"])
def test_cycles_without_a_live_request(kind) -> None:
    """Nobody drafts, then all stop after one step, then all draft: each cycle starts anew, and K and V are kept."""
    config = make_config(num_layers=2)
    rig = Rig(config, SpeculationConfig(**kind, stop_below=0.999))
    for request in range(2):
        rig.join(request, 1 + request)
    rig.cycle([Ask(0, 5, draft_from=False), None, Ask(1, 4, draft_from=False)])
    assert lengths_of(rig, 2) == [0, 0]
    assert rig.results.drafted_for[1:3].tolist() == [5, 4]
    rig.compare(rig.cycle([Ask(0, 3, 2), Ask(1, 3, 1)]))
    assert lengths_of(rig, 2) == [rig.speculation.topk] * 2
    rig.compare_pool()
    free = Rig(config, SpeculationConfig(**kind), share=rig)
    free.compare(free.cycle([Ask(0, 3, 2), Ask(1, 3, 1)]))
    assert lengths_of(free, 2) == [free.speculation.num_draft_tokens - 1] * 2


def test_the_verifier_gets_a_shorter_tree() -> None:
    """The nodes that were not drafted are pads that nothing reaches."""
    rig = Rig(make_config(), SpeculationConfig(**CHAIN, stop_below=0.999))
    rig.join(0, 1)
    rig.cycle([Ask(0, 6)])
    drafted = rig.drafted(1)
    assert len(drafted.tokens) == 1
    tree = reference.tree(drafted, 7, 6, 6)
    assert tree.retrieve_next_token.tolist() == [1, -1, -1, -1, -1, -1]
    assert tree.draft_tokens.tolist() == [7, int(drafted.tokens[0]), 7, 7, 7, 7]


def test_the_reference_by_hand() -> None:
    """A chain of three where the first token has half the probability: 0.6 ends it there, 0.4 lets the second be."""
    config = make_config(vocab_size=4, draft_vocab_size=4)
    weights = widened(random_weights(config), config, torch.float64)
    cache = reference.DraftCache.empty(config, torch.float64)
    _, hidden = reference.extend(config, weights, cache, torch.randn(2, config.aux_width).double(),
                                 torch.tensor([1, 2]))
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).double().log()
    for stop_below, at_least, at_most in ((0.6, 1, 1), (0.4999, 2, 3), (0.0, 3, 3)):
        speculation = SpeculationConfig(num_steps=3, stop_below=stop_below)
        drafted = reference.draft(config, weights, cache, logits, hidden, speculation)
        assert at_least <= len(drafted.tokens) <= at_most
        assert drafted.scores[0] == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("pads", [0, 3])
def test_a_stopped_lane_keeps_its_own_rows(pads) -> None:
    """One request goes on for all K steps beside others that stopped, in lanes before and behind."""
    config = make_config()
    probe = Rig(config, SpeculationConfig(**CHAIN), layout=Layout(max_batch=8))
    for request in range(4):
        probe.join(request, 1 + request)
    probe.cycle([Ask(r, 4 + r) for r in range(4)])
    fourth = sorted(float(probe.results.scores[1 + r, 3]) for r in range(4))
    between = math.exp((fourth[-1] + fourth[-2]) / 2)  # one chain alone is above it after four tokens
    rig = Rig(config, SpeculationConfig(**CHAIN, stop_below=between), weights=probe.weights, layout=Layout(max_batch=8))
    for request in range(4):
        rig.join(request, 1 + request)
    outcomes = rig.cycle([*[None] * pads, *[Ask(r, 4 + r) for r in range(4)]])
    assert rig.compare(outcomes) >= 3
    assert sorted(lengths_of(rig, 4))[-1] == 5
    assert sorted(lengths_of(rig, 4))[-2] < 5
