"""A forward without drafts is the host's decode: what it is given, who chooses tokens, what is put back, its graphs."""

from __future__ import annotations

import ast
import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine_parts import EagleVerifyInput, sampling
from host_source import class_def, methods, module_file, parameters, parse

from eaglex.hosts.sglang import compat
from eaglex.hosts.sglang.plain_decode import DecodingTarget, PlainDecode, decode_graphs

RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"


class Mode(enum.Enum):
    DECODE = enum.auto()
    TARGET_VERIFY = enum.auto()


class Hidden(enum.IntEnum):
    NULL = 0
    FULL = 2


class Algorithm(enum.Enum):
    NONE = enum.auto()
    EAGLEX = enum.auto()


class ForwardBatch:
    @staticmethod
    def init_new(batch: Any, runner: Any, *, capture_hidden_mode: Any, return_hidden_states_before_norm: bool) -> Any:
        return SimpleNamespace(**vars(batch), hidden=capture_hidden_mode, runner=runner)


def cache_locs(
    *, req_pool_indices: Any, req_to_token: Any, start_offset: Any, batch_size: int, draft_token_num: int, device: Any
) -> Any:
    assert (batch_size, draft_token_num) == (2, 1)
    return req_to_token[req_pool_indices, start_offset].to(torch.int64)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The host's names; the calls of its sampling."""
    calls: list[Any] = []

    def eagle_sample(verify_input: Any, batch: Any, output: Any) -> Any:
        calls.append((verify_input, batch.seq_lens.tolist()))
        return torch.tensor([8, 9], dtype=torch.int32), None, None

    symbols = {
        "ForwardMode": Mode, "CaptureHiddenMode": Hidden, "ForwardBatch": ForwardBatch, "eagle_sample": eagle_sample,
        "sanitize_nan_logits": lambda logits, said: None, "SpeculativeAlgorithm": Algorithm,
        "assign_extend_cache_locs_uniform_func": cache_locs,
        "EagleVerifyInput": EagleVerifyInput,
    }  # fmt: skip
    monkeypatch.setattr(compat, "symbol", symbols.__getitem__)
    return calls


class Target:
    """Decodes: token 3 for the first request, 5 for the second."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(decode_cuda_graph_runner="graphs", device="cpu")
        self.batches: list[Any] = []

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        assert (batch, is_verify) == (None, True)
        self.batches.append(forward_batch)
        logits = torch.nn.functional.one_hot(torch.tensor([3, 5]), 16).to(torch.float32)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=torch.ones(2, 6)))


def batch(**fields: Any) -> Any:
    made = SimpleNamespace(
        spec_info=SimpleNamespace(bonus_tokens=torch.tensor([11, 12])), req_pool_indices=torch.tensor([2, 1]),
        seq_lens=torch.tensor([4, 7]), seq_lens_cpu=None, seq_lens_sum=None, forward_mode="any", input_ids=None,
        out_cache_loc=None, sampling_info=sampling(),
    )  # fmt: skip
    vars(made).update(fields)
    return made


def decoded(given: Any, published: Any = None) -> tuple[Any, Target]:
    target, table = Target(), torch.arange(30, dtype=torch.int32).view(3, 10)
    return PlainDecode(target, table, max_batch=4)(given, published), target


def test_the_bonus_tokens_are_decoded_at_a_length_of_one_more(sampled: list[Any]) -> None:
    lengths: list[Any] = []
    given = batch()
    made, target = decoded(given, lambda after: lengths.append((after.tolist(), len(target_of(given)))))
    (forward,) = target.batches
    assert (forward.forward_mode, forward.spec_info, forward.hidden) == (Mode.DECODE, None, Hidden.FULL)
    assert forward.input_ids.tolist() == [11, 12]
    assert forward.seq_lens.tolist() == [5, 8]
    assert (forward.seq_lens_cpu, forward.seq_lens_sum) == (None, None)
    assert forward.out_cache_loc.tolist() == [24, 17], "where the table has the old length"
    assert lengths == [([5, 8], 0)], "they are known before the forward is enqueued"
    assert made.tokens.tolist() == [3, 5]
    assert (made.seq_lens.tolist(), made.new_seq_lens.tolist()) == ([4, 7], [5, 8])
    assert not sampled


def target_of(given: Any) -> list[Any]:
    """What has been decoded of this batch so far: its input is set before."""
    return [] if given.input_ids is None else [given]


def test_lengths_on_the_cpu_grow_too_and_all_are_put_back(sampled: list[Any]) -> None:
    given = batch(seq_lens_cpu=torch.tensor([4, 7]), seq_lens_sum=11)
    _, target = decoded(given)
    assert (target.batches[0].seq_lens_cpu.tolist(), target.batches[0].seq_lens_sum) == ([5, 8], 13)
    assert (given.seq_lens.tolist(), given.seq_lens_cpu.tolist(), given.seq_lens_sum) == ([4, 7], [4, 7], 11)


CHANGES = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")


@pytest.mark.parametrize("changed", [{"greedy": False}, *({name: 1} for name in CHANGES)])
def test_what_is_not_the_argmax_is_the_hosts_sampling_of_roots(changed: Any, sampled: list[Any]) -> None:
    for _ in range(2):
        made, _ = decoded(batch(sampling_info=sampling(**changed)))
        assert made.tokens.tolist() == [8, 9]
        assert made.tokens.dtype == torch.int64
    (roots, lengths), _ = sampled
    assert lengths == [4, 7], "a verification draws by the lengths before it"
    assert roots.draft_token.tolist() == [11, 12]
    assert roots.retrieve_index.tolist() == [[0], [1]]
    assert (roots.spec_steps, roots.draft_token_num, roots.topk) == (0, 1, 1)


def test_a_target_for_the_hosts_verification_decodes_what_it_has_prepared(sampled: list[Any]) -> None:
    plain = Target()
    target = DecodingTarget(plain)
    assert target.model_runner.decode_cuda_graph_runner is None
    assert target.model_runner.device == "cpu"
    assert target.batches is plain.batches
    forward = SimpleNamespace(
        forward_mode=Mode.TARGET_VERIFY, spec_info="roots", seq_lens=torch.tensor([4, 7]), batch_size=2,
        seq_lens_cpu=torch.tensor([4, 7]), seq_lens_sum=11,
    )  # fmt: skip
    target.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
    assert (forward.forward_mode, forward.spec_info, forward.seq_lens_sum) == (Mode.DECODE, None, 13)
    assert forward.seq_lens.tolist() == forward.seq_lens_cpu.tolist() == [5, 8]


class Graphs:
    """As the host's runner: the mode of the algorithm, hidden states as its own attribute says at each capture."""

    def __init__(
        self, runner: Any, *, attn_backend: Any, speculative_num_steps: int, speculative_num_draft_tokens: int
    ) -> None:
        assert (speculative_num_steps, speculative_num_draft_tokens) == (0, 1)
        self.mode = Mode.DECODE if runner.spec_algorithm is Algorithm.NONE else Mode.TARGET_VERIFY
        self.capture_hidden_mode, self.seen = Hidden.NULL, []
        if attn_backend == "broken":
            raise RuntimeError("no memory")
        for size in (4, 2, 1):
            self.capture_prepare(size, num_tokens=size)

    def capture_prepare(self, size: int, num_tokens: int) -> None:
        self.capture_hidden_mode = max(self.capture_hidden_mode, Hidden.NULL)
        self.seen.append((size, self.capture_hidden_mode))


def test_graphs_are_those_of_no_speculation_with_hidden_states(sampled: list[Any]) -> None:
    runner = SimpleNamespace(spec_algorithm=Algorithm.EAGLEX, _decode_cuda_graph_runner_cls=lambda: Graphs)
    made = decode_graphs(runner, "backend")
    assert made.mode is Mode.DECODE
    assert made.seen == [(4, Hidden.FULL), (2, Hidden.FULL), (1, Hidden.FULL)]
    assert runner.spec_algorithm is Algorithm.EAGLEX
    with pytest.raises(RuntimeError, match="no memory"):
        decode_graphs(runner, "broken")
    assert runner.spec_algorithm is Algorithm.EAGLEX


def test_the_hosts_graphs_take_their_mode_from_the_algorithm(running_host: Path) -> None:
    found = methods(class_def(running_host, RUNNER, "DecodeCudaGraphRunner"))
    text = ast.unparse(found["__init__"])
    assert "self.capture_forward_mode = ForwardMode.DECODE" in text
    assert "if model_runner.spec_algorithm.is_speculative():" in text
    assert "self.capture_forward_mode = ForwardMode.TARGET_VERIFY" in text
    prepare = ast.unparse(found["capture_prepare"])
    assert "self.capture_hidden_mode = get_required_capture_hidden_mode(self.capture_hidden_mode, spec_info)" in prepare
    execute = ast.unparse(found["execute"])
    assert "publish_read_done = forward_batch.forward_mode.is_decode()" in execute
    assert execute.index("war_fastpath_read_done_event = read_done") < execute.index("self.backend.replay(")


def test_the_hosts_sampling_reads_no_more_of_roots_than_they_have(running_host: Path, sampled: list[Any]) -> None:
    tree = parse(module_file(running_host, compat.SYMBOLS["eagle_sample"]))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "eagle_sample")
    assert parameters(function)[:3] == ["verify_input", "batch", "logits_output"]
    read = {
        node.attr for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "verify_input"
    }  # fmt: skip
    decoded(batch(sampling_info=sampling(greedy=False)))
    given = set(vars(sampled[0][0]))
    assert read <= given | {"max_tree_depth", "tree_topk", "draft_probs"}, (
        "two properties, and a field that has a default"
    )


def test_the_host_takes_accept_lengths_that_are_on_the_cpu(running_host: Path) -> None:
    text = (running_host / "srt" / "managers" / "utils.py").read_text()
    assert 'if not t.is_cuda:\n        return t.to("cpu", non_blocking=True)' in text
    assert "self.accept_lens = _async_d2h(self.accept_lens)" in text


def test_the_host_prepares_a_verification_only_for_graphs_that_are_there(running_host: Path) -> None:
    text = (running_host / "srt" / "speculative" / "eagle_utils.py").read_text()
    assert "target_worker.model_runner.decode_cuda_graph_runner\n        and target_worker" in text
