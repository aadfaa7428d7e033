"""Rank 0 where a further process drafts: rows go to it, its drafts come back, and all ranks hear of them.

Nothing of the draft is on the target's devices: no weights, no K and V, no engine. Whatever becomes of the drafter
costs drafts and nothing else (docs/bridge.md). The drafter's K and V lie in the host's KV slots, so that it shares
prefixes as the host does: each batch goes with its out_cache_loc, and rows of the host's table at each prefill and
where they were rewritten. Between GPUs all of it travels on the draft's stream; a target on a CPU has the same through
host memory, for tests.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eaglex.bridge import LinkOptions
from eaglex.bridge_dedicated import DrafterClient, RelayClient
from eaglex.drafter import Job
from eaglex.errors import BridgeError
from eaglex.hosts import dedicated
from eaglex.hosts.sglang import draft_memory, engine_arguments
from eaglex.hosts.sglang.following import FollowingSide
from eaglex.hosts.sglang.translate import Prefilled, Translator, Verified, cut
from eaglex.packed import DraftQuant
from eaglex.repeated import RepeatedAsk

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


@dataclass(frozen=True, slots=True)
class Known:
    """What the host knows of the batch that it forwards without asking a device: by request, its slot and how many
    entries of its row of the table it has rewritten.

    As of the forward's begin: what it rewrites later the draft's stream would read before or after, and KV slots that
    it frees with that are given to others by the next forward at the earliest.
    """

    slots: list[int]
    rewritten: list[int]


def _words(quant: DraftQuant) -> str | None:
    """Part by part: what DraftQuant says of itself need not be read as the same."""
    named = {field.name: getattr(quant, field.name) for field in dataclasses.fields(quant)}
    return ",".join(f"{name}={precision.value}" for name, precision in named.items() if precision is not None) or None


class DedicatedDraft(FollowingSide):
    """Asks the drafter, with all it needs to follow the host's table, and tells the other ranks what it says."""

    EVERY = 64  # cycles between two looks at the drafter's counters
    # Seconds for the reply to the first request, of no slot: kernels are loaded for it on both ends.
    TRIAL_SECONDS = 30.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._client: DrafterClient | RelayClient | None = None
        self._known = Known([], [])
        self._repeated: dict[tuple[int, int, bool], RepeatedAsk] = {}  # by requests, rows and whether a draft is wanted
        self._asked = 0
        self._warned_of_weights = False

    @property
    def client(self) -> DrafterClient | RelayClient:
        """Made with the memory pools. Raises RuntimeError before."""
        if self._client is None:
            raise RuntimeError("the drafter is asked for by alloc_memory_pool, which the host has not called yet")
        return self._client

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Results, this end of the bridge, and the drafter's process, which loads while the host goes on."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self._follow()
        bridge = self.link.bridge
        self._rewritten = Rewritten(req_to_token_pool)
        self.translator = Translator(
            max_batch=self.limits.max_batch,
            max_rows=self.limits.max_rows,
            num_draft_tokens=self.speculation.num_draft_tokens,
            device=self.device,
        )
        kind = DrafterClient if bridge.transport == "shm" else RelayClient
        options = LinkOptions(deadline=self.options.drafter_deadline)
        self._client = kind(bridge, self.config, options, req_to_token_pool.req_to_token)
        self._warn_of_shared_device()
        self.process = dedicated.DrafterProcess(dedicated.COMMAND, self._job().to_json())
        weakref.finalize(self, self.process.close)

    @property
    def _drafter_device(self) -> str:
        return engine_arguments.drafter_device_of(self.server_args, self.options)

    def _warn_of_shared_device(self) -> None:
        """A drafter on one of the target's GPUs has memory that the host has counted as the target's."""
        rank = engine_arguments.rank_on(self.server_args, self._drafter_device)
        if rank is not None:
            logger.warning(
                "EAGLEX: the drafter shares %s with rank %d of the target: its K and V of %d slots (%.2f GB), weights "
                "and embedding come on top of what mem_fraction_static gives to the target, and the two take "
                "turns. Lower mem_fraction_static for them, or leave out drafter_device.",
                self._drafter_device, rank, self._pool.num_kv_slots,
                self._pool.num_kv_slots * draft_memory.kv_bytes_per_token(self.config, self.kv_dtype) / 1e9,
            )  # fmt: skip

    def _job(self) -> Job:
        args, options = self.server_args, self.options
        quant = engine_arguments.quant_of(args, options)
        return Job(
            invitation=self.client.invitation(),
            target=args.model_path,
            draft=args.speculative_draft_model_path,
            revision=args.speculative_draft_model_revision,
            target_revision=args.revision,
            aux_layer_ids=None if options.aux_layer_ids is None else list(options.aux_layer_ids),
            convention=None if options.convention is None else options.convention.value,
            dtype=str(self.kv_dtype).removeprefix("torch."),
            draft_quant=_words(quant) if isinstance(quant, DraftQuant) else None,
            device=self._drafter_device,
            max_length=self.target_worker.model_config.context_len,
            num_slots=self.limits.num_slots,
            **Job.shape(self.speculation, self.limits),
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
        client, where = self.client, (self.process.pid, self._drafter_device)
        tried = not isinstance(client, RelayClient) or client.try_out(self.kv_dtype, patience=self.TRIAL_SECONDS)
        self._tell_of_drafter()
        if tried:
            logger.info("EAGLEX: process %d drafts on %s, in the KV slots of this server.", *where)
        else:
            logger.warning("EAGLEX: process %d on %s did not answer a trial; the server starts without drafts.", *where)

    @property
    def alone(self) -> bool:
        """Never: the drafter hears of every batch."""
        return False

    def begin(self, batch: Any) -> None:
        """Remember what the host knows of this batch until its draft is enqueued."""
        super().begin(batch)
        slots = batch.req_pool_indices_cpu.tolist()
        self._known = Known(slots, self._rewritten.take(slots))

    def _renew(self) -> None:
        """The target's weights have changed: the drafter keeps what it has read of the target's files."""
        if self.facts.borrowed and not self._warned_of_weights:
            self._warned_of_weights = True
            logger.warning(
                "EAGLEX: the dedicated drafter keeps the %s of %s; tokens stay the target's, fewer may be accepted.",
                " and ".join(self.facts.borrowed), self.server_args.model_path,
            )  # fmt: skip

    def counters(self) -> dict[str, int]:
        """Falls of the drafter by kind, and its returns."""
        return {} if self._client is None else self._client.counters()

    def draft_verified(self, verified: Verified, drafting: bool, stream: int) -> None:
        """Send the accepted tokens' rows; drafts of each request's last one come back, or none by the deadline."""
        drafted = self._tried(self._ask_verified, verified, drafting, stream)
        slots, lens, accepted = verified.req_pool_indices, verified.seq_lens, verified.accept_lens
        self.link.tell(slots, lens, accepted, draft=drafted, stream=stream)
        self._look_after_drafter()

    def _ask_verified(self, verified: Verified, drafting: bool, stream: int) -> bool:
        client, known = self.client, self._known
        if isinstance(client, RelayClient):
            return self._relay_verified(client, verified, drafting, stream)
        batch = self.translator.after_verify(verified, drafting=drafting)
        return client.draft(batch, begins=[False] * len(known.slots), table_lens=known.rewritten)

    def _relay_verified(self, client: RelayClient, verified: Verified, drafting: bool, stream: int) -> bool:
        slots, rewritten = self._known.slots, [count > 0 for count in self._known.rewritten]
        key = (len(slots), verified.hidden_states.shape[0], drafting)
        repeated = self._repeated.get(key)
        drafted = None
        if repeated is not None:
            drafted = repeated(*verified, slots=slots, rewritten=rewritten, stream=stream)
        if drafted is None:
            batch = self.translator.after_verify(verified, drafting=drafting)
            begins = [False] * len(slots)
            drafted = client.draft(batch, slots=slots, begins=begins, rewritten=rewritten, stream=stream)
            self._repeated[key] = client.repeated(batch)
        return drafted

    def draft_prefilled(self, prefilled: Prefilled, drafting: bool, stream: int) -> None:
        """The same of prompts, with the table's rows in front of theirs."""
        drafted = self._tried(self._ask_prefilled, prefilled, drafting, stream)
        self.link.tell(prefilled.req_pool_indices, prefilled.seq_lens, None, draft=drafted, stream=stream)
        self._look_after_drafter()

    def _ask_prefilled(self, prefilled: Prefilled, drafting: bool, stream: int) -> bool:
        client, drafted = self.client, False
        pieces = cut(prefilled.extend_lens, max_batch=self.limits.max_batch, max_rows=self.limits.max_rows)
        batches = self.translator.after_prefill(prefilled, drafting=drafting)
        for piece, batch in zip(pieces, batches, strict=True):
            slots = self._known.slots[piece.first : piece.last + 1]
            begins = [True] * len(slots)
            if isinstance(client, RelayClient):
                came = client.draft(batch, slots=slots, begins=begins, rewritten=begins, stream=stream)
            else:
                came = client.draft(batch, begins=begins, table_lens=batch.seq_lens.tolist())
            drafted = came or drafted
        return drafted

    def _look_after_drafter(self) -> None:
        """Start it again where it has ended, and say what has become of it. No wait."""
        self.process.keep()
        self._tell_of_drafter()

    def _tell_of_drafter(self) -> None:
        warnings = self.client.take_warnings()
        for warning in warnings:
            logger.warning("EAGLEX: %s.", warning)
        self._asked += 1
        if self.metrics is not None and (warnings or self._asked % self.EVERY == 0):
            self.metrics.drafter(self.client.counters())

    def trial(self, requests: int, nodes: int, *, drafting: bool) -> Callable[[], None]:
        """Never called: pausing is refused with this placement."""
        raise AssertionError(requests)
