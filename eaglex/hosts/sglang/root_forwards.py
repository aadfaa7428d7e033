"""Forwards without drafts: the target decodes, and what the draft will need of its tokens is written a few at a time.

Sizes: B requests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eaglex.hosts.sglang import compat
from eaglex.hosts.sglang.kept_rows import KeptRows
from eaglex.hosts.sglang.plain_decode import DecodingTarget, PlainDecode, Publish
from eaglex.hosts.sglang.translate import Verified
from eaglex.hosts.sglang.verify_states import VerifyStates


def wants_tokens_alone(batch: Any) -> bool:
    """Whether tokens are all that this batch wants of a forward; else the host's verification does the rest as well."""
    return not (batch.has_grammar or batch.return_logprob)


class RootForwards:
    """What one worker needs for them: the states of the target, and where rows wait. Of `rows` 1 each is written by
    itself, of 0 none is on this rank; then there is no `kept`.
    """

    def __init__(
        self, target_worker: Any, req_to_token_pool: Any, states: VerifyStates, *, kept: KeptRows | None, rows: int
    ) -> None:
        self.states = states
        self.target = DecodingTarget(target_worker)  # for the host's verification of roots
        self._kept, self._rows = kept, rows
        self._runner = target_worker.model_runner
        self._decode = PlainDecode(target_worker, req_to_token_pool.req_to_token, max_batch=req_to_token_pool.size)
        self._result = compat.symbol("GenerationBatchResult")
        table = req_to_token_pool.req_to_token
        on_cpu = torch.ones(req_to_token_pool.size, dtype=torch.int32)
        self._accepted = _fronts(on_cpu.to(table.device))
        self._accepted_cpu = _fronts(on_cpu)

    def decode(self, batch: Any, publish: Publish | None) -> tuple[Any, Verified]:
        """A result that accepts one token of each request; its accept lengths are on the CPU already, where the host
        would copy them to. `next_draft_input` is left to the worker.
        """
        decoded = self._decode(batch, publish)
        requests, done = decoded.tokens.shape[0], decoded.done
        result = self._result(
            logits_output=done.logits_output,
            next_token_ids=decoded.tokens,
            can_run_cuda_graph=done.can_run_cuda_graph,
            speculative_num_draft_tokens=1,
            accept_lens=self._accepted_cpu[requests],
            new_seq_lens=decoded.new_seq_lens,
            routed_experts_output=done.routed_experts_output,
            indexer_topk_output=done.indexer_topk_output,
            extra_keep_alive_refs=[decoded.forward_batch],
        )
        verified = Verified(
            hidden_states=done.logits_output.hidden_states,
            next_token_ids=decoded.tokens,
            accept_lens=self._accepted[requests],
            req_pool_indices=batch.req_pool_indices,
            seq_lens=decoded.seq_lens,
            out_cache_loc=decoded.out_cache_loc,
        )
        return result, verified

    def keep(self, verified: Verified) -> Verified | None:
        """Rows of one token each after which nothing is drafted; what is to be written now, if anything is."""
        if self._kept is None:
            return verified if self._rows else None
        self._kept.add(verified)
        return self._kept.take() if self._kept.full else None

    def waiting(self, goes_on: Tensor | None) -> bool:
        """Whether rows wait that a decode of these slots, or of none, does not go on with."""
        kept = self._kept
        return kept is not None and len(kept) > 0 and (goes_on is None or not kept.goes_on(goes_on))

    def take(self) -> Verified:
        """The rows that wait. Raises RuntimeError where none do."""
        rows = None if self._kept is None else self._kept.take()
        if rows is None:
            raise RuntimeError("no rows wait to be written")
        return rows

    def forget(self) -> None:
        """No rows wait any more."""
        if self._kept is not None:
            self._kept.forget()

    def read_done(self) -> Any:
        """The event behind which the last decode reads no buffer that the host shares; None where it was no graph's."""
        event = getattr(self._runner, "war_fastpath_read_done_event", None)
        self._runner.war_fastpath_read_done_event = None
        return event


def _fronts(tensor: Tensor) -> list[Tensor]:
    """The first B elements, for every B: a slice takes as much CPU time as a launch."""
    return [tensor[:requests] for requests in range(tensor.shape[0] + 1)]
