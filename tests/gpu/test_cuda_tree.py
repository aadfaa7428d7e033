"""`tree` on the GPU equals reference.tree in every mask mode, for every number of nodes, in any order of slots."""

from __future__ import annotations

import pytest
import torch
from support.cuda_rig import CudaRig
from support.models import make_config
from support.rig import Ask, Layout

from eaglex import reference
from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import VerifyTensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("nodes", [1, 2, 9, 14, 33, 64])
@pytest.mark.parametrize("mode", list(MaskMode), ids=lambda mode: mode.name.lower())
def test_tree_equals_the_reference(mode, nodes) -> None:
    rig = CudaRig(make_config(max_positions=512), SpeculationConfig(num_steps=4, topk=4, num_draft_tokens=14),
                  layout=Layout(num_slots=9, max_batch=7, max_rows=300))
    lengths = {0: 3, 1: 17, 2: 100, 3: 4}
    for request, length in lengths.items():
        rig.join(request, 1 + request)
        rig.engine.run(rig.batch([Ask(request, length)]))
    slots = [3, 1, 0, 4, 2, 8]  # a padded lane and a slot without a draft among them
    seq_lens = [100, 3, 5, 5, 17, 6]  # slot 4 was drafted for 4, not 5
    bonus = torch.arange(6) + 11
    out = VerifyTensors.allocate(6, nodes, mode, rig.device, total_length=sum(seq_lens))
    links = (out.retrieve_index, out.retrieve_next_token, out.retrieve_next_sibling)
    for tensor in (out.draft_tokens, out.positions, *links):
        tensor.fill_(-77)
    out.mask.fill_(True)
    for dtype in (torch.int32, torch.int64):
        rig.engine.tree(out, req_pool_indices=torch.tensor(slots, dtype=dtype, device=rig.device),
                        seq_lens=torch.tensor(seq_lens, dtype=dtype, device=rig.device),
                        bonus_tokens=bonus.to(rig.device, dtype))
        trees = []
        for lane, (slot, length) in enumerate(zip(slots, seq_lens, strict=True)):
            here = lengths.get(slot - 1) == length
            drafted = rig.drafted(slot) if here else reference.Draft.none()
            assert len(drafted.tokens) == (13 if here else 0)
            expected = reference.tree(drafted, int(bonus[lane]), length, nodes)
            trees.append(expected)
            assert torch.equal(out.draft_tokens[lane].cpu(), expected.draft_tokens)
            assert torch.equal(out.positions[lane].cpu(), expected.positions)
            assert torch.equal(out.retrieve_next_token[lane].cpu(), expected.retrieve_next_token)
            assert torch.equal(out.retrieve_next_sibling[lane].cpu(), expected.retrieve_next_sibling)
        assert torch.equal(out.retrieve_index.cpu().flatten(), torch.arange(6 * nodes))
        if mode is MaskMode.FULL:
            mask = reference.full_mask(trees, seq_lens)
            assert torch.equal(out.mask[: len(mask)].cpu(), mask)
        elif mode is MaskMode.QLEN_ONLY:
            assert torch.equal(out.mask.cpu(), torch.stack([t.mask for t in trees]))
        else:
            assert torch.equal(out.mask.cpu(), reference.packed_mask(trees))


def test_a_damaged_result_is_no_draft() -> None:
    """Ids and parents are checked on the way out: one token beyond the vocabulary, and the slot has only its root."""
    rig = CudaRig(make_config(), SpeculationConfig(num_steps=3))
    rig.join(0, 1)
    for damage in ("draft_tokens", "parents", "num_nodes", "drafted_for"):
        rig.requests[0].length = 0
        rig.engine.run(rig.batch([Ask(0, 5)]))
        value = getattr(rig.engine.results, damage)
        value[1] = 2**20
        out = VerifyTensors.allocate(1, 4, MaskMode.QLEN_ONLY, rig.device)
        slot, length, bonus = (torch.tensor([value], device=rig.device) for value in (1, 5, 7))
        rig.engine.tree(out, req_pool_indices=slot, seq_lens=length, bonus_tokens=bonus)
        assert out.draft_tokens.tolist() == [[7, 7, 7, 7]], damage
        assert out.retrieve_next_token.tolist() == [[-1, -1, -1, -1]], damage


@pytest.mark.parametrize("broken", [None, -1, 2**40], ids=["all lengths fit", "a negative one", "one far too long"])
def test_the_full_mask_of_many_long_requests(broken) -> None:
    """200 requests, more than a block has threads, of up to 5,000 positions: more than one pass of all blocks writes.
    Where a length is broken, requests before it have their whole mask and tree, it and those behind it only a root.
    """
    lanes, nodes, bad = 200, 4, 150
    rig = CudaRig(make_config(max_positions=64), SpeculationConfig(num_steps=nodes - 1),
                  layout=Layout(num_slots=lanes + 2, max_batch=lanes, max_rows=lanes))
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, 5000, (lanes,), generator=generator)
    if broken is not None:
        lengths[bad] = broken
    slots = 1 + torch.randperm(lanes, generator=generator)
    tokens = torch.randint(0, rig.config.vocab_size, (lanes, nodes - 1), generator=generator)
    results = rig.engine.results
    results.draft_tokens[slots.to(rig.device)] = tokens.to(rig.device)
    results.parents[:] = torch.arange(nodes - 1, dtype=torch.int32, device=rig.device)
    results.num_nodes[slots.to(rig.device)] = nodes - 1
    results.drafted_for[slots.to(rig.device)] = lengths.to(rig.device)
    total = int(lengths.sum()) if broken is None else 5000 * lanes
    out = VerifyTensors.allocate(lanes, nodes, MaskMode.FULL, rig.device, total_length=total)
    before = torch.randint(0, 2, out.mask.shape, generator=generator).bool()  # nobody's part stays as it is
    out.mask.copy_(before)
    bonus = torch.arange(lanes, device=rig.device) % rig.config.vocab_size
    rig.engine.tree(out, req_pool_indices=slots.to(rig.device), seq_lens=lengths.to(rig.device), bonus_tokens=bonus)
    whole = lanes if broken is None else bad
    drafts = [reference.Draft(tokens[i], torch.arange(nodes - 1), torch.zeros(nodes - 1)) for i in range(whole)]
    trees = [reference.tree(draft, int(bonus[i]), int(lengths[i]), nodes) for i, draft in enumerate(drafts)]
    mask = reference.full_mask(trees, lengths[:whole].tolist())
    assert torch.equal(out.mask[: len(mask)].cpu(), mask)
    assert torch.equal(out.mask[len(mask):].cpu(), before[len(mask):])
    assert torch.equal(out.draft_tokens[:whole].cpu(), torch.stack([tree.draft_tokens for tree in trees]))
    assert torch.equal(out.positions[:whole].cpu(), torch.stack([tree.positions for tree in trees]))
    assert torch.equal(out.draft_tokens[whole:], bonus[whole:, None].expand(-1, nodes))
    assert bool((out.retrieve_next_token[whole:] == -1).all())
