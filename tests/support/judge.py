"""Drafts in 16 bits, held to float64 along their own paths, also where a near tie sent them another way."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from eaglex import reference
from eaglex.config import DraftConfig, SpeculationConfig
from eaglex.reference import Draft, DraftCache
from eaglex.reference_low_bit import RESCORE_GROUP, rescored
from eaglex.weights import DraftWeights


@dataclasses.dataclass
class Side:
    """One request right after extend, in the type of these weights."""

    weights: DraftWeights
    cache: DraftCache
    logits: Tensor
    hidden: Tensor


def depths(parents: Tensor) -> list[int]:
    """Depth of every node, the root (0) first."""
    depth = [0]
    for parent in parents.tolist():
        depth.append(depth[parent] + 1)
    return depth


@dataclasses.dataclass
class Along:
    """Of what follows the root and every node that was expanded, [n + 1, Vd]; NaN for the rest."""

    rows: Tensor  # log-probabilities; with a rescored head as if every score were exact, over the sum of the replaced
    scan: Tensor  # the head's logits before any is made exact


def along_paths(config: DraftConfig, side: Side, drafted: Draft, speculation: SpeculationConfig) -> Along:
    """One side's figures along the paths of a draft."""
    past, prefix = len(side.cache), side.cache.rows
    local = DraftCache(list(side.cache.k), list(side.cache.v), side.cache.start)
    depth, parents = depths(drafted.parents), drafted.parents.tolist()
    hidden: dict[int, Tensor] = {0: side.hidden}
    seen: dict[int, list[int]] = {0: []}
    rows = torch.full((len(depth), config.draft_vocab_size), torch.nan, dtype=torch.float64)
    scan = rows.clone()

    def score(node: int, logits: Tensor, state: Tensor) -> None:
        counted, _ = reference.rescore(config, side.weights, logits[None], state[None], speculation.topk)
        scan[node], exact = logits.double(), counted[0].double()
        if side.weights.lm_head_rows is not None:
            normed = state if config.next_hidden.value == "normed" else \
                reference.rms_norm(state, side.weights.norm, config.rms_norm_eps)
            exact = (side.weights.lm_head_rows @ normed).double()
        rows[node] = exact - torch.logsumexp(counted[0].double(), -1)

    score(0, side.logits, side.hidden)
    for d in range(1, speculation.num_steps):
        level = [node for node in range(1, len(depth)) if depth[node] == d]
        if not level:
            break
        visible = torch.zeros(len(level), local.rows + len(level), dtype=torch.bool)
        visible[:, :prefix] = True
        for i, node in enumerate(level):
            seen[node] = [*seen[parents[node - 1]], local.rows + i]
            visible[i, seen[node]] = True
        logits, states = reference.forward(
            config, side.weights, local, torch.stack([hidden[parents[node - 1]] for node in level]),
            drafted.tokens[[node - 1 for node in level]], torch.full((len(level),), past + d - 1), visible)
        for i, node in enumerate(level):
            hidden[node] = states[i]
            score(node, logits[i], states[i])
    return Along(rows, scan)


def may_be_drafted(scan: Tensor, topk: int, slack: float) -> tuple[Tensor, Tensor]:
    """Which ids [Vd] are rescored whatever rounding of up to `slack` does to the scan, and which may be."""
    count = max(2, topk)
    padded = torch.nn.functional.pad(scan, (0, -len(scan) % RESCORE_GROUP), value=-torch.inf).view(-1, RESCORE_GROUP)

    def above(by: float) -> Tensor:  # how many of its group come before each id that moves by so much
        return (padded[:, None, :] > padded[:, :, None] + by).sum(-1).flatten()[: len(scan)]

    group_sure, group_may = above(-slack) - 1 < count, above(slack) < count  # the first counts the id itself
    sure_values, may_values = scan[group_sure].sort().values, scan[group_may].sort().values
    before_all = len(may_values) - torch.searchsorted(may_values, scan - slack, right=True) - 1
    before_sure = len(sure_values) - torch.searchsorted(sure_values, scan + slack, right=True)
    return group_sure & (before_all < rescored(topk)), group_may & (before_sure < rescored(topk))


def cumulative(rows: Tensor, drafted: Draft, ids: list[int]) -> Tensor:
    """Scores [n] of the drafted nodes by these rows; ids are the tokens in the draft's vocabulary."""
    scores = torch.zeros(len(ids) + 1, dtype=torch.float64)
    for node, (parent, token) in enumerate(zip(drafted.parents.tolist(), ids, strict=True), 1):
        scores[node] = scores[parent] + rows[parent, token]
    return scores[1:]


def regret(speculation: SpeculationConfig, rows: Tensor, sure: Tensor, drafted: Draft, ids: list[int],
           exact: Tensor) -> float:
    """By how much, in exact log-probability, a choice of the draft fell short of the best one; 0 where it did not.
    `sure` [n + 1, Vd] are `rows` with -infinity for what a rescored head need not have considered.

    A node must be among the k best successors of its parent, its parent among the k best of its depth (by the draft's
    own scores, and exactly so), and no successor that was left out may beat the worst node that was kept.
    """
    k, depth, parents = speculation.topk, depths(drafted.parents), drafted.parents.tolist()
    own = [0.0, *drafted.scores.tolist()]

    def expanded(node: int) -> bool:
        better = sum(own[other] > own[node] for other in range(len(own)) if depth[other] == depth[node])
        return depth[node] < speculation.num_steps and better < k

    children: dict[int, set[int]] = {}
    for parent, token in zip(parents, ids, strict=True):
        assert token not in children.setdefault(parent, set()), f"node {parent} has token {token} twice"
        children[parent].add(token)
    assert all(expanded(parent) for parent in children), f"a node outside the frontier has successors: {drafted}"
    worst = 0.0
    for parent, tokens in children.items():
        best = sure[parent].topk(min(k, rows.shape[1])).values[-1]
        worst = max(worst, *(float(best - rows[parent, token]) for token in tokens))
    if len(ids) == speculation.num_draft_tokens - 1 < speculation.num_candidates:
        scores, least, deepest = [0.0, *exact.tolist()], float(exact.min()), max(depth)
        for node in range(len(depth)):
            if not expanded(node) or depth[node] >= deepest:  # an early stop may have left these
                continue
            taken = children.get(node, set())
            # Where k were taken, one that was left out may as well have lost to the worst of them.
            full = len(taken) == min(k, rows.shape[1])
            lost = min(float(rows[node, token]) for token in taken) if full else -torch.inf
            best_values, best_ids = sure[node].topk(min(k, rows.shape[1]))
            for value, token in zip(best_values.tolist(), best_ids.tolist(), strict=True):
                if token not in taken:
                    worst = max(worst, min(scores[node] + value - least, value - lost))
    return worst


class Judge:
    """Collects the errors of many drafts by depth; `check` holds them to twice those of plain PyTorch.

    The nodes of one draft lie on few paths, and along a path errors add up: what counts is how many drafts came to a
    depth. A tree's deepest nodes are those of one draft in twenty, where either side may be right by luck: of two paths
    the error was 4.4 times PyTorch's by rounding alone.
    """

    ENOUGH = 40  # drafts; the share of a rule of root mean squares that chance alone breaks is small from here on

    def __init__(self, config: DraftConfig, speculation: SpeculationConfig) -> None:
        self.config, self.speculation = config, speculation
        steps = speculation.num_steps + 1
        self.error, self.allowed = (torch.zeros(steps, dtype=torch.float64) for _ in range(2))
        self.nodes, self.drafts = (torch.zeros(steps, dtype=torch.int64) for _ in range(2))  # drafts that got there
        self.regrets: list[float] = []
        self.worst_at = torch.zeros(steps, dtype=torch.float64)  # largest difference of a single score, by depth

    def take(self, drafted: Draft, exact: Side, plain: Side) -> None:
        """One draft of the engine; `exact` and `plain` hold the same request in float64 and in the engine's type."""
        if not len(drafted.tokens):
            return
        ids = self._draft_ids(exact.weights, drafted.tokens)
        right, other = (along_paths(self.config, side, drafted, self.speculation) for side in (exact, plain))
        scores, theirs = cumulative(right.rows, drafted, ids), cumulative(other.rows, drafted, ids)
        sure = right.rows
        if exact.weights.lm_head_rows is not None:
            sure = self._considered(right, other, drafted, ids)
        depth = torch.tensor(depths(drafted.parents)[1:])
        errors = drafted.scores.double() - scores
        self.error.index_add_(0, depth, errors.square())
        self.allowed.index_add_(0, depth, (theirs - scores).square())
        self.nodes.index_add_(0, depth, torch.ones_like(depth))
        self.drafts[depth.unique()] += 1
        self.worst_at.scatter_reduce_(0, depth, errors.abs(), "amax")
        self.regrets.append(regret(self.speculation, right.rows, sure, drafted, ids, scores))

    def _considered(self, right: Along, other: Along, drafted: Draft, ids: list[int]) -> Tensor:
        """`right.rows` of what was surely rescored. What was drafted must be what may have been; else AssertionError.

        The scan's rounding is what plain PyTorch's has, and eight times that.
        """
        sure = right.rows.clone()
        children = list(zip(drafted.parents.tolist(), ids, strict=True))
        for node in range(len(sure)):
            if right.scan[node].isnan().any():
                continue
            slack = 8 * float((other.scan[node] - right.scan[node]).std())
            certain, possible = may_be_drafted(right.scan[node], self.speculation.topk, slack)
            sure[node, ~certain] = -torch.inf
            for parent, token in children:
                assert parent != node or possible[token], f"node {node} has token {token}, which no scan can have found"
        return sure

    @property
    def worst(self) -> float:
        """The largest difference of a single score."""
        return float(self.worst_at.max())

    @property
    def theirs(self) -> Tensor:
        """PyTorch's root mean square error by depth, at least that of the depths before: scores are cumulative."""
        return (self.allowed / self.nodes.clamp(min=1)).sqrt().cummax(0).values

    @property
    def rounding(self) -> float:
        """PyTorch's root mean square error over all depths. The floor is for few drafts, by chance exact."""
        return max(0.02, float((self.allowed.sum() / self.nodes.sum()).sqrt()))

    def check(self) -> None:
        """At every depth at most twice PyTorch's error, no choice worse than rounding explains.

        Fewer drafts than ENOUGH: more by the fourth root of the ratio, about as the tail of a root mean square of so
        few grows (of one draft 2.5 times, of ten 1.4).
        """
        if len(self.regrets) < self.ENOUGH:
            return
        error = (self.error / self.nodes.clamp(min=1)).sqrt()
        few = (self.ENOUGH / self.drafts.clamp(1, self.ENOUGH)) ** 0.25
        by_depth = f"by depth {error.tolist()} against {self.theirs.tolist()} of {self.drafts.tolist()} drafts"
        assert bool((error <= 2 * few * self.theirs).all()), by_depth
        self.check_choices()

    def check_choices(self) -> None:
        """What can be said of a few drafts already: no score and no choice is off by eight times PyTorch's error."""
        limit = 8 * self.rounding
        close = self.worst_at <= (8 * self.theirs).clamp(min=limit)
        assert bool(close.all()), f"a score is off by {self.worst_at.tolist()} by depth, rounding is {self.rounding}"
        assert max(self.regrets) <= limit, f"a choice is off by {max(self.regrets)}, rounding is {self.rounding}"

    def _draft_ids(self, weights: DraftWeights, tokens: Tensor) -> list[int]:
        if weights.d2t is None:
            return [int(t) for t in tokens]
        table = {int(i + d): i for i, d in enumerate(weights.d2t.tolist())}
        return [table[int(t)] for t in tokens]
