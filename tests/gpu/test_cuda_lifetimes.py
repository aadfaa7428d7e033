"""What a call was given is kept until the device has done with it, whatever the host's allocator would do meanwhile."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from support.rig import Ask, Layout
from support.streamed import StreamedRig, make_streamed_config

from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import DraftBatch, VerifyTensors

pytestmark = pytest.mark.gpu

CALLS = 12  # more than the ring of parameter blocks has entries


def ready_rig() -> StreamedRig:
    rig = StreamedRig(make_streamed_config(max_positions=256), SpeculationConfig(num_steps=2),
                      layout=Layout(num_slots=CALLS + 2, max_batch=CALLS))
    for request in range(CALLS):
        rig.join(request, 1 + request)
    rig.engine.warm_up()
    return rig


def single(rig: StreamedRig, request: int) -> DraftBatch:
    return rig.batch([Ask(request, 7)])


def snapshots(rig: StreamedRig) -> list[torch.Tensor]:
    results = rig.results
    return [results.draft_tokens, results.scores, results.drafted_for, results.num_nodes]


@pytest.mark.parametrize("kind", ["enqueue", "run"])
def test_memory_is_not_handed_out_while_the_device_reads_it(kind) -> None:
    """On a stream of its own, behind a busy device: references dropped, tensors of the same sizes made and filled."""
    rig = ready_rig()
    calls = CALLS if kind == "enqueue" else 7  # `run` waits for the device beyond its ring
    for request in range(calls):
        getattr(rig.engine, kind)(single(rig, request))
    torch.cuda.synchronize()
    expected = snapshots(rig)
    for tensor in (rig.engine.results.draft_tokens, rig.engine.results.scores):
        tensor.zero_()
    rig.engine.results.num_nodes.zero_()
    batches = [single(rig, request) for request in range(calls)]
    fields = [[t for t in vars(batch).values() if isinstance(t, torch.Tensor)] for batch in batches]
    places = {t.data_ptr() for tensors in fields for t in tensors}
    sizes = [(t.shape, t.dtype) for t in fields[0]]
    del fields
    gc.collect()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(3_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
    handed_out = set()
    while batches:
        getattr(rig.engine, kind)(batches.pop(0), stream.cuda_stream)
        rubbish = [torch.full(shape, 1, dtype=dtype, device="cuda") for shape, dtype in sizes for _ in range(2)]
        handed_out |= {t.data_ptr() for t in rubbish}
        del rubbish
    assert not busy.query(), "the device was not busy long enough to show anything"
    assert not places & handed_out, "memory that a launch will read was handed out"
    torch.cuda.synchronize()
    for now, then in zip(snapshots(rig), expected, strict=True):
        assert torch.equal(now, then)


def test_inputs_go_when_their_call_has_run() -> None:
    rig = ready_rig()
    batch = single(rig, 0)
    first = weakref.ref(batch.aux_hidden_states)
    rig.engine.run(batch)
    del batch
    torch.cuda.synchronize()
    rig.engine.run(single(rig, 1))
    gc.collect()
    assert first() is None


def test_inputs_of_a_captured_call_stay() -> None:
    """The host's graph reads them whenever it is replayed; asking for others meanwhile does not void the capture."""
    rig = ready_rig()
    rig.engine.run(single(rig, 1))  # under way, so that its event is asked for in the capture
    batch = single(rig, 0)
    rig.engine.enqueue(batch)
    torch.cuda.synchronize()
    expected = snapshots(rig)
    references = [weakref.ref(t) for t in vars(batch).values() if isinstance(t, torch.Tensor)]
    out = VerifyTensors.allocate(1, 3, MaskMode.QLEN_ONLY, "cuda")
    ids = {"req_pool_indices": torch.tensor([1], device="cuda"), "seq_lens": torch.tensor([7], device="cuda"),
           "bonus_tokens": torch.tensor([5], device="cuda")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in global mode, torch's default
        rig.engine.enqueue(batch, torch.cuda.current_stream().cuda_stream)
        rig.engine.tree(out, **ids, stream=torch.cuda.current_stream().cuda_stream)
    tokens = weakref.ref(ids["bonus_tokens"])
    del batch, ids
    for request in range(2, CALLS):
        rig.engine.run(single(rig, request))
    torch.cuda.synchronize()
    gc.collect()
    assert all(reference() is not None for reference in references)
    assert tokens() is not None
    rig.engine.results.draft_tokens[1].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(snapshots(rig)[0][1], expected[0][1])
    assert out.draft_tokens[0].tolist() == [5, *expected[0][1].tolist()]


def test_keeping_costs_little() -> None:
    """The host's share of a call that is for keeping inputs alive stays under 10 µs."""
    rig = ready_rig()
    inputs, times = rig.engine._inputs, []
    for _ in range(300):
        begin = time.perf_counter()
        inputs.keep((), 0)
        times.append(time.perf_counter() - begin)
    median = sorted(times)[150]
    print(f"keep: {1e6 * median:.1f} µs")
    assert median < 10e-6
