"""The CUDA engine is held to every test of the CPU engine, unchanged, and to those that only a GPU can fail."""

from __future__ import annotations

import pytest
import test_early_stop
import test_engine
import test_engine_isolation
import torch
from support.cuda_rig import CudaRig, chain_log_probs
from support.models import make_config, random_weights, rejection
from support.rig import Ask, Layout, Rig
from test_early_stop import *  # noqa: F403
from test_engine import *  # noqa: F403
from test_engine_isolation import *  # noqa: F403

from eaglex import reference
from eaglex.config import SpeculationConfig

pytestmark = pytest.mark.gpu

# The CPU keeps activations in float32; the error rule below takes its place.
del test_16_bit_weights_and_rows  # noqa: F821


@pytest.fixture(autouse=True, scope="module")
def _on_cuda():
    with pytest.MonkeyPatch.context() as patch:
        for module in (test_early_stop, test_engine, test_engine_isolation):
            patch.setattr(module, "Rig", CudaRig)
        yield


SHAPES = [
    {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2},
    {"head_dim": 96, "num_heads": 2, "num_kv_heads": 2},
    {"head_dim": 128, "num_heads": 8, "num_kv_heads": 1, "rotary_dim": 64},
    {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1, "num_layers": 2},
    {"head_dim": 10, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 50, "intermediate_size": 70,
     "target_hidden_size": 34},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_16_bit_error_is_at_most_twice_pytorchs(shape, dtype) -> None:
    """Log-probabilities of every step of the chain that the engine drew, against float64: twice PyTorch's error."""
    config = make_config(**({"hidden_size": 256, "target_hidden_size": 128, "intermediate_size": 384, "vocab_size": 900,
                             "draft_vocab_size": 700, "max_positions": 256} | shape))
    rig = CudaRig(config, rejection(4), weights=random_weights(config, dtype=dtype),
                  layout=Layout(aux_dtype=dtype, kv_dtype=dtype))
    requests = range(6)
    caches = {}
    for request in requests:
        rig.join(request, 1 + request)
    for rows in (16, 5):
        asks = [Ask(r, rows, rows if rows == 16 else 1 + r % 5, temperature=1.0) for r in requests]
        rig.engine.run(rig.batch(asks))
        errors, allowed = [], []
        for ask in asks:
            slot = rig.requests[ask.request].slot
            aux, ids = rig.rows_of(ask)
            tokens = rig.results.draft_tokens[slot]
            assert int(rig.results.num_nodes[slot]) == 4
            actual = rig.results.draft_probs[slot].double().log()
            both = []
            for weights in (rig.wide, rig.weights):
                empty = reference.DraftCache.empty(config, weights.fc.dtype)
                cache = caches.setdefault((ask.request, id(weights)), empty)
                local = reference.DraftCache(list(cache.k), list(cache.v))
                both.append(chain_log_probs(config, weights, local, aux[: ask.count], ids[: ask.count], tokens))
                length = rig.requests[ask.request].length + ask.count  # without the drafted nodes
                cache.k, cache.v = ([t[:length] for t in tensors] for tensors in (local.k, local.v))
            exact, plain = both
            errors.append((actual - exact).square().mean(-1))
            allowed.append((plain - exact).square().mean(-1))
            rig.requests[ask.request].length += ask.count
        error, plain_error = (torch.stack(e).mean(0).sqrt() for e in (errors, allowed))
        assert bool((error <= 2 * plain_error).all()), f"per step {error.tolist()} against {plain_error.tolist()}"


@pytest.mark.parametrize("layers", [1, 2])
def test_prompts_and_vocabularies_in_chunks(layers) -> None:
    """Prompts, heads and frontiers so large that every internal buffer is passed through more than once."""
    config = make_config(hidden_size=16, num_heads=64, num_kv_heads=4, head_dim=256, num_layers=layers,
                         vocab_size=200_000, draft_vocab_size=199_000, max_positions=1024)
    speculation = SpeculationConfig(num_steps=2, topk=16, num_draft_tokens=64)
    rig = CudaRig(config, speculation, layout=Layout(max_rows=700))
    for request in range(6):
        rig.join(request, 1 + request)
    compared = rig.compare(rig.cycle([Ask(0, 650)]), clear=1e-6)
    asks = [Ask(r, 3, 2) for r in range(6)]
    rig.engine.run(rig.batch(asks))
    compared += rig.compare([rig._expect(asks[0]), rig._expect(asks[5])], clear=1e-6)
    assert compared >= 1


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [1, 4])
def test_long_contexts(topk, kv_dtype) -> None:
    """131,000 positions beside 33 and 2,049, in one batch."""
    config = make_config(head_dim=64, num_heads=2, num_kv_heads=1, max_positions=131_072)
    speculation = SpeculationConfig(num_steps=3, topk=topk, num_draft_tokens=4 if topk == 1 else 12)
    rig = CudaRig(config, speculation, layout=Layout(num_slots=4, kv_dtype=kv_dtype, page_size=64))
    for request, length in enumerate((131_000, 33, 2049)):
        rig.fill(request, 1 + request, length, seed=request)
    loose = {} if kv_dtype == torch.float32 else {"scores": 2e-3, "clear": 5e-3}
    assert rig.compare(rig.cycle([Ask(r, 4, 1 + r) for r in range(3)]), **loose) >= 1


def test_the_widest_tree() -> None:
    """16 steps of topk 16: 3,856 candidates, 240 drafted nodes, 64 kept."""
    config = make_config(vocab_size=5000, draft_vocab_size=4500, max_positions=256)
    rig = CudaRig(config, SpeculationConfig(num_steps=16, topk=16, num_draft_tokens=64), layout=Layout(max_batch=3))
    rig.join(0, 2)
    outcomes = rig.cycle([None, Ask(0, 9, 5), None])
    # With thousands of decisions some gap is always small; the scores of what was kept must agree all the same.
    for outcome in outcomes:
        actual = rig.drafted(outcome.slot)
        assert len(actual.tokens) == 63
        scores = (t.scores.double().sort().values for t in (actual, outcome.drafted))
        torch.testing.assert_close(*scores, rtol=0, atol=2e-4)
        assert bool((actual.parents < torch.arange(1, 64)).all())


def test_a_row_that_is_not_finite_costs_its_own_draft_only() -> None:
    rig = CudaRig(make_config(), test_engine.TREE)
    for request in (0, 1):
        rig.join(request, 1 + request)
    rig.cycle([Ask(0, 5), Ask(1, 5)])
    before = rig.engine.counters()
    poison = torch.full((3, rig.config.aux_width), float("nan"))
    batch = rig.batch([Ask(0, 3, aux=poison), Ask(1, 3)])
    rig.engine.run(batch)
    rig.requests[1].length += 3
    assert int(rig.results.num_nodes[1]) == 0
    assert int(rig.results.num_nodes[2]) == test_engine.TREE.num_draft_tokens - 1
    assert rig.engine.counters()["not_finite"] == before["not_finite"] + 1
    assert bool(rig._pool[0][0][rig._table[1, :8].long()].isfinite().all())


def test_bad_indices_touch_nothing() -> None:
    """Ids, lengths and slots out of range: the request is refused on the device, its neighbour drafts."""
    rig = CudaRig(make_config(), test_engine.TREE)
    for request in range(4):
        rig.join(request, 1 + request)
    rig.cycle([Ask(r, 5) for r in range(4)])
    for damage in ("token", "slot", "length", "rows", "kv"):
        pool = [[t.clone() for t in tensors] for tensors in rig._pool]
        batch = rig.batch([Ask(0, 3), Ask(1, 3)])
        if damage == "token":
            batch.input_ids[1] = rig.config.vocab_size
        elif damage == "slot":
            batch.req_pool_indices[0] = rig.layout.num_slots
        elif damage == "length":
            batch.seq_lens[0] = rig.config.max_positions
        elif damage == "rows":
            batch.num_valid[0] = 4
        else:
            rig._table[1, rig.requests[0].length + 1] = rig._pool[0][0].shape[0]
        before = rig.engine.counters()
        rig.engine.run(batch)
        after = rig.engine.counters()
        assert after["bad_index"] == before["bad_index"] + 1, damage
        assert after["drafted"] == before["drafted"] + 1, damage
        mine = rig.table[1].long()
        for old, new in zip(pool, rig._pool, strict=True):
            assert torch.equal(old[0][mine].nan_to_num(), new[0][mine].nan_to_num()), damage


def test_cpu_and_cuda_engines_agree() -> None:
    """The same schedule through both: the same ids where the reference's decisions are clear."""
    rigs = [kind(make_config(num_layers=2), test_engine.TREE) for kind in (Rig, CudaRig)]
    for rig in rigs:
        for request in range(3):
            rig.join(request, 1 + request)
    for asks in ([Ask(r, 6) for r in range(3)], [Ask(2, 5, 3), Ask(0, 5, 1)], [Ask(1, 5, 5)]):
        outcomes = [rig.cycle(list(asks)) for rig in rigs]
        for outcome in outcomes[0]:
            if outcome.margin > 1e-4:
                cpu, cuda = (rig.drafted(outcome.slot) for rig in rigs)
                assert torch.equal(cpu.tokens, cuda.tokens)
                assert torch.equal(cpu.parents, cuda.parents)
                torch.testing.assert_close(cpu.scores, cuda.scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_rows_are_written_where_the_host_says(id_dtype) -> None:
    """A slot given away while its last draft runs, to a request that shares a prefix: out_cache_loc keeps it whole."""
    rig = CudaRig(make_config(), SpeculationConfig(num_steps=3))
    for request in (0, 1):
        rig.join(request, 1 + request)
    rig.cycle([Ask(0, 6), Ask(1, 4)])
    batch, length = rig.batch([Ask(1, 3)]), rig.requests[1].length
    batch.out_cache_loc = rig._table[2, length: length + 3].to(id_dtype, copy=True)
    shared = rig._table[1, :6].long()
    before = [pool[0][shared].clone() for pool in rig._pool]
    rig._table[2] = rig._table[1]
    rig.engine.run(batch)
    assert all(torch.equal(pool[0][shared], then) for pool, then in zip(rig._pool, before, strict=True))
    assert all(bool(pool[0][batch.out_cache_loc.long()].isfinite().all()) for pool in rig._pool)
