"""Stand-ins for what the worker with eaglex's engine takes from SGLang: fake_engine_host.py drives it among them.

They take what 0.5.17's classes take; test_sglang_engine_contract.py reads the real ones.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_host
import torch
from fake_host import LOG, Hidden, Mode, Result
from torch import Tensor

TINY = Path(__file__).parent.parent.parent / "models" / "tiny"
CONTEXT = 96


class TreeMaskMode(enum.IntEnum):
    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


@dataclass
class VerifyMask:
    buffer: Tensor
    mode: TreeMaskMode
    max_bs: int

    def fits(self, bs: int) -> bool:
        return bs <= self.max_bs


@dataclass
class EagleVerifyInput:
    draft_token: Tensor
    custom_mask: Tensor
    positions: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    retrieve_cum_len: Any
    spec_steps: int
    topk: int
    draft_token_num: int
    capture_hidden_mode: Any
    seq_lens_sum: Any
    seq_lens_cpu: Any
    draft_probs: Any = None


@dataclass
class Batch:
    """The fields of a ScheduleBatch that the worker reads or sets."""

    reqs: list[Any]
    req_pool_indices: Tensor
    seq_lens: Tensor
    forward_mode: Mode = Mode.DECODE
    spec_info: Any = None
    input_ids: Tensor | None = None
    out_cache_loc: Tensor | None = None
    extend_lens: list[int] | None = None
    prefix_lens: list[int] | None = None
    chunked_req: Any = None
    chunked_req_next_prompt_token: int | None = None
    is_extend_in_batch: bool = False
    seq_lens_sum: int | None = None
    seq_lens_cpu: Tensor | None = None
    has_grammar: bool = False
    return_logprob: bool = False
    sampling_info: Any = None

    @property
    def req_pool_indices_cpu(self) -> Tensor:
        return self.req_pool_indices.cpu()


def sampling(*, greedy: bool = True, **changed: Any) -> Any:
    """The host's SamplingBatchInfo, in what a decode reads."""
    unchanged = {"acc_additive_penalties": None, "acc_scaling_penalties": None, "logit_bias": None}
    return SimpleNamespace(is_all_greedy=greedy, **(unchanged | changed))


class ForwardBatch:
    """A forward's batch, made of the scheduler's for a decode."""

    @staticmethod
    def init_new(batch: Batch, runner: Any, *, capture_hidden_mode: Any, return_hidden_states_before_norm: bool) -> Any:
        assert capture_hidden_mode is Hidden.FULL
        assert runner.model_config is not None
        return SimpleNamespace(**(vars(batch) | {"batch_size": batch.seq_lens.shape[0], "batch": batch}))


class BaseSpecWorker:
    """As base_spec_worker.py has it, in what this worker inherits."""

    def __init__(self) -> None:
        self._additional_graph_memory_usage: dict[str, float] = {}
        self._additional_graph_time_usage: dict[str, float] = {}

    target_worker = property(lambda self: self._target_worker)
    draft_worker = property(lambda self: self._draft_worker)
    weight_load_time = property(lambda self: self.draft_worker.weight_load_time)
    graph_memory_usage = property(
        lambda self: self.draft_worker.graph_memory_usage | self._additional_graph_memory_usage
    )
    graph_time_usage = property(lambda self: self.draft_worker.graph_time_usage | self._additional_graph_time_usage)
    spec_v2_attn_backends = property(lambda self: (self.target_worker.model_runner.attn_backend,))

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        self.draft_worker.alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator

    def init_attention_backends(self) -> None:
        self.draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        self.draft_worker.init_cuda_graphs()

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        pass

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        pass


class TargetModel(torch.nn.Module):
    """A target's embedding and head, padded as the host pads them, and its list of captured layers."""

    def __init__(self, folder: Path, dtype: torch.dtype, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        from safetensors.torch import load_file

        found = load_file(folder / "model.safetensors")
        pad = torch.full((64, found["model.embed_tokens.weight"].shape[1]), math.nan)
        self.embed = torch.cat((found["model.embed_tokens.weight"].to(dtype), pad.to(dtype)))
        self.head = torch.cat((found["lm_head.weight"].to(dtype), pad.to(dtype)))
        self.inner = torch.nn.Module()
        self.inner.layers_to_capture = []

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """This rank's shards: the padded rows, split evenly and in order."""
        return self.embed.chunk(self.size)[self.rank], self.head.chunk(self.size)[self.rank]

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.inner.layers_to_capture = [i + 1 for i in layer_ids]


class WeightUpdater:
    """The methods that a worker wraps."""

    def _step(self, name: str) -> str:
        LOG.append(name)
        return name

    def release_memory_occupation(self, recv_req: Any) -> str:
        return self._step("release")

    def update_weights_from_disk(self, recv_req: Any) -> str:
        return self._step("update")

    update_weights_from_distributed = update_weights_from_tensor = update_weights_from_ipc = update_weights_from_disk


class PoolConfigurator:
    def _compute_cell_size(self, kvc: Any, num_layers: int) -> int:
        return 1000


class ReqToTokenPool:
    """The host's table: `size` requests and the padding's row."""

    def __init__(self, req_to_token: Tensor, size: int) -> None:
        self.req_to_token, self.size = req_to_token, size

    def write(self, indices: Any, values: Tensor) -> None:
        self.req_to_token[indices] = values


class DraftInput(fake_host.DraftInput):
    pass


@dataclass
class Setting:
    """One server: the host's flags and where its attention backend keeps masks."""

    topk: int = 1
    steps: int = 3
    nodes: int = 4
    slots: int = 4
    page_size: int = 1
    pool: int = 1024
    overlap: bool = True
    graphs: bool = True
    mask: TreeMaskMode | None = TreeMaskMode.FULL_MASK
    mask_fits: bool = True
    max_rows: int = 0
    dtype: torch.dtype = torch.float32
    draft: Path = TINY / "draft"
    target: Path = TINY / "target"
    revision: str | None = None  # of the target
    pausing: bool = False
    adaptive: tuple[int, ...] = ()
    metrics: bool = False
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def most_nodes(self) -> int:
        """Of any verification."""
        return max((self.nodes, *(steps + 1 for steps in self.adaptive)))


SPENT = [0.0]  # seconds that the target's graphs have run


class GraphRunner:
    """The target's graphs of one width. A replay takes a time that grows with the nodes it verifies.

    As the host's: they decode without an algorithm, and verify with one.
    """

    def __init__(
        self, model_runner: Any, *, attn_backend: Any = None, speculative_num_steps: int | None = None,
        speculative_num_draft_tokens: int | None = None,
    ) -> None:  # fmt: skip
        spec = model_runner.context.spec
        assert (speculative_num_steps, speculative_num_draft_tokens) in ((None, None), (spec.steps, spec.nodes))
        self.model_runner, self.nodes = model_runner, spec.nodes
        self.capture_bs = [1, 2, 3, 4]
        self.backend = self
        self.mode = Mode.DECODE if model_runner.spec_algorithm is Algorithm.NONE else Mode.TARGET_VERIFY
        self.capture_hidden_mode = None if self.mode is Mode.DECODE else Hidden.FULL
        for size in self.capture_bs:
            self.capture_prepare(size)

    def capture_prepare(self, size: int) -> None:
        assert self.capture_hidden_mode is Hidden.FULL, "hidden states are not captured"

    def _make_graph_key(self, size: int, stream_idx: Any = None, variant_label: Any = None) -> int:
        assert variant_label is None
        return size

    def replay_session(self) -> Any:
        return contextlib.nullcontext()

    def replay(self, key: int, forward_batch: Any) -> None:
        assert key in self.capture_bs
        SPENT[0] += 1.0 + 0.16 * self.nodes * key


class Context:
    """The published configuration, as far as verification reads it."""

    def __init__(self, setting: Setting) -> None:
        self.spec = SimpleNamespace(steps=setting.steps, nodes=setting.nodes)

    def override(self, source: str, *, speculative_num_steps: int, speculative_num_draft_tokens: int) -> None:
        self.spec = SimpleNamespace(steps=speculative_num_steps, nodes=speculative_num_draft_tokens)


class AdaptiveParams:
    """Steps drawn at random, as a host's rule might have it, and what it has been told."""

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        assert cfg_path == "adaptive.json"
        self.choose, self.told = random.Random(initial_steps), []
        self.steps, self.candidate_steps = initial_steps, [0, 1, initial_steps]

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self.sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return self.sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self.steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        self.told.append((self.steps, num_correct_drafts_per_req))
        self.steps = self.choose.choice(self.candidate_steps)


class Group:
    """The host's tensor-parallel group, in what is used of it, over the default process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group, self.world_size, self.ranks = rank, size, list(range(size))
        self.cpu_group = None

    def broadcast_object(self, obj: Any, src: int) -> Any:
        if self.world_size == 1:
            return obj
        found = [obj]
        torch.distributed.broadcast_object_list(found, src=src)
        return found[0]


class TargetWorker:
    """Answers a prefill with what the host's model has prepared."""

    def __init__(self, setting: Setting, rank: int = 0, size: int = 1) -> None:
        self.answer: Result | None = None
        self.decoded: Any = None  # called with the batch of a decode
        self.setting = setting
        config = json.loads((setting.target / "config.json").read_text())
        self.model_config = SimpleNamespace(
            vocab_size=config["vocab_size"], hidden_size=config["hidden_size"], context_len=CONTEXT,
            dtype=setting.dtype, model_is_mrope=False, spec_hidden_size=config["hidden_size"],
        )  # fmt: skip
        self.model_runner = SimpleNamespace(
            model=TargetModel(setting.target, setting.dtype, rank, size),
            model_config=self.model_config,
            is_hybrid_swa=False,
            spec_aux_config=SimpleNamespace(
                eagle_use_aux_hidden_state=True, eagle_draft_num_layers=1, eagle_aux_hidden_state_layer_ids=None
            ),
            token_to_kv_pool=SimpleNamespace(post_capture_active=False),
            context=Context(setting), init_new_workspace=False, decode_cuda_graph_runner=None,
            _get_attention_backend=self.attention_backend, _decode_cuda_graph_runner_cls=lambda: GraphRunner,
            tp_group=Group(rank, size), spec_algorithm=Algorithm(), war_fastpath_read_done_event=None,
        )  # fmt: skip
        self.model_runner.attn_backend = self.attention_backend()
        if setting.graphs:
            self.model_runner.decode_cuda_graph_runner = GraphRunner(self.model_runner)

    def attention_backend(self, init_new_workspace: bool = False) -> Any:
        """With a mask buffer for the width that is published."""
        setting, nodes = self.setting, self.model_runner.context.spec.nodes
        buffer = None
        if setting.mask is not None:
            rows = setting.slots if setting.mask_fits else 0
            cells = {
                TreeMaskMode.FULL_MASK: nodes * (CONTEXT + 40 + nodes),
                TreeMaskMode.QLEN_ONLY: nodes**2,
                TreeMaskMode.QLEN_ONLY_BITPACKING: nodes,
            }[setting.mask]
            packed = {1: torch.uint8, 2: torch.uint16}[-(-nodes // 8)]
            dtype = packed if setting.mask is TreeMaskMode.QLEN_ONLY_BITPACKING else torch.bool
            cells *= max(rows, 1)
            buffer = VerifyMask(torch.zeros(cells, dtype=dtype, device=setting.device), setting.mask, rows)
        return SimpleNamespace(verify_mask=buffer, max_context_len=CONTEXT + 40, nodes=nodes)

    def forward_batch_generation(
        self,
        batch: Batch | None,
        forward_batch: Any = None,
        is_verify: bool = False,
        *,
        capture_hidden_mode: Any = None,
    ) -> Any:
        if batch is None:
            assert is_verify, "the host would sample"
            LOG.append(f"decode on {fake_host.Stream.current.name}")
            return self.decoded(forward_batch)
        LOG.append(f"prefill on {fake_host.Stream.current.name}")
        assert capture_hidden_mode is Hidden.FULL
        return self.answer

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        LOG.append("target's tensors")
        return True, "updated"


class Algorithm:
    NONE = "no speculation"

    @staticmethod
    def from_string(name: str) -> Algorithm:
        return Algorithm()

    def is_standalone(self) -> bool:
        return False
