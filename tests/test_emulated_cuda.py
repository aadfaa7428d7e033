"""The CUDA backend without a GPU: its kernels, run by tests/emulator, are held to tests of tests/gpu.

Proves their logic: indices, barriers, padded lanes, structure. Not what only a GPU can break: memory ordering, races
between blocks, the rounding of the tensor cores, time.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import test_cuda_engine
import test_cuda_graph
import test_cuda_soak
import test_cuda_tree
import test_early_stop
import test_engine
import test_engine_isolation
import test_low_bit_engine
import test_rescored_head
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import emulated
from support.cuda_rig import CudaRig
from support.cuda_soak import LAYOUT
from support.models import EVERY_INT4, make_config, random_weights
from support.rig import Ask, Layout, Rig
from support.soak import Soak
from test_cuda_engine import *  # noqa: F403
from test_cuda_graph import state, test_a_graph_of_more_lanes_serves_fewer_requests  # noqa: F401
from test_cuda_tree import *  # noqa: F403

from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import VerifyTensors
from eaglex.engine import _extension as built  # before the emulator takes its place
from eaglex.packed import DraftQuant, PackedWeight
from eaglex.quantize import quantize

# Too large for emulated threads; of many shapes, where one will do; with the CPU backend, whose place is taken.
del test_long_contexts, test_prompts_and_vocabularies_in_chunks, test_the_widest_tree  # noqa: F821
del test_16_bit_error_is_at_most_twice_pytorchs, test_cpu_and_cuda_engines_agree  # noqa: F821

pytestmark: list[pytest.MarkDecorator] = []  # not the imported `gpu`


class EmulatedRig(CudaRig):
    device = "cpu"


@pytest.fixture(scope="module")
def emulator():
    return emulated.Emulator(emulated.require())


@pytest.fixture(autouse=True, scope="module")
def _on_the_emulator(emulator):
    with pytest.MonkeyPatch.context() as patch, emulator.installed():
        for module in (test_early_stop, test_engine, test_engine_isolation, test_low_bit_engine, test_rescored_head):
            patch.setattr(module, "Rig", EmulatedRig)
        for module in (test_cuda_engine, test_cuda_graph, test_cuda_tree):
            patch.setattr(module, "CudaRig", EmulatedRig)
        yield


def make_rig(**layout: int) -> EmulatedRig:
    """Six requests past their prompts."""
    rig = EmulatedRig(make_config(max_positions=64), SpeculationConfig(num_steps=2, topk=2, num_draft_tokens=5),
                      layout=Layout(**layout))
    for request in range(6):
        rig.join(request, 1 + request)
        rig.engine.run(rig.batch([Ask(request, 3 + request)]))
        rig.requests[request].length += 3 + request
    return rig


def test_it_is_the_cuda_backend() -> None:
    assert make_rig().engine.backend_name == "emulated cuda"


@pytest.mark.parametrize(("quant", "layers"), [("fp8", 1), (EVERY_INT4, 2), ("head=int4,mlp=fp8", 1)])
def test_packed_weights_are_those_of_the_reference(quant, layers) -> None:
    """The plain chain reads them unpacked; here in float32, so that ids and trees are the reference's."""
    config = make_config(num_layers=layers, **test_low_bit_engine.WIDE)
    weights = quantize(random_weights(config), DraftQuant.parse(quant))
    assert test_low_bit_engine.play(EmulatedRig(config, test_low_bit_engine.TREE, weights=weights)) >= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_int4_scales_of_other_types(dtype) -> None:
    test_low_bit_engine.test_int4_scales_of_other_types(dtype)


def test_fp8_scales_by_groups() -> None:
    test_low_bit_engine.test_fp8_scales_by_groups()


def test_all_256_bytes_of_fp8() -> None:
    test_low_bit_engine.test_all_256_bytes_of_fp8()


@pytest.mark.parametrize(("vocab", "topk"), [(700, 1), (64, 4), (129, 2), (18, 16)])
def test_a_rescored_head_is_the_references(vocab, topk) -> None:
    test_rescored_head.test_equals_the_reference(vocab, topk, torch.float32)


@pytest.mark.parametrize("vocab", [1, 5])
def test_a_rescored_head_of_few_ids(vocab) -> None:
    test_rescored_head.test_fewer_ids_than_are_rescored(vocab)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_rescored_head_is_sampled_from(temperature) -> None:
    test_rescored_head.test_rejection_sampling(temperature)


def test_ties_of_a_rescored_head() -> None:
    test_rescored_head.test_ties_go_to_the_lowest_id()
    test_rescored_head.test_a_zero_head()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_rescored_head_that_is_not_finite(value) -> None:
    test_rescored_head.test_what_is_not_finite_voids_the_draft_where_it_is_read(value)


def test_packed_matrices_may_be_let_go() -> None:
    """Once they are unpacked nothing reads them: the engine holds none."""
    config = make_config(**test_low_bit_engine.WIDE)
    rig = EmulatedRig(config, SpeculationConfig(num_steps=2),
                      weights=quantize(random_weights(config), DraftQuant.parse("fp8")))
    assert not [held for held in rig.engine._bound if isinstance(held, PackedWeight)]
    assert any(isinstance(held, torch.Tensor) and held.shape == rig.weights.fc.shape for held in rig.engine._bound)


# In place of the imported one, which takes longest of all: fewer examples.
@given(data=st.data(), layers=st.sampled_from([1, 2]))
@settings(max_examples=8)
def test_permuted_joined_late_dropped_padded(data, layers) -> None:
    test_engine_isolation.test_permuted_joined_late_dropped_padded.hypothesis.inner_test(data, layers)


@pytest.mark.parametrize("shape", test_cuda_engine.SHAPES[:1], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error(shape, dtype) -> None:
    test_cuda_engine.test_16_bit_error_is_at_most_twice_pytorchs(shape, dtype)


def test_the_host_may_run_a_ring_ahead(emulator) -> None:
    """More cycles in flight than the ring has entries: the host waits for one, and each sees its own parameters."""
    rig = make_rig()
    batches = [rig.batch([Ask(r, 5, 1 + r % 5)]) for r in range(6)]
    for batch in batches:
        rig.engine.run(batch)
    expected = [t.clone() for t in state(rig.engine.results)]
    for t in state(rig.engine.results):
        t.zero_()
    ahead = []
    with emulator.lagging():
        for batch in batches * 4:
            rig.engine.run(batch)
            ahead.append(emulator.pending)
    assert ahead == [*range(1, 9), *[8] * 16], "the host runs 8 cycles ahead, then waits for the oldest"
    for now, then in zip(state(rig.engine.results), expected, strict=True):
        assert torch.equal(now[1:7], then[1:7])


@pytest.mark.parametrize("kind", ["run", "enqueue", "tree"])
def test_inputs_live_until_their_launch_has_run(emulator, kind) -> None:
    """However far the host runs ahead, and not longer."""
    rig = make_rig()
    rig.engine.run(rig.batch([Ask(0, 5, 1)]))  # captures the graphs
    seen = []
    with emulator.lagging():
        for i in range(40):
            batch = rig.batch([Ask(i % 6, 5, 1 + i % 5)])
            seen.append(weakref.ref(batch.seq_lens))
            if kind == "tree":
                out = VerifyTensors.allocate(1, 5, MaskMode.QLEN_ONLY)
                rig.engine.tree(out, req_pool_indices=batch.req_pool_indices, seq_lens=batch.seq_lens,
                                bonus_tokens=batch.seq_lens)
            else:
                getattr(rig.engine, kind)(batch)
            del batch
            # A graph is one launch, and `run` waits for one where the ring is full; the others wait for nothing.
            waiting = min(emulator.pending, len(seen)) if kind == "run" else len(seen)
            assert waiting == min(len(seen), 8 if kind == "run" else 40)
            assert all(ref() is not None for ref in seen[-waiting:])
    rig.engine.run(rig.batch([Ask(0, 5, 1)]))
    gc.collect()
    assert all(ref() is None for ref in seen)


@pytest.mark.parametrize("name", ["chain that stops", "tree"])
def test_soak(name) -> None:
    """A short one against the CPU backend, which is that of the real extension."""
    config, speculation = make_config(max_positions=160), SpeculationConfig(**test_cuda_soak.SCHEDULES[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eaglex.engine._extension", built)
        oracle = Rig(config, speculation, layout=Layout(**LAYOUT))
    assert oracle.engine.backend_name == "cpu"
    soak = Soak(oracle, EmulatedRig(config, speculation, share=oracle), 0)
    test_cuda_soak.run(soak, seconds=0, least=60, exact=True)
