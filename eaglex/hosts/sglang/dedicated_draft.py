"""Rank 0 where a further process drafts: rows go to it, its drafts come back, and all ranks hear of them.

Nothing of the draft is on the target's devices: no weights, no K and V, no engine. Whatever becomes of the drafter
costs drafts and nothing else (docs/bridge.md). The drafter's K and V lie in the host's KV slots, so that it shares
prefixes as the host does: each batch goes with its out_cache_loc, and rows of the host's table at each prefill and
where they were rewritten.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from eaglex.bridge import Follower, LinkOptions
from eaglex.bridge_dedicated import DrafterClient
from eaglex.drafter import Job
from eaglex.engine import DraftBatch, DraftResults
from eaglex.errors import BridgeError
from eaglex.hosts.dedicated import DrafterProcess
from eaglex.hosts.sglang import engine_arguments
from eaglex.hosts.sglang.draft_side import DraftSide
from eaglex.hosts.sglang.translate import Prefilled, Translator, Verified
from eaglex.hosts.sglang.verify_input import Trees
from eaglex.packed import DraftQuant

logger = logging.getLogger(__name__)


class Rewritten:
    """Rows of the host's table that it has written since the drafter was told of them, by request slot.

    The host writes a request's row through its pool: with its prefix when it is scheduled, and again where the radix
    cache has the same tokens in other KV slots.
    """

    def __init__(self, pool: Any) -> None:
        self._entries: dict[int, int] = {}
        plain = pool.write

        def write(indices: Any, values: Any) -> None:
            plain(indices, values)
            if isinstance(indices, tuple) and isinstance(indices[1], slice) and indices[1].stop is not None:
                slot, stop = int(indices[0]), int(indices[1].stop)
                self._entries[slot] = max(stop, self._entries.get(slot, 0))

        pool.write = write

    def take(self, slots: Sequence[int]) -> list[int]:
        """So many entries of each of these slots' rows are new; none of them afterwards."""
        return [self._entries.pop(slot, 0) for slot in slots]


def _words(quant: DraftQuant) -> str | None:
    """Part by part: what DraftQuant says of itself need not be read as the same."""
    named = {field.name: getattr(quant, field.name) for field in dataclasses.fields(quant)}
    return ",".join(f"{name}={precision.value}" for name, precision in named.items() if precision is not None) or None


class DedicatedDraft(DraftSide):
    """Asks the drafter, with all it needs to follow the host's table, and tells the other ranks what it says."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._client: DrafterClient | None = None
        self._follower: Follower | None = None
        self._warned_of_weights = False

    @property
    def client(self) -> DrafterClient:
        """Made with the memory pools. Raises RuntimeError before."""
        if self._client is None:
            raise RuntimeError("the drafter is asked for by alloc_memory_pool, which the host has not called yet")
        return self._client

    @property
    def trees(self) -> Trees:
        """Of what the drafter has said."""
        assert self._follower is not None
        return self._follower

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Results, this end of the bridge, and the drafter's process, which loads while the host goes on."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._connect(DraftResults.allocate(self.speculation, self.limits, self.device))
        assert self._link is not None
        bridge = self._link.bridge
        self._follower = bridge.follower()
        self._rewritten = Rewritten(req_to_token_pool)
        self.translator = Translator(
            max_batch=self.limits.max_batch,
            max_rows=self.limits.max_rows,
            num_draft_tokens=self.speculation.num_draft_tokens,
            device=self.device,
        )
        self._client = DrafterClient(
            bridge, self.config, LinkOptions(deadline=self.options.drafter_deadline), req_to_token_pool.req_to_token
        )
        self.process = DrafterProcess([sys.executable, "-m", "eaglex.drafter", self._job().to_json()])
        weakref.finalize(self, self.process.close)

    def _job(self) -> Job:
        args, options, speculation = self.server_args, self.options, self.speculation
        quant = engine_arguments.quant_of(args, options)
        return Job(
            invitation=self.client.invitation(),
            target=args.model_path,
            draft=args.speculative_draft_model_path,
            revision=args.speculative_draft_model_revision,
            aux_layer_ids=None if options.aux_layer_ids is None else list(options.aux_layer_ids),
            convention=None if options.convention is None else options.convention.value,
            dtype=str(self.kv_dtype).removeprefix("torch."),
            draft_quant=_words(quant) if isinstance(quant, DraftQuant) else None,
            device="cpu",
            num_steps=speculation.num_steps,
            topk=speculation.topk,
            num_draft_tokens=speculation.num_draft_tokens,
            stop_below=speculation.stop_below,
            max_batch=self.limits.max_batch,
            max_rows=self.limits.max_rows,
            max_length=self.target_worker.model_config.context_len,
            num_slots=self.limits.num_slots,
        )

    def init_cuda_graphs(self) -> None:
        """The last step of a start: the drafter has joined. Raises BridgeError where it does not."""
        until = time.monotonic() + self.options.join_deadline
        while not self.client.joined():
            code = self.process.exit_code()
            if code is not None:
                raise BridgeError(f"dedicated drafter: expected it to join, got exit code {code}; it says why above")
            if time.monotonic() >= until:
                raise BridgeError(
                    f"dedicated drafter: expected it to join within {self.options.join_deadline:g} s, got no word"
                )
            time.sleep(0.02)
        logger.info("EAGLEX: process %d drafts, in the KV slots of this server.", self.process.pid)

    def renew(self) -> None:
        """The target's weights have changed: the drafter keeps what it has read of the target's files."""
        if self.facts.borrowed and not self._warned_of_weights:
            self._warned_of_weights = True
            logger.warning(
                "EAGLEX: the dedicated drafter keeps the %s of %s; tokens stay the target's, fewer may be accepted.",
                " and ".join(self.facts.borrowed), self.server_args.model_path,
            )  # fmt: skip

    def forget(self) -> None:
        """No slot has a draft any more."""
        assert self._link is not None
        self._link.bridge.results.drafted_for.fill_(-1)

    def counters(self) -> dict[str, int]:
        """Falls of the drafter by kind, and its returns."""
        return {} if self._client is None else self._client.counters()

    def draft_verified(self, verified: Verified, drafting: bool, stream: int) -> None:
        """Send the accepted tokens' rows; drafts of each request's last one come back, or none by the deadline."""
        batch = self.translator.after_verify(verified, drafting=drafting)
        drafted = self._ask(batch, prompts=False)
        assert self._link is not None
        slots, lens, accepted = verified.req_pool_indices, verified.seq_lens, verified.accept_lens
        self._link.tell(slots, lens, accepted, draft=drafted, stream=stream)

    def draft_prefilled(self, prefilled: Prefilled, drafting: bool, stream: int) -> None:
        """The same of prompts, with the table's rows in front of theirs."""
        drafted = False
        for batch in self.translator.after_prefill(prefilled, drafting=drafting):
            drafted = self._ask(batch, prompts=True) or drafted
        assert self._link is not None
        self._link.tell(prefilled.req_pool_indices, prefilled.seq_lens, None, draft=drafted, stream=stream)

    def _ask(self, batch: DraftBatch, *, prompts: bool) -> bool:
        """Whether there are drafts. The batch is in host memory."""
        self.process.keep()
        slots = batch.req_pool_indices.tolist()
        table_lens = self._rewritten.take(slots)
        if prompts:
            table_lens = batch.seq_lens.tolist()
        drafted = self.client.draft(batch, begins=[prompts] * len(slots), table_lens=table_lens)
        for warning in self.client.take_warnings():
            logger.warning("EAGLEX: %s.", warning)
        return drafted

    def trial(self, requests: int, nodes: int, *, drafting: bool) -> Callable[[], None]:
        """Never called: pausing is refused with this placement."""
        raise AssertionError(requests)
