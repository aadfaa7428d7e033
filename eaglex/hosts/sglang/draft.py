"""SGLang's own draft model, run early: extend and the K steps after verification, results by request slot."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eaglex.hosts.sglang import compat
from eaglex.hosts.sglang.results import Drafts, Grid, SlotResults, chain_parents, grid_of, grid_parents
from eaglex.hosts.sglang.scratch import Scratch, ScratchPlan

_StockDraftWorker: Any = compat.symbol("EagleDraftWorker")


@dataclass(frozen=True)
class Verified:
    """A verified batch, as the draft reads it. `batch` is a shallow copy: the host goes on with its own.

    hidden_states [B*N, A*Ht], the accepted path at each request's front; next_token_ids [B*N] int32; accept_lens [B]
    int32, bonus included; new_seq_lens [B] int64.
    """

    batch: Any
    hidden_states: Tensor
    next_token_ids: Tensor
    accept_lens: Tensor
    new_seq_lens: Tensor


@dataclass(frozen=True)
class Prefilled:
    """A prefilled batch: hidden_states [tokens, A*Ht]; next_token_ids [B]; seq_lens [B] int64, the prompt (so far)."""

    batch: Any
    hidden_states: Tensor
    next_token_ids: Tensor
    seq_lens: Tensor
    mm_input_embeds: Tensor | None


class EaglexDraftWorker(_StockDraftWorker):  # type: ignore[misc]
    """The host's draft worker. `draft` reads what `draft_verified` or `draft_prefilled` left by request slot."""

    results: SlotResults
    chain_grid: Grid
    no_topk_p: Tensor
    no_topk_index: Tensor
    scratch: Scratch | None = None
    scratch_base: int

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Allocate the draft's KV pool, larger than the host's by the scratch, and the result buffers.

        The pool is shared with nobody and indexed by the host's slot ids, so ids past the host's last are free to use.
        No budget of the host's counts them: lanes * K * topk tokens of the draft's layers (4 KB each for an 8B head).

        Raises:
            ValueError: the draft is of a kind that the scratch does not serve.
        """
        runner = self.draft_runner
        unserved = {
            "a sliding-window KV pool": runner.is_hybrid_swa,
            "multimodal positions": runner.model_config.model_is_mrope,
            "an indexer shared over steps": self.index_share_for_mtp_iteration,
        }
        for what, found in unserved.items():
            if found:
                raise ValueError(f"EAGLEX does not serve a draft with {what}: {runner.model_config.model_path}")
        page_size = token_to_kv_pool_allocator.page_size
        self.scratch_base = token_to_kv_pool_allocator.size + page_size
        extra = req_to_token_pool.size * self.topk * self.speculative_num_steps
        extra = -(-extra // page_size) * page_size
        super().alloc_memory_pool(
            memory_pool_config=dataclasses.replace(
                memory_pool_config, max_total_num_tokens=memory_pool_config.max_total_num_tokens + extra
            ),
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )
        pool = runner.token_to_kv_pool
        if pool.size + page_size < self.scratch_base + extra:
            raise ValueError(
                f"draft KV pool: {self.scratch_base + extra} slots are needed, {extra} of them for drafted tokens, "
                f"and the host made {pool.size + page_size}"
            )
        self.results = SlotResults(
            slots=req_to_token_pool.req_to_token.shape[0],
            num_draft_tokens=self.speculative_num_draft_tokens,
            vocab_size=self.target_worker.model_config.vocab_size,
            chain=self.topk == 1,
            device=self.device,
        )
        lanes = req_to_token_pool.size
        self.chain_grid = grid_of(chain_parents(lanes, self.speculative_num_draft_tokens, self.device))
        self.no_topk_p = torch.zeros((lanes, 1), dtype=torch.float32, device=self.device)
        self.no_topk_index = torch.zeros((lanes, 1), dtype=torch.int64, device=self.device)

    def init_attention_backend(self) -> None:
        """Point the multi-step draft attention at the table whose tail is the scratch."""
        super().init_attention_backend()
        self.plan_stream, self.plan_stream_ctx = None, contextlib.nullcontext()  # a third stream would not be ordered
        backend = self.draft_attn_backend
        if backend is None:  # one step: the draft is extend's last row, nothing is written for it
            return
        expected = compat.symbol("TritonMultiStepDraftBackend")
        if not isinstance(backend, expected):
            raise ValueError(f"draft attention backend: {expected.__name__} is needed, the host made {type(backend)}")
        pool = self.req_to_token_pool
        plan = ScratchPlan(
            lanes=pool.size,
            steps=self.speculative_num_steps,
            topk=self.topk,
            table_width=pool.req_to_token.shape[1],
            first_slot=self.scratch_base,
        )
        self.scratch = Scratch(plan, self.device)
        backend.req_to_token_pool = SimpleNamespace(req_to_token=self.scratch.table)
        backend.pool_len = self.scratch.table.shape[1]
        backend.page_size = 1  # the scratch has no pages: branches lie one after another

    def draft(self, batch: Any) -> Any:
        """The verifier's input, from the drafts of the batch's slots in the batch's order.

        A request without a draft is verified with its root alone.
        """
        found = self.results.gather(batch.req_pool_indices, batch.seq_lens)
        if found.parents is None:
            grid = self.chain_grid.rows(found.tokens.shape[0])
        else:
            grid = grid_of(found.parents)
        verify_input = compat.symbol("build_eagle_verify_input")(
            batch,
            batch.spec_info,
            grid.parent_list,
            grid.selected,
            found.tokens,
            None,
            target_worker=self.target_worker,
            topk=grid.topk,
            num_steps=grid.depth,
            num_draft_tokens=self.speculative_num_draft_tokens,
            tree_mask_mode=self.tree_mask_mode,
            device=self.device,
        )
        verify_input.topk = self.topk
        verify_input.spec_steps = self.speculative_num_steps
        verify_input.retrieve_next_token.masked_fill_(found.missing[:, None], -1)
        return verify_input

    def draft_verified(self, verified: Verified) -> None:
        """Extend by the accepted tokens, then draft from each request's last one."""
        next_input = compat.symbol("EagleDraftInput")()
        self._draft_extend_for_decode(
            verified.batch,
            SimpleNamespace(
                logits_output=SimpleNamespace(hidden_states=verified.hidden_states),
                next_token_ids=verified.next_token_ids,
                accept_lens=verified.accept_lens,
                next_draft_input=next_input,
            ),
        )
        self._steps(verified.batch, next_input, verified.new_seq_lens)

    def draft_prefilled(self, prefilled: Prefilled) -> None:
        """Extend by the prompt's tokens, then draft from each prompt's last one; a prompt with more to come waits."""
        batch = prefilled.batch
        unfinished = None
        if batch.chunked_req_next_prompt_token is not None:
            unfinished = next((i for i, request in enumerate(batch.reqs) if request is batch.chunked_req), None)
        next_input = self._draft_extend_for_prefill(
            batch, prefilled.hidden_states, prefilled.next_token_ids, prefilled.mm_input_embeds
        )
        if unfinished is None:
            self._steps(batch, next_input, prefilled.seq_lens)
        elif len(batch.reqs) == 1:
            self.results.clear(batch.req_pool_indices)
        else:
            drafted = torch.arange(len(batch.reqs), device=self.device) != unfinished
            self._steps(batch, next_input, prefilled.seq_lens, drafted=drafted)

    def _steps(self, batch: Any, draft_input: Any, lengths: Tensor, *, drafted: Tensor | None = None) -> None:
        """The K steps from `draft_input` (top-k and hidden state per request), into the results of their slots."""
        slots = batch.req_pool_indices
        parent_list, selected, tokens, _ = self._forward_steps(self._step_batch(batch, draft_input, lengths))
        parents = None if self.topk == 1 else grid_parents(parent_list, selected, topk=self.topk)
        self.results.store(slots, Drafts(tokens=tokens, parents=parents, drafted_for=lengths), drafted=drafted)

    def _step_batch(self, batch: Any, draft_input: Any, lengths: Tensor) -> Any:
        """The forward batch of the K steps: what the host's `prepare_for_draft` makes, over the scratch.

        Lengths are on the device alone: those after verification are not known to the CPU yet.
        """
        step = copy.copy(batch)
        step.forward_mode = compat.symbol("ForwardMode").DECODE
        step.input_ids = None
        step.seq_lens, step.seq_lens_cpu, step.seq_lens_sum = lengths, None, None
        step.is_extend_in_batch = False
        step.return_logprob = False
        step.extend_input_logprob_token_ids = None
        step.input_embeds = step.replace_embeds = step.replace_positions = None
        step.multimodal_inputs = None
        step.spec_info = draft_input
        draft_input.num_tokens_per_req = draft_input.num_tokens_for_logprob_per_req = self.topk
        draft_input.positions = lengths.repeat_interleave(self.topk, dim=0)
        if self.scratch is None:
            step.out_cache_loc = lengths.new_zeros((lengths.shape[0] * self.topk,))
        else:
            table = self.req_to_token_pool.req_to_token
            step.req_pool_indices, step.out_cache_loc = self.scratch.bind(table, batch.req_pool_indices, lengths)
        return compat.symbol("ForwardBatch").init_new(
            step,
            self.draft_runner,
            capture_hidden_mode=compat.symbol("CaptureHiddenMode").LAST,
            return_hidden_states_before_norm=False,
        )

    def _forward_steps(self, forward_batch: Any) -> tuple[Any, Any, Tensor, Any]:
        """The host's draft loop, by its captured graph where one fits."""
        if self.cuda_graph_runner and self.cuda_graph_runner.can_run_graph(forward_batch):
            result: tuple[Any, Any, Tensor, Any] = self.cuda_graph_runner.execute(forward_batch)
            return result
        if self.speculative_num_steps > 1:
            self.draft_attn_backend.init_forward_metadata(forward_batch)
            forward_batch.mark_forward_metadata_ready()
        result = self.draft_forward(forward_batch)
        return result
