"""EAGLE-3 drafting and verification in plain PyTorch: the spec. Where C++ or CUDA differ, they are wrong.

One request at a time, no paging, no batching, every row through every layer: what the engine makes of it for speed
(docs/design.md: the single-layer identity, scratch, slots) must not change a result. The functions bear the names of
the engine's steps:

    fuse → qkv → attention → o_proj → gate_up → down → head → select → tree

Sizes: H hidden, Ht target hidden, A auxiliary layers, V vocabulary, Vd draft vocabulary, K num_steps, k topk,
N num_draft_tokens (root included), T rows. Arithmetic runs in the dtype of `fc`, norms and softmax in at least float32.
Matrices of few bits are those of reference_low_bit.py.
Sources: EAGLE-3 (arXiv 2503.01840) for the model, EAGLE-2 (arXiv 2406.16858) for the re-ranked tree, Leviathan et al.
(arXiv 2211.17192) for rejection sampling, SGLang's verifier for node order and the retrieve_* links.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglex.reference_low_bit import product, with_exact_best
from eaglex.reference_rope import rope_frequencies

if TYPE_CHECKING:
    from eaglex.config import DraftConfig, SpeculationConfig
    from eaglex.weights import DraftWeights, LayerWeights


# ---------------------------------------------------------------------------------------------------------------- model


@dataclasses.dataclass
class DraftCache:
    """The draft's own K and V of one request's prefix: per layer [rows, num_kv_heads, head_dim], keys after RoPE.

    Row 0 sits at position `start`; positions before it have no K and V and nothing attends to them.
    """

    k: list[Tensor]
    v: list[Tensor]
    start: int = 0

    @classmethod
    def empty(cls, config: DraftConfig, dtype: torch.dtype, start: int = 0) -> DraftCache:
        """A cache of a request that has no rows yet."""
        blank = [torch.zeros(0, config.num_kv_heads, config.head_dim, dtype=dtype) for _ in range(config.num_layers)]
        return cls(blank, list(blank), start)

    def __len__(self) -> int:
        return self.start + self.rows

    @property
    def rows(self) -> int:
        """Rows that are there, len(self) - start."""
        return self.k[0].shape[0]


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · gamma over the last dimension, in at least float32, back in x's dtype."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(gamma)).to(x.dtype)


def rope(x: Tensor, positions: Tensor, config: DraftConfig) -> Tensor:
    """Turn the first rotary_dim of x [T, heads, head_dim] by its row's position, halves paired (i, i + rotary_dim/2).

    The angle position · inv_freq is rounded to float32 in every precision, as the models were trained.
    """
    inv_freq, factor = rope_frequencies(config.rope, config.rotary_dim)
    angle = positions.float()[:, None, None] * inv_freq
    cos, sin = (_wide(f(angle.to(_wide(x).dtype)) * factor) for f in (torch.cos, torch.sin))
    half = config.rotary_dim // 2
    left, right, rest = _wide(x[..., :half]), _wide(x[..., half: 2 * half]), x[..., 2 * half:]
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1)


def fuse(config: DraftConfig, weights: DraftWeights, aux_hidden_states: Tensor) -> Tensor:
    """aux_hidden_states [T, A·Ht] → hidden [T, H]: EAGLE-3's fc over the auxiliary layers, normed by aux_norm."""
    x = aux_hidden_states.to(weights.fc.dtype)
    if config.aux_norm.value == "whole":
        x = rms_norm(x, weights.aux_norms[0], config.rms_norm_eps)
    elif config.aux_norm.value == "each":
        parts = torch.split(x, config.target_hidden_size, -1)
        x = torch.cat([rms_norm(p, g, config.rms_norm_eps) for p, g in zip(parts, weights.aux_norms, strict=True)], -1)
    return x @ weights.fc.T


def qkv(config: DraftConfig, weights: DraftWeights, index: int, hidden: Tensor, input_ids: Tensor,
        positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer `index`: hidden [T, H] → q [T, heads, D], k, v [T, kv_heads, D] and the residual [T, H].

    The first layer reads the concatenation of embedding and hidden state, each normed; later ones the normed hidden
    state.
    """
    layer, eps = weights.layers[index], config.rms_norm_eps
    residual = hidden
    if index == 0:
        assert layer.hidden_norm is not None
        embedding = weights.embed_tokens[input_ids]
        if layer.input_layernorm is not None:
            embedding = rms_norm(embedding, layer.input_layernorm, eps)
        normed = rms_norm(hidden, layer.hidden_norm, eps)
        if config.residual.value == "normed":
            residual = normed
        x = torch.cat([embedding, normed], -1)
    else:
        assert layer.input_layernorm is not None
        x = rms_norm(hidden, layer.input_layernorm, eps)
    q, k, v = (_heads(product(x, w), config.head_dim) for w in (layer.q_proj, layer.k_proj, layer.v_proj))
    return rope(q, positions, config), _finite(rope(k, positions, config)), _finite(v), residual


def attention(config: DraftConfig, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax(q kᵀ / √D) v: q [T, heads, D] over k, v [S, kv_heads, D] where `visible` [T, S]; → [T, heads·D]."""
    group = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", _wide(q), _wide(k)) / math.sqrt(config.head_dim)
    weight = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
    return torch.einsum("hts,shd->thd", weight, _wide(v)).to(q.dtype).flatten(1)


def o_proj(layer: LayerWeights, x: Tensor, residual: Tensor) -> Tensor:
    """residual + x W_oᵀ: [T, heads·D] → [T, H]."""
    return residual + product(x, layer.o_proj)


def gate_up(config: DraftConfig, layer: LayerWeights, x: Tensor) -> Tensor:
    """SwiGLU silu(gate) · up of the normed x: [T, H] → [T, I]."""
    normed = rms_norm(x, layer.post_attention_layernorm, config.rms_norm_eps)
    return torch.nn.functional.silu(product(normed, layer.gate_proj)) * product(normed, layer.up_proj)


def down(layer: LayerWeights, x: Tensor, residual: Tensor) -> Tensor:
    """residual + x W_downᵀ: [T, I] → [T, H]."""
    return residual + product(x, layer.down_proj)


def head(config: DraftConfig, weights: DraftWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [T, H] → logits [T, Vd] and the hidden state [T, H] that feeds the next step.

    Where there are lm_head_rows the logits are the scan's, whose best `rescore` makes exact.
    """
    normed = rms_norm(hidden, weights.norm, config.rms_norm_eps)
    return product(normed, weights.lm_head), normed if config.next_hidden.value == "normed" else hidden


def rescore(config: DraftConfig, weights: DraftWeights, logits: Tensor, hidden: Tensor,
            topk: int) -> tuple[Tensor, Tensor]:
    """head's logits [T, Vd] and next hidden [T, H] → the logits that count and the ids [T, R], ascending, that may be
    drafted: all of them, or with lm_head_rows the best of the scan, their scores replaced (with_exact_best).
    """
    if weights.lm_head_rows is None:
        return logits, torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    if config.next_hidden.value != "normed":
        hidden = rms_norm(hidden, weights.norm, config.rms_norm_eps)
    return with_exact_best(hidden, logits, weights.lm_head_rows, topk)


def forward(config: DraftConfig, weights: DraftWeights, cache: DraftCache, hidden: Tensor, input_ids: Tensor,
            positions: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """All layers over T rows; appends their K and V to `cache` in place.

    `visible` [T, cache.rows + T] says what each row attends to. Returns logits [T, Vd] and next hidden [T, H].
    """
    for index, layer in enumerate(weights.layers):
        q, k, v, residual = qkv(config, weights, index, hidden, input_ids, positions)
        cache.k[index], cache.v[index] = torch.cat([cache.k[index], k]), torch.cat([cache.v[index], v])
        x = o_proj(layer, attention(config, q, cache.k[index], cache.v[index], visible), residual)
        hidden = down(layer, gate_up(config, layer, x), x)
    return head(config, weights, hidden)


def extend(config: DraftConfig, weights: DraftWeights, cache: DraftCache, aux_hidden_states: Tensor,
           input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Take in T accepted rows: aux_hidden_states [T, A·Ht] and for each the token *after* it, input_ids [T].

    Row j sits at position len(cache) + j. Returns logits [Vd] and hidden [H] of the last row, from which drafting
    starts.
    """
    if input_ids.shape[0] == 0 or aux_hidden_states.shape != (input_ids.shape[0], config.aux_width):
        raise ValueError(f"aux_hidden_states: expected [{input_ids.shape[0]} >= 1, {config.aux_width}], "
                         f"got {list(aux_hidden_states.shape)}")
    past, rows = len(cache), input_ids.shape[0]
    if past + rows > config.max_positions:
        room = config.max_positions - past
        raise ValueError(f"input_ids: expected at most {room} rows (max_positions={config.max_positions}), got {rows}")
    visible = torch.ones(rows, cache.rows + rows, dtype=torch.bool).tril(cache.rows)
    hidden = fuse(config, weights, aux_hidden_states)
    logits, hidden = forward(config, weights, cache, hidden, input_ids, torch.arange(past, past + rows), visible)
    return logits[-1], hidden[-1]


# ------------------------------------------------------------------------------------------------------------- drafting


@dataclasses.dataclass
class Draft:
    """Drafted nodes in order of grid index, parents first; node i of the tree is entry i - 1, node 0 the root."""

    tokens: Tensor  # [n] int64, target vocabulary
    parents: Tensor  # [n] int64, node in 0..n
    scores: Tensor  # [n], cumulative log-probability from the root
    probs: Tensor | None = None  # [K, Vd] with sampling: the distribution that each token of the chain was drawn from

    @classmethod
    def none(cls) -> Draft:
        """No draft: the request decodes plainly this cycle."""
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0))


def draft(config: DraftConfig, weights: DraftWeights, cache: DraftCache, logits: Tensor, hidden: Tensor,
          speculation: SpeculationConfig, temperature: float = 0.0, uniforms: Tensor | None = None) -> Draft:
    """Draft up to N - 1 nodes from extend's logits [Vd] and hidden [H]; `cache` is left as it was.

    Step s extends each of the k best nodes (the frontier) by its k best tokens; of these k² candidates the k best by
    cumulative log-probability are the next frontier (EAGLE-2). At the end `select` keeps the N - 1 best of all. Ties go
    to the lowest index. With temperature > 0 a chain draws each token from softmax(logits / temperature) by uniforms
    [K], and says from what (at temperature 0 the engine writes the one-hot of the argmax there). Logits whose
    log-sum-exp is not finite, or a context without room for K more tokens: no draft. With `stop_below` it may end
    before step K, with as many nodes as there are by then.
    """
    steps, k, past, prefix = speculation.num_steps, speculation.topk, len(cache), cache.rows
    if temperature > 0 and (k != 1 or uniforms is None):
        raise ValueError(f"temperature: expected 0 unless topk=1 and uniforms are given, got {temperature}, topk={k}")
    if steps == 0 or past + steps >= config.max_positions:
        return Draft.none()
    local = DraftCache(list(cache.k), list(cache.v), cache.start)
    logits, hidden = logits[None], hidden[None]
    frontier_score, frontier_node = torch.zeros(1, dtype=_wide(logits).dtype), torch.zeros(1, dtype=torch.int64)
    ancestors: list[list[int]] = [[]]  # per frontier node: rows of `local` behind the prefix that it sees
    grid_token: list[Tensor] = []
    grid_parent: list[Tensor] = []
    grid_score: list[Tensor] = []
    probs: list[Tensor] = []
    for step in range(steps):
        scan, (logits, ids) = logits, rescore(config, weights, logits, hidden, k)
        if not bool(torch.isfinite(torch.logsumexp(_wide(torch.cat([scan, logits])), -1)).all()):
            return Draft.none()
        if temperature > 0:
            assert uniforms is not None
            top, ids = sample(logits, temperature, uniforms[step])
            probs.append(torch.softmax(_wide(logits[0]) / temperature, -1))
        else:
            top, best = top_k(torch.log_softmax(_wide(logits), -1).gather(1, ids), k)
            ids = ids.gather(1, best)
        score = frontier_score[:, None] + top  # [frontier, k]
        base = sum(len(g) for g in grid_token)
        grid_token.append((ids if weights.d2t is None else ids + weights.d2t[ids]).flatten())
        grid_parent.append(frontier_node.repeat_interleave(ids.shape[1]))
        grid_score.append(score.flatten())
        if step + 1 == steps:
            break
        frontier_score, best = (t[0] for t in top_k(score.flatten()[None], k))
        if falls_short(float(frontier_score[0]), speculation):
            break
        parent_row = best // ids.shape[1]
        frontier_node = best + base + 1
        rows = range(step * k, step * k + k)
        ancestors = [ancestors[int(p)] + [row] for p, row in zip(parent_row, rows, strict=True)]
        visible = torch.zeros(k, prefix + (step + 1) * k, dtype=torch.bool)
        visible[:, :prefix] = True
        for i, seen in enumerate(ancestors):
            visible[i, [prefix + row for row in seen]] = True
        positions = torch.full((k,), past + step)
        logits, hidden = forward(config, weights, local, hidden[parent_row], grid_token[-1][best], positions, visible)
    count = speculation.num_draft_tokens - 1
    drafted = select(torch.cat(grid_token), torch.cat(grid_parent), torch.cat(grid_score), count)
    drafted.probs = torch.stack(probs) if probs else None
    return drafted


def falls_short(score: float, speculation: SpeculationConfig) -> bool:
    """Whether a step's best cumulative log-probability ends the draft; all that was drafted by then is kept."""
    return score < speculation.stop_score


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [R, n], largest first, ties by the lowest index (torch.topk leaves them undefined)."""
    order = torch.sort(values, dim=-1, descending=True, stable=True)
    return order.values[:, :k], order.indices[:, :k]


def sample(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one draft id from softmax(logits [1, Vd] / T) by inverse CDF in id order: (log-probability, id)."""
    log_probs = torch.log_softmax(_wide(logits) / temperature, -1)
    index = inverse_cdf(log_probs[0].exp(), uniform).view(1, 1)
    return log_probs.gather(1, index), index


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose running sum of weights [n] exceeds uniform · total; uniform in [0, 1)."""
    running = weights.double().cumsum(0)
    last = int(weights.nonzero()[-1])
    return torch.searchsorted(running, uniform.double() * running[-1], right=True).clamp(max=last)


def select(tokens: Tensor, parents: Tensor, scores: Tensor, count: int) -> Draft:
    """EAGLE-2 re-ranking: the `count` best candidates by score, ties by grid index, put back into grid order.

    tokens, parents, scores [G] are the whole grid: k entries of the first step, then k² per step; parents name grid
    index + 1, 0 the root. A parent never scores below its child and precedes it, so the chosen set is closed under
    parents.
    """
    _, order = top_k(scores[None], count)
    chosen = order[0].sort().values
    node_of = torch.zeros(len(tokens) + 1, dtype=torch.int64)
    node_of[chosen + 1] = torch.arange(1, len(chosen) + 1)
    return Draft(tokens[chosen], node_of[parents[chosen]], scores[chosen])


# ---------------------------------------------------------------------------------------------------------- verify tree


@dataclasses.dataclass
class VerifyTree:
    """What the target verifies for one request: the bonus token, the drafted nodes, then pads that nothing reaches."""

    draft_tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64: seq_len + depth
    mask: Tensor  # [N, N] bool: row i sees its ancestors and itself
    retrieve_next_token: Tensor  # [N] int64: first child by node index, -1 none
    retrieve_next_sibling: Tensor  # [N] int64: next child of the same parent, -1 none


def tree(drafted: Draft, bonus_token: int, seq_len: int, num_draft_tokens: int) -> VerifyTree:
    """Verifier tensors for a request whose bonus token sits at position seq_len.

    Fewer nodes than N - 1: the rest are pads (the bonus token again, a child of the root in mask and position, linked
    from nowhere, so that nothing can accept them). More: the first N - 1, which are closed under parents.
    """
    n = min(len(drafted.tokens), num_draft_tokens - 1)
    tokens = torch.full((num_draft_tokens,), bonus_token, dtype=torch.int64)
    tokens[1: n + 1] = drafted.tokens[:n]
    parents = [0] * num_draft_tokens
    parents[1: n + 1] = drafted.parents[:n].tolist()
    depth, mask = [0] * num_draft_tokens, torch.eye(num_draft_tokens, dtype=torch.bool)
    for node in range(1, num_draft_tokens):
        depth[node] = depth[parents[node]] + 1
        mask[node] |= mask[parents[node]]
    next_token = torch.full((num_draft_tokens,), -1, dtype=torch.int64)
    next_sibling = next_token.clone()
    for node in range(n, 0, -1):  # backwards, so that the first child comes first
        next_sibling[node] = next_token[parents[node]]
        next_token[parents[node]] = node
    return VerifyTree(tokens, seq_len + torch.tensor(depth), mask, next_token, next_sibling)


def full_mask(trees: list[VerifyTree], seq_lens: list[int]) -> Tensor:
    """SGLang's FULL_MASK: per request [N, seq_len + N], the prefix visible to all, all requests flattened into one."""
    prefixes = [torch.ones(len(t.mask), n, dtype=torch.bool) for t, n in zip(trees, seq_lens, strict=True)]
    return torch.cat([torch.cat([prefix, t.mask], 1).flatten() for prefix, t in zip(prefixes, trees, strict=True)])


def packed_mask(trees: list[VerifyTree]) -> Tensor:
    """SGLang's QLEN_ONLY_BITPACKING: [B, N, bytes] uint8, node j in bit j % 8 of byte j / 8; 1, 2, 4 or 8 bytes."""
    n = len(trees[0].mask)
    width = 1 << max(0, math.ceil(math.log2((n + 7) // 8)))
    bits = torch.zeros(len(trees), n, width * 8, dtype=torch.int64)
    bits[:, :, :n] = torch.stack([t.mask for t in trees]).long()
    return (bits.view(len(trees), n, width, 8) << torch.arange(8)).sum(-1).to(torch.uint8)


# --------------------------------------------------------------------------------------------------------- verification


@dataclasses.dataclass
class Accepted:
    """One verification: the accepted nodes (root first) and the tokens that it emits, the bonus token last."""

    nodes: list[int]
    tokens: list[int]

    @property
    def accept_length(self) -> int:
        """Tokens emitted, the bonus token counted."""
        return len(self.tokens)


def verify_greedy(candidates: VerifyTree, target_ids: Tensor) -> Accepted:
    """Follow the target's own argmax [N] (per node, the token after it) down the tree as far as the draft has it."""
    nodes, tokens = [0], [int(target_ids[0])]
    while (child := _child_with(candidates, nodes[-1], tokens[-1])) >= 0:
        nodes.append(child)
        tokens.append(int(target_ids[child]))
    return Accepted(nodes, tokens)


def verify_target_only(
    candidates: VerifyTree, target_probs: Tensor, uniforms: Tensor, final_uniform: Tensor
) -> Accepted:
    """Sampled verification without draft probabilities (SGLang's target-only rule); emits the target's distribution.

    At a node the children split [0, 1) by their target probability [N, V], in sibling order: the uniform [N] of that
    node falls on a child, which is accepted, or beyond all; then the emitted token is drawn from the rest of the
    target's distribution.
    """
    node, nodes = 0, [0]
    tokens: list[int] = []
    while True:
        rest, reach, child = target_probs[node].double(), 0.0, int(candidates.retrieve_next_token[node])
        rest = rest.clone()
        while child >= 0:
            token = int(candidates.draft_tokens[child])
            reach += float(target_probs[node, token])
            if float(uniforms[node]) < reach:
                break
            rest[token] = 0.0
            child = int(candidates.retrieve_next_sibling[child])
        if child < 0:
            if float(rest.sum()) <= 0:  # rounding left nothing behind the children
                rest = target_probs[node].double()
            return Accepted(nodes, [*tokens, int(inverse_cdf(rest, final_uniform))])
        nodes.append(child)
        tokens.append(int(candidates.draft_tokens[child]))
        node = child


def verify_rejection(
    chain: Draft, d2t: Tensor | None, target_probs: Tensor, uniforms: Tensor, final_uniform: Tensor
) -> Accepted:
    """Rejection sampling (arXiv 2211.17192) of a drawn chain against target_probs [K + 1, V]; emits the latter's
    distribution.

    Draft probabilities live in the draft vocabulary and are scattered through d2t; ids outside it have probability 0.
    Token i is accepted with min(1, p/q); at the first refusal the token is drawn from max(p - q, 0), after the last one
    from p.
    """
    assert chain.probs is not None
    ids = torch.arange(chain.probs.shape[1])
    ids = ids if d2t is None else ids + d2t
    for i, token in enumerate(chain.tokens.tolist()):
        p = target_probs[i].double()
        q = torch.zeros_like(p).index_add_(0, ids, chain.probs[i].double())
        if not float(uniforms[i]) * q[token] < p[token]:
            rest = (p - q).clamp(min=0)
            rest = rest if float(rest.sum()) > 0 else p
            return Accepted(list(range(i + 1)), [*chain.tokens[:i].tolist(), int(inverse_cdf(rest, final_uniform))])
    return Accepted(list(range(len(chain.tokens) + 1)),
                    [*chain.tokens.tolist(), int(inverse_cdf(target_probs[len(chain.tokens)], final_uniform))])


# -------------------------------------------------------------------------------------------------------------- helpers


def _child_with(candidates: VerifyTree, node: int, token: int) -> int:
    child = int(candidates.retrieve_next_token[node])
    while child >= 0 and int(candidates.draft_tokens[child]) != token:
        child = int(candidates.retrieve_next_sibling[child])
    return child


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _finite(x: Tensor) -> Tensor:
    """Zero where not finite: a NaN in the cache would void every later draft of all requests that share the prefix."""
    return torch.where(torch.isfinite(x), x, torch.zeros((), dtype=x.dtype))


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(x.shape[0], -1, head_dim)
