"""The engine borrows memory: what it was given lives as long as it may be read, whatever its caller does meanwhile."""

import gc
import weakref

import pytest
import torch
from support.models import make_config, random_weights
from support.rig import Ask, Rig

from eaglex.config import SpeculationConfig
from eaglex.errors import DeviceError

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


def test_what_has_run_is_let_go() -> None:
    """On the CPU a call has run when it returns, so nothing is kept."""
    rig = running_rig()
    batch = rig.batch([Ask(0, 4)])
    first = weakref.ref(batch.aux_hidden_states)
    rig.engine.run(batch)
    del batch
    assert not alive(first)


class Failing:
    """A C++ engine on a device that has failed: no call comes through, and none can be marked."""

    def run(self, batch: object, stream: int) -> None:
        raise DeviceError("the launch's own error")

    def mark(self, stream: int) -> int:
        raise DeviceError("mark")

    def reached(self) -> int:
        raise DeviceError("reached")


def test_a_call_that_failed_says_why_and_keeps_its_inputs() -> None:
    """Half a cycle may be under way, and the device cannot say how far it is."""
    rig = running_rig()
    batch = rig.batch([Ask(0, 4)])
    given = weakref.ref(batch.seq_lens)
    rig.engine._inputs._engine = failing = Failing()
    with pytest.raises(DeviceError, match="the launch's own error"):
        rig.engine._inputs.call(failing.run, rig.engine._binary.BatchTensors(), dict(vars(batch)), 0)
    del batch
    assert alive(given)
    with pytest.raises(DeviceError, match="mark"):
        rig.engine._inputs.keep((torch.zeros(1),), 0)


def test_layers_from_a_sequence_that_makes_its_items() -> None:
    """A stacked pool: indexing it makes a view that nobody else holds."""
    config = make_config(num_layers=2)
    rig = Rig(config, CHAIN, weights=random_weights(config))
    rig.draft_k, rig.draft_v = list(torch.stack(rig.draft_k)), list(torch.stack(rig.draft_v))
    rig.engine = rig.build()
    rig.join(0, 1)
    assert rig.compare(rig.cycle([Ask(0, 5)])) > 0


def test_an_engine_ends_before_what_its_last_cycle_writes() -> None:
    """The C++ engine's end waits for the device; results that went before it would be written into others' memory."""
    gone = []

    class Last:
        def __del__(self) -> None:
            gone.append("engine")

    engine = running_rig().engine
    real = engine._engine
    engine._engine = engine._inputs._engine = Last()
    weakref.finalize(engine.results.num_nodes, gone.append, "results")
    weakref.finalize(engine._bound[0], gone.append, "weights")
    del engine
    gc.collect()
    assert gone[0] == "engine"
    assert "results" in gone
    assert real.backend_name == "cpu"
