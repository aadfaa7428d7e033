"""One launch per cycle: replays are bitwise equal, take no memory, wait for nothing; a host may capture the cycle."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import pytest
import torch
from support.cuda_rig import CudaRig
from support.models import make_config, random_weights
from support.own_process import own_process
from support.profiled import CYCLES, calls_of_the_runtime
from support.rig import Ask, Layout
from support.streamed import PLAIN, STREAMS
from torch.profiler import record_function

from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import DraftResults, VerifyTensors
from eaglex.packed import DraftQuant
from eaglex.quantize import quantize

pytestmark = pytest.mark.gpu

TREE = SpeculationConfig(num_steps=4, topk=4, num_draft_tokens=16)
CHAIN = SpeculationConfig(num_steps=4)


def make_rig(speculation: SpeculationConfig = TREE, dtype: torch.dtype = torch.bfloat16, *, precision: str = "bf16",
             **layout: int) -> CudaRig:
    """A draft of a few heads with six requests that are past their prompts."""
    config = make_config(hidden_size=256, target_hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2,
                         head_dim=64, vocab_size=6000, draft_vocab_size=5000, max_positions=2048)
    weights = random_weights(config, dtype=dtype)
    if precision != "bf16":
        weights = quantize(weights, DraftQuant.parse(precision))
    rig = CudaRig(config, speculation, weights=weights,
                  layout=Layout(**({"kv_dtype": dtype, "aux_dtype": dtype, "max_rows": 700} | layout)))
    for request in range(6):
        rig.join(request, 1 + request)
        rig.engine.run(rig.batch([Ask(request, 60 + 97 * request)]))
        rig.requests[request].length += 60 + 97 * request
    return rig


def state(results: DraftResults) -> list[torch.Tensor]:
    return [results.draft_tokens, results.parents, results.scores, results.num_nodes, results.drafted_for]


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_thousand_replays_are_bitwise_equal(speculation, precision) -> None:
    """With other work on another stream, and the batch in other sizes in between."""
    rig = make_rig(speculation, precision=precision)
    assert rig.engine.backend_name == STREAMS
    asks = [Ask(r, speculation.num_draft_tokens, 1 + r % 3) for r in range(5)]
    batch, other = rig.batch(asks), rig.batch([Ask(5, 4, 2)])
    rig.engine.run(batch)
    expected = [t.clone() for t in state(rig.engine.results)]
    pool = [t.clone() for tensors in rig._pool for t in tensors]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    side, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    for i in range(1000):
        with torch.cuda.stream(side):
            noise = (noise @ noise).clamp(-1, 1)
        rig.engine.run(batch)
        if i % 7 == 0:
            rig.engine.run(other)
        for now, then in zip(state(rig.engine.results), expected, strict=True):
            different += (now[1:6] != then[1:6]).sum()
    assert int(different) == 0
    for now, then in zip([t for tensors in rig._pool for t in tensors], pool, strict=True):
        touched = rig._table[1:6].long()
        assert torch.equal(now[touched].nan_to_num(), then[touched].nan_to_num())


@pytest.mark.parametrize("kind", ["run", "enqueue"])
@own_process
def test_nothing_is_allocated_and_nothing_waits(kind) -> None:
    """Behind a kernel that keeps the device busy for a long time, cycles of all sizes and their tree return at once."""
    rig = make_rig()
    cycle = getattr(rig.engine, kind)
    batches = [rig.batch([Ask(r, 16, 3) for r in range(size)]) for size in range(1, 7)]
    # Whatever a first call does (lazy loading, the capture of all buckets) it has done by now.
    out = VerifyTensors.allocate(6, 16, MaskMode.QLEN_ONLY, "cuda")
    ids = {"req_pool_indices": torch.arange(1, 7, device="cuda"), "bonus_tokens": torch.arange(6, device="cuda"),
           "seq_lens": rig.engine.results.drafted_for[1:7].clone()}
    for batch in batches:
        cycle(batch)
    rig.engine.tree(out, **ids)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]

    def cycles_behind_a_busy_device() -> None:
        torch.cuda._sleep(2_000_000_000)  # about a second
        asleep = torch.cuda.Event()
        asleep.record()
        with record_function(CYCLES):
            for batch in batches:
                cycle(batch)
            rig.engine.tree(out, **ids)
        assert not asleep.query(), "a call waited for the device"
        torch.cuda.synchronize()

    cycles_behind_a_busy_device()
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers use the same device's memory
        assert torch.cuda.mem_get_info()[0] == free
    with calls_of_the_runtime(window=True) as calls:
        cycles_behind_a_busy_device()
    kernels = sum(count for name, count in calls.items() if name.startswith("cudaLaunchKernel"))
    if kind == "run":
        assert calls["cudaGraphLaunch"] == len(batches), "the hook sees this extension's calls"
        assert kernels == 1, f"a cycle is one launch, the tree another: {calls}"
    else:
        assert kernels > 20 * len(batches), f"the hook sees this extension's calls: {calls}"
    assert not {name for name in calls if any(word in name for word in ("Malloc", "Alloc", "Free", "Memcpy", "Memset"))}
    assert not {name for name in calls if "Synchronize" in name}


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_a_thread_that_captures_another_stream_may_run_cycles(warm) -> None:
    """In torch's global mode, and with so many cycles that the host must ask how far the device is, or with graphs yet
    to be made: the capture is not voided.
    """
    rig = make_rig()
    batch = rig.batch([Ask(r, 16, 1 + r) for r in range(6)])
    rig.engine.run(batch)
    torch.cuda.synchronize()
    expected = [t.clone() for t in state(rig.engine.results)]
    if not warm:
        rig.engine = rig.build()  # over an empty pool; the prompts once more
        for request in range(6):
            rows = rig.requests[request].length
            rig.requests[request].length = 0
            rig.engine.enqueue(rig.batch([Ask(request, rows)]))
            rig.requests[request].length = rows
    for t in state(rig.engine.results):
        t.zero_()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    numbers = torch.ones(16, device="cuda")
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        twice = 2 * numbers
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
        for _ in range(20):
            rig.engine.run(batch, stream.cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    assert twice.tolist() == [2] * 16
    for now, then in zip(state(rig.engine.results), expected, strict=True):
        assert torch.equal(now[1:7], then[1:7])


@own_process
def test_warm_up_leaves_nothing_for_the_first_cycle() -> None:
    """Captured at start in under 5 s for 64 requests; the first cycle of any size then only launches a graph."""
    config = make_config(hidden_size=256, target_hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2,
                         head_dim=64, vocab_size=6000, draft_vocab_size=5000, max_positions=2048)
    rig = CudaRig(config, TREE, weights=random_weights(config, dtype=torch.bfloat16),
                  layout=Layout(num_slots=66, max_batch=64, max_rows=4096, kv_dtype=torch.bfloat16,
                                aux_dtype=torch.bfloat16))  # graphs read rows of 16 bits alone
    torch.cuda.synchronize()
    begin = time.perf_counter()
    rig.engine.warm_up()
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 5
    for request in range(64):
        rig.join(request, 1 + request)
    batches = [rig.batch([Ask(r, 16, 3) for r in range(size)]) for size in (1, 3, 9, 64)]
    with calls_of_the_runtime(window=False) as calls:
        for batch in batches:
            rig.engine.run(batch)
        torch.cuda.synchronize()
    assert calls["cudaGraphLaunch"] == len(batches), calls
    assert not {name for name in calls if any(word in name for word in ("BeginCapture", "Instantiate", "Alloc"))}
    assert rig.engine.counters()["drafted"] == 1 + 3 + 9 + 64
    begin = time.perf_counter()
    rig.engine.warm_up()
    assert time.perf_counter() - begin < 1e-3, "a second call does nothing"


def test_steps_that_nobody_needs_are_skipped() -> None:
    """A cycle of 16 steps that all stop after the first, or that nobody drafts in, takes well under half the time."""
    config = make_config(hidden_size=512, target_hidden_size=512, intermediate_size=2048, num_heads=8, num_kv_heads=2,
                         head_dim=64, vocab_size=8000, draft_vocab_size=8000, max_positions=512)
    weights = random_weights(config, dtype=torch.bfloat16)
    fastest = {}
    for name, stop_below, drafts in (("all", 0.0, True), ("stopped", 0.999, True), ("held", 0.0, False)):
        rig = CudaRig(config, SpeculationConfig(num_steps=16, stop_below=stop_below), weights=weights,
                      layout=Layout(kv_dtype=torch.bfloat16, aux_dtype=torch.bfloat16))  # graphs read no other rows
        rig.engine.warm_up()
        for request in range(2):
            rig.join(request, 1 + request)
        batch = rig.batch([Ask(r, 5, draft_from=drafts) for r in range(2)])
        # Other workers use the device too: the fastest counts.
        fastest[name] = min(microseconds(lambda engine=rig.engine, batch=batch: engine.run(batch)) for _ in range(30))
        assert rig.results.num_nodes[1:3].tolist() == {"all": [16, 16], "stopped": [1, 1], "held": [0, 0]}[name]
    assert fastest["stopped"] < 0.6 * fastest["all"], fastest
    assert fastest["held"] < 1.05 * fastest["stopped"], fastest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers use the device too")
@pytest.mark.parametrize("quant", ["none", "head=int4"])
@pytest.mark.parametrize("topk", [1, 4], ids=["chain", "tree"])
def test_a_skipped_step_takes_under_10_us(topk, quant) -> None:
    """Cycles whose requests all stop with their first token: twelve further steps for the difference of two."""
    config = make_config(hidden_size=1024, target_hidden_size=256, intermediate_size=4096, num_heads=16,
                         num_kv_heads=4, head_dim=128, vocab_size=16000, draft_vocab_size=16000, max_positions=512)
    weights = quantize(random_weights(config, dtype=torch.bfloat16), DraftQuant.parse(quant))
    fastest = []
    for steps in (4, 16):
        speculation = SpeculationConfig(num_steps=steps, topk=topk, num_draft_tokens=17 if topk > 1 else steps + 1,
                                        stop_below=0.999)
        rig = CudaRig(config, speculation, weights=weights, layout=Layout(
            num_slots=3, max_batch=1, kv_dtype=torch.bfloat16, aux_dtype=torch.bfloat16))
        rig.engine.warm_up()
        rig.join(0, 1)
        batch = rig.batch([Ask(0, 5)])
        fastest.append(min(microseconds(lambda engine=rig.engine, batch=batch: engine.run(batch)) for _ in range(30)))
        assert rig.engine.counters()["stopped"] == 30
    print(f"{(fastest[1] - fastest[0]) / 12:.1f} µs per skipped step")
    assert fastest[1] - fastest[0] < 12 * 10


def microseconds(work: Callable[[], None]) -> float:
    """On the device, behind a kernel that keeps it busy until the host has launched all of it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(500_000)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def test_the_host_may_run_a_ring_ahead() -> None:
    """More cycles in flight than the ring has entries: each still sees its own parameters."""
    rig = make_rig()
    singles = [rig.batch([Ask(r, 16, 1 + r)]) for r in range(6)]
    expected = []
    for batch in singles:
        rig.engine.run(batch)
        torch.cuda.synchronize()
    expected = [t.clone() for t in state(rig.engine.results)]
    for t in state(rig.engine.results):
        t.zero_()
    torch.cuda._sleep(50_000_000)
    for batch in singles * 8:
        rig.engine.run(batch)
    torch.cuda.synchronize()
    for now, then in zip(state(rig.engine.results), expected, strict=True):
        assert torch.equal(now[1:7], then[1:7])


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("dtype", "backend"), [(torch.float32, PLAIN), (torch.bfloat16, STREAMS)], ids=str)
def test_a_host_captures_the_cycle(dtype, backend, speculation) -> None:
    """enqueue and run inside the host's graph: replays read what its tensors hold by then; the bits of raw launches."""
    rig, twin = (make_rig(speculation, dtype) for _ in range(2))
    assert rig.engine.backend_name == backend
    asks = [[Ask(r, 5, 1 + r) for r in range(3)], [Ask(r, 5, 4 - r) for r in range(3)]]
    batch = rig.batch(asks[0])
    for run in (rig.engine.enqueue, rig.engine.run):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run(batch, torch.cuda.current_stream().cuda_stream)
        for cycle in asks:
            fresh = rig.batch(cycle)
            for field in dataclasses.fields(fresh):
                value = getattr(fresh, field.name)
                if isinstance(value, torch.Tensor):
                    getattr(batch, field.name).copy_(value)
            graph.replay()
            twin.engine.enqueue(twin.batch(cycle))
            torch.cuda.synchronize()
            for now, then in zip(state(rig.engine.results), state(twin.engine.results), strict=True):
                assert torch.equal(now, then)


def test_a_graph_of_more_lanes_serves_fewer_requests() -> None:
    """Nine requests run in the graph of ten lanes, and a lane that is not there touches nothing."""
    config = make_config(max_positions=64)
    rigs = [CudaRig(config, TREE, layout=Layout(num_slots=14, max_batch=size, max_rows=400)) for size in (9, 12)]
    states = []
    for rig in rigs:
        for request in range(9):
            rig.join(request, 1 + request)
        rig.engine.run(rig.batch([Ask(r, 7) for r in range(9)]))
        for request in rig.requests.values():
            request.length += 7
        rig.engine.run(rig.batch([Ask(r, 5, 1 + r % 5) for r in range(9)]))
        states.append([t.cpu() for t in state(rig.engine.results)])
        assert rig.engine.counters()["drafted"] == 18
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
