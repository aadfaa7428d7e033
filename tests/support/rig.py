"""An engine with the reference beside it: the same rows go to both, results are compared by request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from eaglex import reference
from eaglex.config import DraftConfig, EngineLimits, Sampling, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine, DraftResults
from eaglex.weights import DraftWeights
from support.margin import kv_rounded_to, recorded
from support.models import random_weights, widened

CLEAR = 1e-4  # a reference decision with a smaller gap says nothing about float32


@dataclasses.dataclass
class Ask:
    """What one request brings to a cycle: `rows` rows of which the first `valid` count (all where None)."""

    request: int
    rows: int
    valid: int | None = None
    draft_from: bool = True
    temperature: float = 0.0
    aux: Tensor | None = None
    ids: Tensor | None = None

    @property
    def count(self) -> int:
        return self.rows if self.valid is None else self.valid


@dataclasses.dataclass
class Request:
    """A request's slot, its length and the reference's K and V."""

    slot: int
    cache: reference.DraftCache
    length: int = 0


@dataclasses.dataclass
class Outcome:
    """What the reference drafted for a request, by what margin, and how to draft it again in another precision."""

    request: int
    slot: int
    new_len: int
    drafted: reference.Draft
    margin: float
    again: Callable[[DraftWeights], reference.Draft]


@dataclasses.dataclass(kw_only=True)
class Layout:
    """How the host lays out its memory and ids."""

    kv_dtype: torch.dtype = torch.float32
    aux_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int64
    page_size: int = 1
    aux_gap: int = 0  # elements between rows of aux_hidden_states
    seed: int = 0
    num_slots: int = 8
    max_batch: int = 6
    max_rows: int = 96
    context: int = 0  # width of req_to_token, max_positions where 0
    token_table_bytes: int = 2**30


def worst(left: reference.Draft, right: reference.Draft) -> float:
    """The largest difference of two drafts' scores."""
    return float((left.scores.double() - right.scores.double()).abs().max()) if len(left.scores) else 0.0


class Rig:
    """One engine on the CPU over a KV pool full of NaN, in pages dealt at random, and one float64 reference per
    request.
    """

    def __init__(
        self,
        config: DraftConfig,
        speculation: SpeculationConfig,
        *,
        layout: Layout | None = None,
        weights: DraftWeights | None = None,
        share: Rig | None = None,
    ) -> None:
        self.config, self.speculation = config, speculation
        self.layout = layout or (share.layout if share else Layout())
        self.weights = weights or (share.weights if share else random_weights(config))
        self.wide, self.narrow = (widened(self.weights, config, dtype) for dtype in (torch.float64, torch.float32))
        self.requests: dict[int, Request] = {} if share is None else share.requests
        if share is None:
            self._lay_out()
        else:
            self.table, self.draft_k, self.draft_v = share.table, share.draft_k, share.draft_v
        self.engine = self.build()

    def _lay_out(self) -> None:
        layout, page = self.layout, self.layout.page_size
        context = layout.context or self.config.max_positions
        per_slot = math.ceil(context / page)
        generator = torch.Generator().manual_seed(layout.seed)
        pages = torch.randperm(layout.num_slots * per_slot + 3, generator=generator)[: layout.num_slots * per_slot]
        places = pages.view(layout.num_slots, per_slot, 1) * page + torch.arange(page)
        self.table = places.view(layout.num_slots, -1)[:, :context].int().contiguous()
        shape = ((layout.num_slots * per_slot + 3) * page, self.config.num_kv_heads, self.config.head_dim)
        self.draft_k, self.draft_v = (
            [torch.full(shape, math.nan, dtype=layout.kv_dtype) for _ in range(self.config.num_layers)]
            for _ in range(2)
        )

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            max_batch=self.layout.max_batch, max_rows=self.layout.max_rows, num_slots=self.layout.num_slots,
            token_table_bytes=self.layout.token_table_bytes,
        )  # fmt: skip

    def build(self) -> DraftEngine:
        return DraftEngine(
            self.config,
            self.speculation,
            limits=self.limits,
            weights=self.weights,
            req_to_token=self.table,
            draft_k=self.draft_k,
            draft_v=self.draft_v,
        )

    @property
    def results(self) -> DraftResults:
        return self.engine.results

    def join(self, request: int, slot: int, start: int = 0) -> None:
        """A request takes a slot; its first `start` positions have no K and V."""
        self.table[slot, :start] = -1
        self.requests[request] = Request(slot, reference.DraftCache.empty(self.config, torch.float64, start), start)

    def rows_of(self, ask: Ask) -> tuple[Tensor, Tensor]:
        """The request's rows at its length: the same values in whatever batch, rows beyond `count` are poison."""
        length = self.requests[ask.request].length
        generator = torch.Generator().manual_seed(1_000_003 * ask.request + length + 17)
        aux = torch.randn(ask.rows, self.config.aux_width, generator=generator)
        ids = torch.randint(0, self.config.vocab_size, (ask.rows,), generator=generator)
        aux = (aux if ask.aux is None else ask.aux).to(self.layout.aux_dtype).clone()
        ids = (ids if ask.ids is None else ask.ids).clone()
        aux[ask.count :], ids[ask.count :] = math.nan, 2**30
        return aux, ids

    def batch(self, asks: list[Ask | None]) -> DraftBatch:
        """The cycle's input; None is a padded lane of one row in slot 0, full of poison."""
        aux, ids, slots, lens, counts, valid, live, heat = [], [], [], [], [], [], [], []
        for ask in asks:
            if ask is None:
                a, i = torch.full((1, self.config.aux_width), math.nan).to(self.layout.aux_dtype), torch.tensor([-5])
            else:
                a, i = self.rows_of(ask)
            aux.append(a)
            ids.append(i)
            counts.append(len(i))
            slots.append(0 if ask is None else self.requests[ask.request].slot)
            lens.append(0 if ask is None else self.requests[ask.request].length)
            valid.append(1 if ask is None else ask.count)
            live.append(ask is None or ask.draft_from)
            heat.append(0.0 if ask is None else ask.temperature)
        width, rows = self.config.aux_width, sum(counts)
        wide = torch.full((rows, width + self.layout.aux_gap), math.nan, dtype=self.layout.aux_dtype)
        wide[:, :width] = torch.cat(aux)
        sampled = self.speculation.sampling is Sampling.REJECTION
        return DraftBatch(
            aux_hidden_states=wide[:, :width],
            input_ids=torch.cat(ids).to(self.layout.id_dtype),
            row_start=torch.tensor([0, *counts]).cumsum(0).int(),
            num_valid=torch.tensor(valid, dtype=torch.int32),
            draft_from=torch.tensor(live),
            req_pool_indices=torch.tensor(slots, dtype=self.layout.id_dtype),
            seq_lens=torch.tensor(lens, dtype=self.layout.id_dtype),
            temperatures=torch.tensor(heat) if sampled else None,
            uniforms=torch.stack([self.uniforms(ask) for ask in asks]) if sampled else None,
        )

    def uniforms(self, ask: Ask | None) -> Tensor:
        if ask is None:
            return torch.zeros(self.speculation.num_steps)
        seed = 7919 * ask.request + self.requests[ask.request].length
        return torch.rand(self.speculation.num_steps, generator=torch.Generator().manual_seed(seed))

    def cycle(self, asks: list[Ask | None], *, enqueue: bool = False) -> list[Outcome]:
        """One cycle through both; the outcomes are the reference's, in the order of the asks that are no pads."""
        batch = self.batch(asks)
        (self.engine.enqueue if enqueue else self.engine.run)(batch)
        return [self._expect(ask) for ask in asks if ask is not None]

    def _expect(self, ask: Ask) -> Outcome:
        request = self.requests[ask.request]
        aux, ids = self.rows_of(ask)
        uniforms = self.uniforms(ask) if ask.temperature > 0 else None
        before = reference.DraftCache(list(request.cache.k), list(request.cache.v), request.cache.start)
        request.length += ask.count

        def draft(weights: DraftWeights, cache: reference.DraftCache) -> reference.Draft:
            with kv_rounded_to(self.layout.kv_dtype):
                logits, hidden = reference.extend(
                    self.config, weights, cache, aux[: ask.count].to(weights.fc.dtype), ids[: ask.count]
                )
                if not ask.draft_from:
                    return reference.Draft.none()
                return reference.draft(
                    self.config, weights, cache, logits, hidden, self.speculation, ask.temperature, uniforms
                )

        def again(weights: DraftWeights) -> reference.Draft:
            dtype = weights.fc.dtype
            k, v = ([t.to(dtype) for t in tensors] for tensors in (before.k, before.v))
            return draft(weights, reference.DraftCache(k, v, before.start))

        with recorded() as margin:
            drafted = draft(self.wide, request.cache)
        return Outcome(ask.request, request.slot, request.length, drafted, margin.gap, again)

    def drafted(self, slot: int) -> reference.Draft:
        """What the engine holds for a slot, as the reference would say it."""
        n = int(self.results.num_nodes[slot])
        return reference.Draft(
            self.results.draft_tokens[slot, :n], self.results.parents[slot, :n].long(), self.results.scores[slot, :n]
        )

    def compare(self, outcomes: list[Outcome], *, scores: float = 1e-5, clear: float = CLEAR) -> int:
        """Engine against reference, exactly in ids and structure; returns how many drafts were clear enough
        to compare.
        """
        compared = 0
        for outcome in outcomes:
            slot = outcome.slot
            assert int(self.results.drafted_for[slot]) == outcome.new_len
            if outcome.margin < clear:
                continue
            actual = self.drafted(slot)
            assert actual.tokens.tolist() == outcome.drafted.tokens.tolist()
            assert actual.parents.tolist() == outcome.drafted.parents.tolist()
            error = worst(actual, outcome.drafted)
            # A score is a sum of a log-probability per step. More is allowed only where plain float32 PyTorch is as far
            # off: an ill-conditioned draw.
            if error > scores * self.speculation.num_steps:
                assert error <= 5 * worst(outcome.again(self.narrow), outcome.drafted)
            compared += 1
        return compared

    def fetch_pool(self) -> None:
        """Brings `draft_k` and `draft_v` up to date where the engine's pool is elsewhere."""

    def compare_pool(self, *, atol: float = 1e-5) -> None:
        """The pool holds the K and V of the live requests' positions, NaN wherever nobody wrote."""
        self.fetch_pool()
        untouched = torch.ones(len(self.draft_k[0]), dtype=torch.bool)
        for request in self.requests.values():
            at = self.table[request.slot, request.cache.start : request.length].long()
            untouched[at] = False
            for layer in range(self.config.num_layers):
                for pool, cache in ((self.draft_k, request.cache.k), (self.draft_v, request.cache.v)):
                    torch.testing.assert_close(pool[layer][at].double(), cache[layer].double(), rtol=0, atol=atol)
        for pool in (*self.draft_k, *self.draft_v):
            assert bool(pool[untouched].isnan().all()), "a KV slot was written that no request owns"

    def snapshot(self, slot: int) -> tuple[Tensor, ...]:
        """The slot's results, for comparison bit by bit."""
        r = self.results
        return tuple(t[slot].clone() for t in (r.num_nodes, r.draft_tokens, r.parents, r.scores, r.drafted_for))
