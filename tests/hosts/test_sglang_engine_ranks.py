"""The worker with eaglex's engine on several ranks: one drafts, the others make the same trees of what it says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_engine_host import Host, made_host
from fake_engine_parts import Group, Setting, TreeMaskMode
from rank_processes import Ranks
from support import emulated
from test_sglang_dedicated import Tolerant, between_gpus

from eaglex import bridge, checkpoint
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftResults
from eaglex.errors import BridgeError, CheckpointError, DeviceError
from eaglex.hosts.sglang import options
from eaglex.hosts.sglang.hooks import UPDATES
from eaglex.hosts.sglang.ranks import Link
from eaglex.hosts.sglang.ranks import Ranks as TargetRanks

CASES = Path(__file__).parent.parent / "cases"
SETTINGS = {
    "chain": Setting(),
    "chain, no overlap": Setting(overlap=False),
    "chain, prompts in pieces": Setting(max_rows=1),
    "tree": Setting(topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY),
    "chain, pausing": Setting(pausing=True),
    "chain, adaptive": Setting(adaptive=(0, 1, 3)),
}


def on_ranks(count: int, folder: Path, body: Callable[[int, int], None]) -> list[str]:
    """`body(rank, size)` on processes of one process group; what each has printed."""

    def run(rank: int) -> int:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        body(rank, count)
        return 0

    with Ranks(count, run, folder) as ranks:
        ended = ranks.wait()
        assert [one.code for one in ended] == [0] * count, "\n".join(one.err for one in ended)
        return [one.out for one in ended]


def played(host: Host, turns: int) -> None:
    for _ in range(turns):
        host.step()


@pytest.mark.parametrize("name", SETTINGS)
def test_every_rank_verifies_the_reference_draft(name: str, tmp_path: Path) -> None:
    """Both hosts play the same schedule; each checks what its own worker gives the verifier."""

    def body(rank: int, size: int) -> None:
        with made_host(SETTINGS[name], len(name), rank, size) as host:
            played(host, 20)
            assert host.started > host.setting.slots, "slots were not used again"
            assert host.drafted > (host.verified / 3 if host.setting.adaptive else host.verified / 2)
            draft = host.worker._draft_worker
            assert type(draft).__name__ == ("EngineDraft" if rank == 0 else "FollowerDraft")
            assert hasattr(draft, "draft_k") is (rank == 0)
            print(host.drafted, host.verified, draft.kv_bytes_per_token)
            dist.barrier()

    first, second = on_ranks(2, tmp_path, body)
    assert first == second


@pytest.mark.slow
def test_every_rank_verifies_what_a_dedicated_drafter_has_drafted(tmp_path: Path) -> None:
    """No rank has the draft; when the drafter is killed, all go on without."""

    def body(rank: int, size: int) -> None:
        options = {"placement": "dedicated", "drafter_deadline": 20.0}
        with made_host(Setting(overlap=False, options=options), 4, rank, size) as host:
            draft = host.worker._draft_worker
            assert type(draft).__name__ == ("DedicatedDraft" if rank == 0 else "FollowerDraft")
            assert draft.kv_bytes_per_token == 0
            played(host, 12)
            assert host.drafted > host.verified / 2
            before = host.drafted, host.verified
            if rank == 0:
                draft.process.close()
            dist.barrier()
            host.decode([])  # of the last cycle before
            for _ in range(3):
                for request in host.running:
                    request.expected = type(request.expected).none()
                host.decode([])
            assert host.verified > before[1]
            print(*before, host.drafted, host.verified)
            if rank == 0:
                assert draft.counters()["gone"] == 1
            dist.barrier()

    first, second = on_ranks(2, tmp_path, body)
    assert first == second


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_devices_verify_what_a_third_has_drafted(tmp_path: Path) -> None:
    """Emulated: rows and drafts from device to device, and drafts on to the other rank's."""
    emulated.require()

    def body(rank: int, size: int) -> None:
        options = {"placement": "dedicated", "drafter_deadline": 20.0}
        with between_gpus(Setting(overlap=False, options=options), 4, rank, size) as host:
            played(host, 10)
            assert host.drafted > host.verified / 2
            print(host.drafted, host.verified)
            dist.barrier()

    first, second = on_ranks(2, tmp_path, body)
    assert first == second


@pytest.mark.parametrize("transport", ["p2p", "mailbox"])
def test_lanes_of_a_bridge_between_gpus_are_used_again(transport: str, tmp_path: Path) -> None:
    """With the emulated device: requests of one count by addresses alone, more than a message holds in several."""
    module = emulated.require()
    speculation = SpeculationConfig(num_steps=2, topk=1, num_draft_tokens=3)
    limits = EngineLimits(max_batch=4, max_rows=64, num_slots=12)

    def body(rank: int, size: int) -> None:
        with emulated.Emulator(module).installed():
            chosen = options.Options(transport=transport)
            results = DraftResults.allocate(speculation, limits)
            ranks = TargetRanks(Group(rank, size), chosen, rank=rank, size=size)
            bridge = ranks.bridge(speculation, limits, results, vocab_size=1000)
            assert bridge is not None
            link = Link(bridge, max_lanes=limits.max_batch)
            choose = torch.Generator().manual_seed(1)
            for cycle in range(24):
                count = 3 if cycle % 4 else 7  # 7: two messages
                slots = torch.randperm(11, generator=choose)[:count] + 1
                lens, valid = torch.arange(count) + cycle, torch.full((count,), 2, dtype=torch.int32)
                wanted = torch.randint(0, 1000, (count, 2), generator=choose)
                if rank == 0:
                    results.draft_tokens[slots], results.parents[slots] = wanted, torch.tensor([0, 1]).int()
                    results.num_nodes[slots], results.drafted_for[slots] = 2, lens + valid
                    link.tell(slots, lens, valid, draft=True, stream=0)
                else:
                    link.hear(slots, lens, valid, stream=0)
                    bridge.check()
                    assert torch.equal(results.draft_tokens[slots], wanted), cycle
                    assert torch.equal(results.drafted_for[slots], lens + valid)
            assert list(link._known) == [3]
            dist.barrier()

    on_ranks(2, tmp_path, body)


def test_the_embedding_is_gathered_at_start_and_after_an_update(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        with made_host(Setting(), 3, rank, size) as host:
            model = host.worker.target_worker.model_runner.model
            assert model.get_embed_and_head()[0].shape[0] < host.config.vocab_size, "the shards are not shards"
            played(host, 6)
            model.embed = model.embed * 0.5
            host.weights.embed_tokens = model.embed[: host.config.vocab_size]
            getattr(host.symbols["SchedulerWeightUpdaterManager"](), UPDATES[0])(None)
            before = host.drafted
            played(host, 10)
            assert host.drafted > before
            dist.barrier()

    on_ranks(2, tmp_path, body)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_may_come_late_to_an_update_that_makes_the_bridge_again(late: int, tmp_path: Path) -> None:
    """Emulated: a bridge between GPUs has a watcher, which must not take one that was let go for a lost rank."""
    module = emulated.require()
    draft, target = CASES / "C02_no_lm_head_full_vocab", CASES / "_target"
    setting = Setting(draft=draft, target=target, overlap=False, options={"transport": "p2p"})

    def body(rank: int, size: int) -> None:
        with emulated.Emulator(module).installed(), made_host(setting, 3, rank, size) as host:
            host.worker._stream.stream.cuda_stream = 0  # the stand-in's number is no stream of this device
            played(host, 6)
            host.symbols["SchedulerWeightUpdaterManager"]().update_weights_from_disk(None)
            dist.barrier()
            if rank == late:
                time.sleep(0.1)  # the watcher looks every 20 ms
            for request in host.running:
                request.expected = type(request.expected).none()
            host.decode([])
            assert host.worker._draft_worker._link.bridge.transport == "p2p"
            dist.barrier()

    on_ranks(2, tmp_path, body)


@pytest.mark.parametrize("fails", [None, "files", 0, 1])
def test_an_engine_with_the_targets_head_is_made_again_on_all_ranks_or_on_none(
    fails: str | int | None, tmp_path: Path
) -> None:
    """What fails: nothing, the draft's files on the rank that drafts, or a rank's end of the bridge."""

    def no_file(*_: Any, **__: Any) -> None:
        raise CheckpointError("the draft's files are gone")

    def no_bridge(members: Any, *_: Any, **__: Any) -> Any:
        with members.step("bridge"):
            if members.rank == fails:
                raise DeviceError("no memory of another process can be opened")

    def body(rank: int, size: int) -> None:
        setting = Setting(draft=CASES / "C02_no_lm_head_full_vocab", target=CASES / "_target")
        with made_host(setting, 3, rank, size) as host, pytest.MonkeyPatch.context() as patch:
            draft = host.worker._draft_worker
            assert draft.facts.borrowed == ("embed_tokens", "lm_head")
            played(host, 6)
            updater = host.symbols["SchedulerWeightUpdaterManager"]()
            if rank == 0 and fails == "files":
                patch.setattr(checkpoint, "load", no_file)
            if fails in (0, 1):
                patch.setattr(bridge, "choose", no_bridge)
            updater.update_weights_from_disk(None)
            before = host.drafted
            for _ in range(4):
                for request in host.running:
                    request.expected = type(request.expected).none()
                host.decode([])
                if fails is None:
                    break
            assert host.drafted == before
            host.worker.clear_cache_pool()
            patch.undo()
            updater.update_weights_from_disk(None)  # and the next one brings drafts back
            for request in host.running:
                request.expected = type(request.expected).none()
            host.decode([])
            tolerant = Tolerant(host)
            if fails is not None:
                tolerant.loose |= {request.number for request in host.running}  # rows of theirs are missing
            played(host, 10)
            assert host.drafted > before
            print(host.drafted, host.verified)
            dist.barrier()

    first, second = on_ranks(2, tmp_path, body)
    assert first == second


def test_tied_embeddings_are_gathered_once(tmp_path: Path) -> None:
    class Tied:
        """A target whose head is its embedding: one parameter under both names."""

        def __init__(self, whole: torch.Tensor, rank: int) -> None:
            self.part = whole.chunk(2)[rank].clone()

        def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
            return self.part, self.part

    def body(rank: int, size: int) -> None:
        whole = torch.arange(48.0).view(12, 4)
        ranks = TargetRanks(Group(rank, size), options.Options(), rank=rank, size=size)
        gathers, plain = [], ranks._whole
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "_whole", lambda *given: (gathers.append(given), plain(*given))[1])
            for names in (("embed_tokens", "lm_head"), ("lm_head",), ()):
                found = ranks.shared(Tied(whole, rank), names, 10, torch.float32)
                assert set(found) == (set(names) if rank == 0 else set())
                assert all(torch.equal(tensor, whole[:10]) for tensor in found.values())
                assert len({id(tensor) for tensor in found.values()}) <= 1
        assert len(gathers) == 2
        dist.barrier()

    on_ranks(2, tmp_path, body)


def test_a_draft_that_fails_costs_drafts_on_all_ranks_and_nothing_else(tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise DeviceError("the device is having a bad day")

    def body(rank: int, size: int) -> None:
        with made_host(Setting(), 5, rank, size) as host:
            host.prefill(2)
            draft = host.worker._draft_worker
            if rank == 0:
                draft._after_verify = draft._launch = fail
            while any(request.unfinished for request in host.running):
                host.prefill(0)
            host.worker._stream.join()
            for _ in range(3):
                for request in host.running:
                    request.expected = type(request.expected).none()
                host.decode([])
            assert host.verified
            assert not host.drafted
            dist.barrier()

    on_ranks(2, tmp_path, body)


def test_a_rank_that_is_gone_is_named_within_the_deadline(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        with made_host(Setting(options={"deadline": 5.0}), 5, rank, size) as host:
            host.prefill(2)
            while any(request.unfinished for request in host.running):
                host.prefill(0)
            host.worker._stream.join()
            dist.barrier()
            if rank == 0:
                os._exit(0)
            begun = time.monotonic()
            with pytest.raises(BridgeError, match="rank 0"):
                for _ in range(3):
                    host.decode([])
            assert time.monotonic() - begun < 10
            os._exit(0)

    on_ranks(2, tmp_path, body)
