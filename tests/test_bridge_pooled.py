"""A dedicated drafter whose K and V lie in the host's KV slots: its drafts are the reference's, request by request."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.pooled_host import LAYOUT, PooledHost
from support.rig import Ask

from eaglex.bridge_dedicated import join_as_drafter
from eaglex.errors import BridgeError, ShapeError


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[PooledHost]:
    made = PooledHost(7, **getattr(request, "param", {}))
    yield made
    made.close()


def step(host: PooledHost, *numbers: int) -> None:
    """A verification of these requests: four rows each, of which some count."""
    host.compare(host.cycle([Ask(number, 4, host.choose.randint(1, 4)) for number in numbers]))


def prompt(host: PooledHost, number: int, rows: int, source: Ask | None = None) -> None:
    ask = Ask(number, rows) if source is None else source
    host.compare(host.cycle([ask], {number}))


def test_requests_of_their_own(host: PooledHost) -> None:
    first, second = host.begin(), host.begin()
    host.compare(host.cycle([Ask(first, 9), Ask(second, 5)], {first, second}))
    for _ in range(5):
        step(host, second, first)
    assert host.drafter.anew == [True] + [False] * 5
    assert host.compared > 8


def test_a_prefix_that_another_request_computed_is_attended_to(host: PooledHost) -> None:
    first = host.begin()
    prompt(host, first, 20)
    second = host.begin(like=first, shared=16)
    prompt(host, second, 3)
    for _ in range(4):
        step(host, first, second)
    host.end(first)  # its KV slots behind the prefix are dealt again; the prefix is still in use
    host.free = [loc for loc in host.free if loc not in host.table[host.running[second].slot, :16].tolist()]
    third = host.begin(like=second, shared=18)
    prompt(host, third, 12)
    for _ in range(4):
        step(host, third, second)
    assert host.compared > 12


def test_a_row_that_the_host_rewrites_is_sent_again(host: PooledHost) -> None:
    """Two requests have computed the same prompt; the second's KV slots go to a third at once."""
    first, second = host.begin(), host.begin()
    ask = Ask(first, 14)
    aux, ids = host.rig.rows_of(ask)
    prompt(host, first, 14)
    prompt(host, second, 14, Ask(second, 14, aux=aux, ids=ids))
    step(host, first, second)
    host.rewrite(second, first, 14)
    third = host.begin()
    prompt(host, third, 20)  # over what was the second's
    for _ in range(4):
        step(host, second, third, first)
    assert host.compared > 12


def test_a_prompt_in_pieces(host: PooledHost) -> None:
    number = host.begin()
    for rows, last in ((10, False), (6, False), (5, True)):
        outcomes = host.cycle([Ask(number, rows, draft_from=last)], {number})
        assert host.has(outcomes[0]) is last
    host.compare(outcomes)
    step(host, number)


def test_random_schedules() -> None:
    host = PooledHost(3)
    try:
        for _ in range(60):
            choose, running = host.choose, list(host.running)
            if running and choose.random() < 0.2:
                leaving = choose.choice(running)
                # what it shares with others stays theirs, as in a radix cache
                kept = {loc for n in running if n != leaving for loc in host.table[host.running[n].slot].tolist()}
                host.owned[leaving] = [loc for loc in host.owned[leaving] if loc not in kept]
                host.end(leaving)
                continue
            grown = [n for n in running if host.running[n].length < 50]
            if len(running) < LAYOUT.max_batch - 1 and choose.random() < 0.4:
                like = choose.choice(running) if running and choose.random() < 0.6 else None
                shared = 0 if like is None else choose.randint(0, min(host.running[like].length, 30))
                number = host.begin(like=like, shared=shared)
                prompt(host, number, choose.randint(1, 12))
            elif grown:
                step(host, *choose.sample(grown, choose.randint(1, len(grown))))
        assert host.numbers > 10
        assert host.compared > 40
    finally:
        host.close()


def test_who_missed_a_cycle_goes_without_and_a_prompt_begins_anew(host: PooledHost) -> None:
    """Lengths say nothing here: a request that has no rows of its own in front is not taken for a new one."""
    first = host.begin()
    prompt(host, first, 7)
    second = host.begin()
    assert not host.has(host.cycle([Ask(second, 4)])[0])  # its prompt's rows never went out as such
    step(host, first)
    third = host.begin(like=first, shared=5)
    prompt(host, third, 2)


@pytest.mark.parametrize("host", [{"deadline": 0.4}], indirect=True)
def test_after_a_fall_the_pool_is_empty_and_requests_begin_anew(host: PooledHost) -> None:
    first = host.begin()
    prompt(host, first, 9)
    host.drafter.deafen()
    assert not host.has(host.cycle([Ask(first, 4, 2)])[0])
    assert host.client.counters()["late"] == 1
    assert not host.has(host.cycle([Ask(first, 4, 2)])[0])
    host.drafter.deaf.clear()
    until = time.monotonic() + 10
    while len(host.drafter.anew) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert not host.has(host.cycle([Ask(first, 4, 2)])[0]), "it lacks rows"
    second = host.begin()
    prompt(host, second, 8)
    assert host.drafter.anew == [True, False, True]
    assert host.client.counters()["returns"] == 1
    written = host.drafter.pool.draft_k[0].flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(host.table[host.running[second].slot, :8].tolist())
    # A prefix that was computed before the fall is of no use, and of no harm to others.
    third = host.begin(like=first, shared=6)
    assert host.has(host.cycle([Ask(third, 2)], {third})[0])
    step(host, second)


def test_what_a_cycle_needs_is_named(host: PooledHost) -> None:
    number = host.begin()
    batch = host.rig.batch([Ask(number, 3)])
    with pytest.raises(ShapeError, match="out_cache_loc: expected the rows' KV slots"):
        host.client.draft(batch, begins=[True], table_lens=[0])
    batch.out_cache_loc = batch.input_ids * 0 + 1
    with pytest.raises(ShapeError, match="table_lens: expected 1 lengths, got 0"):
        host.client.draft(batch, begins=[True])
    with pytest.raises(ShapeError, match="begins: expected 1 flags, got 0"):
        host.client.draft(batch, table_lens=[0])


def test_a_drafter_without_the_hosts_pool_is_refused(host: PooledHost) -> None:
    host.drafter.end()
    host.drafter.server = None  # its place is free
    invitation = host.client.invitation()
    with pytest.raises(BridgeError, match="num_kv_slots: expected 220 as in the group, got 0"):
        join_as_drafter(invitation, host.drafter.engine)
