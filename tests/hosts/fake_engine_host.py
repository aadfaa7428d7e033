"""A model of SGLang around the worker with eaglex's engine: scheduler, KV slots, verification, and what it must draft.

The target says anything: its hidden states and bonus tokens are random numbers, and verification accepts a random path
of the tree that it is given. What the worker must give it next is computed with eaglex.reference from the same rows,
one request at a time. Rows that do not count hold NaN, tokens that nobody may read are out of range.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import fake_host
import pytest
import torch
from fake_engine_parts import (
    CONTEXT,
    SPENT,
    AdaptiveParams,
    Algorithm,
    BaseSpecWorker,
    Batch,
    DraftInput,
    EagleVerifyInput,
    ForwardBatch,
    PoolConfigurator,
    ReqToTokenPool,
    Setting,
    TargetWorker,
    TreeMaskMode,
    WeightUpdater,
    sampling,
)
from fake_host import LOG, Mode, PoolConfig, Result
from torch import Tensor

from eaglex import checkpoint, reference
from eaglex.hosts.sglang import break_even, compat, options

BAD = -7
MODULES = tuple(
    f"eaglex.hosts.sglang.{name}"
    for name in ("draft_side", "engine_draft", "dedicated_draft", "follower_draft", "engine_worker")
)


@dataclass
class DecodeResult(Result):
    """The fields of the host's result that a decode sets beside those."""

    can_run_cuda_graph: bool = False
    speculative_num_draft_tokens: int | None = None
    routed_experts_output: Any = None
    indexer_topk_output: Any = None
    extra_keep_alive_refs: list[Any] | None = None


@dataclass
class Request:
    """One request, with the reference's K and V of it and the draft that its next verification must be given."""

    number: int
    prompt: list[int]
    slot: int
    cache: reference.DraftCache
    length: int = 0
    kv: list[int] = field(default_factory=list)
    bonus: int = 0
    expected: reference.Draft = field(default_factory=reference.Draft.none)

    @property
    def unfinished(self) -> bool:
        return self.length < len(self.prompt)


class Host:
    """The scheduler's side. Every verification is checked before it is answered."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        self.setting, self.choose = setting, random.Random(seed)
        self.random = torch.Generator().manual_seed(seed)
        loaded = checkpoint.load(setting.draft, target=setting.target, max_positions=CONTEXT, dtype=setting.dtype)
        self.config, self.weights = loaded.config, loaded.weights
        self.table = torch.zeros((setting.slots + 1, CONTEXT + 40), dtype=torch.int32, device=setting.device)
        self.pool = ReqToTokenPool(self.table, setting.slots)
        self.free_slots = list(range(1, setting.slots + 1))
        self.free_kv = list(range(1, setting.pool))
        self.running: list[Request] = []
        self.shared: list[Request] = []
        self.leaving: list[Request] = []
        self.started = self.verified = self.drafted = 0
        self.widths: dict[int, int] = {}  # verifications by their steps
        self.decodes: dict[str, int] = {}  # forwards without drafts, by how their tokens were chosen
        self.last_batch: tuple[list[Request], Tensor] | None = None  # as the host keeps it from decode to decode
        self.aux_of_graphs: Tensor | None = None  # what the last decode's graph wrote, and the next one's overwrites
        self.unprocessed: list[list[int]] = []  # accepted drafts of verifications whose results are on their way
        self.worker: Any = None
        self.worker_target: Any = None

    # ---- what stands for the target ----------------------------------------------------------------------------------

    def aux(self, rows: int) -> Tensor:
        return torch.randn((rows, self.config.aux_width), generator=self.random).to(self.setting.dtype)

    def there(self, values: list[int] | Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        """On the target's device."""
        return torch.as_tensor(values, dtype=dtype).to(self.setting.device)

    def token(self) -> int:
        return self.choose.randrange(self.config.vocab_size)

    def extended(self, request: Request, aux: Tensor, following: list[int]) -> None:
        """The reference takes in rows; `expected` is what it drafts from the last of them."""
        logits, hidden = reference.extend(self.config, self.weights, request.cache, aux, torch.tensor(following))
        request.length += len(following)
        speculation = self.worker._draft_worker.speculation
        request.expected = reference.draft(self.config, self.weights, request.cache, logits, hidden, speculation)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, length: int) -> None:
        """KV slots for positions below `length`."""
        while len(request.kv) < length:
            request.kv.append(self.free_kv.pop(self.choose.randrange(len(self.free_kv))))
        self.table[request.slot, : len(request.kv)] = torch.tensor(request.kv, dtype=torch.int32)

    def release(self, request: Request) -> None:
        """Its slot may go to another at once; its prefix stays, as a radix cache would keep it."""
        self.free_slots.append(request.slot)
        del request.kv[request.length :]
        self.shared.append(request)
        while len(self.shared) > 3:
            kept = {slot for one in (*self.shared[1:], *self.running, *self.leaving) for slot in one.kv}
            self.free_kv = [slot for slot in range(1, self.setting.pool) if slot not in kept]
            self.shared.pop(0)

    # ---- forwards ----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Any:
        LOG.clear()
        before = dict(vars(batch))
        result = self.worker.forward_batch_generation(
            batch, on_publish=(lambda _: LOG.append("publish")) if self.setting.overlap else None
        )
        result.copy_to_cpu(return_logprob=False)  # tensors of the result are replaced
        vars(batch).update(before)  # as the host restores its batch
        if not self.worker._plan.drafting:
            for request in batch.reqs:
                request.expected = reference.Draft.none()
        return result

    def join(self) -> Request:
        """A new request on a free slot, some with the prefix of another in the cache."""
        slot = self.free_slots.pop(self.choose.randrange(len(self.free_slots)))
        self.started += 1
        prompt = [self.token() for _ in range(self.choose.randint(1, 40))]
        request = Request(self.started, prompt, slot, reference.DraftCache.empty(self.config, self.setting.dtype))
        donors = [one for one in self.shared if len(one.prompt) > 3]
        if donors and self.choose.random() < 0.6:
            donor = self.choose.choice(donors)
            keep = self.choose.randint(1, min(len(donor.prompt), donor.length) - 2)
            # the token at `keep` is shared as well: K and V at keep - 1 depend on it
            request.prompt = (donor.prompt[: keep + 1] + request.prompt)[:60]
            request.kv, request.length = donor.kv[:keep], keep
            request.cache = reference.DraftCache([k[:keep] for k in donor.cache.k], [v[:keep] for v in donor.cache.v])
        return request

    def prefill(self, count: int) -> None:
        joining = [self.join() for _ in range(min(count, len(self.free_slots)))]
        joining = [request for request in self.running if request.unfinished] + joining
        self.running = [request for request in self.running if request not in joining]
        if not joining:
            return
        self.choose.shuffle(joining)
        lengths = [len(request.prompt) - request.length for request in joining]
        chunked = None
        if self.choose.random() < 0.4 and lengths[-1] > 1:
            lengths[-1], chunked = self.choose.randint(1, lengths[-1] - 1), joining[-1]
        prefixes, ids, places = [request.length for request in joining], [], []
        for request, length in zip(joining, lengths, strict=True):
            self.reserve(request, request.length + length)
            ids += request.prompt[request.length : request.length + length]
            places += request.kv[request.length : request.length + length]
        first = [self.token() for _ in joining]
        aux = self.aux(len(ids))
        if chunked is not None:
            first[-1] = BAD  # sampled from the middle of a prompt: nobody's business
        batch = Batch(
            list(joining), self.there([request.slot for request in joining]),
            self.there([p + n for p, n in zip(prefixes, lengths, strict=True)]), Mode.EXTEND,
            input_ids=self.there(ids), out_cache_loc=self.there(places), extend_lens=lengths, prefix_lens=prefixes,
        )  # fmt: skip
        if chunked is not None:
            batch.chunked_req = chunked
            batch.chunked_req_next_prompt_token = chunked.prompt[prefixes[-1] + lengths[-1]]
        self.worker.target_worker.answer = Result(
            logits_output=SimpleNamespace(hidden_states=self.there(aux, aux.dtype)), next_token_ids=self.there(first)
        )
        result = self.forward(batch)
        assert result.new_seq_lens.tolist() == batch.seq_lens.tolist()
        assert result.next_draft_input.bonus_tokens.tolist() == first
        row = 0
        for request, length, token in zip(joining, lengths, first, strict=True):
            following = request.prompt[request.length + 1 : request.length + length]
            following += [token] if request is not chunked else [request.prompt[request.length + length]]
            self.extended(request, aux[row : row + length], following)
            row += length
            request.bonus = token
            if request is chunked:
                request.expected = reference.Draft.none()
        self.running += joining

    def decode(self, gone: list[Request]) -> None:
        """Verify all that run, in a new order; `gone` have finished and are overrun by one forward."""
        batch_of = [request for request in self.running if not request.unfinished] + gone
        if not batch_of:
            return
        self.choose.shuffle(batch_of)
        slots = self.there([request.slot for request in batch_of])
        if self.last_batch is not None and set(map(id, batch_of)) == set(map(id, self.last_batch[0])):
            batch_of, slots = self.last_batch
        self.last_batch = (batch_of, slots)
        for request in batch_of:
            self.reserve(request, request.length + self.setting.nodes)
        lengths = [request.length for request in batch_of]
        on_cpu = self.choose.random() < 0.5
        batch = Batch(
            list(batch_of), slots, self.there(lengths),
            spec_info=DraftInput(bonus_tokens=self.there([request.bonus for request in batch_of], torch.int32)),
            seq_lens_sum=sum(lengths) if on_cpu else None, seq_lens_cpu=torch.tensor(lengths) if on_cpu else None,
            sampling_info=sampling(greedy=self.choose.random() < 0.7), return_logprob=self.choose.random() < 0.2,
        )  # fmt: skip
        self.unprocessed.append([request.length for request in batch_of])
        result = self.forward(batch)
        self.unprocessed[-1] = [int(count) - 1 for count in result.accept_lens]
        while len(self.unprocessed) > (2 if self.setting.overlap else 0):
            correct = self.unprocessed.pop(0)
            self.worker.on_verify_complete_cpu(correct, batch_size=len(correct))

    # ---- without drafts ----------------------------------------------------------------------------------------------

    def cache_locs(
        self, *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, batch_size: int,
        draft_token_num: int, device: Any,
    ) -> Tensor:  # fmt: skip
        assert (batch_size, draft_token_num) == (len(start_offset), 1)
        return req_to_token[req_pool_indices, start_offset].to(torch.int64)

    def decoded(self, made: Any) -> Any:
        """The target's decode: check what it is given, then choose a token for each request.

        Its hidden states are the graph's output: one memory, written again by the next decode.
        """
        requests: list[Request] = made.batch.reqs
        runner = self.worker.target_worker.model_runner
        assert runner.attn_backend.nodes == runner.context.spec.nodes == 1
        assert runner.decode_cuda_graph_runner is None or runner.decode_cuda_graph_runner.mode is Mode.DECODE
        assert (made.forward_mode, made.spec_info) == (Mode.DECODE, None)
        assert made.input_ids.tolist() == [request.bonus for request in requests]
        lengths = [request.length + 1 for request in requests]
        assert made.seq_lens.tolist() == lengths
        assert made.seq_lens_cpu is None or made.seq_lens_cpu.tolist() == lengths
        assert made.seq_lens_sum is None or made.seq_lens_sum == sum(lengths)
        assert made.out_cache_loc.tolist() == [request.kv[request.length] for request in requests]
        assert made.batch.seq_lens.tolist() == [request.length for request in requests], "sampling takes those before"
        aux = self.aux(len(requests))
        if self.aux_of_graphs is None:
            self.aux_of_graphs = torch.empty((self.setting.slots + 1, self.config.aux_width), dtype=self.setting.dtype)
        self.aux_of_graphs.fill_(math.nan)
        self.aux_of_graphs[: len(requests)] = aux
        logits = torch.zeros((len(requests), self.config.vocab_size))
        for place, request in enumerate(requests):
            request.bonus = self.token()
            logits[place, request.bonus] = 1
            self.extended(request, aux[place : place + 1], [request.bonus])
        self.widths[0] = self.widths.get(0, 0) + 1
        self.verified += len(requests)
        output = SimpleNamespace(next_token_logits=logits, hidden_states=self.aux_of_graphs[: len(requests)])
        return SimpleNamespace(
            logits_output=output, can_run_cuda_graph=self.setting.graphs, routed_experts_output=None,
            indexer_topk_output=None,
        )  # fmt: skip

    def sample(self, verify_input: Any, batch: Batch, output: Any) -> tuple[Tensor, None, None]:
        """The host's sampling over roots, which draws what the target wants most."""
        bonus = verify_input.draft_token.tolist()
        count = len(batch.reqs)
        assert (verify_input.spec_steps, verify_input.draft_token_num, len(bonus)) == (0, 1, count)
        assert verify_input.retrieve_index.tolist() == [[place] for place in range(count)]
        assert (
            verify_input.retrieve_next_token.tolist() == verify_input.retrieve_next_sibling.tolist() == [[-1]] * count
        )
        self.decodes["sampled"] = self.decodes.get("sampled", 0) + 1
        return output.next_token_logits.argmax(-1).to(torch.int32), None, None

    def verify_roots(self, batch: Batch, **given: Any) -> Result:
        """The host's verification of roots, over a target that decodes what it has prepared."""
        assert batch.return_logprob
        self.decodes["verified"] = self.decodes.get("verified", 0) + 1
        made, target = batch.spec_info, given["target_worker"]
        assert target.model_runner.decode_cuda_graph_runner is None, "the host would prepare for it"
        assert (made.spec_steps, made.draft_token_num, given["num_draft_tokens"]) == (0, 1, 1)
        assert made.draft_token.tolist() == [request.bonus for request in batch.reqs]
        assert made.positions.tolist() == [request.length for request in batch.reqs]
        batch.out_cache_loc = self.cache_locs(
            req_pool_indices=batch.req_pool_indices, req_to_token=self.table, start_offset=batch.seq_lens,
            batch_size=len(batch.reqs), draft_token_num=1, device="cpu",
        )  # fmt: skip
        batch.forward_mode, batch.input_ids = Mode.TARGET_VERIFY, made.draft_token
        forward_batch = ForwardBatch.init_new(
            batch,
            target.model_runner,
            capture_hidden_mode=fake_host.Hidden.FULL,
            return_hidden_states_before_norm=False,
        )
        done = target.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        predict = done.logits_output.next_token_logits.argmax(-1).to(torch.int32)
        accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32)
        return Result(
            logits_output=done.logits_output, next_token_ids=predict, accept_lens=accept_lens,
            new_seq_lens=batch.seq_lens + accept_lens, next_draft_input=DraftInput(bonus_tokens=predict),
        )  # fmt: skip

    # ---- with drafts -------------------------------------------------------------------------------------------------

    def verify(self, batch: Batch, **given: Any) -> Result:
        """The host's verification: check what the worker made, then accept a random path of each tree."""
        LOG.append(f"verify on {fake_host.Stream.current.name}")
        if given["num_steps"] == 0:
            return self.verify_roots(batch, **given)
        assert given["target_worker"] is self.worker_target
        assert given["topk"] == self.setting.topk
        made, nodes, steps = batch.spec_info, given["num_draft_tokens"], given["num_steps"]
        whole = steps == self.setting.steps
        assert nodes == (self.setting.nodes if whole else steps + 1)
        runner = self.worker.target_worker.model_runner
        assert runner.attn_backend.nodes == runner.context.spec.nodes == nodes
        assert runner.decode_cuda_graph_runner is None or runner.decode_cuda_graph_runner.nodes == nodes
        self.widths[steps] = self.widths.get(steps, 0) + 1
        trees = [reference.tree(r.expected, r.bonus, r.length, nodes) for r in batch.reqs]
        tokens = made.draft_token.view(-1, nodes)
        for place, (request, tree) in enumerate(zip(batch.reqs, trees, strict=True)):
            said = f"request {request.number} at {request.length}"
            assert tokens[place].tolist() == tree.draft_tokens.tolist(), said
            assert made.positions.view(-1, nodes)[place].tolist() == tree.positions.tolist(), said
            assert made.retrieve_next_token[place].tolist() == tree.retrieve_next_token.tolist(), said
            assert made.retrieve_next_sibling[place].tolist() == tree.retrieve_next_sibling.tolist(), said
            self.drafted += len(request.expected.tokens) > 0
        assert made.retrieve_index.flatten().tolist() == list(range(len(trees) * nodes))
        assert (made.spec_steps, made.topk, made.draft_token_num) == (steps, self.setting.topk, nodes)
        self.check_mask(made.custom_mask, trees, [request.length for request in batch.reqs])
        self.verified += len(trees)
        batch.out_cache_loc = torch.cat(
            [self.table[r.slot, r.length : r.length + nodes] for r in batch.reqs]
        ).to(torch.int64)  # fmt: skip
        return self.answer(batch, trees, nodes)

    def answer(self, batch: Batch, trees: list[reference.VerifyTree], nodes: int) -> Result:
        hidden = torch.full((len(trees), nodes, self.config.aux_width), math.nan, dtype=self.setting.dtype)
        predict = torch.full((len(trees), nodes), BAD, dtype=torch.int32)
        counts, bonus = [], []
        for place, (request, tree) in enumerate(zip(batch.reqs, trees, strict=True)):
            path = [0]
            while (child := int(tree.retrieve_next_token[path[-1]])) >= 0 and self.choose.random() < 0.75:
                while (other := int(tree.retrieve_next_sibling[child])) >= 0 and self.choose.random() < 0.5:
                    child = other
                path.append(child)
            request.bonus = self.token()
            following = [*tree.draft_tokens[path[1:]].tolist(), request.bonus]
            aux = self.aux(len(path))
            hidden[place, : len(path)], predict[place, : len(path)] = aux, torch.tensor(following, dtype=torch.int32)
            self.extended(request, aux, following)
            counts.append(len(path))
            bonus.append(request.bonus)
        accept_lens, hidden = self.there(counts, torch.int32), self.there(hidden, hidden.dtype)
        return Result(
            logits_output=SimpleNamespace(hidden_states=hidden.view(-1, self.config.aux_width)),
            next_token_ids=self.there(predict.view(-1), torch.int32),
            accept_lens=accept_lens,
            new_seq_lens=batch.seq_lens + accept_lens,
            next_draft_input=DraftInput(bonus_tokens=self.there(bonus, torch.int32)),
        )

    def check_mask(self, mask: Tensor, trees: list[reference.VerifyTree], lengths: list[int]) -> None:
        kept = self.setting.mask
        mode = TreeMaskMode.FULL_MASK if kept is None else kept
        if mode is TreeMaskMode.FULL_MASK:
            wanted = reference.full_mask(trees, lengths)
        elif mode is TreeMaskMode.QLEN_ONLY:
            wanted = torch.stack([tree.mask for tree in trees]).flatten()
        else:
            wanted, mask = reference.packed_mask(trees).flatten(), mask.view(torch.uint8)
        assert torch.equal(mask.flatten()[: len(wanted)].cpu(), wanted)
        if kept is not None and self.setting.mask_fits:
            assert mask.data_ptr() == self.worker.target_worker.model_runner.attn_backend.verify_mask.buffer.data_ptr()

    def step(self) -> None:
        """One turn of the scheduler: who joins, who leaves, a forward of either kind, now and then a flush."""
        if self.choose.random() < 0.4:
            self.prefill(self.choose.randint(1, 3))
        near_end = CONTEXT - 3 * self.setting.nodes
        leaving = [r for r in self.running if not r.unfinished and (self.choose.random() < 0.2 or r.length > near_end)]
        self.running = [request for request in self.running if request not in leaving]
        self.decode(gone=leaving if self.setting.overlap else [])
        self.leaving = leaving
        while self.leaving:
            self.release(self.leaving[0])
            self.leaving.pop(0)
        if self.choose.random() < 0.04:
            self.worker.clear_cache_pool()
            for request in self.running:
                request.expected = reference.Draft.none()


def server_args(setting: Setting) -> Any:
    return SimpleNamespace(
        device=setting.device, base_gpu_id=0, gpu_id_step=1, tp_size=1,
        speculative_algorithm="EAGLEX", speculative_num_steps=setting.steps,
        speculative_eagle_topk=setting.topk, speculative_num_draft_tokens=setting.nodes,
        speculative_draft_model_path=str(setting.draft), speculative_draft_model_revision=None,
        model_path=str(setting.target), revision=setting.revision, chunked_prefill_size=64,
        speculative_adaptive=bool(setting.adaptive), max_speculative_num_draft_tokens=setting.most_nodes,
        speculative_adaptive_config="adaptive.json", speculative_draft_model_quantization=None, quantization=None,
        enable_metrics=setting.metrics, served_model_name="tiny",
    )  # fmt: skip


def seconds_of(action: Callable[[], object]) -> float:
    """A clock that only the target's graphs move."""
    before = SPENT[0]
    action()
    return SPENT[0] - before + 0.1


@contextlib.contextmanager
def made_host(setting: Setting | None = None, seed: int = 0, rank: int = 0, size: int = 1) -> Iterator[Host]:
    """A host whose worker has been started, in the order in which the host starts one."""
    setting = setting or Setting()
    host = Host(setting, seed)
    updater = type("Updater", (WeightUpdater,), dict(vars(WeightUpdater)))
    symbols = fake_host.SYMBOLS | {
        "BaseSpecWorker": BaseSpecWorker, "EagleVerifyInput": EagleVerifyInput, "EagleDraftInput": DraftInput,
        "run_eagle_verify": lambda batch, **given: host.verify(batch, **given),
        "ForwardBatch": ForwardBatch, "GenerationBatchResult": DecodeResult,
        "assign_extend_cache_locs_uniform_func": lambda **given: host.cache_locs(**given),
        "eagle_sample": lambda *given: host.sample(*given), "sanitize_nan_logits": lambda logits, said: None,
        "default_tree_mask_mode": lambda: TreeMaskMode.FULL_MASK, "mambaish_config": lambda config: None,
        "DefaultPoolConfigurator": type("Configurator", (PoolConfigurator,), dict(vars(PoolConfigurator))),
        "SchedulerWeightUpdaterManager": updater, "SpeculativeAlgorithm": Algorithm,
        "Scheduler": type("Scheduler", (fake_host.Scheduler,), {}),
        "Phase": SimpleNamespace(DECODE="decode"), "Backend": SimpleNamespace(DISABLED="disabled"),
        "get_context": lambda: host.worker_target.model_runner.context, "AdaptiveSpeculativeParams": AdaptiveParams,
        "check_cuda_graph_backend": lambda phase, backend: (phase, backend) == ("decode", "disabled")
        and not setting.graphs,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "symbol", symbols.__getitem__)
        chosen = {"drafter": "engine", "max_rows": setting.max_rows, "pausing": setting.pausing}
        chosen |= setting.options
        patch.setenv(options.VARIABLE, json.dumps(chosen))
        patch.setattr(break_even, "clock_of", lambda device: seconds_of)
        stand_ins = {
            "Stream": fake_host.Stream, "Event": fake_host.Event, "stream": fake_host.OnStream,
            "current_stream": lambda: fake_host.Stream.current,
        }  # fmt: skip
        for name, stand_in in stand_ins.items() if setting.device == "cpu" else ():
            patch.setattr(torch.cuda, name, stand_in)
        for name in MODULES:
            sys.modules.pop(name, None)
        try:
            host.worker_target = target = TargetWorker(setting, rank, size)
            target.decoded = host.decoded
            made = importlib.import_module(MODULES[-1]).EaglexEngineWorker(
                server_args(setting), 0, SimpleNamespace(tp_rank=rank, tp_size=size), 0, target
            )
            host.worker, host.symbols = made, symbols
            made.alloc_memory_pool(
                memory_pool_config=PoolConfig(setting.pool),
                req_to_token_pool=host.pool,
                token_to_kv_pool_allocator=SimpleNamespace(size=setting.pool, page_size=setting.page_size),
            )
            target.model_runner.model.set_eagle3_layers_to_capture(
                target.model_runner.spec_aux_config.eagle_aux_hidden_state_layer_ids
            )
            made.init_attention_backends()
            made.init_cuda_graphs()
            LOG.clear()
            yield host
        finally:
            for name in MODULES:
                sys.modules.pop(name, None)
