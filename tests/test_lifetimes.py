"""The engine borrows memory: what it was given lives as long as it may be read, whatever its caller does meanwhile."""

import gc
import weakref

import torch
from support.models import make_config, random_weights
from support.rig import Ask, Rig

from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import VerifyTensors

CHAIN = SpeculationConfig(num_steps=3)


def running_rig() -> Rig:
    rig = Rig(make_config(), CHAIN)
    rig.join(0, 1)
    return rig


def alive(reference: "weakref.ref[torch.Tensor]") -> bool:
    gc.collect()
    return reference() is not None


def test_bound_tensors_outlive_the_callers_lists() -> None:
    rig = running_rig()
    kept = [weakref.ref(t) for t in (rig.draft_k[0], rig.draft_v[0], rig.table, rig.weights.fc)]
    rig.draft_k.clear()
    rig.draft_v.clear()
    del rig.table
    rig.weights.fc = torch.zeros(0)
    assert all(map(alive, kept))


def test_a_batchs_tensors_outlive_the_batch_for_some_calls() -> None:
    rig = running_rig()
    batch = rig.batch([Ask(0, 4)])
    rig.engine.run(batch)
    first = weakref.ref(batch.aux_hidden_states)
    for call in range(rig.engine._KEPT_CALLS):
        assert alive(first), f"gone after {call} further calls"
        batch.aux_hidden_states = batch.aux_hidden_states.clone()  # a host that reuses its batch
        rig.engine.run(batch)
    assert not alive(first)


def test_tree_calls_do_not_shorten_the_life_of_a_batch() -> None:
    rig = running_rig()
    batch = rig.batch([Ask(0, 4)])
    rig.engine.run(batch)
    first = weakref.ref(batch.seq_lens)
    ids = torch.tensor([1])
    for _ in range(3 * rig.engine._KEPT_CALLS):
        out = VerifyTensors.allocate(1, 4, MaskMode.QLEN_ONLY)
        rig.engine.tree(out, req_pool_indices=ids, seq_lens=ids, bonus_tokens=ids)
    del batch
    assert alive(first)


def test_layers_from_a_sequence_that_makes_its_items() -> None:
    """A stacked pool: indexing it makes a view that nobody else holds."""
    config = make_config(num_layers=2)
    rig = Rig(config, CHAIN, weights=random_weights(config))
    rig.draft_k, rig.draft_v = list(torch.stack(rig.draft_k)), list(torch.stack(rig.draft_v))
    rig.engine = rig.build()
    rig.join(0, 1)
    assert rig.compare(rig.cycle([Ask(0, 5)])) > 0
