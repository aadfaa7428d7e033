"""An engine on a device that is not the current one, and two engines on two devices: every call keeps to its own.

The current device is cuda:0 throughout, before and after each call; the engine is on cuda:1.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from support.cuda_rig import moved_weights
from support.models import EVERY_INT4, make_config, random_weights
from support.rig import Ask, Layout
from support.streamed import PlainChainRig, StreamedRig, make_streamed_config
from test_generate_gpu import generate

from eaglex import reference
from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import DraftEngine, VerifyTensors
from eaglex.errors import ShapeError
from eaglex.hosts import auto_quant, calibration
from eaglex.packed import DraftQuant, Precision
from eaglex.quantize import pack, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CHAIN = SpeculationConfig(num_steps=4)
TREE = SpeculationConfig(num_steps=4, topk=4, num_draft_tokens=16)
FIRST, SECOND = "cuda:0", "cuda:1"
LAYOUT = {"num_slots": 8, "max_batch": 6, "max_rows": 1000}


@pytest.fixture(autouse=True)
def _the_first_is_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


class FirstRig(StreamedRig):
    device = FIRST


class SecondRig(StreamedRig):
    device = SECOND


class SecondPlainRig(PlainChainRig):
    device = SECOND


def make_rig(kind: type[StreamedRig], speculation: SpeculationConfig, *, quant: str | None = None,
             **changes: object) -> StreamedRig:
    """Six requests in slots 1..6, without a row yet."""
    config = make_streamed_config(max_positions=2048, **changes)
    weights = random_weights(config, dtype=torch.bfloat16)
    if quant is not None:
        weights = quantize(weights, DraftQuant.parse(quant))
    rig = kind(config, speculation, weights=weights, layout=Layout(**LAYOUT))
    for request in range(6):
        rig.join(request, 1 + request)
    return rig


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("quant", [None, "fp8", EVERY_INT4])
@pytest.mark.parametrize("kind", [SecondRig, SecondPlainRig], ids=["fast", "plain"])
def test_every_call_of_an_engine_on_the_second_device(kind, quant, speculation, monkeypatch) -> None:
    """Made, warmed up, run from graphs and raw, with prompts in all kernels' sizes, its tree, its counters."""
    if kind is SecondPlainRig:
        monkeypatch.setenv("EAGLEX_CHAIN", "plain")
    rig = make_rig(kind, speculation, quant=quant)
    rig.check_backend()
    assert torch.cuda.current_device() == 0
    rig.engine.warm_up()
    assert torch.cuda.current_device() == 0
    calls = ([Ask(0, 700)], [Ask(1, 300)], [Ask(r, 20) for r in (2, 3)], [Ask(r, 5, 1 + r % 5) for r in range(4)],
             [Ask(2, 3), None], [Ask(r, 16, 1 + r) for r in range(6)])
    drafts = 0
    for asks in calls:
        for enqueue in (False, True):
            outcomes = rig.cycle(list(asks), enqueue=enqueue)
            assert torch.cuda.current_device() == 0
            drafts += rig.compare(outcomes)
    rig.compare_pool()
    assert rig.engine.counters()["drafted"] == drafts == 30
    slots, lengths = [3, 1, 6], [rig.requests[r].length for r in (2, 0, 5)]
    out = VerifyTensors.allocate(3, speculation.num_draft_tokens, MaskMode.QLEN_ONLY, SECOND)
    ids = {"req_pool_indices": slots, "seq_lens": lengths, "bonus_tokens": [7, 8, 9]}
    rig.engine.tree(out, **{name: torch.tensor(values, device=SECOND) for name, values in ids.items()})
    assert torch.cuda.current_device() == 0
    for lane, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        expected = reference.tree(rig.drafted(slot), 7 + lane, length, speculation.num_draft_tokens)
        assert torch.equal(out.draft_tokens[lane].cpu(), expected.draft_tokens)
        assert torch.equal(out.mask[lane].cpu(), expected.mask)


def states(rig: StreamedRig, cycles: int, stream: int = 0) -> list[list[torch.Tensor]]:
    """Results of that many cycles of all six requests, each waited for."""
    seen = []
    for _ in range(cycles):
        asks = [Ask(r, 5, 1 + r % 5) for r in range(6)]
        rig.engine.run(rig.batch(asks), stream)
        for ask in asks:
            rig.requests[ask.request].length += ask.count
        torch.cuda.synchronize(rig.device)
        r = rig.engine.results
        seen.append([t.cpu() for t in (r.draft_tokens, r.parents, r.scores, r.num_nodes, r.counters)])
    return seen


def same(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for a, b in zip(left, right, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_two_engines_take_turns(speculation) -> None:
    """The same cycles on both devices, in one thread: the same bits, wherever the other one's kernels were set up."""
    rigs = [make_rig(kind, speculation) for kind in (FirstRig, SecondRig)]
    for _ in range(10):
        first, second = (states(rig, 1) for rig in rigs)
        assert same(first, second)
    assert rigs[0].engine.counters()["drafted"] == 60


def test_two_engines_in_two_threads() -> None:
    """Both devices at work at once, each under a thread of its own, whose current device is the first."""
    rigs = [make_rig(kind, TREE) for kind in (FirstRig, SecondRig)]
    seen: list[list[list[torch.Tensor]]] = [[], []]

    def work(index: int) -> None:
        seen[index] = states(rigs[index], 40)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(seen[0]) == 40
    assert same(*seen)


def test_a_capture_on_the_first_device_is_not_disturbed() -> None:
    """A host captures on cuda:0 in global mode, torch's default, while its thread runs cycles on cuda:1."""
    rig, alone = (make_rig(SecondRig, CHAIN) for _ in range(2))
    expected = states(alone, 4)
    rig.engine.warm_up()
    batches, lengths = [], dict.fromkeys(range(6), 0)
    for _ in range(4):
        batches.append(rig.batch([Ask(r, 5, 1 + r % 5) for r in range(6)]))
        for request in range(6):
            lengths[request] += 1 + request % 5
            rig.requests[request].length = lengths[request]
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
    value, graph = torch.zeros(4, device=FIRST), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        for batch in batches:
            rig.engine.run(batch, stream.cuda_stream)
    graph.replay()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert value.tolist() == [1.0] * 4
    assert torch.equal(rig.engine.results.scores.cpu(), expected[-1][2])
    assert torch.equal(rig.engine.results.draft_tokens.cpu(), expected[-1][0])


def test_an_engine_goes_when_its_own_device_has_done() -> None:
    """Its memory is not freed under a cycle that has still to run, though the current device is idle."""
    rig = make_rig(SecondRig, CHAIN)
    rig.engine.warm_up()
    batch = rig.batch([Ask(r, 5) for r in range(6)])
    with torch.cuda.device(1):
        stream, busy = torch.cuda.Stream(), torch.cuda.Event()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            busy.record()
    rig.engine.run(batch, stream.cuda_stream)
    results = rig.engine.results
    assert not busy.query(), "the device was not busy long enough to show anything"
    del rig.engine
    assert busy.query(), "an engine went while its device had still to run it"
    torch.cuda.synchronize(1)
    assert results.num_nodes[1:7].tolist() == [4] * 6


def test_tensors_of_another_device_are_refused_by_name() -> None:
    rig = make_rig(SecondRig, CHAIN)
    batch = rig.batch([Ask(0, 5)])
    batch.seq_lens = batch.seq_lens.to(FIRST)
    with pytest.raises(ShapeError, match=r"seq_lens: expected .* on cuda:1, got .* on cuda:0"):
        rig.engine.run(batch)
    with pytest.raises(ShapeError, match=r"req_to_token: expected .* on cuda:1, got .* on cuda:0"):
        DraftEngine(rig.config, CHAIN, limits=rig.limits, weights=moved_weights(rig.weights, rig.config, SECOND),
                    req_to_token=rig._table.to(FIRST), draft_k=rig._pool[0], draft_v=rig._pool[1])


@pytest.mark.parametrize("precision", [Precision.FP8, Precision.INT4])
def test_matrices_are_packed_where_they_lie(precision) -> None:
    weight = torch.randn(256, 640, generator=torch.Generator().manual_seed(1)).bfloat16()
    here, there = pack("w", weight, precision), pack("w", weight.to(SECOND), precision)
    assert there.device == torch.device(SECOND)
    there = there.to("cpu")
    assert torch.equal(here.values.view(torch.uint8), there.values.view(torch.uint8))
    assert torch.equal(here.scales, there.scales)


def test_auto_measures_where_the_draft_will_run() -> None:
    config = make_config(hidden_size=256, target_hidden_size=256, intermediate_size=512, num_heads=4, head_dim=64,
                         vocab_size=900, draft_vocab_size=700, max_positions=512)
    weights = random_weights(config, dtype=torch.bfloat16)
    text = calibration.stand_ins(config, weights)
    choice = auto_quant.choose(config, weights, CHAIN, text=text, device=torch.device(SECOND))
    assert torch.cuda.current_device() == 0
    assert choice.lines[-1].startswith("draft_quant: ")


@pytest.mark.timeout(150)
def test_generate_on_the_second_device() -> None:
    run = generate("--device", SECOND, "--dtype", "bfloat16")
    assert run["lossless"] is True
    assert run["accept_length"] > 2.5
