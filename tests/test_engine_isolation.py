"""A request's draft depends on that request alone, bit by bit: not on its place in the batch, its neighbours, its
slot's past.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import make_config, random_weights
from support.rig import Ask, Layout, Rig

from eaglex.config import SpeculationConfig

TREE = SpeculationConfig(num_steps=3, topk=3, num_draft_tokens=9)
CONFIGS = {layers: make_config(num_layers=layers) for layers in (1, 2)}
WEIGHTS = {layers: random_weights(config) for layers, config in CONFIGS.items()}


def make_rig(layers: int = 1, **layout: object) -> Rig:
    return Rig(CONFIGS[layers], TREE, weights=WEIGHTS[layers], layout=Layout(**layout))  # type: ignore[arg-type]


def alone(asks: list[Ask], layers: int = 1) -> list[tuple[torch.Tensor, ...]]:
    """The results after each cycle of one request that has the engine for itself."""
    rig = make_rig(layers)
    rig.join(asks[0].request, 4)
    snapshots = []
    for ask in asks:
        rig.engine.run(rig.batch([ask]))
        rig.requests[ask.request].length += ask.count
        snapshots.append(rig.snapshot(4))
    return snapshots


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def advance(rig: Rig, asks: list[Ask | None]) -> None:
    """One cycle without the reference."""
    rig.engine.run(rig.batch(asks))
    for ask in asks:
        if ask is not None:
            rig.requests[ask.request].length += ask.count


@given(data=st.data(), layers=st.sampled_from([1, 2]))
@settings(max_examples=25)
def test_permuted_joined_late_dropped_padded(data, layers) -> None:
    """Any interleaving of requests into batches, with padded lanes, on any slots and pages: what each gets alone."""
    plans = {
        r: [
            dataclasses.replace(Ask(r, 1), rows=rows, valid=data.draw(st.integers(1, rows)))
            for rows in data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        ]
        for r in range(data.draw(st.integers(2, 4)))
    }
    expected = {r: alone(plan, layers) for r, plan in plans.items()}
    rig = make_rig(layers, page_size=data.draw(st.sampled_from([1, 16])), seed=data.draw(st.integers(0, 99)), aux_gap=3)
    slots = data.draw(st.permutations(range(1, 8)))
    done = dict.fromkeys(plans, 0)
    while any(done[r] < len(plans[r]) for r in plans):
        ready = [r for r in plans if done[r] < len(plans[r])]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        lanes: list[Ask | None] = [plans[r][done[r]] for r in chosen]
        for _ in range(data.draw(st.integers(0, 2))):
            lanes.insert(data.draw(st.integers(0, len(lanes))), None)
        for r in chosen:
            if r not in rig.requests:
                rig.join(r, slots[r])
        advance(rig, lanes)
        for r in chosen:
            assert same(rig.snapshot(slots[r]), expected[r][done[r]]), f"request {r}, cycle {done[r]}"
            done[r] += 1
    assert rig.engine.counters()["bad_index"] == 0


def test_a_reused_slot_knows_nothing_of_its_past() -> None:
    """The same slot and the same KV slots, first for one request, then for another, a shorter one."""
    asks = [Ask(7, 3), Ask(7, 4, 2)]
    expected = alone(asks)
    rig = make_rig()
    rig.join(0, 4)
    for ask in (Ask(0, 20), Ask(0, 4, 4)):
        advance(rig, [ask])
    del rig.requests[0]
    rig.join(7, 4)
    for ask, snapshot in zip(asks, expected, strict=True):
        advance(rig, [ask])
        assert same(rig.snapshot(4), snapshot)


def test_other_slots_are_left_alone() -> None:
    """A cycle writes the results of its own slots only, and a padded lane those of nobody, slot 0 included."""
    rig = make_rig()
    for request in (0, 1):
        rig.join(request, 2 + request)
    advance(rig, [Ask(0, 5), Ask(1, 5)])
    before = [rig.snapshot(slot) for slot in range(8)]
    advance(rig, [None, Ask(1, 4, 2), None])
    after = [rig.snapshot(slot) for slot in range(8)]
    changed = [slot for slot in range(8) if not same(before[slot], after[slot])]
    assert changed == [3]
    assert rig.engine.counters()["padded"] == 2


def test_a_shared_prefix_is_shared() -> None:
    """A radix hit: a request whose table points at another's KV slots drafts as if it had written them itself."""
    rig = make_rig()
    rig.join(0, 2)
    ids = torch.arange(12)
    aux = torch.randn(12, rig.config.aux_width, generator=torch.Generator().manual_seed(3))
    advance(rig, [Ask(0, 8, aux=aux[:8], ids=ids[:8])])
    rig.join(1, 5)
    rig.table[5, :8] = rig.table[2, :8]
    rig.requests[1].length = 8
    advance(rig, [Ask(0, 4, aux=aux[8:], ids=ids[8:]), Ask(1, 4, aux=aux[8:], ids=ids[8:])])
    assert same(rig.snapshot(2), rig.snapshot(5))
    assert int(rig.results.num_nodes[5]) == 8


@pytest.mark.parametrize("layers", [1, 2])
def test_run_is_enqueue(layers) -> None:
    snapshots = []
    for enqueue in (False, True):
        rig = make_rig(layers)
        for request in (0, 1):
            rig.join(request, 2 + request)
        for asks in ([Ask(0, 5), Ask(1, 3)], [Ask(1, 4, 2), None, Ask(0, 4, 4)]):
            (rig.engine.enqueue if enqueue else rig.engine.run)(rig.batch(asks))
            for ask in asks:
                if ask is not None:
                    rig.requests[ask.request].length += ask.count
        snapshots.append([rig.snapshot(slot) for slot in range(8)])
    assert all(same(a, b) for a, b in zip(*snapshots, strict=True))
