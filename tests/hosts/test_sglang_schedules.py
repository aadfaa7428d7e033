"""Schedules as the host makes them: requests join, leave, come back and change places on few slots; whose draft is it?

The worker is driven against a model of the host's scheduler. Every request counts in a range of its own, so a draft
that belongs to another request, or to another length of the same one, is told by its tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import fake_host
import fake_worker
import pytest
import torch
from fake_host import LOG, Batch, DraftInput, K, Mode, N
from fake_worker import made_worker

ACCEPTED = fake_host.EAGLEWorkerV2.accepts + 1
RANGE = 40  # of token ids per request


@dataclass
class Request:
    """What the host knows of a request: its slot while it runs, its length, and its last token."""

    number: int
    slot: int = 0
    length: int = 0
    last: int = 0
    unfinished: bool = False


class Host:
    """A scheduler over few slots, with overlap or without; every step checks what the worker made of it."""

    def __init__(self, worker: Any, choose: random.Random, *, slots: int, overlap: bool) -> None:
        self.worker, self.choose, self.overlap = worker, choose, overlap
        self.free = list(range(1, slots + 1))
        self.running: list[Request] = []
        self.started = 0

    def forward(self, batch: Batch) -> Any:
        """One forward and its result copy."""
        result = self.worker.forward_batch_generation(batch, on_publish=(lambda _: None) if self.overlap else None)
        result.copy_to_cpu(return_logprob=False)
        return result

    def prefill(self, count: int) -> None:
        """New requests, or ones that were retracted, on free slots; the last prompt may have more to come."""
        joining = []
        for _ in range(min(count, len(self.free))):
            slot = self.free.pop(self.choose.randrange(len(self.free)))
            number, self.started = self.started % (fake_host.VOCAB // RANGE - 5), self.started + 1
            joining.append(Request(number, slot, length=self.choose.choice((5, 6, 8))))
        joining += [request for request in self.running if request.unfinished]
        self.running = [request for request in self.running if not request.unfinished]
        if not joining:
            return
        more_to_come = self.choose.random() < 0.3
        for request in joining:
            request.unfinished = more_to_come and request is joining[-1]
            request.length += 1
        slots = torch.tensor([request.slot for request in joining])
        batch = Batch(slots, torch.tensor([request.length for request in joining]), Mode.EXTEND, reqs=joining)
        if joining[-1].unfinished:
            batch.chunked_req, batch.chunked_req_next_prompt_token = joining[-1], 7
        self.worker.target_worker.first_tokens = torch.tensor([request.number * RANGE for request in joining])
        self.forward(batch)
        for request in joining:
            request.last = request.number * RANGE
        self.running += joining

    def decode(self, gone: list[Request]) -> None:
        """Verify everyone who runs, in a new order; `gone` are finished or retracted and overrun by one forward."""
        batch_of = [request for request in self.running if not request.unfinished] + gone
        if not batch_of:
            return
        self.choose.shuffle(batch_of)
        slots = torch.tensor([request.slot for request in batch_of])
        lengths = torch.tensor([request.length for request in batch_of])
        bonus = torch.tensor([request.last for request in batch_of])
        result = self.forward(Batch(slots, lengths, spec_info=DraftInput(bonus_tokens=bonus)))
        assert result.accept_lens.tolist() == [ACCEPTED] * len(batch_of), "a request was verified without its draft"
        for request, row in zip(batch_of, self.worker.seen_candidates.tolist(), strict=True):
            assert row == [request.last + step for step in range(N)], f"request {request.number} got another's draft"
            request.length += ACCEPTED
            request.last = request.number * RANGE + (request.last + K) % RANGE % (RANGE - N)

    def step(self) -> None:
        if self.choose.random() < 0.4:
            self.prefill(self.choose.randint(1, 3))
        leaving = [
            request
            for request in self.running
            if not request.unfinished and (self.choose.random() < 0.2 or request.length > fake_worker.CONTEXT - 3 * N)
        ]
        self.running = [request for request in self.running if request not in leaving]
        self.decode(gone=leaving if self.overlap else [])
        self.free += [request.slot for request in leaving]
        if self.choose.random() < 0.05:
            self.worker.clear_cache_pool()
            self.free += [request.slot for request in self.running]
            self.running = []


@pytest.fixture(autouse=True)
def bonus_follows_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake verifier accepts what it is given and picks a bonus token in the range of the same request."""

    def verify(self: Any, batch: Batch, grammar_barrier: Any = None) -> fake_host.Result:
        self.seen_candidates = batch.spec_info.draft_token.view(-1, N).clone()
        result = original(self, batch, grammar_barrier)
        first = self.seen_candidates[:, 0]
        bonus = first // RANGE * RANGE + (first + K) % RANGE % (RANGE - N)
        predict = result.next_token_ids.view(-1, N)
        predict.scatter_(1, (result.accept_lens - 1).to(torch.int64)[:, None], bonus[:, None].to(predict.dtype))
        result.next_draft_input.bonus_tokens = bonus
        return result

    def prefill(self: Any, batch: Batch, capture_hidden_mode: Any) -> fake_host.Result:
        result = prefill_original(self, batch, capture_hidden_mode)
        result.next_token_ids = self.first_tokens
        return result

    original = fake_host.EAGLEWorkerV2.verify
    prefill_original = fake_host.TargetWorker.forward_batch_generation
    monkeypatch.setattr(fake_host.EAGLEWorkerV2, "verify", verify)
    monkeypatch.setattr(fake_host.TargetWorker, "forward_batch_generation", prefill)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("slots", [3, 6])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_its_own_draft(seed: int, slots: int, overlap: bool) -> None:
    with made_worker(slots=slots) as worker:
        host = Host(worker, random.Random(seed), slots=slots, overlap=overlap)
        for _ in range(60):
            host.step()
        assert host.started > 2 * slots, "slots were not used again"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_order_of_steps_does_not_depend_on_timing(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks differ in when an event has passed. What they enqueue must not, or their collectives would not meet."""
    logs = []
    for passed in (True, False):
        monkeypatch.setattr(fake_host.Event, "query", lambda self, passed=passed: passed)
        with made_worker(slots=3) as worker:
            host = Host(worker, random.Random(11), slots=3, overlap=overlap)
            for _ in range(40):
                host.step()
        logs.append([line for line in LOG if not line.startswith("cpu waits")])
    assert logs[0] == logs[1]
    assert len(logs[0]) > 100
