"""Any test's draft in the sizes and types that the fast chain streams, and the rig that holds its drafts to float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from eaglex import reference
from eaglex.config import DraftConfig, SpeculationConfig
from eaglex.weights import DraftWeights
from support.cuda_rig import CudaRig
from support.judge import Judge, Side
from support.margin import recorded
from support.models import make_config, random_weights
from support.rig import Ask, Layout, Outcome, Rig

STREAMS, PLAIN = "cuda", "cuda, plain chain"
HEAD_DIMS = (64, 96, 128, 256)


def streamed(config: DraftConfig) -> DraftConfig:
    """The same switches, layers, heads, vocabulary and positions in widths and head dims that stream."""
    def width(size: int) -> int:
        return size if size % 64 == 0 else 64 * (2 + size % 3)

    head_dim = config.head_dim if config.head_dim in HEAD_DIMS else 128 if config.head_dim == 10 else 64
    rotary = max(16, round(config.rotary_dim / config.head_dim * head_dim / 16) * 16)
    return dataclasses.replace(
        config, hidden_size=width(config.hidden_size), target_hidden_size=width(config.target_hidden_size),
        intermediate_size=width(config.intermediate_size), head_dim=head_dim, rotary_dim=min(rotary, head_dim))


def make_streamed_config(**changes: object) -> DraftConfig:
    """A draft of 256 wide states and eight heads over two; any field may be changed."""
    return make_config(**({"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 512, "num_heads": 8,
                           "num_kv_heads": 2, "head_dim": 64, "vocab_size": 900, "draft_vocab_size": 700,
                           "max_positions": 512} | changes))


@dataclasses.dataclass
class Judged(Outcome):
    """An outcome with both sides of the judgement."""

    exact: Side
    plain: Side


class StreamedRig(CudaRig):
    """A rig whose engine runs the fast chain: bf16 in weights, rows and pool. `compare` judges instead of comparing.

    Takes the arguments of any test and maps them: see `streamed`. Weights of another shape are replaced by random ones.
    """

    dtype = torch.bfloat16
    backend = STREAMS
    pad = False  # every batch to max_batch lanes: then all run in one graph, and a request's bits depend on it alone

    def __init__(self, config: DraftConfig, speculation: SpeculationConfig, *, layout: Layout | None = None,
                 weights: DraftWeights | None = None, share: Rig | None = None) -> None:
        config = streamed(config)
        if weights is not None and weights.fc.shape[0] != config.hidden_size:
            weights = None
        if weights is None and share is None:
            weights = random_weights(config, dtype=self.dtype)
        layout = layout or (share.layout if share else Layout())
        layout = self.layout_of(layout)
        self.judge = Judge(config, speculation)
        self.plain: dict[int, reference.DraftCache] = share.plain if isinstance(share, StreamedRig) else {}
        super().__init__(config, speculation, layout=layout, weights=weights, share=share)
        self.check_backend()

    def layout_of(self, layout: Layout) -> Layout:
        return dataclasses.replace(layout, kv_dtype=self.dtype, aux_dtype=self.dtype, aux_gap=8 * layout.aux_gap)

    def check_backend(self) -> None:
        assert self.engine.backend_name == self.backend

    def batch(self, asks: list[Ask | None]) -> Any:
        missing = self.layout.max_batch - len(asks) if self.pad else 0
        return super().batch([*asks, *[None] * missing])

    def join(self, request: int, slot: int, start: int = 0) -> None:
        super().join(request, slot, start)
        self.plain[request] = reference.DraftCache.empty(self.config, self.dtype, start)

    def fill(self, request: int, slot: int, length: int, seed: int = 0) -> None:
        super().fill(request, slot, length, seed)
        exact, plain = self.requests[request].cache, self.plain[request]
        for layer in range(self.config.num_layers):
            plain.k[layer], plain.v[layer] = exact.k[layer].to(self.dtype), exact.v[layer].to(self.dtype)

    def _expect(self, ask: Ask) -> Judged:
        request = self.requests[ask.request]
        aux, ids = self.rows_of(ask)
        request.length += ask.count
        sides = []
        for weights, cache in ((self.wide, request.cache), (self.weights, self.plain[ask.request])):
            logits, hidden = reference.extend(self.config, weights, cache, aux[: ask.count].to(weights.fc.dtype),
                                              ids[: ask.count])
            at = reference.DraftCache(list(cache.k), list(cache.v), cache.start)
            sides.append(Side(weights, at, logits, hidden))
        exact, plain = sides
        drafted = reference.Draft.none()
        with recorded() as margin:
            if ask.draft_from:
                drafted = reference.draft(self.config, exact.weights, exact.cache, exact.logits, exact.hidden,
                                          self.speculation)
        return Judged(ask.request, request.slot, request.length, drafted, margin.gap, lambda _: drafted, exact, plain)

    def compare(self, outcomes: list[Outcome], *, scores: float = 0.0, clear: float = 0.0) -> int:
        """Judges every draft; returns how many there were. `scores` and `clear` are those of float32, and unused."""
        results, judged = self.results, 0
        for outcome in outcomes:
            assert isinstance(outcome, Judged)
            slot, size = outcome.slot, int(results.num_nodes[outcome.slot])
            assert int(results.drafted_for[slot]) == outcome.new_len
            actual = reference.Draft(results.draft_tokens[slot, :size], results.parents[slot, :size].long(),
                                     results.scores[slot, :size])
            # Where a draft may stop early, rounding decides where it does; test_early_stop looks at that.
            if self.speculation.stop_below == 0:
                assert size == len(outcome.drafted.tokens)
            assert bool((actual.parents < torch.arange(1, size + 1)).all())
            self.judge.take(actual, outcome.exact, outcome.plain)
            judged += 1
        if self.judge.regrets:
            self.judge.check_choices()
            self.judge.check()
        return judged

    def compare_pool(self, *, atol: float = 0.0) -> None:
        """K and V within rounding (values are around 1, two layers deep), and exactly nobody else's touched."""
        super().compare_pool(atol=max(atol, 0.05))


class PaddedRig(StreamedRig):
    """Bits may be compared: every cycle of up to max_batch lanes runs in the largest graph."""

    pad = True


class PlainChainRig(StreamedRig):
    """The same under EAGLEX_CHAIN=plain, or in a type that does not stream."""

    backend = PLAIN
