"""Drafts by request slot, and trees in the host's numbering and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eaglex.hosts.sglang.results import Drafts, SlotResults, chain_parents, grid_of, grid_parents

N = 6


def results(slots: int = 8, chain: bool = False) -> SlotResults:
    return SlotResults(slots=slots, num_draft_tokens=N, vocab_size=100, chain=chain, device="cpu")


def drafts(rows: int, length: int = 10, first: int = 0) -> Drafts:
    tokens = torch.arange(first, first + rows * (N - 1)).view(rows, N - 1)
    return Drafts(tokens=tokens, parents=chain_parents(rows, N, "cpu"), drafted_for=torch.full((rows,), length))


def test_a_batch_in_another_order_gets_its_own_drafts() -> None:
    kept = results()
    made = drafts(3)
    kept.store(torch.tensor([5, 2, 7]), made)
    found = kept.gather(torch.tensor([7, 5]), torch.tensor([10, 10]))
    assert found.missing.tolist() == [False, False]
    assert torch.equal(found.tokens, made.tokens[[2, 0]])
    assert made.parents is not None
    assert found.parents is not None
    assert torch.equal(found.parents, made.parents[[2, 0]])


def test_a_chain_needs_no_parents() -> None:
    kept = results(chain=True)
    made = drafts(2)
    kept.store(torch.tensor([5, 2]), Drafts(tokens=made.tokens, parents=None, drafted_for=made.drafted_for))
    found = kept.gather(torch.tensor([2, 5, 1]), torch.tensor([10, 10, 10]))
    assert found.parents is None
    assert found.missing.tolist() == [False, False, True]
    assert torch.equal(found.tokens[:2], made.tokens[[1, 0]])


def test_a_tree_without_parents_is_refused() -> None:
    made = drafts(1)
    with pytest.raises(ValueError, match="parents"):
        results().store(torch.tensor([1]), Drafts(tokens=made.tokens, parents=None, drafted_for=made.drafted_for))


def test_a_draft_for_another_length_is_none() -> None:
    kept = results()
    kept.store(torch.tensor([1, 2]), drafts(2, length=10))
    assert kept.gather(torch.tensor([1, 2, 3]), torch.tensor([10, 11, 10])).missing.tolist() == [False, True, True]


def test_a_slot_taken_over_holds_the_new_requests_draft() -> None:
    kept = results()
    kept.store(torch.tensor([4]), drafts(1, length=10))
    kept.store(torch.tensor([4]), drafts(1, length=3, first=50))
    found = kept.gather(torch.tensor([4, 4]), torch.tensor([3, 10]))
    assert found.missing.tolist() == [False, True]
    assert found.tokens[0, 0] == 50


@pytest.mark.parametrize(("column", "token"), [(0, -1), (4, 100), (2, 1 << 40)])
def test_a_token_out_of_range_is_no_draft(column: int, token: int) -> None:
    kept = results()
    made = drafts(2)
    made.tokens[1, column] = token
    kept.store(torch.tensor([1, 2]), made)
    found = kept.gather(torch.tensor([1, 2]), torch.tensor([10, 10]))
    assert found.missing.tolist() == [False, True]
    assert found.tokens.max() < 100
    assert found.tokens.min() >= 0


@pytest.mark.parametrize("parent", [-1, 3, 9])
def test_a_parent_that_is_not_before_its_child_is_no_draft(parent: int) -> None:
    kept = results()
    made = drafts(2)
    assert made.parents is not None
    wrong = made.parents.clone()
    wrong[0, 2] = parent  # node 3
    kept.store(torch.tensor([1, 2]), Drafts(tokens=made.tokens, parents=wrong, drafted_for=made.drafted_for))
    found = kept.gather(torch.tensor([1, 2]), torch.tensor([10, 10]))
    assert found.missing.tolist() == [True, False]
    assert found.parents is not None
    assert bool((found.parents < torch.arange(1, N)).all())


def test_requests_that_are_left_out_and_slots_that_are_cleared() -> None:
    kept = results()
    kept.store(torch.tensor([1, 2, 3]), drafts(3), drafted=torch.tensor([True, False, True]))
    kept.clear(torch.tensor([3]))
    assert kept.gather(torch.tensor([1, 2, 3]), torch.tensor([10, 10, 10])).missing.tolist() == [False, True, True]
    kept.clear()
    assert bool(kept.gather(torch.tensor([1]), torch.tensor([10])).missing)


def host_tree(parent_list: Tensor, selected: Tensor, topk: int) -> tuple[list[int], list[int], list[int]]:
    """One request through the host's tree kernel, transcribed: (parents, next_token, next_sibling) by node."""
    nodes = selected.numel() + 1
    parents, following, sibling = [0] * nodes, [-1] * nodes, [-1] * nodes
    for node in range(nodes - 1, 0, -1):
        place = int(selected[node - 1]) // topk
        if place > 0:
            cell = int(parent_list[place])
            parents[node] = selected.tolist().index(cell) + 1
        if following[parents[node]] != -1:
            sibling[node] = following[parents[node]]
        following[parents[node]] = node
    return parents[1:], following, sibling


@st.composite
def eagle_grids(draw: st.DrawFn) -> tuple[int, Tensor, Tensor]:
    """A tree as the host's draft loop makes it: topk, parent_list and the selected cells of one request.

    Cells 0..topk-1 hang on the root. Each further step expands topk chosen cells of the one before, with topk cells
    each, and `parent_list` names the expanded cells, after one entry for the root.
    """
    topk, steps = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    expanded: list[int] = []
    parent_of = dict.fromkeys(range(topk), -1)
    last = list(range(topk))
    for _ in range(steps - 1):
        chosen = draw(st.permutations(last).map(lambda order: order[:topk]))
        first = topk * (1 + len(expanded))
        expanded += chosen
        last = list(range(first, first + topk * topk))
        parent_of |= {cell: chosen[(cell - first) // topk] for cell in last}
    selected: set[int] = set()
    for _ in range(draw(st.integers(1, min(15, len(parent_of))))):
        free = [c for c, parent in parent_of.items() if c not in selected and (parent < 0 or parent in selected)]
        selected.add(draw(st.sampled_from(free)))
    parent_list = torch.tensor([[-1, *expanded]] if expanded else [[]], dtype=torch.int64)
    return topk, parent_list, torch.tensor([sorted(selected)])


@settings(max_examples=150, deadline=None)
@given(grid=eagle_grids())
def test_parents_from_the_hosts_grid(grid: tuple[int, Tensor, Tensor]) -> None:
    topk, parent_list, selected = grid
    parents = grid_parents(parent_list, selected, topk=topk)
    assert parents[0].tolist() == host_tree(parent_list[0], selected[0], topk)[0]


@settings(max_examples=150, deadline=None)
@given(grid=eagle_grids())
def test_the_rewritten_tree_is_the_same_to_the_hosts_kernel(grid: tuple[int, Tensor, Tensor]) -> None:
    topk, parent_list, selected = grid
    parents = grid_parents(parent_list, selected, topk=topk)
    grid_again = grid_of(parents)
    assert grid_again.parent_list.shape[1] == grid_again.topk * (grid_again.depth - 1) + 1  # the kernel's stride
    assert grid_again.parent_list.is_contiguous()
    rewritten = host_tree(grid_again.parent_list[0], grid_again.selected[0], grid_again.topk)
    assert rewritten == host_tree(parent_list[0], selected[0], topk)


def test_a_chain_is_a_tree_too() -> None:
    grid = grid_of(chain_parents(3, N, "cpu")).rows(2)
    assert grid.parent_list.is_contiguous()
    assert grid.selected.shape == (2, N - 1)
    parents, following, sibling = host_tree(grid.parent_list[1], grid.selected[1], grid.topk)
    assert parents == list(range(N - 1))
    assert following == [*range(1, N), -1]
    assert sibling == [-1] * N
