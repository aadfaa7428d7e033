"""The draft's side of the worker on every rank: what the host keeps as `draft_worker.draft_worker`.

Nothing of SGLang's draft is built: no model, no attention backend, no graph. One rank drafts (engine_draft.py), the
others hear of its drafts (follower_draft.py). Sizes: B requests, N nodes per request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eaglex import checkpoint
from eaglex.bridge import Follower, HostPool
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftResults, current_stream_of
from eaglex.errors import ConfigError, DeviceError
from eaglex.hosts.sglang import aux_capture, compat, draft_memory, engine_arguments
from eaglex.hosts.sglang.copies import Copies
from eaglex.hosts.sglang.metrics import Metrics
from eaglex.hosts.sglang.options import Options, Placement
from eaglex.hosts.sglang.ranks import Link, Ranks
from eaglex.hosts.sglang.translate import Prefilled, Verified
from eaglex.hosts.sglang.verify_input import Trees, VerifyBuffers, VerifyPool

logger = logging.getLogger(__name__)


@dataclass
class RunnerFacts:
    """What the host asks of a draft's model runner, where there is none.

    The scheduler sets `device_timer`, and reads the width of hidden states for disaggregation, which is refused.
    """

    model_config: Any
    spec_algorithm: Any
    token_to_kv_pool: None = None
    device_timer: Any = None

    def check_weights(self, action: str, allow_quant_error: bool = False) -> None:
        """The host checks its target's weights; the draft's are not among them."""


class DraftSide:
    """What the draft is, which layers the target captures for it, and the verifier's input from its drafts.

    Built in the host's order: before it sizes its KV pool, after it, and with its graphs. Raises ConfigError and
    CheckpointError in words for the launch's log.
    """

    def __init__(
        self, server_args: Any, options: Options, *, target_worker: Any, ranks: Ranks, device: torch.device,
        algorithm: Any,
    ) -> None:  # fmt: skip
        self.server_args, self.options = server_args, options
        self.target_worker, self.ranks, self.device = target_worker, ranks, device
        self.speculation: SpeculationConfig = engine_arguments.speculation_of(server_args, options)
        decode, off = compat.symbol("Phase").DECODE, compat.symbol("Backend").DISABLED
        self.graphs = not compat.symbol("check_cuda_graph_backend")(decode, off)
        self.speculative_num_steps = server_args.speculative_num_steps  # of the verification that comes
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.topk = self.speculation.topk
        self.graph_memory_usage: dict[str, float] = {}
        self.graph_time_usage: dict[str, float] = {}
        self.weight_load_time = 0.0
        self.metrics: Metrics | None = None
        self._failures = 0  # of drafts, by a device
        self.stale = False  # the target's weights have changed since the last forward
        self._alone: Follower | None = None  # this rank goes on without drafts
        self._link: Link | None = None  # where there are several ranks, once there are results for it
        self._buffers = VerifyPool(device)
        self._stream_now = current_stream_of(device)
        self._verify_input = compat.symbol("EagleVerifyInput")
        runner, model_config = target_worker.model_runner, target_worker.model_config
        self._runner = runner
        if model_config.model_is_mrope:
            raise ConfigError("EAGLEX does not serve a target with multimodal rotary positions (mrope).")
        self.draft_runner = RunnerFacts(model_config, algorithm)
        self.facts = checkpoint.examine(
            server_args.speculative_draft_model_path,
            target=server_args.model_path,
            aux_layer_ids=options.aux_layer_ids,
            convention=options.convention,
            max_positions=model_config.context_len,
            revision=server_args.speculative_draft_model_revision,
            target_revision=server_args.revision,
        )
        self.config, aux = self.facts.config, self.facts.aux
        self.speculation.check(self.config)
        if aux.output_ids is None:
            raise ConfigError(f"{self.facts.label}: expected auxiliary layers, got none.")
        self.output_ids = aux.output_ids
        aux_capture.check_width(
            self.config.num_aux, self.config.target_hidden_size, model_hidden=model_config.hidden_size
        )
        runner.spec_aux_config.eagle_use_aux_hidden_state = True
        # the host sets this list once more, with its attention backends
        runner.spec_aux_config.eagle_aux_hidden_state_layer_ids = aux_capture.set_layers(runner.model, self.output_ids)
        # On every rank: the pool is as large as the rank with the least room for it allows, which is the one that
        # drafts, and all ranks must come to the same size.
        draft_memory.charge_kv(runner, self.kv_bytes_per_token)
        logger.info("EAGLEX: %s; the target captures the outputs of layers %s.", aux, list(self.output_ids))

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the draft's K, V and weights: the target's."""
        dtype: torch.dtype = self.target_worker.model_config.dtype
        return dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """What the host charges for each token of its pool: nothing where a further GPU has the draft's K and V."""
        if self.options.placement is Placement.DEDICATED:
            return 0
        return draft_memory.kv_bytes_per_token(self.config, self.kv_dtype)

    @property
    def draft_runners(self) -> list[Any]:
        """None: the host updates the weights of its own runners by them."""
        return []

    @property
    def trees(self) -> Trees:
        """What fills the verifier's tensors."""
        raise NotImplementedError

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """What the draft needs, for as many requests as the host serves at once."""
        if self.target_worker.model_runner.token_to_kv_pool.post_capture_active:
            raise ConfigError(
                "EAGLEX does not support SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 (needs 0): the draft's K and V would "
                "not grow with the host's pool."
            )
        max_batch, nodes = req_to_token_pool.size, self.speculation.num_draft_tokens
        rows = engine_arguments.max_rows_of(self.server_args, self.options, max_batch=max_batch, num_draft_tokens=nodes)
        num_slots = req_to_token_pool.req_to_token.shape[0]
        self.limits = EngineLimits(
            max_batch=max_batch, max_rows=rows, num_slots=num_slots, token_table_bytes=self.options.token_table_bytes
        )
        kv_slots = token_to_kv_pool_allocator.size + token_to_kv_pool_allocator.page_size
        self._pool = HostPool(num_kv_slots=kv_slots, table_width=req_to_token_pool.req_to_token.shape[1])

    def init_attention_backends(self) -> None:
        """The host has set the auxiliary layers by now, and captures the target next: check them."""
        model = self.target_worker.model_runner.model
        wanted, seen = [i + 1 for i in self.output_ids], aux_capture.captured(model)
        if seen != wanted:
            raise ConfigError(f"target {type(model).__name__}: expected layers_to_capture={wanted}, got {seen}.")

    def init_cuda_graphs(self) -> None:
        """The last step of a start."""

    def outdated(self) -> None:
        """The target's weights have changed, and with them what the draft shares."""
        self.stale = True

    def renew(self) -> None:
        """To be called before a forward where `stale`: renew what the draft shares with the target, once for all
        updates since the last one, which come in dozens of pieces. All ranks do it before the same forward.
        """
        self.stale = False  # no check of the bridge: ranks that came sooner may have let go of theirs, to make another
        self._renew()

    def _renew(self) -> None:
        raise NotImplementedError

    @property
    def _renewed_in_place(self) -> bool:
        """Whether the embedding, which the engine reads as it is, is all that the draft shares: the same on all ranks.
        A head lies in the engine in an order of its own, maybe with fewer bits and rows: then it is made again.
        """
        return self.facts.borrowed == ("embed_tokens",)

    def _agreed(self, failure: str | None) -> bool:
        """Whether the rank that drafts has an engine again; all ranks ask. Without one they all go on without drafts,
        until the next update.
        """
        self._alone = None
        if self.ranks.told(failure is None):
            return True
        if failure is not None:
            self._say_why_alone("engine", failure)
        self._go_alone()
        return False

    def _connected_again(self, connect: Callable[[], None]) -> bool:
        """Whether there is a bridge over the new engine's results; where one rank fails, none has one, as each step of
        it is agreed, and all go on without drafts until the next update.
        """
        try:
            connect()
        except Exception as error:  # its own on the rank that fails, BridgeError on the others
            self._say_why_alone("bridge between ranks", str(error) or type(error).__name__)
            self._link = None
            self._go_alone()
            return False
        return True

    def _say_why_alone(self, what: str, failure: str) -> None:
        logger.error(
            "EAGLEX: after an update of weights the %s could not be made again; requests go on without drafts "
            "until the next update: %s",
            what,
            failure,
        )

    def _go_alone(self) -> None:
        """Roots alone from now on."""
        results = DraftResults.allocate(self.speculation, self.limits, self.device)
        self._alone = Follower.alone(
            self.speculation, limits=self.limits, vocab_size=self.config.vocab_size, results=results
        )

    def forget(self) -> None:
        """No slot has a draft any more."""
        raise NotImplementedError

    @property
    def alone(self) -> bool:
        """Whether `begin` does nothing, whatever the batch: nobody else hears of it, or may have been lost."""
        return self._link is None

    def begin(self, batch: Any) -> None:
        """The host forwards this batch next, and no draft waits to be enqueued any more.

        Raises BridgeError once the ranks have lost each other. No wait.
        """
        self.check()

    def check(self) -> None:
        """Raise BridgeError once the ranks have lost each other. No wait."""
        if self._link is not None:
            self._link.bridge.check()

    def _tried(self, run: Callable[..., bool], *arguments: Any) -> bool:
        """What `run` says, False where a device failed: that costs drafts, not the server. The slots' old drafts are
        for other lengths, so that nobody takes them. Where the device itself is at its end, the target finds that too.
        """
        try:
            return run(*arguments)
        except DeviceError as error:
            return self._failed(error)

    def _failed(self, error: DeviceError) -> bool:
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            logger.error("EAGLEX: drafting failed, %d times so far; requests go on: %s", self._failures, error)
        return False

    def _connect(self, results: DraftResults) -> None:
        """This rank's end of the bridge, over these results. Raises BridgeError on every rank alike."""
        drafter: dict[str, Any] = {}
        if self.options.placement is Placement.DEDICATED:
            drafter = {"aux_width": self.config.aux_width, "pool": self._pool}
        bridge = self.ranks.bridge(self.speculation, self.limits, results, vocab_size=self.config.vocab_size, **drafter)
        self._link = None if bridge is None else Link(bridge, max_lanes=self.limits.max_batch)

    def counters(self) -> dict[str, int]:
        """Requests per outcome since the start; none where nothing is drafted."""
        return {}

    def draft(self, batch: Any) -> Any:
        """The verifier's input, from the drafts of the batch's slots in the batch's order.

        A request without a draft for its length is verified with its root alone; of a chain that was drafted further
        than is verified, the first nodes are.
        """
        seq_lens = batch.seq_lens
        buffers = self._buffers.take(
            self._runner.attn_backend,
            requests=seq_lens.shape[0],
            nodes=self.speculative_num_draft_tokens,
            seq_lens_sum=batch.seq_lens_sum,
        )
        given = (batch.req_pool_indices, seq_lens, batch.spec_info.bonus_tokens, self._stream_now())
        if not buffers.again(*given):
            buffers.fill(self.trees, *given)
        inputs = buffers.inputs
        if inputs is None:
            inputs = buffers.inputs = Copies(self._input_of(buffers))
        return inputs.made("spec_steps", self.speculative_num_steps)

    def _input_of(self, buffers: VerifyBuffers) -> Any:
        tensors = buffers.tensors
        return self._verify_input(
            draft_token=buffers.draft_tokens,
            custom_mask=buffers.custom_mask,
            positions=buffers.positions,
            retrieve_index=tensors.retrieve_index,
            retrieve_next_token=tensors.retrieve_next_token,
            retrieve_next_sibling=tensors.retrieve_next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.speculative_num_steps,
            topk=self.topk,
            draft_token_num=self.speculative_num_draft_tokens,
            capture_hidden_mode=None,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    @property
    def rows_kept(self) -> int:
        """Rows of a request that may wait for one `draft_verified` while nothing is drafted; 0: it does nothing."""
        return 1

    def draft_verified(self, verified: Verified, drafting: bool, stream: int) -> None:
        """What follows a verification, on `stream`. Without `drafting` no draft is wanted for the next one."""
        raise NotImplementedError

    def draft_prefilled(self, prefilled: Prefilled, drafting: bool, stream: int) -> None:
        """The same after a prefill, with `stream` as torch's current one."""
        raise NotImplementedError

    def trial(self, requests: int, nodes: int, *, drafting: bool) -> Callable[[], None]:
        """One launch after a verification of so many requests and nodes, all accepted, to be timed at start."""
        raise NotImplementedError

    def end_trials(self) -> None:
        """Leave no trace of trials."""
