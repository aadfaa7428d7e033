"""The worker that SGLang's scheduler drives under EAGLEX.

One forward: join the last draft; take the drafts of the batch's slots and verify them (or prefill); publish the
lengths; fork the next draft. With overlapped scheduling the draft is enqueued at the end of the scheduler's turn: after
the host has enqueued its result copy and passed on the tokens of the forward before. On the GPU it still starts where
verification ends, unless the CPU is late; and where the CPU is what a server waits for, enqueuing it any sooner would
hold those tokens back by as long as that takes. Any later, at the next forward's top, it would hold back the prompt of
the next request that reaches an idle server.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from eaglex.hosts.sglang import compat, hooks
from eaglex.hosts.sglang.draft import EaglexDraftWorker, Prefilled, Verified
from eaglex.hosts.sglang.stream import DraftStream, Events, Fence, Work

logger = logging.getLogger(__name__)

_StockWorker: Any = compat.symbol("EAGLEWorkerV2")


@contextlib.contextmanager
def stock_draft_class(replacement: type) -> Iterator[None]:
    """Let the host's worker build `replacement` where it names its own draft worker."""
    namespace = _StockWorker.__init__.__globals__
    original = namespace["EagleDraftWorker"]
    namespace["EagleDraftWorker"] = replacement
    try:
        yield
    finally:
        namespace["EagleDraftWorker"] = original


class EaglexWorker(_StockWorker):  # type: ignore[misc]
    """The host's EAGLE worker, drafting right after verification instead of at the next cycle's start."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        with stock_draft_class(EaglexDraftWorker):
            super().__init__(server_args, gpu_id, ps, nccl_port, target_worker)
        if not isinstance(self._draft_worker, EaglexDraftWorker):
            raise RuntimeError(f"the host built {type(self._draft_worker)} as draft worker, not EaglexDraftWorker")
        self._stream = DraftStream(self.device)
        self._fence, self._events = Fence(), Events()
        # The host pauses the KV pool's memory first and calls `clear_cache_pool` afterwards, so a draft still running
        # would write to pages that are gone. 0.5.17 has no hook of its own for this.
        manager = compat.symbol("SchedulerWeightUpdaterManager")
        hooks.around(manager, "release_memory_occupation", before=self._stream.drain)
        hooks.at_the_end_of_a_turn(self._stream.launch)
        logger.info("EAGLEX: drafts right after verification, on a stream of its own.")

    @property
    def war_fastpath_runner(self) -> Fence:
        """What holds the event after which the host may write shared buffers again."""
        return self._fence

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None) -> Any:
        """Verify the drafts of the batch, or prefill it, and fork the next draft.

        `on_publish(new_seq_lens)` is called where the lengths are known, as in the host's worker; it is None when the
        host schedules without overlap.
        """
        current = self._stream.join()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result, draft = self._prefill(batch)
        else:
            result, draft = self._verify(batch, grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        ready = self._events.recorded(current)
        self._fence.publish(ready)
        inputs = [result.logits_output.hidden_states, result.next_token_ids, result.accept_lens, result.new_seq_lens]
        inputs += [batch.input_ids, batch.out_cache_loc, batch.req_pool_indices, batch.seq_lens]
        run = self._stream.within(functools.partial(self._draft, draft))
        self._stream.fork(Work(run=run, inputs=inputs, ready=ready))
        if on_publish is None:  # the host waits for the lengths before it goes on
            self._stream.launch()
        return result

    def _prefill(self, batch: Any) -> tuple[Any, Callable[[], None]]:
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=compat.symbol("CaptureHiddenMode").FULL
        )
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = self._relayed(result.next_token_ids)
        prefilled = Prefilled(
            batch=copy.copy(batch),
            hidden_states=result.logits_output.hidden_states,
            next_token_ids=result.next_token_ids,
            seq_lens=batch.seq_lens,
            mm_input_embeds=result.logits_output.mm_input_embeds,
        )
        return result, functools.partial(self._draft_worker.draft_prefilled, prefilled)

    def _verify(self, batch: Any, grammar_barrier: Any) -> tuple[Any, Callable[[], None]]:
        batch.spec_info = self._draft_worker.draft(batch)
        result = self.verify(batch, grammar_barrier=grammar_barrier)
        result.next_draft_input = self._relayed(result.next_draft_input.bonus_tokens)
        verified = Verified(
            batch=copy.copy(batch),
            hidden_states=result.logits_output.hidden_states,
            next_token_ids=result.next_token_ids,
            accept_lens=result.accept_lens,
            new_seq_lens=result.new_seq_lens,
        )
        return result, functools.partial(self._draft_worker.draft_verified, verified)

    def _relayed(self, bonus_tokens: Tensor) -> Any:
        """What the host carries to the next cycle: the bonus tokens.

        The top-k is not read by anyone; without overlap the host slices it whenever requests leave or join, so it has
        one column of the right length.
        """
        rows = bonus_tokens.shape[0]
        return compat.symbol("EagleDraftInput")(
            bonus_tokens=bonus_tokens,
            topk_p=self._draft_worker.no_topk_p[:rows],
            topk_index=self._draft_worker.no_topk_index[:rows],
        )

    def _draft(self, draft: Callable[[], None]) -> None:
        with (
            self._draft_worker.draft_tp_context(self._draft_worker.draft_runner.tp_group),
            compat.symbol("speculative_moe_backend_context")(),
            compat.symbol("speculative_moe_a2a_backend_context")(),
        ):
            draft()

    def clear_cache_pool(self) -> None:
        """The host flushes: no draft runs any more, and none is remembered."""
        self._stream.drain()
        self._draft_worker.results.clear()

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        self._stream.drain()
        return super().update_weights_from_disk(recv_req)

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        self._stream.drain()
        return super().update_weights_from_ipc(recv_req)

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        self._stream.drain()
        return super().update_weights_from_tensor(recv_req)
