"""The bridge between GPUs without one: its kernels run on the emulated device, in processes that share its memory.

Proves protocol, deadlines and teardown; memory ordering and time are for tests/gpu/test_bridge_gpu.py.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from support import emulated
from support.bridge_world import Plan, World, opened


def latest(deadline: float) -> float:
    """Seconds until a fault is named at the latest. A device's bound, the deadline and a second, is for tests/gpu: here
    kernels wait on the processors that the watching threads need.
    """
    return deadline + 3


@pytest.fixture(scope="module")
def module():
    return emulated.require()


TRANSPORTS = ["p2p", "mailbox", "nccl"]


def plan_of(transport: str, **fields: object) -> Plan:
    """With nccl over tests/emulator/fake_nccl.cpp, whose waits hold the driver: no other thread gets in."""
    return Plan(device="emulated", transport=transport, fake_nccl=transport == "nccl", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_message_arrives_whole(transport, tmp_path, module):
    plan = plan_of(transport, cycles=60, most_stall=0.002)
    with opened(3, plan, tmp_path, module) as world:
        found = world.all("done")
        assert world.ended() == [0, 0, 0]
    assert [one["wrong"] for one in found] == [0, 0, 0]
    assert [one["transport"] for one in found] == [transport] * 3
    sent = 60 + 20  # the probe's
    assert found[0]["counters"] == {"pushed": sent, "received": 0, "drafts": sent}
    assert found[1]["counters"] == found[2]["counters"] == {"pushed": 0, "received": sent, "drafts": sent}


@pytest.mark.parametrize("call", ["run", "enqueue"])
def test_a_cycle_ends_with_its_push(call, tmp_path, module):
    """The engine's own graphs have it, and so have raw launches: drafts on the other rank are those of rank 0."""
    plan = Plan(device="emulated", transport="p2p", engine=call, cycles=12)
    with opened(2, plan, tmp_path, module) as world:
        found = world.all("done")
        assert world.ended() == [0, 0]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["drafts"] == found[1]["drafts"] > 24
    assert found[0]["counters"]["pushed"] == found[1]["counters"]["received"] == 12 + 20


def test_a_rank_that_has_split_ends_all(tmp_path, module):
    plan = Plan(device="emulated", transport="p2p", cycles=40, wrong_length_at=5)
    with opened(2, plan, tmp_path, module) as world:
        (_, words, _), (kind, also, _) = world.all("error")
    assert kind == "BridgeError"
    assert words == also == "rank 1: it has split from rank 0: length of lane 0: expected 108, got 107"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("transport", ["mailbox", "nccl"])
def test_a_killed_rank_is_named(transport, victim, tmp_path, module):
    plan = plan_of(transport, until_killed=True, deadline=3.0)
    with opened(3, plan, tmp_path, module) as world:
        time.sleep(0.3)
        begun = time.monotonic()
        os.kill(world.processes[victim].pid, signal.SIGKILL)
        told = [world.hear(rank, "error") for rank in range(3) if rank != victim]
    assert {words for _, words, _ in told} == {f"rank {victim}: its process has ended"}
    assert max(when for _, _, when in told) - begun < latest(plan.deadline)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_a_stopped_rank_is_named_at_the_deadline(transport, victim, tmp_path, module):
    plan = plan_of(transport, until_killed=True, deadline=1.0)
    with opened(2, plan, tmp_path, module) as world:
        time.sleep(0.3)
        begun = time.monotonic()
        os.kill(world.processes[victim].pid, signal.SIGSTOP)
        _, words, when = world.hear(1 - victim, "error")
    late = ["rank 0: no message to rank 1 within 1 s", "rank 1: it took no message of rank 0 within 1 s"]
    assert words == late[victim]
    assert 0.5 < when - begun < latest(plan.deadline)


def test_without_nccl_the_probe_says_so_on_all_ranks(tmp_path, module):
    with World(2, Plan(device="emulated", transport="nccl"), tmp_path, emulated=module) as world:
        told = world.all("error")
    assert len({words for _, words, _ in told}) == 1
    assert told[0][1].startswith("transport: expected nccl to carry a message, got nccl: rank 0: ")
