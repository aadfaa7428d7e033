"""The worker with eaglex's own engine, which is what EAGLEX means unless the option `drafter` says otherwise.

One forward: join the last draft; turn the drafts of the batch's slots into the verifier's input and verify (or
prefill); publish the lengths; fork the next draft. When it is enqueued is what `worker.py` has settled: with overlapped
scheduling at the end of the scheduler's turn, else before the forward returns.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from eaglex.errors import ConfigError
from eaglex.hosts.sglang import compat, hooks, metrics, options, step_choice
from eaglex.hosts.sglang.copies import Copies
from eaglex.hosts.sglang.dedicated_draft import DedicatedDraft
from eaglex.hosts.sglang.draft_side import DraftSide
from eaglex.hosts.sglang.engine_draft import EngineDraft
from eaglex.hosts.sglang.follower_draft import FollowerDraft
from eaglex.hosts.sglang.ranks import Ranks
from eaglex.hosts.sglang.root_forwards import RootForwards, wants_tokens_alone
from eaglex.hosts.sglang.steps import Always, StepPlan
from eaglex.hosts.sglang.stream import DraftStream, Events, Fence, Work
from eaglex.hosts.sglang.translate import Prefilled, Verified, unfinished_of
from eaglex.hosts.sglang.verify_states import VerifyStates

logger = logging.getLogger(__name__)
_Base: Any = compat.symbol("BaseSpecWorker")
NO_PLAN_STREAM = contextlib.nullcontext()
new: Final = tuple.__new__  # of a named tuple, without a Python frame
KEPT = "EAGLEX: the target's weights are updated; the draft keeps its own, and what it shares is renewed."


class EaglexEngineWorker(_Base):  # type: ignore[misc]
    """Drafts with eaglex's engine on the target's GPU; verifies with the host's own code."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self.server_args, self.gpu_id, self.ps = server_args, gpu_id, ps
        self.device = server_args.device
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self._target_worker = target_worker
        algorithm = compat.symbol("SpeculativeAlgorithm").from_string(server_args.speculative_algorithm)
        device = torch.device(self.device, gpu_id) if self.device == "cuda" else torch.device(self.device)
        chosen = options.read()
        ranks = Ranks(target_worker.model_runner.tp_group, chosen, rank=ps.tp_rank, size=ps.tp_size)
        drafting = DedicatedDraft if chosen.placement is options.Placement.DEDICATED else EngineDraft
        kind: type[DraftSide] = drafting if ranks.drafts else FollowerDraft
        self._draft_worker = kind(
            server_args, chosen, target_worker=target_worker, ranks=ranks, device=device, algorithm=algorithm
        )
        self._plan = StepPlan(Always(self.speculative_num_steps))  # until init_cuda_graphs knows more
        self._roots: RootForwards | None = None  # where fewer steps may be chosen
        self._forwards: Any = None  # the stream of the last forward
        self._stream = DraftStream(device)
        self._fence, self._events = Fence(), Events()
        self._relayed_by_rows: dict[int, Copies] = {}  # of verifications, whose hidden states were checked once
        self._relayed_otherwise: dict[int, Copies] = {}
        self._begin: Callable[[Any], None] | None = self._draft_worker.begin  # None where it would do nothing
        self._aux_width = self._draft_worker.config.aux_width
        self._draft_input, self._run_verify = compat.symbol("EagleDraftInput"), compat.symbol("run_eagle_verify")
        manager = compat.symbol("SchedulerWeightUpdaterManager")
        hooks.around(manager, "release_memory_occupation", before=self._drain)
        hooks.at_the_end_of_a_turn(self._stream.launch)
        for name in hooks.UPDATES:
            hooks.around(manager, name, before=self._drain, after=self._draft_worker.outdated)
        if kind is EngineDraft:
            logger.info("EAGLEX: eaglex's engine drafts right after verification.")

    @property
    def war_fastpath_runner(self) -> Fence:
        """What holds the event after which the host may write shared buffers again."""
        return self._fence

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        rows = req_to_token_pool.size
        self._no_topk_p = torch.zeros((rows, 1), dtype=torch.float32, device=self.device)
        self._no_topk_index = torch.zeros((rows, 1), dtype=torch.int64, device=self.device)

    def init_cuda_graphs(self) -> None:
        """Capture the engine's graphs, and the target's for other numbers of steps where they may be chosen."""
        super().init_cuda_graphs()
        chosen = step_choice.choose(
            self.server_args, self._draft_worker, self.target_worker.model_runner, pausing=options.read().pausing
        )
        self._plan = StepPlan(chosen.choice)
        self._begin = None if self._draft_worker.alone else self._draft_worker.begin
        device, entered = self._draft_worker.device, self._stream.entered
        self._draft_worker.metrics = metrics.of(self.server_args, self.ps.tp_rank, device, entered)
        if chosen.states is not None:
            rows, pool = self._draft_worker.rows_kept, self.req_to_token_pool
            self._roots = RootForwards(self.target_worker, pool, chosen.states, kept=chosen.kept, rows=rows)
            self._additional_graph_memory_usage["target_verify"] = chosen.gigabytes
            self._additional_graph_time_usage["target_verify"] = chosen.seconds

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None) -> Any:
        """Verify the drafts of the batch, or prefill it, and fork the next draft.

        `on_publish(new_seq_lens)` is called where the lengths are known; it is None when the host schedules without
        overlap.
        """
        if self._draft_worker.stale:
            self._draft_worker.renew()
        current = self._forwards = self._stream.join()
        if self._begin is not None:
            self._begin(batch)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._write_kept()
            result, draft, inputs = self._prefill(batch)
        elif self._roots is not None and self._next_steps(self._roots.states, batch) == 0:
            self._write_kept(None if self._plan.drafting else batch.req_pool_indices)
            return self._forward_roots(self._roots, batch, on_publish, grammar_barrier)
        else:
            result, draft, inputs = self._verify(batch, grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
            self._fence.result = result
            self._stream.fork(new(Work, (draft, inputs, None, result)))
        else:  # the host waits for the lengths before it goes on
            ready = self._events.recorded(current)
            self._fence.publish(ready)
            self._stream.fork(Work(draft, inputs, ready))
            self._stream.launch()
        return result

    def _prefill(self, batch: Any) -> tuple[Any, Callable[[int], None], Any]:
        self._stream.let_go()  # of what may be large
        mode = compat.symbol("CaptureHiddenMode").FULL
        with contextlib.nullcontext() if self._roots is None else self._roots.states.as_captured():
            result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=mode)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = self._relayed(result.next_token_ids)
        prefilled = Prefilled(
            hidden_states=self._checked(result.logits_output.hidden_states),
            input_ids=batch.input_ids,
            next_token_ids=result.next_token_ids,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            extend_lens=list(batch.extend_lens),
            prefix_lens=list(batch.prefix_lens),
            unfinished=unfinished_of(batch),
        )
        return result, functools.partial(self._draft_prefilled, prefilled, self._plan.drafting), prefilled

    def _draft_prefilled(self, prefilled: Prefilled, drafting: bool, stream: int) -> None:
        with self._stream.entered():  # a prompt is turned into batches by torch
            self._draft_worker.draft_prefilled(prefilled, drafting, stream)

    def _forward_roots(self, roots: RootForwards, batch: Any, on_publish: Any, grammar_barrier: Any) -> Any:
        """A forward without drafts, and what follows it: the next draft, rows that are written, or nothing yet."""
        drafting = self._plan.drafting
        if wants_tokens_alone(batch):
            result, verified = self.decode(roots, batch, on_publish)
        else:
            result, _, verified = self._verify(batch, grammar_barrier)
            if on_publish is not None:
                on_publish(result.new_seq_lens)
        read = roots.read_done()
        inputs = verified if drafting else roots.keep(verified)
        if inputs is None and read is not None:
            self._fence.publish(read)
            return result
        ready = self._events.recorded(self._forwards)
        self._fence.publish(ready if drafting or read is None else read)
        if inputs is not None:
            self._stream.fork(
                Work(functools.partial(self._draft_worker.draft_verified, inputs, drafting), inputs, ready)
            )
            if on_publish is None:
                self._stream.launch()
        return result

    def decode(self, roots: RootForwards, batch: Any, on_publish: Any) -> tuple[Any, Verified]:
        """The host's decode of the bonus tokens, as a verification that accepts nothing more."""
        result, verified = roots.decode(batch, on_publish)
        self._checked(verified.hidden_states)
        result.next_draft_input = self._relayed(result.next_token_ids)
        return result, verified

    def _write_kept(self, goes_on: Tensor | None = None) -> None:
        """Write rows that wait, before what may not come before them: anything but a decode of the same slots."""
        if self._roots is None or not self._roots.waiting(goes_on):
            return
        with torch.cuda.stream(self._forwards):  # where they were made; who updates weights is on another
            rows = self._roots.take()
            ready = self._events.recorded(self._forwards)
        self._stream.fork(Work(functools.partial(self._draft_worker.draft_verified, rows, False), rows, ready))
        self._stream.join()

    def _drain(self) -> None:
        self._stream.join()
        self._write_kept()
        self._stream.drain()

    def _verify(self, batch: Any, grammar_barrier: Any) -> tuple[Any, Callable[[int], None], Any]:
        side = self._draft_worker
        batch.spec_info = side.draft(batch)
        result = self.verify(batch, grammar_barrier)
        hidden_states, bonus_tokens = result.logits_output.hidden_states, result.next_draft_input.bonus_tokens
        relayed = self._relayed_by_rows.get(bonus_tokens.shape[0])
        if relayed is None:  # of later ones of as many requests, the engine sees whether they have another size
            self._checked(hidden_states)
            relayed = self._relayed_by_rows[bonus_tokens.shape[0]] = self._relayed_of(bonus_tokens)
        result.next_draft_input = relayed.made("bonus_tokens", bonus_tokens)
        verified = new(
            Verified,
            (
                hidden_states,
                result.next_token_ids,
                result.accept_lens,
                batch.req_pool_indices,
                batch.seq_lens,
                batch.out_cache_loc,
            ),
        )
        return result, functools.partial(side.draft_verified, verified, self._plan.drafting), verified

    def _next_steps(self, states: VerifyStates, batch: Any) -> int:
        """Steps that are verified from now on; the scheduler and its metrics read them here."""
        steps = self._plan.verification(batch.seq_lens.shape[0])
        if steps != self.speculative_num_steps:
            state = states.activate(steps)
            for owner in (self, self._draft_worker):
                owner.speculative_num_steps, owner.speculative_num_draft_tokens = state.steps, state.nodes
        return steps

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """The host has the accept counts of one verification on the CPU; the same on all ranks, in the same order."""
        if self._roots is not None:
            self._plan.observe(num_correct_drafts_per_req, batch_size)
        if self._draft_worker.metrics is not None:
            self._draft_worker.metrics.paused(self._plan.paused_cycles)

    def verify(self, batch: Any, grammar_barrier: Any = None) -> Any:
        """The host's verification of `batch.spec_info`; of roots alone, the target decodes."""
        roots = self._roots if self.speculative_num_steps == 0 else None
        return self._run_verify(
            batch,
            target_worker=self.target_worker if roots is None else roots.target,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            plan_stream=None,  # a third stream would not be ordered
            plan_stream_ctx=NO_PLAN_STREAM,
            topk=self.topk,
            num_steps=self.speculative_num_steps,
            num_draft_tokens=self.speculative_num_draft_tokens,
            device=self.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
            grammar_barrier=grammar_barrier,
        )

    def _checked(self, hidden_states: Tensor | None) -> Tensor:
        """The auxiliary hidden states, if they are as wide as the draft's `fc` reads them."""
        if hidden_states is None or hidden_states.shape[1] != self._aux_width:
            got = None if hidden_states is None else list(hidden_states.shape)
            raise ConfigError(
                f"hidden_states: expected [rows, {self._aux_width}] of layers {list(self._draft_worker.output_ids)}, "
                f"got {got}: the target does not capture them all."
            )
        return hidden_states

    def _relayed(self, bonus_tokens: Tensor) -> Any:
        """What the host carries to the next cycle: bonus tokens, and top-k columns that it slices and nobody reads."""
        rows = bonus_tokens.shape[0]
        made = self._relayed_otherwise.get(rows)
        if made is None:
            made = self._relayed_otherwise[rows] = self._relayed_of(bonus_tokens)
        return made.made("bonus_tokens", bonus_tokens)

    def _relayed_of(self, bonus_tokens: Tensor) -> Copies:
        rows = bonus_tokens.shape[0]
        topk_p, topk_index = self._no_topk_p[:rows], self._no_topk_index[:rows]
        return Copies(self._draft_input(bonus_tokens=bonus_tokens, topk_p=topk_p, topk_index=topk_index))

    def clear_cache_pool(self) -> None:
        """The host flushes: no draft runs any more, and none is remembered."""
        self._stream.drain()
        if self._roots is not None:
            self._roots.forget()
        counts = self._draft_worker.counters()
        if counts:
            logger.info("EAGLEX: requests since the start, by outcome: %s.", counts)
        self._draft_worker.forget()

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """The host has updated its target; what is shared is renewed when it is done."""
        return True, KEPT

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """As `update_weights_from_disk`."""
        return True, KEPT

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        """The host leaves the target to the worker here."""
        return self.target_worker.update_weights_from_tensor(recv_req)
