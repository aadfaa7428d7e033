"""The draft side of the worker with eaglex's engine: what the host keeps as `draft_worker.draft_worker`.

Nothing of SGLang's draft is built: no model, no attention backend, no graph. Sizes: B requests, N nodes per request.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglex import checkpoint
from eaglex.config import EngineLimits, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine, current_stream
from eaglex.errors import ConfigError
from eaglex.hosts.draft_slots import to_device
from eaglex.hosts.sglang import aux_capture, compat, draft_memory, engine_arguments
from eaglex.hosts.sglang.metrics import Metrics
from eaglex.hosts.sglang.options import Options
from eaglex.hosts.sglang.translate import Prefilled, Translator, Verified
from eaglex.hosts.sglang.verify_input import MODES, MaskPlace, VerifyPool
from eaglex.weights import DraftWeights

logger = logging.getLogger(__name__)
SHARED = ("embed_tokens", "lm_head")


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


class EngineDraft:
    """A draft checkpoint, its KV pool and the engine over both.

    Built in the host's order: weights before it sizes its pool, the pool and the engine after, graphs at the end.
    Raises ConfigError and CheckpointError in words for the launch's log.
    """

    def __init__(
        self, server_args: Any, options: Options, *, target_worker: Any, device: torch.device, algorithm: Any
    ) -> None:
        self.server_args, self.options = server_args, options
        self.target_worker, self.device = target_worker, device
        self.speculation: SpeculationConfig = engine_arguments.speculation_of(server_args, options)
        decode, off = compat.symbol("Phase").DECODE, compat.symbol("Backend").DISABLED
        self.graphs = not compat.symbol("check_cuda_graph_backend")(decode, off)
        self.speculative_num_steps = server_args.speculative_num_steps  # of the verification that comes
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.topk = self.speculation.topk
        self.graph_memory_usage: dict[str, float] = {}
        self.graph_time_usage: dict[str, float] = {}
        self._engine: DraftEngine | None = None
        self.metrics: Metrics | None = None
        self._buffers: dict[int, VerifyPool] = {}  # by nodes per request
        runner = target_worker.model_runner
        model_config = target_worker.model_config
        if model_config.model_is_mrope:
            raise ConfigError("EAGLEX does not serve a target with multimodal rotary positions (mrope).")
        started = time.perf_counter()
        self.memory = draft_memory.Ledger(device)
        with self.memory.taking("weights"):
            loaded = self._load(model_config)
            self.config, self.facts = loaded.config, loaded.facts
            self._weights: DraftWeights | None = to_device(loaded.weights, device)
        self.memory.planned["weights"] = draft_memory.own_weight_bytes(self._weights, self.facts.borrowed)
        self.weight_load_time = time.perf_counter() - started
        self.kv_dtype = self._weights.fc.dtype
        if loaded.aux.output_ids is None:
            raise ConfigError(f"{self.facts.label}: expected auxiliary layers, got none.")
        self.output_ids = loaded.aux.output_ids
        aux_capture.check_width(
            self.config.num_aux, self.config.target_hidden_size, model_hidden=model_config.hidden_size
        )
        runner.spec_aux_config.eagle_use_aux_hidden_state = True
        # the host sets this list once more, with its attention backends
        runner.spec_aux_config.eagle_aux_hidden_state_layer_ids = aux_capture.set_layers(runner.model, self.output_ids)
        draft_memory.charge_kv(runner, self.kv_bytes_per_token)
        self.draft_runner = RunnerFacts(model_config, algorithm)
        logger.info("EAGLEX: %s; the target captures the outputs of layers %s.", loaded.aux, list(self.output_ids))
        for note in self.facts.notes:
            logger.info("EAGLEX: %s", note)

    @property
    def kv_bytes_per_token(self) -> int:
        """What the host charges for each token of its pool."""
        return draft_memory.kv_bytes_per_token(self.config, self.kv_dtype)

    @property
    def draft_runners(self) -> list[Any]:
        """None: the host updates the weights of its own runners by them."""
        return []

    @property
    def engine(self) -> DraftEngine:
        """Made with the memory pools. Raises RuntimeError before."""
        if self._engine is None:
            raise RuntimeError("the engine is made by alloc_memory_pool, which the host has not called yet")
        return self._engine

    def _load(self, model_config: Any) -> checkpoint.Checkpoint:
        args, options = self.server_args, self.options
        loaded = checkpoint.load(
            args.speculative_draft_model_path,
            target=args.model_path,
            aux_layer_ids=options.aux_layer_ids,
            convention=options.convention,
            max_positions=model_config.context_len,
            dtype=model_config.dtype,
            revision=args.speculative_draft_model_revision,
            held=self._held(model_config.vocab_size, model_config.dtype),
        )
        self.speculation.check(loaded.config)
        return loaded

    def _held(self, vocab_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The target's embedding and head as they are in its memory, without the rows that the host pads them by."""
        held: dict[str, Tensor] = {}
        for name, tensor in zip(SHARED, self.target_worker.model_runner.model.get_embed_and_head(), strict=True):
            if tensor.dtype != dtype or tensor.shape[0] < vocab_size:
                raise ConfigError(
                    f"target's {name}: expected at least {vocab_size} rows of {dtype} to share with the draft, got "
                    f"{list(tensor.shape)} {tensor.dtype}."
                )
            held[name] = tensor.detach()[:vocab_size]
        return held

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """The draft's KV pool, indexed by the host's slots, and the engine. The host never hands out a later slot."""
        runner = self.target_worker.model_runner
        if runner.token_to_kv_pool.post_capture_active:
            raise ConfigError(
                "EAGLEX does not support SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 (needs 0): the draft's K and V would "
                "not grow with the host's pool."
            )
        slots = token_to_kv_pool_allocator.size + token_to_kv_pool_allocator.page_size
        shape = (slots, self.config.num_kv_heads, self.config.head_dim)
        # zeroed: a slot that no draft has written may be read, and NaN in it would void the draft of who reads it
        with self.memory.taking("K and V"):
            self.draft_k, self.draft_v = (
                [torch.zeros(shape, dtype=self.kv_dtype, device=self.device) for _ in range(self.config.num_layers)]
                for _ in range(2)
            )
        self.memory.planned["K and V"] = self.kv_bytes_per_token * slots
        self.req_to_token = req_to_token_pool.req_to_token
        max_batch = req_to_token_pool.size
        nodes = self.speculation.num_draft_tokens
        rows = engine_arguments.max_rows_of(self.server_args, self.options, max_batch=max_batch, num_draft_tokens=nodes)
        self.limits = EngineLimits(max_batch=max_batch, max_rows=rows, num_slots=self.req_to_token.shape[0])
        self.translator = Translator(max_batch=max_batch, max_rows=rows, num_draft_tokens=nodes, device=self.device)
        self._build()

    def _build(self) -> None:
        """The engine. The originals of the matrices that it keeps in an order of its own are let go of."""
        weights, self._weights = self._weights, None
        if weights is None:
            weights = to_device(self._load(self.target_worker.model_config).weights, self.device)
        borrowed = self.facts.borrowed
        originals = [(weakref.ref(tensor), tensor.nbytes) for name, tensor in weights.named() if name not in borrowed]
        with self.memory.taking("engine"):
            self._engine = DraftEngine(
                self.config,
                self.speculation,
                limits=self.limits,
                weights=weights,
                req_to_token=self.req_to_token,
                draft_k=self.draft_k,
                draft_v=self.draft_v,
            )
            del weights
        dropped = sum(size for tensor, size in originals if tensor() is None)
        results = sum(tensor.nbytes for tensor in vars(self._engine.results).values() if tensor is not None)
        kept = self._engine.prepared_bytes - dropped
        self.memory.planned["engine"] = kept + self._engine.workspace_bytes + results

    def _report(self) -> None:
        logger.info(
            "EAGLEX: GPU memory %s; the draft shares %s with the target; %d bytes of K and V for each of %d slots; "
            "drafts on %s.",
            self.memory,
            " and ".join(self.facts.borrowed) or "nothing",
            self.kv_bytes_per_token,
            self.draft_k[0].shape[0],
            self.engine.backend_name,
        )

    def init_attention_backends(self) -> None:
        """The host has set the auxiliary layers by now, and captures the target next: check them."""
        model = self.target_worker.model_runner.model
        wanted, seen = [i + 1 for i in self.output_ids], aux_capture.captured(model)
        if seen != wanted:
            raise ConfigError(f"target {type(model).__name__}: expected layers_to_capture={wanted}, got {seen}.")

    def init_cuda_graphs(self) -> None:
        """Capture the engine's graphs; with the host's graphs off there are none. The last step of a start."""
        self._capture()
        self._report()

    def _capture(self) -> None:
        if self.graphs:
            started = time.perf_counter()
            with self.memory.taking("graphs"):
                self.engine.warm_up()
            self.graph_time_usage = {"draft_decode": time.perf_counter() - started}
            self.graph_memory_usage = {"draft_decode": self.memory.used["graphs"] / 1e9}

    def renew(self) -> None:
        """The target's weights have changed, and those that the draft shares with it: the engine is made again."""
        if not self.facts.borrowed or self._engine is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a tree that is being made reads the engine that goes
        self._engine = None  # before the next, as both would not fit beside each other
        if self.metrics is not None:
            self.metrics.restart()
        self.memory = draft_memory.Ledger(self.device)
        self._build()
        self._capture()

    def forget(self) -> None:
        """No slot has a draft any more."""
        self.engine.results.drafted_for.fill_(-1)

    def draft(self, batch: Any) -> Any:
        """The verifier's input, from the drafts of the batch's slots in the batch's order.

        A request without a draft for its length is verified with its root alone; of a chain that was drafted further
        than is verified, the first nodes are.
        """
        requests, nodes = batch.seq_lens.shape[0], self.speculative_num_draft_tokens
        if nodes not in self._buffers:
            self._buffers[nodes] = VerifyPool(nodes=nodes, device=self.device)
        buffers = self._buffers[nodes].take(self._mask_place(batch), requests=requests)
        tensors = buffers.tensors
        self.engine.tree(
            tensors,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            bonus_tokens=batch.spec_info.bonus_tokens,
            stream=current_stream(self.device),
        )
        return compat.symbol("EagleVerifyInput")(
            draft_token=buffers.draft_tokens,
            custom_mask=buffers.custom_mask,
            positions=buffers.positions,
            retrieve_index=tensors.retrieve_index,
            retrieve_next_token=tensors.retrieve_next_token,
            retrieve_next_sibling=tensors.retrieve_next_sibling,
            retrieve_cum_len=None,
            spec_steps=self.speculative_num_steps,
            topk=self.topk,
            draft_token_num=nodes,
            capture_hidden_mode=None,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    def _mask_place(self, batch: Any) -> MaskPlace:
        """Where the host's attention backend wants the mask, as its own `build_eagle_verify_input` decides it."""
        backend = self.target_worker.model_runner.attn_backend
        total = batch.seq_lens_sum
        if total is None:
            total = batch.seq_lens.shape[0] * backend.max_context_len
        place = backend.verify_mask
        if place is None:
            return MaskPlace(MODES[compat.symbol("default_tree_mask_mode")().name], None, total)
        buffer = place.buffer if place.fits(batch.seq_lens.shape[0]) else None
        return MaskPlace(MODES[place.mode.name], buffer, total)

    def draft_verified(self, verified: Verified, drafting: bool = True) -> None:
        """Extend by the accepted tokens, then draft from each request's last one; on the current stream.

        Without `drafting` fc, K and V of the accepted tokens are kept and nothing is drafted.
        """
        self._launch(self.translator.after_verify(verified, drafting=drafting))

    def draft_prefilled(self, prefilled: Prefilled, drafting: bool = True) -> None:
        """Extend by the prompts' tokens, then draft from each prompt that is whole; on the current stream."""
        for batch in self.translator.after_prefill(prefilled, drafting=drafting):
            self._launch(batch)

    def _launch(self, batch: DraftBatch) -> None:
        run = self.engine.run if self.graphs else self.engine.enqueue
        run(batch, current_stream(self.device))
        if self.metrics is not None:
            self.metrics.after_launch(self.engine.results.counters)

    def trial(self, requests: int, nodes: int, *, drafting: bool) -> Callable[[], None]:
        """One launch after a verification of so many requests and nodes, all accepted, to be timed at start.

        Its rows are those that the host keeps for padding: KV slot 0, which every row of an unused table names.
        """

        def ints(values: int, count: int, dtype: torch.dtype) -> Tensor:
            return torch.full((count,), values, dtype=dtype, device=self.device)

        rows = requests * nodes
        verified = Verified(
            hidden_states=torch.zeros((rows, self.config.aux_width), dtype=self.kv_dtype, device=self.device),
            next_token_ids=ints(0, rows, torch.int32),
            accept_lens=ints(nodes, requests, torch.int32),
            seq_lens=ints(1, requests, torch.int64),
            req_pool_indices=torch.arange(1, requests + 1, device=self.device),
            out_cache_loc=ints(0, rows, torch.int64),
        )
        return functools.partial(self._launch, self.translator.after_verify(verified, drafting=drafting))

    def end_trials(self) -> None:
        """Leave no trace of trials: no draft, no count, nothing in the padding slot."""
        self.forget()
        self.engine.results.counters.zero_()
        for pool in (*self.draft_k, *self.draft_v):
            pool[0].zero_()
