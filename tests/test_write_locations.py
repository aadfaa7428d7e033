"""out_cache_loc: where extend writes K and V is what the host said, not what its table says by then."""

import pytest
import torch
from support.models import make_config
from support.rig import Ask, Rig

from eaglex.config import SpeculationConfig
from eaglex.errors import ShapeError

CHAIN = SpeculationConfig(num_steps=3)


def running_rig() -> Rig:
    """Request 0 in slot 1 with 6 rows, request 1 in slot 2 with 4."""
    rig = Rig(make_config(), CHAIN)
    rig.join(0, 1)
    rig.join(1, 2)
    assert rig.compare(rig.cycle([Ask(0, 6), Ask(1, 4)])) > 0
    return rig


def prefix(rig: Rig) -> torch.Tensor:
    return torch.stack([rig.draft_k[0][rig.table[1, :6]], rig.draft_v[0][rig.table[1, :6]]])


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("said", [True, False])
def test_a_slot_given_away_while_its_last_draft_runs(said: bool, id_dtype: torch.dtype) -> None:
    """Slot 2 goes to a request that shares request 0's prefix before the draft from its last verification has run."""
    rig = running_rig()
    batch, length = rig.batch([Ask(1, 3)]), rig.requests[1].length
    places = rig.table[2, length : length + 3].to(id_dtype, copy=True)
    if said:
        batch.out_cache_loc = places
    before = prefix(rig)
    rig.table[2] = rig.table[1]
    rig.engine.run(batch)
    assert torch.equal(prefix(rig), before) is said
    if said:
        assert torch.isfinite(rig.draft_k[0][places]).all()
        assert rig.compare(rig.cycle([Ask(0, 3)])) > 0


def test_the_hosts_places_give_the_same_draft() -> None:
    plain, told = running_rig(), running_rig()
    batch, length = told.batch([Ask(0, 4, 2)]), told.requests[0].length
    batch.out_cache_loc = told.table[1, length : length + 4].clone()
    batch.out_cache_loc[2:] = -1  # rows that do not count are not looked at
    told.engine.run(batch)
    plain.cycle([Ask(0, 4, 2)])
    assert torch.equal(told.results.draft_tokens, plain.results.draft_tokens)
    assert torch.equal(told.results.scores, plain.results.scores)
    assert torch.equal(told.results.drafted_for, plain.results.drafted_for)


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_a_place_outside_the_pool_touches_nothing(bad: int) -> None:
    rig = running_rig()
    batch = rig.batch([Ask(1, 2)])
    length = rig.requests[1].length
    batch.out_cache_loc = torch.tensor([int(rig.table[2, length]), bad])
    before = rig.draft_k[0].clone()
    rig.engine.run(batch)
    assert torch.equal(rig.draft_k[0].nan_to_num(), before.nan_to_num())
    assert int(rig.results.num_nodes[2]) == 0
    assert rig.engine.counters()["bad_index"] == 1


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("length", [2**63 - 1, 2**63 - 4, 2**40])
def test_a_length_that_would_overflow(length: int, said: bool) -> None:
    rig = running_rig()
    batch = rig.batch([Ask(1, 4), Ask(0, 2)])
    if said:
        batch.out_cache_loc = torch.cat([rig.table[2, 4:8], rig.table[1, 6:8]])
    batch.seq_lens = torch.tensor([length, 6])
    rig.engine.run(batch)
    assert rig.engine.counters()["bad_index"] == 1
    assert int(rig.results.num_nodes[2]) == 0
    assert int(rig.results.num_nodes[1]) == CHAIN.num_draft_tokens - 1


def test_one_place_per_row() -> None:
    rig = running_rig()
    batch = rig.batch([Ask(1, 2)])
    batch.out_cache_loc = torch.tensor([1, 2, 3])
    message = r"^out_cache_loc: expected contiguous \[2\] int32 or int64 on cpu, got \[3\] int64 on cpu"
    with pytest.raises(ShapeError, match=message):
        rig.engine.run(batch)
