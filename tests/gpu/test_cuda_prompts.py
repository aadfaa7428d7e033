"""Prompts of hundreds of rows: K and V of every row, and the draft from the last one, as exact as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from support.cuda_rig import CudaRig
from support.models import make_config, random_weights
from support.own_process import own_process
from support.profiled import kernels
from support.rig import Ask, Layout
from support.streamed import StreamedRig, make_streamed_config

from eaglex import _C, reference
from eaglex.config import AuxNorm, SpeculationConfig

pytestmark = pytest.mark.gpu

ROWS = 700  # more than hopper::kLeastRows, and no multiple of a tile


def make_rig(dtype: torch.dtype, **changes: object) -> CudaRig:
    config = make_config(**({"hidden_size": 256, "target_hidden_size": 192, "intermediate_size": 384, "num_heads": 4,
                             "num_kv_heads": 2, "head_dim": 64, "vocab_size": 900, "draft_vocab_size": 700,
                             "max_positions": 2048} | changes))
    rig = CudaRig(config, SpeculationConfig(num_steps=2), weights=random_weights(config, dtype=dtype),
                  layout=Layout(max_rows=1600, kv_dtype=dtype, aux_dtype=dtype))
    for request in range(2):
        rig.join(request, 1 + request)
    return rig


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{}, {"num_layers": 2}, {"aux_norm": AuxNorm.EACH}], ids=str)
def test_error_of_k_and_v_is_at_most_twice_pytorchs(dtype, changes) -> None:
    rig = make_rig(dtype, **changes)
    ask, neighbour = Ask(0, ROWS), Ask(1, 37, 30)
    rig.engine.run(rig.batch([ask, neighbour]))
    rig.fetch_pool()
    for each in (ask, neighbour):
        aux, ids = rig.rows_of(each)
        at = rig.table[1 + each.request, : each.count].long()
        caches = []
        for weights in (rig.wide, rig.weights):
            cache = reference.DraftCache.empty(rig.config, weights.fc.dtype)
            reference.extend(rig.config, weights, cache, aux[: each.count].to(weights.fc.dtype), ids[: each.count])
            caches.append(cache)
        exact, plain = caches
        for layer in range(rig.config.num_layers):
            for pool, name in ((rig.draft_k, "k"), (rig.draft_v, "v")):
                right = getattr(exact, name)[layer].double()
                error = (pool[layer][at].double() - right).square().mean().sqrt()
                allowed = (getattr(plain, name)[layer].double() - right).square().mean().sqrt()
                assert 0 < error <= 2 * allowed, f"{name} of layer {layer}, {each.count} rows: {error} > 2 * {allowed}"
    assert rig.engine.counters()["drafted"] == 2


def test_a_prompt_of_thousands_of_rows() -> None:
    """3,300 rows in one call, beside a request that decodes: K and V of all of them, and the judged draft."""
    config = make_streamed_config(max_positions=3500, num_heads=2, num_kv_heads=1)
    rig = StreamedRig(config, SpeculationConfig(num_steps=3), layout=Layout(num_slots=4, max_rows=3400, page_size=16))
    for request in range(2):
        rig.join(request, 1 + request)
    assert rig.compare(rig.cycle([Ask(1, 9)])) == 1
    assert rig.compare(rig.cycle([Ask(0, 3300), Ask(1, 4, 2)])) == 2
    assert rig.compare(rig.cycle([Ask(1, 4, 3), Ask(0, 4, 4)])) == 2
    rig.compare_pool()


@pytest.mark.skipif(not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
                         and _C.build_info()["cutlass"]), reason="needs a Hopper and a build with CUTLASS")
@pytest.mark.parametrize(("rows", "expected"), [(ROWS, True), (40, False)])
@own_process
def test_the_hopper_kernel_is_used(rows, expected) -> None:
    """For the long prompt, and not for a short one."""
    rig = make_rig(torch.bfloat16)
    batch = rig.batch([Ask(0, rows)])
    rig.engine.run(batch)
    with kernels() as launched:
        rig.engine.run(batch)
    assert any("cutlass" in name.lower() for name in launched) is expected


def test_a_prompt_is_the_same_in_every_run() -> None:
    """Bit for bit, in K and V and in the draft; also where a host captures it."""
    rig = make_rig(torch.bfloat16)
    batch = rig.batch([Ask(0, 1500)])
    states = []
    for _ in range(5):
        rig.engine.run(batch)
        states.append([t.clone() for t in (*rig._pool[0], *rig._pool[1], rig.engine.results.scores)])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rig.engine.run(batch, torch.cuda.current_stream().cuda_stream)
    for tensors in rig._pool:
        for tensor in tensors:
            tensor.fill_(float("nan"))
    graph.replay()
    states.append([t.clone() for t in (*rig._pool[0], *rig._pool[1], rig.engine.results.scores)])
    for state in states[1:]:
        for now, then in zip(state, states[0], strict=True):
            assert torch.equal(now.nan_to_num(), then.nan_to_num())
