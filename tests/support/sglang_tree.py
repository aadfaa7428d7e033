"""SGLang's tree, from the description of its drafting loop: top-k per step, one sorted cut over all scores, links
built from
`parent_list` and `selected_index`. An independent path to what eaglex.reference calls draft, select and tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

LogProbs = Callable[[tuple[int, ...]], Tensor]


@dataclasses.dataclass
class Drafted:
    """What SGLang's draft loop hands to the tree builder, for one request."""

    parent_list: list[int]  # grid index of each expanded node, after a leading -1 and one step after the other
    selected_index: list[int]  # ascending grid indices of the kept candidates
    tokens: list[int]
    scores: list[float]


def ranked(scores: list[float], k: int) -> list[int]:
    """Indices of the k best, best first, ties by index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def draft(log_probs: LogProbs, to_target: Tensor, *, steps: int, topk: int, num_draft_tokens: int) -> Drafted:
    """The loop over steps: every step scores topk continuations of each expanded node and expands the topk best
    of them.
    """
    all_scores: list[float] = []
    all_tokens: list[int] = []
    parents_of_steps = [[-1, *range(topk)]]
    paths: list[tuple[int, ...]] = [()]
    path_scores = [0.0]
    for step in range(steps):
        candidates, candidate_scores = [], []
        for path, score in zip(paths, path_scores, strict=True):
            logs = log_probs(path).tolist()
            for draft_id in ranked(logs, topk):
                candidates.append((*path, int(to_target[draft_id])))
                candidate_scores.append(score + logs[draft_id])
        offset = len(all_scores)
        all_scores += candidate_scores
        all_tokens += [path[-1] for path in candidates]
        best = ranked(candidate_scores, topk)
        if step > 0:
            parents_of_steps.append([offset + i for i in best])
        paths, path_scores = [candidates[i] for i in best], [candidate_scores[i] for i in best]
    kept = sorted(ranked(all_scores, num_draft_tokens - 1))
    parent_list = [p for parents in parents_of_steps[:-1] for p in parents]
    return Drafted(parent_list, kept, [all_tokens[i] for i in kept], [all_scores[i] for i in kept])


@dataclasses.dataclass
class Links:
    """What the kernel that builds the tree writes for one request."""

    positions: list[int]
    retrieve_index: list[int]
    retrieve_next_token: list[int]
    retrieve_next_sibling: list[int]
    visible: list[set[int]]  # per node the nodes that it sees


def build(drafted: Drafted, *, lane: int, seq_len: int, topk: int) -> Links:
    """One request's tree: node t stands for selected_index[t - 1]; a candidate's parent is found through
    parent_list by index / topk.
    """
    n = len(drafted.selected_index) + 1
    node_at = {grid: node for node, grid in enumerate(drafted.selected_index, start=1)}

    def parent(node: int) -> int:
        row = drafted.selected_index[node - 1] // topk
        return 0 if row == 0 else node_at[drafted.parent_list[row]]

    links = Links([], [lane * n + node for node in range(n)], [-1] * n, [-1] * n, [])
    for node in range(n):
        visible, at, depth = {0, node}, node, 0
        while at > 0:
            visible.add(at)
            at, depth = parent(at), depth + 1
        links.visible.append(visible)
        links.positions.append(seq_len + depth)
    for node in reversed(range(1, n)):  # each child is pushed in front of its siblings
        above = parent(node)
        links.retrieve_next_token[above], links.retrieve_next_sibling[node] = node, links.retrieve_next_token[above]
    return links


def full_mask(trees: list[Links], seq_lens: list[int]) -> list[bool]:
    """FULL_MASK: request after request, row after row, the prefix and then the tree."""
    flat: list[bool] = []
    for links, length in zip(trees, seq_lens, strict=True):
        for visible in links.visible:
            flat += [True] * length + [node in visible for node in range(len(links.visible))]
    return flat


def packed_mask(links: Links) -> list[list[int]]:
    """QLEN_ONLY_BITPACKING: a row's bits in 1, 2, 4 or 8 bytes, low node in the low bit."""
    n = len(links.visible)
    width = next(w for w in (1, 2, 4, 8) if n <= 8 * w)
    return [list(sum(1 << node for node in visible).to_bytes(width, "little")) for visible in links.visible]
