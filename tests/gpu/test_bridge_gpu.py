"""The bridge between GPUs: two processes on one device, and on two where there are two.

EAGLEX_BRIDGE_CYCLES sets how many messages each of the long tests sends (default 10,000; on one device, where processes
take turns, 400).
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.bridge_places import ONE, TWO, WHERE, cycles_of, needs
from support.bridge_world import Plan, World, opened

from eaglex.config import EngineLimits, SpeculationConfig

pytestmark = pytest.mark.gpu

WAYS = [
    pytest.param(transport, where, id=f"{transport}-{where}")
    for transport, where in (("p2p", ONE), ("mailbox", ONE), ("p2p", TWO), ("mailbox", TWO), ("nccl", TWO))
]
PROBED = 20


def plan_of(transport: str | None, where: str, **fields: object) -> Plan:
    needs(where, transport)
    fields.setdefault("patience", 100.0)  # less than a test has, so that a rank which hangs says where
    return Plan(device="cuda", transport=transport, shared_device=where == ONE, **fields)  # type: ignore[arg-type]


@pytest.mark.timeout(320)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("transport", "where"), WAYS)
def test_every_message_arrives_whole(transport, where, captured, tmp_path):
    """Random stalls on either side; each message's content is compared. The captured graph outlives its bridge."""
    cycles = cycles_of(where)
    plan = plan_of(transport, where, cycles=cycles, captured=captured, most_stall=0.0005, patience=310)
    with opened(2, plan, tmp_path) as world:
        found, ended = world.all("done"), world.ended()
    sent = cycles + (1 if captured else 0)
    assert [(one["wrong"], one["number"]) for one in found] == [(0, sent)] * 2
    assert found[0]["counters"]["pushed"] == found[1]["counters"]["received"] == sent + PROBED
    assert found[0]["counters"]["drafts"] == found[1]["counters"]["drafts"] == sent + PROBED
    assert all(one["seconds_to_close"] < 5 for one in found), found
    assert ended == [0, 0]


@pytest.mark.parametrize("call", ["run", "enqueue"])
@pytest.mark.parametrize(("transport", "where"), WAYS)
def test_a_cycle_ends_with_its_push(transport, where, call, tmp_path):
    """In the engine's own graphs, and behind raw launches: drafts on the other rank are those of rank 0."""
    with opened(2, plan_of(transport, where, engine=call, cycles=200), tmp_path) as world:
        found = world.all("done")
        assert world.ended() == [0, 0]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["drafts"] == found[1]["drafts"] > 200
    assert found[0]["counters"]["pushed"] == found[1]["counters"]["received"] == 200 + PROBED


@pytest.mark.parametrize("transport", ["p2p", "mailbox"])
def test_the_push_costs_the_draft_ranks_stream_little(transport, tmp_path, record_property):
    """DESIGN: under 5 us. Cycles with and without it, in turn."""
    with opened(2, plan_of(transport, TWO, engine="run", cycles=10, timed=True), tmp_path) as world:
        times = world.all("done")[0]["us"]
    record_property("us", times)
    print(f"\n{transport}: {times}")
    assert times["with"] - times["without"] < 5


@pytest.mark.parametrize(("transport", "where"), WAYS)
def test_large_messages(transport, where, tmp_path):
    """More lanes than a block has threads, trees of 63 nodes: 266 KB."""
    plan = plan_of(
        transport, where, cycles=20,
        limits=EngineLimits(max_batch=520, max_rows=520 * 64, num_slots=600),
        speculation=SpeculationConfig(num_steps=8, topk=8, num_draft_tokens=64),
    )  # fmt: skip
    with opened(2, plan, tmp_path) as world:
        assert [one["wrong"] for one in world.all("done")] == [0, 0]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("transport", "where"), WAYS)
def test_a_killed_rank_is_named(transport, where, victim, captured, tmp_path):
    plan = plan_of(transport, where, until_killed=True, captured=captured, deadline=3.0)
    with opened(2, plan, tmp_path) as world:
        time.sleep(0.5)
        begun = time.monotonic()
        os.kill(world.processes[victim].pid, signal.SIGKILL)
        kind, words, when = world.hear(1 - victim, "error")
    assert (kind, words) == ("BridgeError", f"rank {victim}: its process has ended")
    assert when - begun < plan.deadline + 1


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("transport", "where"), WAYS)
def test_a_stopped_rank_is_named_at_the_deadline(transport, where, victim, tmp_path):
    plan = plan_of(transport, where, until_killed=True, deadline=1.0)
    with opened(2, plan, tmp_path) as world:
        time.sleep(0.5)
        begun = time.monotonic()
        os.kill(world.processes[victim].pid, signal.SIGSTOP)
        _, words, when = world.hear(1 - victim, "error")
    late = ["rank 0: no message to rank 1 within 1 s", "rank 1: it took no message of rank 0 within 1 s"][victim]
    assert words == late
    assert when - begun < plan.deadline + 1


@pytest.mark.parametrize(("transport", "where"), WAYS)
def test_a_rank_that_has_split_ends_all(transport, where, tmp_path):
    plan = plan_of(transport, where, until_killed=True, wrong_length_at=5)
    with opened(2, plan, tmp_path) as world:
        (_, words, _), (_, also, _) = world.all("error")
    assert words == also == "rank 1: it has split from rank 0: length of lane 0: expected 108, got 107"


@pytest.mark.parametrize(("transport", "where"), WAYS)
def test_two_groups_do_not_meet(transport, where, tmp_path):
    """Two servers on one host: each has its own content, and what ends one of them is nothing to the other."""
    mine = plan_of(transport, where, cycles=300, most_stall=0.0005)
    other = plan_of(transport, where, until_killed=True, salt=1_000_000, deadline=5.0)
    with opened(2, mine, tmp_path) as world, World(2, other, tmp_path) as second:
        second.all("open")
        os.kill(second.processes[1].pid, signal.SIGKILL)
        assert second.hear(0, "error")[1] == "rank 1: its process has ended"
        found = world.all("done")
        assert world.ended() == [0, 0]
    assert [(one["wrong"], one["number"]) for one in found] == [(0, 300)] * 2


@pytest.mark.parametrize("where", WHERE)
def test_the_probe_finds_a_transport(where, tmp_path):
    with opened(2, plan_of(None, where, cycles=5), tmp_path) as world:
        assert {one["transport"] for one in world.all("done")} <= {"p2p", "mailbox"}
