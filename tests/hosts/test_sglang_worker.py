"""The order of the worker's steps, and whose draft each request gets, with stand-ins for the host and its streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_host
import pytest
import torch
from fake_host import LOG, Batch, DraftInput, K, Mode, N
from fake_worker import PAGE, POOL, SLOTS, made_worker


@pytest.fixture
def worker() -> Iterator[Any]:
    with made_worker() as made:
        yield made


def prefill(worker: Any, slots: list[int], length: int = 5, **fields: Any) -> Any:
    batch = Batch(
        torch.tensor(slots), torch.full((len(slots),), length), Mode.EXTEND, reqs=[object() for _ in slots], **fields
    )
    return worker.forward_batch_generation(batch, on_publish=lambda lengths: LOG.append("publish"))


def decode(worker: Any, slots: list[int], lengths: list[int], bonus: list[int], publish: bool = True) -> Any:
    batch = Batch(torch.tensor(slots), torch.tensor(lengths), spec_info=DraftInput(bonus_tokens=torch.tensor(bonus)))
    return worker.forward_batch_generation(batch, on_publish=(lambda _: LOG.append("publish")) if publish else None)


def candidates(result: Any) -> Any:
    return result.next_token_ids.view(-1, N).tolist()


def test_one_cycle_in_order(worker: Any) -> None:
    result = prefill(worker, [2])
    assert LOG == ["prefill on forward", "publish", "event on forward"]
    result.copy_to_cpu(return_logprob=False)
    assert LOG[3:] == ["copy on forward", "event on forward"], (
        "the host has a first token to pass on before a draft is enqueued"
    )
    LOG.clear()
    decode(worker, [2], [5], [20])
    assert LOG == [
        "draft waits for forward's event", "extend on draft", "steps on draft", "event on draft",
        "forward waits for draft's event", "gather", "verify on forward", "publish", "event on forward",
    ]  # fmt: skip


def test_without_overlap_the_draft_starts_at_once(worker: Any) -> None:
    decode(worker, [2], [5], [20], publish=False)
    assert LOG[-5:] == [
        "event on forward", "draft waits for forward's event", "extend on draft", "steps on draft", "event on draft",
    ]  # fmt: skip


def test_each_request_is_verified_with_its_own_draft(worker: Any) -> None:
    """Prefilled together, verified in another order with one gone, one new and one that took a slot over."""
    prefill(worker, [1, 2, 3])
    prefill(worker, [5])
    prefill(worker, [3], length=9)  # slot 3 changed hands
    result = decode(worker, [5, 3, 1], [5, 9, 5], [50, 30, 10])
    assert candidates(result) == [[51, 52, 152, 53], [31, 32, 132, 33], [11, 12, 112, 13]]
    assert result.accept_lens.tolist() == [3, 3, 3]


def test_drafts_follow_the_accepted_tokens(worker: Any) -> None:
    prefill(worker, [1, 4])
    first = decode(worker, [4, 1], [5, 5], [40, 10])
    assert first.new_seq_lens.tolist() == [8, 8]
    second = decode(worker, [1, 4], [8, 8], [112, 142])
    assert candidates(second) == [[113, 114, 214, 115], [143, 144, 244, 145]]


def test_a_request_at_another_length_is_verified_with_its_root_alone(worker: Any) -> None:
    prefill(worker, [1, 2])
    result = decode(worker, [1, 2, 4], [5, 6, 5], [10, 20, 40])
    assert result.accept_lens.tolist() == [3, 1, 1]


def test_an_unfinished_prompt_is_extended_and_not_drafted_for(worker: Any) -> None:
    request = object()
    batch = Batch(torch.tensor([1]), torch.tensor([5]), Mode.EXTEND, reqs=[request], chunked_req=request)
    batch.chunked_req_next_prompt_token = 7
    worker.forward_batch_generation(batch)
    assert "extend on draft" in LOG
    assert "steps on draft" not in LOG
    assert decode(worker, [1], [5], [10]).accept_lens.tolist() == [1]


def test_an_unfinished_prompt_beside_a_finished_one(worker: Any) -> None:
    request = object()
    batch = Batch(torch.tensor([1, 2]), torch.tensor([5, 5]), Mode.EXTEND, reqs=[object(), request])
    batch.chunked_req, batch.chunked_req_next_prompt_token = request, 7
    worker.forward_batch_generation(batch)
    assert decode(worker, [2, 1], [5, 5], [20, 10]).accept_lens.tolist() == [1, 3]


def test_the_fence_is_published_where_verification_ends(worker: Any) -> None:
    assert worker.war_fastpath_runner.war_fastpath_read_done_event is None
    decode(worker, [2], [5], [20])
    event = worker.war_fastpath_runner.war_fastpath_read_done_event
    assert event.name == "forward's event"
    worker.war_fastpath_runner.war_fastpath_read_done_event = None  # as the host takes it


def test_the_host_gets_its_own_batch_back(worker: Any) -> None:
    batch = Batch(torch.tensor([2]), torch.tensor([5]), spec_info=DraftInput(bonus_tokens=torch.tensor([20])))
    batch.input_ids = torch.tensor([1])
    worker.forward_batch_generation(batch)
    assert batch.input_ids is not None, "the draft worked on the host's batch"
    assert batch.seq_lens.tolist() == [5]
    assert batch.req_pool_indices.tolist() == [2]


def test_extend_writes_where_verification_wrote(worker: Any) -> None:
    """Not where the host's table points by then: the slot may have a new owner with a shared prefix."""
    decode(worker, [2, 3], [5, 5], [20, 30])
    worker._draft_worker.req_to_token_pool.req_to_token.zero_()
    worker._stream.join()
    assert worker._draft_worker.written.tolist() == [2000, 3000]


def test_the_verifier_gets_the_draft_it_was_configured_for(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree kernel is given strides of eaglex's own; what the sampler takes widths from is set back."""
    given: list[Any] = []
    verify = fake_host.EAGLEWorkerV2.verify

    def seen(self: Any, batch: Batch, grammar_barrier: Any = None) -> Any:
        given.append(batch.spec_info)
        return verify(self, batch, grammar_barrier)

    monkeypatch.setattr(fake_host.EAGLEWorkerV2, "verify", seen)
    decode(worker, [2], [5], [20])
    assert (given[0].topk, given[0].spec_steps) == (1, K)


def test_what_the_host_relays_can_be_filtered(worker: Any) -> None:
    relayed = decode(worker, [2, 3], [5, 5], [20, 30]).next_draft_input
    assert relayed.bonus_tokens.tolist() == [120, 130]
    assert len(relayed.topk_p) == len(relayed.topk_index) == 2
    assert relayed.hidden_states is None


def test_drafted_tokens_have_slots_of_their_own(worker: Any) -> None:
    prefill(worker, [2, 3])
    worker._stream.join()
    step = worker._draft_worker.last_step_batch
    first = POOL + PAGE
    assert step.out_cache_loc.tolist() == list(range(first, first + 2 * K))
    assert step.req_pool_indices.tolist() == [1, 2]
    backend = worker._draft_worker.draft_attn_backend
    table = backend.req_to_token_pool.req_to_token
    assert table[1, :8].tolist() == [*range(100, 105), first, first + 1, first + 2]
    assert (backend.pool_len, backend.page_size) == (table.shape[1], 1)
    assert worker._draft_worker.draft_runner.token_to_kv_pool.size + PAGE >= first + SLOTS * K
    assert step.seq_lens_cpu is None


@pytest.mark.parametrize("update", ["from_disk", "from_ipc", "from_tensor"])
def test_weights_change_when_no_draft_runs(worker: Any, update: str) -> None:
    decode(worker, [2], [5], [20])
    assert getattr(worker, f"update_weights_{update}")(None) == "updated"
    assert LOG.index("steps on draft") < LOG.index("cpu waits for draft") < LOG.index("update")


def test_a_draft_is_enqueued_when_the_results_are_passed_on(worker: Any) -> None:
    """Not before the forward returns, and not only when the next begins: an idle server's next prompt would wait."""
    decode(worker, [2], [5], [20])
    assert "steps on draft" not in LOG
    fake_host.Scheduler().launch_batch_sample_if_needed(None, None)
    assert LOG.index("end of turn") < LOG.index("steps on draft")
    del LOG[:]
    fake_host.Scheduler().launch_batch_sample_if_needed(None, None)
    assert LOG == ["end of turn"]


def test_memory_is_released_when_no_draft_runs(worker: Any) -> None:
    decode(worker, [2], [5], [20])
    assert fake_host.SchedulerWeightUpdaterManager().release_memory_occupation(None) == "released"
    assert LOG.index("steps on draft") < LOG.index("cpu waits for draft") < LOG.index("release")


def test_a_flush_forgets_all_drafts(worker: Any) -> None:
    prefill(worker, [2])
    worker.clear_cache_pool()
    assert LOG[-1] == "cpu waits for draft"
    assert decode(worker, [2], [5], [20]).accept_lens.tolist() == [1]


def test_inputs_are_kept_until_the_draft_has_run(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_host.Event, "query", lambda self: False)
    for length in range(5, 13):
        decode(worker, [2], [length], [20], publish=False)
    assert len(worker._stream.kept) == 8
    monkeypatch.setattr(fake_host.Event, "query", lambda self: True)
    decode(worker, [2], [13], [20], publish=False)
    assert len(worker._stream.kept) == 2, "the last two: nothing yet says that they have run"


def test_a_draft_kind_that_is_not_served_is_refused(worker: Any) -> None:
    worker._draft_worker.draft_runner.is_hybrid_swa = True
    with pytest.raises(ValueError, match=r"sliding-window .* a/head"):
        worker._draft_worker.alloc_memory_pool(None, None, None)
