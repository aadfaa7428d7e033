"""`tree`: a slot's draft as the verifier's tensors, in any order, at any N, whatever lies in the result buffers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_config, random_weights
from support.rig import Ask, Layout, Rig

from eaglex import reference
from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import VerifyTensors
from eaglex.errors import ConfigError

CONFIG = make_config()
WEIGHTS = random_weights(CONFIG)
TREE = SpeculationConfig(num_steps=4, topk=3, num_draft_tokens=12)


def make_rig(speculation: SpeculationConfig = TREE) -> Rig:
    return Rig(CONFIG, speculation, weights=WEIGHTS, layout=Layout(num_slots=6, max_batch=6))


RIGS = {n: make_rig(dataclasses.replace(TREE, num_draft_tokens=n)) for n in (5, 12, 31)}


@st.composite
def written(draw: st.DrawFn, nodes: int, *, depth: int = 4) -> reference.Draft:
    """Any sound draft of `nodes` nodes, parents first, no deeper than K."""
    depths, parents = [0], []
    for node in range(1, nodes + 1):
        parents.append(draw(st.sampled_from([p for p in range(node) if depths[p] < depth])))
        depths.append(depths[parents[-1]] + 1)
    tokens = draw(st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=nodes, max_size=nodes))
    return reference.Draft(
        torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64), torch.zeros(nodes)
    )


def put(rig: Rig, slot: int, draft: reference.Draft, drafted_for: int) -> None:
    """Plant a draft in the slot's result buffers, as the engine would have left it."""
    n = len(draft.tokens)
    rig.results.draft_tokens[slot, :n] = draft.tokens
    rig.results.parents[slot, :n] = draft.parents.int()
    rig.results.num_nodes[slot] = n
    rig.results.drafted_for[slot] = drafted_for


def build(
    rig: Rig,
    slots: list[int],
    lens: list[int],
    bonus: list[int],
    n: int,
    mode: MaskMode = MaskMode.QLEN_ONLY,
    dtype: torch.dtype = torch.int64,
) -> VerifyTensors:
    out = VerifyTensors.allocate(len(slots), n, mode, total_length=sum(lens))
    for field in dataclasses.fields(out):
        tensor = getattr(out, field.name)
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(1 if tensor.dtype == torch.bool else 119)
    rig.engine.tree(
        out,
        req_pool_indices=torch.tensor(slots, dtype=dtype),
        seq_lens=torch.tensor(lens, dtype=dtype),
        bonus_tokens=torch.tensor(bonus, dtype=dtype),
    )
    return out


def check(out: VerifyTensors, lane: int, expected: reference.VerifyTree) -> None:
    for name in ("draft_tokens", "positions", "retrieve_next_token", "retrieve_next_sibling"):
        assert getattr(out, name)[lane].tolist() == getattr(expected, name).tolist(), name
    n = out.draft_tokens.shape[1]
    assert out.retrieve_index[lane].tolist() == list(range(lane * n, lane * n + n))


@given(
    data=st.data(),
    drafted_n=st.sampled_from([5, 12, 31]),
    n=st.integers(1, 64),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@settings(max_examples=80)
def test_equals_the_reference_in_every_mask_mode(data, drafted_n, n, dtype) -> None:
    """Sound drafts in some slots, stale or none in others, read by a verifier of any N in any order of requests."""
    rig = RIGS[drafted_n]
    lanes = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5]), min_size=1, max_size=6, unique=True))
    lens, bonus, drafts = [], [], []
    for slot in lanes:
        lens.append(data.draw(st.integers(0, 50)))
        bonus.append(data.draw(st.integers(0, CONFIG.vocab_size - 1)))
        draft = data.draw(written(data.draw(st.integers(0, drafted_n - 1))))
        fresh = data.draw(st.booleans())
        put(rig, slot, draft, lens[-1] if fresh else lens[-1] + 1)
        drafts.append(draft if fresh and slot > 0 else reference.Draft.none())
    trees = [reference.tree(*args, n) for args in zip(drafts, bonus, lens, strict=True)]
    outs = {mode: build(rig, lanes, lens, bonus, n, mode, dtype) for mode in MaskMode}
    for out in outs.values():
        for lane, expected in enumerate(trees):
            check(out, lane, expected)
    qlen = torch.stack([tree.mask for tree in trees])
    assert torch.equal(outs[MaskMode.QLEN_ONLY].mask, qlen)
    assert torch.equal(outs[MaskMode.FULL].mask, reference.full_mask(trees, lens))
    assert torch.equal(outs[MaskMode.QLEN_ONLY_BITPACK].mask, reference.packed_mask(trees))


@given(data=st.data(), nodes=st.integers(0, 30), n=st.integers(1, 40))
@settings(max_examples=60)
def test_properties(data, nodes, n) -> None:
    """What any tree must satisfy, said without the reference."""
    rig, seq_len = RIGS[31], 17
    draft = data.draw(written(nodes))
    put(rig, 3, draft, seq_len)
    out = build(rig, [3], [seq_len], [7], n)
    live = min(nodes, n - 1)
    parents = [0, *draft.parents.tolist()]
    mask = out.mask[0]

    closure = []
    for node in range(n):  # ancestor closure: self, and all that the parent sees
        above = set() if node == 0 else closure[parents[node] if node <= live else 0]
        closure.append(above | {node})
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == closure
    assert out.positions[0].tolist() == [seq_len + len(seen) - 1 for seen in closure]
    assert not bool(mask.triu(1).any()), "a node sees one that comes after it"

    visited, stack = [], [0]
    while stack:  # the verifier's walk: first child, then its siblings
        node = stack.pop()
        visited.append(node)
        child = int(out.retrieve_next_token[0, node])
        while child != -1:
            assert child > node
            assert parents[child] == node
            stack.append(child)
            child = int(out.retrieve_next_sibling[0, child])
    assert sorted(visited) == list(range(live + 1)), "each live node once, never a pad"
    assert out.draft_tokens[0, live + 1 :].tolist() == [7] * (n - 1 - live)


@pytest.mark.parametrize("n", [2, 4, 9])
def test_a_smaller_verifier_takes_a_prefix(n) -> None:
    """The first N - 1 nodes are closed under parents, for a chain they are the shorter chain."""
    rig = make_rig(SpeculationConfig(num_steps=8))
    rig.join(0, 2)
    outcome = rig.cycle([Ask(0, 6)])[0]
    out = build(rig, [2], [6], [1], n)
    assert out.draft_tokens[0].tolist() == [1, *outcome.drafted.tokens[: n - 1].tolist()]
    assert out.retrieve_next_token[0].tolist() == [*range(1, n), -1]


def test_after_a_real_cycle_in_another_order() -> None:
    rig = make_rig()
    for request in range(3):
        rig.join(request, 1 + request)
    outcomes = rig.cycle([Ask(r, 5 + r) for r in range(3)])
    out = build(rig, [3, 1, 0, 2], [7, 5, 9, 6], [11, 12, 13, 14], 12)
    for lane, request in ((0, 2), (1, 0), (3, 1)):
        drafted = rig.drafted(outcomes[request].slot)
        check(out, lane, reference.tree(drafted, 11 + lane, outcomes[request].new_len, 12))
        assert len(drafted.tokens) == 11
    check(out, 2, reference.tree(reference.Draft.none(), 13, 9, 12))


GARBAGE = {
    "token below 0": ("draft_tokens", 2, -1),
    "token beyond the vocabulary": ("draft_tokens", 0, CONFIG.vocab_size),
    "token far beyond": ("draft_tokens", 4, 2**62),
    "parent below 0": ("parents", 1, -1),
    "parent is itself": ("parents", 2, 3),
    "parent comes later": ("parents", 0, 5),
    "parent far beyond": ("parents", 3, 2**31 - 1),
    "nodes below 0": ("num_nodes", None, -3),
    "more nodes than there is room for": ("num_nodes", None, 12),
    "far more nodes": ("num_nodes", None, 2**31 - 1),
    "drafted for another length": ("drafted_for", None, 31),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("mode", MaskMode)
def test_garbage_in_the_results_is_no_draft(what, mode) -> None:
    """For that slot; its neighbour keeps its own."""
    rig = make_rig()
    sound = reference.Draft(torch.arange(11), torch.tensor([0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 7]), torch.zeros(11))
    for slot in (2, 3):
        put(rig, slot, sound, 30)
    name, index, value = GARBAGE[what]
    if index is None:
        getattr(rig.results, name)[2] = value
    else:
        getattr(rig.results, name)[2, index] = value
    out = build(rig, [2, 3], [30, 30], [5, 6], 12, mode)
    check(out, 0, reference.tree(reference.Draft.none(), 5, 30, 12))
    check(out, 1, reference.tree(sound, 6, 30, 12))


def test_deeper_than_the_steps_is_no_draft() -> None:
    """A verifier has room for K accepted tokens per request: a path of K + 1 would be written behind its end."""
    rig = make_rig()
    deep = reference.Draft(torch.arange(5), torch.arange(5), torch.zeros(5))
    put(rig, 2, deep, 30)
    check(build(rig, [2], [30], [5], 12), 0, reference.tree(reference.Draft.none(), 5, 30, 12))


def test_garbage_behind_the_verifiers_end_does_not_matter() -> None:
    """Nodes that a smaller verifier does not read are not checked."""
    rig = make_rig()
    draft = reference.Draft(torch.arange(11), torch.zeros(11, dtype=torch.int64), torch.zeros(11))
    put(rig, 2, draft, 30)
    rig.results.draft_tokens[2, 8] = -1
    out = build(rig, [2], [30], [5], 5)
    assert out.draft_tokens[0].tolist() == [5, 0, 1, 2, 3]


@pytest.mark.parametrize("slot", [-1, 6, 2**31 - 1])
def test_slots_out_of_range_are_no_draft(slot) -> None:
    rig = make_rig()
    check(build(rig, [slot], [4], [9], 6), 0, reference.tree(reference.Draft.none(), 9, 4, 6))


def test_without_steps_there_is_the_root_alone() -> None:
    rig = make_rig(SpeculationConfig(num_steps=0))
    rig.join(0, 1)
    rig.cycle([Ask(0, 4)])
    out = build(rig, [1], [4], [9], 1)
    assert (out.draft_tokens.tolist(), out.positions.tolist(), out.mask.tolist()) == ([[9]], [[4]], [[[True]]])


@pytest.mark.parametrize(("batch", "nodes"), [(-1, 4), (1, 0), (1, -6), (1, 65)])
@pytest.mark.parametrize("mode", MaskMode)
def test_buffers_that_cannot_be(batch, nodes, mode) -> None:
    with pytest.raises(ConfigError, match=f"in 1..64, got {batch} and {nodes}$"):
        VerifyTensors.allocate(batch, nodes, mode)
