"""The bridge's Python side: how ranks meet, what they are told, and the tree of a rank without a draft."""

import threading

import pytest
import torch
import torch.distributed as dist

from eaglex.bridge import Bridge, BridgeOptions, LinkOptions, Members
from eaglex.config import EngineLimits, MaskMode, SpeculationConfig
from eaglex.engine import DraftResults, VerifyTensors
from eaglex.errors import BridgeError, ConfigError, ShapeError
from eaglex.reference import Draft, tree

SPECULATION = SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=5)
LIMITS = EngineLimits(max_batch=2, max_rows=8, num_slots=4)


def on_ranks(count, body, deadline=10.0):
    """body(members) on `count` threads that share a store; per rank what it returned or raised."""
    store, found = dist.HashStore(), [None] * count

    def run(rank):
        try:
            found[rank] = body(Members(store, rank=rank, num_ranks=count, deadline=deadline))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def bridge_of(members, results=None, *, speculation=SPECULATION, limits=LIMITS, vocab_size=50):
    results = results or DraftResults.allocate(speculation, limits)
    return Bridge(members, speculation, limits=limits, vocab_size=vocab_size, results=results, deadline=5.0)


def test_gather_and_agree():
    def body(members):
        members.agree("options", {"same": 1, "rank": None})
        return members.gather("value", members.rank * 10)

    assert on_ranks(3, body) == [[0, 10, 20]] * 3


def test_agree_names_the_field_and_the_rank():
    found = on_ranks(3, lambda members: members.agree("options", {"steps": 4 if members.rank == 2 else 5}))
    assert [str(error) for error in found] == ["steps: expected 5 as on rank 0, got 4 on rank 2"] * 3
    assert all(isinstance(error, BridgeError) for error in found)


@pytest.mark.parametrize("kind", [ConfigError, MemoryError])
def test_a_step_that_fails_on_one_rank_fails_on_all(kind):
    def body(members):
        with members.step("weights"):
            if members.rank == 1:
                raise kind("path: expected a folder, got none")

    found = on_ranks(3, body)
    assert isinstance(found[1], kind)
    expected = "weights: expected success on all ranks, got on rank 1: path: expected a folder, got none"
    assert [str(found[0]), str(found[2])] == [expected] * 2


def test_a_rank_that_does_not_come_is_named():
    found = on_ranks(3, lambda members: members.rank == 1 or members.gather("start", None), deadline=0.3)
    expected = "start: expected word from all ranks within 0.3 s, got none from rank 1"
    assert [str(found[0]), str(found[2])] == [expected] * 2


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"^deadline: expected > 0 and finite, got 0"):
        BridgeOptions(deadline=0)
    with pytest.raises(ConfigError, match=r"^drafter deadline: expected > 0 and finite, got inf"):
        LinkOptions(deadline=float("inf"))


def test_drafts_reach_every_rank_and_become_the_references_trees():
    tokens, parents = [11, 12, 13, 14], [0, 0, 1, 1]

    def body(members):
        results = DraftResults.allocate(SPECULATION, LIMITS)
        bridge = bridge_of(members, results)
        assert bridge.transport == "shm"
        if members.rank == 0:
            results.draft_tokens[3] = torch.tensor(tokens)
            results.parents[3] = torch.tensor(parents)
            results.num_nodes[3], results.drafted_for[3] = 4, 21
            bridge.push([3, 1], [21, 9], draft=True)
            bridge.push([3], [22], draft=False)
        else:
            assert bridge.receive([3, 1], [21, 9])
        out = VerifyTensors.allocate(2, 5, MaskMode.QLEN_ONLY)
        bridge_tree = bridge.follower().tree
        if members.rank == 0:
            members.gather("pushed", None)
            assert int(results.num_nodes[3]) == 0  # its own second word
            return bridge.counters()
        ids = {"req_pool_indices": torch.tensor([1, 3]), "seq_lens": torch.tensor([9, 21])}
        bridge_tree(out, **ids, bonus_tokens=torch.tensor([7, 8]))
        members.gather("pushed", None)
        assert not bridge.receive([3], [22])
        return out, bridge.counters()

    first, (one, counted), (other, _) = on_ranks(3, body)
    assert first == {"pushed": 2, "received": 0, "drafts": 1}
    assert counted == {"pushed": 0, "received": 2, "drafts": 1}
    expected = tree(Draft(torch.tensor(tokens), torch.tensor(parents), torch.zeros(4)), 8, 21, 5)
    for out in (one, other):
        assert out.draft_tokens[1].tolist() == expected.draft_tokens.tolist()
        assert out.positions[1].tolist() == expected.positions.tolist()
        assert out.mask[1].tolist() == expected.mask.tolist()
        assert out.retrieve_next_token[1].tolist() == expected.retrieve_next_token.tolist()
        assert out.retrieve_next_sibling[1].tolist() == expected.retrieve_next_sibling.tolist()
        assert out.retrieve_next_token[0].tolist() == [-1] * 5


def test_a_rank_that_has_split_ends_all():
    def body(members):
        bridge = bridge_of(members)
        if members.rank == 0:
            bridge.push([1], [9], draft=False)
            members.gather("split", None)
            bridge.push([1], [10], draft=False)
        else:
            try:
                bridge.receive([1], [8])
            finally:
                members.gather("split", None)

    found = on_ranks(2, body)
    expected = "rank 1: it has split from rank 0: length of lane 0: expected 8, got 9"
    assert [str(error) for error in found] == [expected] * 2


def test_two_groups_on_one_host_do_not_meet():
    first, second = on_ranks(2, bridge_of), on_ranks(2, bridge_of)
    first[0].push([1], [5], draft=False)
    second[0].push([1], [6], draft=False)
    assert not second[1].receive([1], [6])
    assert not first[1].receive([1], [5])
    assert first[0].invitation().identity != second[0].invitation().identity


MISFITS = {
    "vocabulary": ({"vocab_size": 51}, "vocab_size: expected 50 as in the group, got 51 on rank 1"),
    "slots": (
        {"limits": EngineLimits(max_batch=2, max_rows=8, num_slots=5)},
        "num_slots: expected 4 as in the group, got 5 on rank 1",
    ),
    "steps": (
        {"speculation": SpeculationConfig(num_steps=4, topk=2, num_draft_tokens=5)},
        "num_steps: expected 3 as in the group, got 4 on rank 1",
    ),
}


@pytest.mark.parametrize(("other", "message"), MISFITS.values(), ids=MISFITS.keys())
def test_ranks_of_other_sizes_do_not_join(other, message):
    found = on_ranks(2, lambda members: bridge_of(members, **(other if members.rank else {})))
    assert str(found[1]) == message
    assert str(found[0]) == f"bridge: expected success on all ranks, got on rank 1: {message}"


def test_results_of_other_sizes_are_refused():
    results = DraftResults.allocate(SPECULATION, LIMITS)
    results.num_nodes = torch.zeros(3, dtype=torch.int32)
    (found,) = on_ranks(1, lambda members: bridge_of(members, results))
    assert isinstance(found, ShapeError)
    assert str(found).startswith("num_nodes: expected ")


def test_lists_of_other_lengths_are_refused():
    (bridge,) = on_ranks(1, bridge_of)
    with pytest.raises(ShapeError, match="new_lens: expected 2 lengths, got 1"):
        bridge.push([1, 2], [3], draft=False)
    with pytest.raises(ConfigError, match=r"push slot: expected in 0\.\.3, got 4"):
        bridge.push([4], [3], draft=False)
    with pytest.raises(ConfigError, match=r"push lanes: expected in 1\.\.2, got 3"):
        bridge.push([1, 2, 3], [3, 3, 3], draft=False)
    with pytest.raises(BridgeError, match="receive: expected a rank above 0, got 0"):
        bridge.receive([1], [3])
