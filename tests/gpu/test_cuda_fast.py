"""The weight-streaming chain: PyTorch's error twice at most, the plain chain's drafts, the same bits however launched.

bench/steps.cu (`bench_steps check`) holds each of its kernels to a plain one; bench/delays.cu delays each launch of a
cycle in turn over poisoned buffers; here it runs in whole cycles.
"""

from __future__ import annotations

import dataclasses

import pytest
import test_engine_isolation
import torch
from support.cuda_rig import CudaRig, moved_weights
from support.models import random_weights
from support.own_process import own_process
from support.profiled import kernels
from support.rig import Ask, Layout
from support.streamed import PLAIN, PlainChainRig, StreamedRig, make_streamed_config

from eaglex.config import AuxNorm, EmbeddingNorm, NextHidden, Residual, SpeculationConfig
from eaglex.engine import DraftEngine
from eaglex.errors import ShapeError

pytestmark = pytest.mark.gpu

CHAIN = SpeculationConfig(num_steps=4)
TREE = SpeculationConfig(num_steps=4, topk=4, num_draft_tokens=16)

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


def make_rig(name: str, speculation: SpeculationConfig, *, kind: type[StreamedRig] = StreamedRig,
             **layout: object) -> StreamedRig:
    values: dict[str, object] = {"num_slots": 40, "max_batch": 32, "max_rows": 200}
    return kind(make_streamed_config(**SHAPES[name]), speculation, layout=Layout(**(values | layout)))


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", SHAPES)
def test_error_is_at_most_twice_pytorchs(name, speculation) -> None:
    """Cumulative log-probabilities of the nodes that the engine chose, by depth, against float64 along their paths."""
    rig = make_rig(name, speculation)
    for request in range(16):
        rig.join(request, 1 + request)
    for rows in (6, 2, 5):
        asks = [Ask(r, rows, rows if rows == 6 else 1 + r % rows) for r in range(16)]
        assert rig.compare(rig.cycle(asks)) == 16
    assert len(rig.judge.regrets) >= rig.judge.ENOUGH
    rig.judge.check()
    rig.compare_pool()


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_last_to_arrive_may_sum_up(speculation, monkeypatch) -> None:
    """As under MPS, where no block may wait for another: drafts are as good, and K and V the same in each run."""
    monkeypatch.setenv("EAGLEX_STREAM_REDUCTION", "last")
    rig = make_rig("half rotary, odd sizes", speculation)
    for request in range(16):
        rig.join(request, 1 + request)
    for rows in (6, 2, 5):
        assert rig.compare(rig.cycle([Ask(r, rows, rows if rows == 6 else 1 + r % rows) for r in range(16)])) == 16
    rig.judge.check()
    rig.compare_pool()
    batch = rig.batch([Ask(r, 5, 3) for r in range(16)])
    runs = []
    for _ in range(20):
        rig.engine.run(batch)
        runs.append([t.clone().nan_to_num() for t in (*rig._pool[0], *rig._pool[1], rig.engine.results.num_nodes)])
    assert all(torch.equal(x, y) for run in runs for x, y in zip(run, runs[0], strict=True))


def state(rig: StreamedRig) -> list[torch.Tensor]:
    r = rig.engine.results
    return [t.clone() for t in (r.draft_tokens, r.parents, r.scores, r.num_nodes, r.drafted_for, r.counters)]


def drive(rig: StreamedRig, schedule: list[list[Ask | None]]) -> list[list[torch.Tensor]]:
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
    cycles = schedule(speculation.num_draft_tokens)
    first = drive(make_rig(name, speculation, max_rows=512), cycles)
    again = drive(make_rig(name, speculation, max_rows=512), cycles)
    monkeypatch.setenv("EAGLEX_PDL", "0")
    serial = drive(make_rig(name, speculation, max_rows=512), cycles)
    for cycle, (a, b, c) in enumerate(zip(first, again, serial, strict=True)):
        for x, y, z in zip(a, b, c, strict=True):
            assert torch.equal(x, y), f"two engines differ in cycle {cycle}"
            assert torch.equal(x, z), f"with EAGLEX_PDL=0 cycle {cycle} differs"


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_the_plain_chain(name, speculation, monkeypatch) -> None:
    """The same counts and statuses, nodes but for near ties; what both have scores alike (rounding of both is 0.02 rms
    and more with the depth; support/judge.py holds drafts to float64 elsewhere).
    """
    cycles = schedule(speculation.num_draft_tokens)
    fast = drive(make_rig(name, speculation, max_rows=512), cycles)
    monkeypatch.setenv("EAGLEX_CHAIN", "plain")
    plain = drive(make_rig(name, speculation, kind=PlainChainRig, max_rows=512), cycles)
    drafts = nodes = common = 0
    for a, b in zip(fast, plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[3:], b[3:], strict=True)), "num_nodes, drafted_for or counters"
        for slot in torch.nonzero(a[3]).view(-1).tolist():
            mine, theirs = (paths(x[0][slot], x[1][slot], x[2][slot]) for x in (a, b))
            drafts, nodes = drafts + 1, nodes + len(mine)
            for path in mine.keys() & theirs.keys():
                common += 1
                assert abs(mine[path] - theirs[path]) < 0.2, f"slot {slot}: {mine} against {theirs}"
    print(f"{common} of {nodes} nodes in {drafts} drafts are the same")
    assert drafts > 100
    assert common > 0.93 * nodes, f"{common} of {nodes} nodes in {drafts} drafts are the same"


@pytest.mark.parametrize("accepted", ["one", "all", "some"])
@pytest.mark.parametrize("requests", [7, 16, 24, 32])
@pytest.mark.parametrize("name", ["gqa", "mha, aux norms"])
def test_rows_that_count_are_few_or_all(name, requests, accepted) -> None:
    """35 to 160 rows come in two parts; the second has work where the target has accepted more than about half. A
    request with a token that does not exist keeps nothing, and no other notices.
    """
    nodes = CHAIN.num_draft_tokens
    rig = make_rig(name, CHAIN)
    for request in range(requests):
        rig.join(request, 1 + request)
    rig.compare(rig.cycle([Ask(r, 2) for r in range(requests)]))
    count = {"one": lambda r: 1, "all": lambda r: nodes, "some": lambda r: 1 + r * 3 % nodes}[accepted]
    asks: list[Ask | None] = [Ask(r, nodes, count(r), draft_from=r % 5 != 3) for r in range(requests)]
    batch = rig.batch(asks)
    damaged = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    damaged.input_ids[2 * nodes] = -1
    rig.engine.run(damaged)
    assert int(rig.engine.results.num_nodes[3]) == 0
    others = [r for r in range(requests) if r != 2]
    first = [rig.snapshot(1 + r) for r in others]
    rig.compare(rig.cycle(asks))
    assert all(map(test_engine_isolation.same, [rig.snapshot(1 + r) for r in others], first))
    rig.compare(rig.cycle([Ask(r, 3) for r in range(requests)]))
    rig.judge.check()
    rig.compare_pool()


def paths(tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Each node's score by the tokens that lead to it."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*found[parent], token))
    return dict(zip(found[1:], scores.tolist(), strict=True))


@pytest.mark.parametrize(("field", "value"), [("aux_dtype", torch.float32), ("aux_gap", 4)])
@own_process
def test_rows_that_cannot_be_streamed_take_the_plain_fuse(field, value, monkeypatch) -> None:
    """fp32 rows, and rows 8 bytes out of line: from the plain fuse on, the rest of the cycle is the fast chain's."""
    monkeypatch.setattr(StreamedRig, "layout_of", lambda _, layout: dataclasses.replace(
        layout, **({"kv_dtype": torch.bfloat16, "aux_dtype": torch.bfloat16} | {field: value})))
    rig = make_rig("gqa", CHAIN)
    for request in range(3):
        rig.join(request, 1 + request)
    assert rig.compare(rig.cycle([Ask(r, 7) for r in range(3)])) == 3
    with kernels() as launched:
        outcomes = rig.cycle([Ask(r, 3) for r in range(3)])
    assert rig.compare(outcomes) == 3
    assert any("fuse_input_kernel" in name for name in launched)
    assert any("stream_gemm" in name for name in launched)
    assert not any("qkv_input_kernel" in name or "rank_segment_kernel" in name for name in launched)


@own_process
def test_aligned_rows_take_the_fast_fuse() -> None:
    rig = make_rig("gqa", CHAIN)
    rig.join(0, 1)
    rig.cycle([Ask(0, 7)])
    with kernels() as launched:
        rig.cycle([Ask(0, 3)])
    assert any("stream_gemm" in name for name in launched)
    assert not any("fuse_input_kernel" in name or "gemm_mma" in name for name in launched)


@pytest.mark.parametrize("change", [{"intermediate_size": 500}, {"head_dim": 80, "num_heads": 4}, {"rotary_dim": 24}],
                         ids=str)
def test_what_cannot_be_streamed_takes_the_plain_chain(change) -> None:
    config = make_streamed_config(**change)
    rig = CudaRig(config, CHAIN, weights=random_weights(config, dtype=torch.bfloat16),
                  layout=Layout(kv_dtype=torch.bfloat16, aux_dtype=torch.bfloat16))
    assert rig.engine.backend_name == PLAIN


def test_a_wrong_name_of_a_chain_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("EAGLEX_CHAIN", "quick")
    with pytest.raises(Exception, match="EAGLEX_CHAIN: expected plain or fast, got quick"):
        make_rig("gqa", CHAIN)


@pytest.mark.parametrize("name", ["norm", "embed_tokens"])
def test_weights_out_of_line_are_refused_by_name(name) -> None:
    """Before memory is taken. The kernels copy them 16 bytes at a time; elsewhere that is a fault, which no process
    survives.
    """
    config = make_streamed_config()
    weights = moved_weights(random_weights(config, dtype=torch.bfloat16), config, "cuda")
    value = getattr(weights, name)
    shifted = torch.empty(value.numel() + 8, dtype=value.dtype, device="cuda")[1: 1 + value.numel()].view(value.shape)
    setattr(weights, name, shifted.copy_(value))
    rig = make_rig("gqa", CHAIN)
    with pytest.raises(ShapeError, match=f"{name}: expected memory aligned to 16 bytes"):
        DraftEngine(config, CHAIN, limits=rig.limits, weights=weights, req_to_token=rig._table,
                    draft_k=rig._pool[0], draft_v=rig._pool[1])


def test_a_pool_out_of_line_takes_the_plain_chain() -> None:
    rig = make_rig("gqa", CHAIN)
    pool = rig._pool[0][0]
    shifted = torch.empty(pool.numel() + 8, dtype=pool.dtype, device="cuda")[1: 1 + pool.numel()].view(pool.shape)
    weights = moved_weights(rig.weights, rig.config, "cuda")
    engine = DraftEngine(rig.config, CHAIN, limits=rig.limits, weights=weights, req_to_token=rig._table,
                         draft_k=[shifted], draft_v=rig._pool[1])
    assert engine.backend_name == PLAIN
