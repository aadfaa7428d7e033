"""The weight-streaming chain: PyTorch's error twice at most, the plain chain's drafts, the same bits however launched.

bench/steps.cu (`bench_steps check`) holds each of its kernels to a plain one; bench/delays.cu delays each launch of a
cycle in turn over poisoned buffers; here it runs in whole cycles.
"""

from __future__ import annotations

import pytest
import torch
from support.cuda_rig import CudaRig, chain_log_probs
from support.models import make_config, random_weights
from support.rig import Ask, Layout

from eaglex import reference
from eaglex.config import AuxNorm, DraftConfig, EmbeddingNorm, NextHidden, Residual, SpeculationConfig

pytestmark = pytest.mark.gpu

CHAIN = SpeculationConfig(num_steps=4)
TREE = SpeculationConfig(num_steps=4, topk=4, num_draft_tokens=16)
STREAMS, PLAIN = "cuda", "cuda, plain chain"

SHAPES = {
    "gqa": {"head_dim": 64, "num_heads": 8, "num_kv_heads": 2},
    "half rotary, odd sizes": {"head_dim": 128, "num_heads": 4, "num_kv_heads": 1, "rotary_dim": 64,
                               "hidden_size": 320, "target_hidden_size": 192, "intermediate_size": 448,
                               "draft_vocab_size": 701},
    "mha, aux norms": {"head_dim": 96, "num_heads": 2, "num_kv_heads": 2, "aux_norm": AuxNorm.EACH,
                       "residual": Residual.NORMED, "next_hidden": NextHidden.NORMED},
    "two layers, wide heads": {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1, "num_layers": 2,
                               "aux_norm": AuxNorm.WHOLE, "embedding_norm": EmbeddingNorm.NONE},
}


def config_of(name: str) -> DraftConfig:
    return make_config(**({"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 512, "vocab_size": 900,
                           "draft_vocab_size": 700, "max_positions": 512} | SHAPES[name]))


def make_rig(config: DraftConfig, speculation: SpeculationConfig, *, share: CudaRig | None = None,
             **layout: int) -> CudaRig:
    weights = random_weights(config, dtype=torch.bfloat16) if share is None else share.weights
    return CudaRig(config, speculation, weights=weights, share=share,
                   layout=Layout(**({"kv_dtype": torch.bfloat16, "aux_dtype": torch.bfloat16, "num_slots": 40,
                                     "max_batch": 32, "max_rows": 200} | layout)))


@pytest.mark.parametrize("name", SHAPES)
def test_error_is_at_most_twice_pytorchs(name) -> None:
    """Log-probabilities of the tokens that the engine chose, per step, against float64: twice PyTorch's error."""
    config = config_of(name)
    rig = make_rig(config, CHAIN)
    assert rig.engine.backend_name == STREAMS
    requests = range(32)
    caches: dict[tuple[int, int], reference.DraftCache] = {}
    for request in requests:
        rig.join(request, 1 + request)
    errors, allowed = [], []
    for cycle, rows in enumerate((6, 2, 5, 5)):
        asks = [Ask(r, rows, rows if cycle == 0 else 1 + r % rows) for r in requests]
        rig.engine.run(rig.batch(asks))
        results = rig.results
        for ask in asks:
            slot = rig.requests[ask.request].slot
            aux, ids = rig.rows_of(ask)
            assert int(results.num_nodes[slot]) == 4
            tokens = results.draft_tokens[slot]
            steps = torch.diff(results.scores[slot].double(), prepend=torch.zeros(1, dtype=torch.float64))
            drafted = tokens if rig.weights.d2t is None else draft_ids(rig, tokens)
            both = []
            for weights in (rig.wide, rig.weights):
                empty = reference.DraftCache.empty(config, weights.fc.dtype)
                cache = caches.setdefault((ask.request, id(weights)), empty)
                local = reference.DraftCache(list(cache.k), list(cache.v))
                rows_of_step = chain_log_probs(config, weights, local, aux[: ask.count], ids[: ask.count], tokens)
                both.append(rows_of_step.gather(1, drafted.view(-1, 1)).view(-1))
                length = rig.requests[ask.request].length + ask.count
                cache.k, cache.v = ([t[:length] for t in tensors] for tensors in (local.k, local.v))
            exact, plain = both
            errors.append((steps - exact).square())
            allowed.append((plain - exact).square())
            rig.requests[ask.request].length += ask.count
    error, plain_error = (torch.stack(e).mean(0).sqrt() for e in (errors, allowed))
    assert bool((error <= 2 * plain_error).all()), f"per step {error.tolist()} against {plain_error.tolist()}"


def draft_ids(rig: CudaRig, tokens: torch.Tensor) -> torch.Tensor:
    """Draft-vocabulary ids of target tokens."""
    assert rig.weights.d2t is not None
    targets = torch.arange(len(rig.weights.d2t)) + rig.weights.d2t.cpu()
    return (targets.view(1, -1) == tokens.view(-1, 1)).int().argmax(1)


def state(rig: CudaRig) -> list[torch.Tensor]:
    r = rig.engine.results
    return [t.clone() for t in (r.draft_tokens, r.parents, r.scores, r.num_nodes, r.drafted_for, r.counters)]


def drive(rig: CudaRig, schedule: list[list[Ask | None]]) -> list[list[torch.Tensor]]:
    """The results after each cycle, requests 0..31 in slots 1..32, lengths as the schedule's."""
    seen = []
    for request in range(32):
        rig.join(request, 1 + request)
    for asks in schedule:
        rig.engine.run(rig.batch(asks))
        for ask in asks:
            if ask is not None:
                rig.requests[ask.request].length += ask.count
        seen.append(state(rig))
    return seen


def schedule(nodes: int) -> list[list[Ask | None]]:
    """Prompts, batches of 1 to 32 with pads, accept lengths of all sizes, a held prompt chunk."""
    cycles: list[list[Ask | None]] = [[Ask(r, 9 + 3 * r) for r in range(part, part + 4)] for part in range(0, 32, 4)]
    for i, size in enumerate((1, 2, 5, 8, 9, 16, 17, 32, 3)):
        asks: list[Ask | None] = [Ask((r * 7 + i) % 32, nodes, 1 + (r + i) % nodes, draft_from=(r + i) % 5 != 3)
                                  for r in range(size)]
        if size in (2, 9):
            asks[0] = None
        cycles.append(asks)
    cycles.append([Ask(5, 12, draft_from=False)])
    return cycles


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_with_and_without_dependent_launch(name, speculation, monkeypatch) -> None:
    """With PDL off kernels run one after the other: a read before its wait would show as another result."""
    config = config_of(name)
    cycles = schedule(speculation.num_draft_tokens)
    limits = {"max_rows": 512}
    first = drive(make_rig(config, speculation, **limits), cycles)
    again = drive(make_rig(config, speculation, **limits), cycles)
    monkeypatch.setenv("EAGLEX_PDL", "0")
    serial = drive(make_rig(config, speculation, **limits), cycles)
    for cycle, (a, b, c) in enumerate(zip(first, again, serial, strict=True)):
        for x, y, z in zip(a, b, c, strict=True):
            assert torch.equal(x, y), f"two engines differ in cycle {cycle}"
            assert torch.equal(x, z), f"with EAGLEX_PDL=0 cycle {cycle} differs"


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_the_plain_chain(name, speculation, monkeypatch) -> None:
    """Node by node until rounding decides: where tokens differ, the scores of both must be close all the same."""
    config = config_of(name)
    cycles = schedule(speculation.num_draft_tokens)
    limits = {"max_rows": 512}
    fast = drive(make_rig(config, speculation, **limits), cycles)
    monkeypatch.setenv("EAGLEX_CHAIN", "plain")
    rig = make_rig(config, speculation, **limits)
    assert rig.engine.backend_name == PLAIN
    plain = drive(rig, cycles)
    equal = drafts = 0
    for a, b in zip(fast, plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[3:], b[3:], strict=True)), "num_nodes, drafted_for or counters"
        for slot in torch.nonzero(a[3]).view(-1).tolist():
            drafts += 1
            same = bool((a[0][slot] == b[0][slot]).all() and (a[1][slot] == b[1][slot]).all())
            equal += same
            best = (float(x[2][slot].max()) for x in (a, b))
            torch.testing.assert_close(*best, rtol=0, atol=0.08)
            if same:
                torch.testing.assert_close(a[2][slot], b[2][slot], rtol=0, atol=0.25)
    assert drafts > 100
    assert equal > (0.8 if speculation is CHAIN else 0.6) * drafts, f"{equal} of {drafts} drafts are the same"


@pytest.mark.parametrize(("field", "value"), [("aux_dtype", torch.float32), ("aux_gap", 4)])
def test_rows_that_cannot_be_streamed_take_the_plain_fuse(field, value) -> None:
    """fp32 rows, and rows 8 bytes out of line: the same draft as from aligned bf16 rows of the same values."""
    config = config_of("gqa")
    usual, other = make_rig(config, CHAIN), make_rig(config, CHAIN, **{field: value})
    assert other.engine.backend_name == STREAMS
    for rig in (usual, other):
        for request in range(3):
            rig.join(request, 1 + request)
    generator = torch.Generator().manual_seed(3)
    for rows in (7, 3, 3):
        aux = torch.randn(3, rows, config.aux_width, generator=generator).bfloat16()
        ids = torch.randint(config.vocab_size, (3, rows), generator=generator)
        for rig in (usual, other):
            dtype = rig.layout.aux_dtype
            rig.engine.run(rig.batch([Ask(r, rows, aux=aux[r].to(dtype), ids=ids[r]) for r in range(3)]))
            for r in range(3):
                rig.requests[r].length += rows
        torch.testing.assert_close(usual.results.scores[1:4], other.results.scores[1:4], rtol=0, atol=0.1)
        assert torch.equal(usual.results.num_nodes, other.results.num_nodes)


@pytest.mark.parametrize("change", [{"intermediate_size": 500}, {"head_dim": 80, "num_heads": 4}, {"rotary_dim": 24}],
                         ids=str)
def test_what_cannot_be_streamed_takes_the_plain_chain(change) -> None:
    config = make_config(**({"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 512, "vocab_size": 900,
                             "draft_vocab_size": 700, "head_dim": 64} | change))
    assert make_rig(config, CHAIN).engine.backend_name == PLAIN


def test_a_wrong_name_of_a_chain_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("EAGLEX_CHAIN", "quick")
    with pytest.raises(Exception, match="EAGLEX_CHAIN: expected plain or fast, got quick"):
        make_rig(config_of("gqa"), CHAIN)
