"""Stand-ins for SGLang's worker, pools and CUDA streams: enough to drive eaglex's worker and see the order of steps.

The stand-ins take exactly what 0.5.17's classes take (test_sglang_contract.py holds the real signatures), do the
arithmetic that the order can be told from, and write every step into one log.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LOG: list[str] = []
K, N, VOCAB = 3, 4, 1000


class Stream:
    """A stream that runs what is enqueued at once; `name` tells which one is current."""

    current: Stream

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.name = "draft" if priority else "forward"
        self.cuda_stream = -priority

    def wait_event(self, event: Event) -> None:
        LOG.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: Stream) -> None:
        LOG.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        LOG.append(f"cpu waits for {self.name}")


class Event:
    def __init__(self) -> None:
        self.name = "unrecorded"

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        self.name = f"{stream.name}'s event"
        LOG.append(f"event on {stream.name}")

    def query(self) -> bool:
        return True


class OnStream:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self.stream

    def __exit__(self, *_: Any) -> None:
        Stream.current = self.before


class Mode(enum.Enum):
    DECODE = 1
    EXTEND = 2
    TARGET_VERIFY = 3

    def is_extend(self) -> bool:
        return self is Mode.EXTEND


class Hidden(enum.Enum):
    FULL = 1
    LAST = 2


@dataclass
class Batch:
    """The fields of a ScheduleBatch that the worker reads or sets."""

    req_pool_indices: Tensor
    seq_lens: Tensor
    forward_mode: Mode = Mode.DECODE
    spec_info: Any = None
    reqs: list[Any] = field(default_factory=list)
    chunked_req: Any = None
    chunked_req_next_prompt_token: int | None = None
    is_extend_in_batch: bool = False
    input_ids: Tensor | None = None
    out_cache_loc: Tensor | None = None
    seq_lens_cpu: Tensor | None = None
    seq_lens_sum: int | None = None
    return_logprob: bool = False
    extend_input_logprob_token_ids: Tensor | None = None
    input_embeds: Tensor | None = None
    replace_embeds: Tensor | None = None
    replace_positions: Tensor | None = None
    multimodal_inputs: Any = None


@dataclass
class DraftInput:
    topk_p: Any = None
    topk_index: Any = None
    hidden_states: Any = None
    bonus_tokens: Any = None


@dataclass
class Result:
    logits_output: Any
    next_token_ids: Tensor
    accept_lens: Tensor | None = None
    new_seq_lens: Tensor | None = None
    next_draft_input: Any = None
    delay_sample_func: Any = None
    copy_done: Any = None  # made before the copies, recorded behind them

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        LOG.append(f"copy on {Stream.current.name}")
        self.next_token_ids = self.next_token_ids.clone()
        self.copy_done = torch.cuda.Event()
        self.copy_done.record()


@dataclass
class PoolConfig:
    max_total_num_tokens: int


class TritonMultiStepDraftBackend:
    def __init__(self) -> None:
        self.req_to_token_pool: Any = None
        self.pool_len, self.page_size = 0, 64


class EagleDraftWorker:
    """Drafts last token + 1, + 2, ...; extends by copying the last accepted token."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens = 1, K, N
        self.device, self.target_worker = "cpu", target_worker
        self.index_share_for_mtp_iteration = False
        self.tree_mask_mode = 0
        self.plan_stream, self.plan_stream_ctx = None, None
        self.cuda_graph_runner = None
        config = SimpleNamespace(model_is_mrope=False, model_path="a/head")
        self.draft_runner = SimpleNamespace(is_hybrid_swa=False, model_config=config, tp_group=None)

    def alloc_memory_pool(
        self, memory_pool_config: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.draft_runner.token_to_kv_pool = SimpleNamespace(size=memory_pool_config.max_total_num_tokens)

    def init_attention_backend(self) -> None:
        self.draft_attn_backend = TritonMultiStepDraftBackend()
        self.draft_attn_backend.init_forward_metadata = lambda batch: None

    def draft_tp_context(self, group: Any) -> OnStream:
        return OnStream(Stream.current)

    def _draft_extend_for_decode(self, batch: Batch, batch_result: Any) -> None:
        LOG.append(f"extend on {Stream.current.name}")
        self.written = batch.out_cache_loc
        rows = batch.seq_lens.shape[0]
        last = torch.arange(rows) * N + batch_result.accept_lens - 1
        batch_result.next_draft_input.topk_index = batch_result.next_token_ids[last][:, None].to(torch.int64)
        batch.input_ids = None

    def _draft_extend_for_prefill(
        self, batch: Batch, target_hidden_states: Tensor, next_token_ids: Tensor, mm_input_embeds: Any = None
    ) -> DraftInput:
        LOG.append(f"extend on {Stream.current.name}")
        return DraftInput(topk_index=next_token_ids[:, None].to(torch.int64), bonus_tokens=next_token_ids)

    def draft_forward(self, forward_batch: Any) -> tuple[Any, Any, Tensor, Any]:
        LOG.append(f"steps on {Stream.current.name}")
        self.last_step_batch = forward_batch
        return None, None, forward_batch.spec_info.topk_index + torch.arange(1, K + 1), None


class EAGLEWorkerV2:
    """Verifies by taking the draft's first `accepts` tokens and a bonus token that is 100 above the last."""

    accepts = 2

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        self.device, self._target_worker = "cpu", target_worker
        self._draft_worker = EagleDraftWorker(server_args, gpu_id, ps, nccl_port, target_worker)

    @property
    def target_worker(self) -> Any:
        return self._target_worker

    def verify(self, batch: Batch, grammar_barrier: Any = None) -> Result:
        LOG.append(f"verify on {Stream.current.name}")
        batch.out_cache_loc = batch.req_pool_indices * 1000  # looked up in the table of this moment
        candidates = batch.spec_info.draft_token.view(-1, N)
        drafted = batch.spec_info.retrieve_next_token[:, 0] >= 0
        accept_lens = torch.where(drafted, self.accepts + 1, 1).to(torch.int32)
        predict = candidates.clone()
        predict[:, :-1] = candidates[:, 1:]
        last = (accept_lens - 1).to(torch.int64)[:, None]
        bonus = candidates.gather(1, last) + 100
        predict.scatter_(1, last, bonus)
        return Result(
            logits_output=SimpleNamespace(hidden_states=torch.zeros(1)),
            next_token_ids=predict.reshape(-1).to(torch.int32),
            accept_lens=accept_lens,
            new_seq_lens=batch.seq_lens + accept_lens,
            next_draft_input=DraftInput(bonus_tokens=bonus[:, 0]),
        )

    def update_weights_from_disk(self, recv_req: Any) -> str:
        LOG.append("update")
        return "updated"

    update_weights_from_ipc = update_weights_from_tensor = update_weights_from_disk


class Scheduler:
    def launch_batch_sample_if_needed(self, batch_result: Any, cur_batch: Any) -> None:
        LOG.append("end of turn")


class SchedulerWeightUpdaterManager:
    def release_memory_occupation(self, recv_req: Any) -> str:
        LOG.append("release")
        return "released"


class TargetWorker:
    model_config = SimpleNamespace(vocab_size=VOCAB)

    def forward_batch_generation(self, batch: Batch, capture_hidden_mode: Any) -> Result:
        LOG.append(f"prefill on {Stream.current.name}")
        assert capture_hidden_mode is Hidden.FULL
        output = SimpleNamespace(hidden_states=torch.zeros(1), mm_input_embeds=None)
        return Result(logits_output=output, next_token_ids=batch.req_pool_indices * 10)


def build_eagle_verify_input(
    batch: Batch, draft_input: DraftInput, parent_list: Tensor, top_scores_index: Tensor, draft_tokens: Tensor,
    draft_probs: Any, *, target_worker: Any, topk: int, num_steps: int, num_draft_tokens: int, tree_mask_mode: Any,
    device: str,
) -> Any:  # fmt: skip
    """The root in front; a chain, told by its parents."""
    LOG.append("gather")
    rows = batch.seq_lens.shape[0]
    assert parent_list.shape == (rows, topk * (num_steps - 1) + 1)
    assert top_scores_index.shape == (rows, num_draft_tokens - 1)
    return SimpleNamespace(
        draft_token=torch.cat((draft_input.bonus_tokens[:, None], draft_tokens), 1).reshape(-1),
        retrieve_next_token=torch.tensor([[1, 2, 3, -1]]).repeat(rows, 1),
        topk=topk,
        spec_steps=num_steps,
    )


class ForwardBatch:
    @staticmethod
    def init_new(batch: Batch, runner: Any, *, capture_hidden_mode: Any, return_hidden_states_before_norm: bool) -> Any:
        assert capture_hidden_mode is Hidden.LAST
        made = dataclasses.replace(batch)
        made.mark_forward_metadata_ready = lambda: None  # type: ignore[attr-defined]
        return made


def no_context() -> OnStream:
    return OnStream(Stream.current)


SYMBOLS: dict[str, Any] = {
    "EAGLEWorkerV2": EAGLEWorkerV2,
    "EagleDraftWorker": EagleDraftWorker,
    "EagleDraftInput": DraftInput,
    "build_eagle_verify_input": build_eagle_verify_input,
    "speculative_moe_backend_context": no_context,
    "speculative_moe_a2a_backend_context": no_context,
    "CaptureHiddenMode": Hidden,
    "ForwardBatch": ForwardBatch,
    "ForwardMode": Mode,
    "Scheduler": Scheduler,
    "SchedulerWeightUpdaterManager": SchedulerWeightUpdaterManager,
    "TritonMultiStepDraftBackend": TritonMultiStepDraftBackend,
}
Stream.current = Stream()
