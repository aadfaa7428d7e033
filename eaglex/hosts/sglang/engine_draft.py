"""The rank that drafts: a draft checkpoint, its KV pool, eaglex's engine over both, and word to the other ranks.

Sizes: B requests, N nodes per request.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eaglex import checkpoint
from eaglex.engine import DraftBatch, DraftEngine, current_stream
from eaglex.errors import DeviceError
from eaglex.hosts.draft_slots import to_device
from eaglex.hosts.sglang import draft_memory, engine_arguments
from eaglex.hosts.sglang.draft_side import DraftSide
from eaglex.hosts.sglang.kept_rows import rows_that_fit
from eaglex.hosts.sglang.shrink import Shrink, Wanted
from eaglex.hosts.sglang.translate import Prefilled, Translator, Verified
from eaglex.hosts.sglang.verify_input import Trees
from eaglex.repeated import Again, RepeatedRun
from eaglex.weights import DraftWeights

logger = logging.getLogger(__name__)


def _never(*_: Any) -> bool:
    """In place of a run that repeats, where there is none yet."""
    return False


class EngineDraft(DraftSide):
    """Drafts for all ranks. Weights before the host sizes its pool, pool and engine after, graphs at the end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._engine: DraftEngine | None = None
        self._runs: dict[tuple[int, int, bool], RepeatedRun] = {}  # by requests, rows and whether a draft is wanted
        self._last: dict[bool, Again] = dict.fromkeys((True, False), _never)  # of those, by whether a draft is wanted
        wanted = Wanted(
            quant=engine_arguments.quant_of(self.server_args, self.options), hot_vocab=self.options.hot_vocab
        )
        self._shrink = Shrink(wanted, self.server_args.speculative_draft_model_path, speculation=self.speculation)
        started = time.perf_counter()
        self.memory = draft_memory.Ledger(self.device)
        with self.memory.taking("weights"):
            self._weights: DraftWeights | None = self._load()
        self.memory.planned["weights"] = draft_memory.own_weight_bytes(self._weights, self._in_place)
        self.weight_load_time = time.perf_counter() - started
        for note in self.facts.notes:
            logger.info("EAGLEX: %s", note)

    @property
    def engine(self) -> DraftEngine:
        """Made with the memory pools. Raises RuntimeError before."""
        if self._engine is None:
            raise RuntimeError("the engine is made by alloc_memory_pool, which the host has not called yet")
        return self._engine

    @property
    def trees(self) -> Trees:
        """The engine, or what makes trees of roots where there is none any more."""
        return self._alone or self.engine

    @property
    def _in_place(self) -> tuple[str, ...]:
        """Tensors that are the target's own memory: those that it has whole on this GPU."""
        return self._borrowed if self.ranks.size == 1 else ()

    @property
    def _borrowed(self) -> tuple[str, ...]:
        return self._shrink.shared(self.facts.borrowed)

    def _load(self) -> DraftWeights:
        args, options, model_config = self.server_args, self.options, self.target_worker.model_config
        model = self.target_worker.model_runner.model
        loaded = checkpoint.load(
            args.speculative_draft_model_path,
            target=args.model_path,
            aux_layer_ids=options.aux_layer_ids,
            convention=options.convention,
            max_positions=model_config.context_len,
            dtype=model_config.dtype,
            revision=args.speculative_draft_model_revision,
            target_revision=args.revision,
            held=self.ranks.shared(model, self.facts.borrowed, model_config.vocab_size, model_config.dtype),
        )
        weights = to_device(loaded.weights, self.device)
        self.config, weights = self._shrink.of(self.facts.config, weights, self.device)
        return weights

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """The draft's KV pool, indexed by the host's slots, and the engine. The host never hands out a later slot."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
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
        self.translator = Translator(
            max_batch=self.limits.max_batch,
            max_rows=self.limits.max_rows,
            num_draft_tokens=self.speculation.num_draft_tokens,
            device=self.device,
        )
        # Of windows that are narrower, and of rows that were kept: made here, as no launch would wait for them later.
        narrower = range(1, self.speculation.num_draft_tokens) if self.server_args.speculative_adaptive else (1,)
        for rows in (*narrower, self.rows_kept):
            self.translator.row_starts(rows)
        self._build()

    def _build(self) -> None:
        self._make_engine()
        self._connect(self.engine.results)

    def _make_engine(self) -> None:
        """The engine. The originals of the matrices that it keeps in an order of its own are let go of."""
        weights, self._weights = self._weights, None
        if weights is None:
            weights = self._load()
        in_place = self._in_place
        self._embedding: Tensor | None = weights.embed_tokens
        originals = [(weakref.ref(tensor), tensor.nbytes) for name, tensor in weights.named() if name not in in_place]
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
            "drafts on %s%s.",
            self.memory,
            " and ".join(self._borrowed) or "nothing",
            self.kv_bytes_per_token,
            self.draft_k[0].shape[0],
            self.engine.backend_name,
            "" if self._link is None else f" for {self.ranks.size} ranks, told by {self._link.bridge.transport}",
        )

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

    def _renew(self) -> None:
        """The embedding where it lies; an engine that has more of the target's in it is made again."""
        if not self.facts.borrowed:
            return
        if self._renewed_in_place:
            self._renew_embedding()
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a tree that is being made reads the engine that goes
        self._runs.clear()
        self._last = dict.fromkeys((True, False), _never)
        self._buffers.forget()
        self._link = None  # over the results of the engine that goes; the others do the same
        # Before the next, as both would not fit beside each other.
        self._engine = self._weights = self._embedding = None
        if self.metrics is not None:
            self.metrics.restart()
        self.memory = draft_memory.Ledger(self.device)
        failure: str | None = None
        try:
            self._make_engine()
            self._capture()
        except Exception as error:  # no memory, no file any more: the target has its weights, and serves
            failure = str(error) or type(error).__name__  # the error's own frames hold half an engine
            self._engine = self._weights = self._embedding = None
        if self._agreed(failure) and not self._connected_again(lambda: self._connect(self.engine.results)):
            self._engine = self._weights = self._embedding = None

    def _renew_embedding(self) -> None:
        model, model_config = self.target_worker.model_runner.model, self.target_worker.model_config
        try:
            held = self.ranks.shared(model, self.facts.borrowed, model_config.vocab_size, model_config.dtype)
            (found,) = held.values()
            assert self._embedding is not None, "only a draft that shares more lets go of it"
            if found.data_ptr() != self._embedding.data_ptr():  # else the update has written it already
                self._embedding.copy_(found)
            self.engine.embeddings_changed()
        except Exception as error:
            logger.error("EAGLEX: after an update of weights the draft keeps the old embedding: %s", error)

    def forget(self) -> None:
        """No slot has a draft any more."""
        if self._engine is None:
            return
        self._engine.results.drafted_for.fill_(-1)

    def counters(self) -> dict[str, int]:
        """Requests per outcome since the engine was made."""
        return {} if self._engine is None else self._engine.counters()

    @property
    def rows_kept(self) -> int:
        """As many as make a launch worth its reading of the weights."""
        limits = self.limits
        return rows_that_fit(num_layers=self.config.num_layers, max_batch=limits.max_batch, max_rows=limits.max_rows)

    def draft_verified(self, verified: Verified, drafting: bool, stream: int) -> None:
        """Extend by the accepted tokens, then draft from each request's last one.

        Without `drafting` fc, K and V of the accepted tokens are kept and nothing is drafted.
        """
        if self._engine is None:
            return
        try:  # as the verification before, mostly
            drafted = self._last[drafting](*verified, stream) or self._after_verify(verified, drafting, stream)
            if self.metrics is not None:
                self.metrics.after_launch(self._engine.results.counters)
        except DeviceError as error:
            drafted = self._failed(error)
        if drafting and self._link is not None:
            slots, lens, accepted = verified.req_pool_indices, verified.seq_lens, verified.accept_lens
            self._link.tell(slots, lens, accepted, draft=drafted, stream=stream)

    def _after_verify(self, verified: Verified, drafting: bool, stream: int) -> bool:
        key = (verified.accept_lens.shape[0], verified.hidden_states.shape[0], drafting)
        run = self._runs.get(key)
        if run is None or not run(*verified, stream):
            batch = self.translator.after_verify(verified, drafting=drafting)
            self._launch(batch, stream)
            if not self.graphs:
                return True
            run = self._runs[key] = self.engine.repeated_run(batch)
        self._last[drafting] = run.again
        return True

    def draft_prefilled(self, prefilled: Prefilled, drafting: bool, stream: int) -> None:
        """Extend by the prompts' tokens, then draft from each prompt that is whole."""
        if self._engine is None:
            return
        drafted = self._tried(self._after_prefill, prefilled, drafting, stream)
        if drafting and self._link is not None:
            self._link.tell(prefilled.req_pool_indices, prefilled.seq_lens, None, draft=drafted, stream=stream)

    def _after_prefill(self, prefilled: Prefilled, drafting: bool, stream: int) -> bool:
        for batch in self.translator.after_prefill(prefilled, drafting=drafting):
            self._launch(batch, stream)
            if self.metrics is not None:
                self.metrics.after_launch(self.engine.results.counters)
        return True

    def _launch(self, batch: DraftBatch, stream: int) -> None:
        run = self.engine.run if self.graphs else self.engine.enqueue
        run(batch, stream)

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
            req_pool_indices=torch.arange(1, requests + 1, device=self.device),
            seq_lens=ints(1, requests, torch.int64),
            out_cache_loc=ints(0, rows, torch.int64),
        )
        batch = self.translator.after_verify(verified, drafting=drafting)
        return lambda: self._launch(batch, current_stream(self.device))

    def end_trials(self) -> None:
        """Leave no trace of trials: no draft, no count, nothing in the padding slot."""
        self.forget()
        self.engine.results.counters.zero_()
        for pool in (*self.draft_k, *self.draft_v):
            pool[0].zero_()
