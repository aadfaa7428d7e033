"""Drafts on the device, kept by request slot until a later batch asks for them.

Sizes: S request slots (row 0 is the host's padding row), N nodes per request, root included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1  # drafted_for of a slot that holds no draft


@dataclass(frozen=True)
class Drafts:
    """Drafts of B requests.

    tokens [B, N-1] int64, target vocabulary, in the order in which the host numbers a tree's nodes;
    parents [B, N-1] int32, parent node of nodes 1..N-1, 0 = root; None for chains, whose parents are known;
    drafted_for [B] int64, the length of the sequence that the draft continues.
    """

    tokens: Tensor
    parents: Tensor | None
    drafted_for: Tensor


@dataclass(frozen=True)
class Gathered:
    """Drafts in a batch's order: tokens and parents as in `Drafts`; `missing` [B] bool, true where there is none."""

    tokens: Tensor
    parents: Tensor | None
    missing: Tensor


class SlotResults:
    """The result buffers: written by the draft's stream, read by the verifier's after it has joined.

    tokens [S, N-1] int64; parents [S, N-1] int32, None for chains; drafted_for [S] int64, NEVER where there is no
    draft. All nodes of a draft count, so there is no number of nodes. A cycle pays for every operation here with CPU
    time, and the first token of a prompt with its delay: they are few on purpose.
    """

    def __init__(
        self, *, slots: int, num_draft_tokens: int, vocab_size: int, chain: bool, device: torch.device | str
    ) -> None:
        width = num_draft_tokens - 1
        self.vocab_size = vocab_size
        self.tokens = torch.zeros((slots, width), dtype=torch.int64, device=device)
        self.parents = None if chain else torch.zeros((slots, width), dtype=torch.int32, device=device)
        self.drafted_for = torch.full((slots,), NEVER, dtype=torch.int64, device=device)
        self.last_parent = torch.arange(width, dtype=torch.int32, device=device)

    def store(self, slots: Tensor, drafts: Drafts, *, drafted: Tensor | None = None) -> None:
        """Write drafts under their slots [B]; a draft with an id or a parent out of range is stored as "no draft".

        `drafted` [B] bool, where given, leaves requests out that were not to be drafted for (an unfinished prompt).
        """
        tokens = drafts.tokens.clamp(0, self.vocab_size - 1)
        valid = (tokens == drafts.tokens).all(dim=1)
        if self.parents is not None:
            if drafts.parents is None:
                raise ValueError("parents: a tree needs them, got None")
            parents = drafts.parents.clamp(min=0).minimum(self.last_parent)
            valid &= (parents == drafts.parents).all(dim=1)
            self.parents[slots] = parents
        if drafted is not None:
            valid &= drafted
        self.tokens[slots] = tokens
        self.drafted_for[slots] = torch.where(valid, drafts.drafted_for, NEVER)

    def clear(self, slots: Tensor | None = None) -> None:
        """Forget the drafts of some slots, or of all."""
        if slots is None:
            self.drafted_for.fill_(NEVER)
        else:
            self.drafted_for[slots] = NEVER

    def gather(self, slots: Tensor, seq_lens: Tensor) -> Gathered:
        """Drafts of these slots [B], for requests of these lengths [B].

        There is none when the slot's draft continues another length than the request has now.
        """
        parents = None if self.parents is None else self.parents[slots]
        return Gathered(self.tokens[slots], parents, self.drafted_for[slots] != seq_lens)


def chain_parents(rows: int, num_draft_tokens: int, device: torch.device | str) -> Tensor:
    """Parents of a chain, [rows, N-1] int32: every node hangs on the one before it."""
    return torch.arange(num_draft_tokens - 1, dtype=torch.int32, device=device).expand(rows, -1)


def grid_parents(parent_list: Tensor, selected: Tensor, *, topk: int) -> Tensor:
    """Parent node of every selected cell of the host's tree grid, [B, N-1] int32.

    The host numbers a tree's cells (cell // topk is the place of its parent in `parent_list`, 0 is the root) and
    returns the cells that it selected, ascending, [B, N-1] int64, and `parent_list` [B, P], the cell of each possible
    parent. A node's parent scores at least as high as the node (scores are products of probabilities), so it is
    selected too.
    """
    place = selected // topk
    if parent_list.shape[1] == 0:  # one step: all nodes hang on the root
        return torch.zeros_like(selected, dtype=torch.int32)
    cell = torch.gather(parent_list, 1, place.clamp(max=parent_list.shape[1] - 1))
    node = torch.searchsorted(selected.contiguous(), cell.contiguous()) + 1
    return torch.where(place > 0, node, 0).to(torch.int32)


@dataclass(frozen=True)
class Grid:
    """A tree in the host's numbering, for its tree kernel: parent_list [B, N+1] and selected [B, N-1], int64."""

    parent_list: Tensor
    selected: Tensor
    topk: int
    depth: int = 2

    def rows(self, count: int) -> Grid:
        """The first `count` requests'."""
        return Grid(self.parent_list[:count], self.selected[:count], self.topk, self.depth)


def grid_of(parents: Tensor) -> Grid:
    """Trees of any shape, [B, N-1] parents, in the host's numbering.

    Node j with parent p becomes cell p * N + j - 1 of a grid whose rows are N wide, so a cell names its parent whatever
    the tree's shape, and the host's kernel, which takes `topk` and `depth` as strides only, builds it.
    """
    rows, width = parents.shape
    nodes = width + 1
    selected = parents.to(torch.int64) * nodes + torch.arange(width, device=parents.device)
    parent_list = torch.zeros((rows, nodes + 1), dtype=torch.int64, device=parents.device)
    parent_list[:, 1:nodes] = selected
    return Grid(parent_list, selected, topk=nodes)
