"""A forward with nothing to verify, as the host's own decode: what its server without speculation runs.

The host's EAGLE worker verifies a request's root alone as a TARGET_VERIFY of one token. For the GPU that is nearly a
decode, but the CPU prepares a tree, records its tensors, and samples with a dozen small operations, which is what a
server of a small target waits for. Here the bonus tokens are decoded by a graph of the host's that was captured as
without speculation, with the auxiliary hidden states as a second output. The result is what the scheduler expects of a
verification that accepted nothing: one token for each request.

Tokens: greedy ones are the target's argmax, as in the host's sampler. Sampled ones are drawn by the host's
`eagle_sample` over roots, with the coins that a verification would have drawn. Batches with structured output or
log-probabilities go through the host's verification as a whole, over a target that decodes.

Sizes: B requests, W the width of the auxiliary hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglex.hosts.sglang import compat
from eaglex.hosts.sglang.copies import Copies

Publish = Callable[[Tensor], None]


@dataclass(slots=True)
class Decoded:
    """What a decode leaves, on the device: what the host's target worker has done, with hidden states [B, W]; tokens
    [B] int64; the KV slots written to [B] int64; the lengths before and after, [B] int64. `forward_batch` must outlive
    the next forward.
    """

    done: Any
    tokens: Tensor
    out_cache_loc: Tensor
    seq_lens: Tensor
    new_seq_lens: Tensor
    forward_batch: Any


class PlainDecode:
    """Decodes batches whose `spec_info` holds their bonus tokens, on the runner's active state for roots."""

    def __init__(self, target_worker: Any, req_to_token: Tensor, *, max_batch: int) -> None:
        self._target, self._runner, self._req_to_token = target_worker, target_worker.model_runner, req_to_token
        self._cache_locs = compat.symbol("assign_extend_cache_locs_uniform_func")
        self._forward_batch = compat.symbol("ForwardBatch").init_new
        self._hidden, self._mode = compat.symbol("CaptureHiddenMode").FULL, compat.symbol("ForwardMode").DECODE
        self._sanitize, self._sample = compat.symbol("sanitize_nan_logits"), compat.symbol("eagle_sample")
        self._roots = Roots(max_batch, req_to_token.device)

    def __call__(self, batch: Any, publish: Publish | None) -> Decoded:
        """Decode. `publish` is called with the new lengths at once: they do not depend on what is decoded.

        The batch is the host's, which puts back what is set here when the forward returns.
        """
        before, bonus = batch.seq_lens, batch.spec_info.bonus_tokens
        requests = before.shape[0]
        after = before + 1
        if publish is not None:
            publish(after)
        places = self._cache_locs(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self._req_to_token,
            start_offset=before,
            batch_size=requests,
            draft_token_num=1,
            device=before.device,
        )
        batch.forward_mode, batch.input_ids, batch.out_cache_loc, batch.spec_info = self._mode, bonus, places, None
        # A verification's lengths, which sampling draws by, are those before its tokens; a decode's hold the token that
        # it writes.
        on_cpu, total = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens = after
        batch.seq_lens_cpu = None if on_cpu is None else on_cpu + 1
        batch.seq_lens_sum = None if total is None else total + requests
        forward_batch = self._forward_batch(
            batch, self._runner, capture_hidden_mode=self._hidden, return_hidden_states_before_norm=False
        )
        batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = before, on_cpu, total
        done = self._target.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        tokens = self._tokens(batch, bonus, done.logits_output)
        return Decoded(done, tokens, places, before, after, forward_batch)

    def _tokens(self, batch: Any, bonus: Tensor, output: Any) -> Tensor:
        sampling, logits = batch.sampling_info, output.next_token_logits
        changed = sampling.acc_additive_penalties, sampling.acc_scaling_penalties, sampling.logit_bias
        if sampling.is_all_greedy and all(tensor is None for tensor in changed):
            self._sanitize(logits, "EAGLEX: logits of a decode")
            greedy: Tensor = logits.argmax(dim=-1)
            return greedy
        predict, _, _ = self._sample(self._roots.over(bonus), batch, output)
        tokens: Tensor = predict.to(torch.int64)
        return tokens


class Roots:
    """The verifier's input for requests of which nothing but the root is verified, for the host's sampling alone."""

    def __init__(self, max_batch: int, device: torch.device) -> None:
        self._device, self._by_requests = device, dict[int, Copies]()
        self._index = torch.arange(max_batch, device=device)[:, None]
        self._none = torch.full((max_batch, 1), -1, device=device)

    def over(self, tokens: Tensor) -> Any:
        """Of these bonus tokens [B]."""
        tokens = tokens.to(torch.int64)
        requests = tokens.shape[0]
        found = self._by_requests.get(requests)
        if found is None:
            made = compat.symbol("EagleVerifyInput")(
                draft_token=tokens,
                custom_mask=None,
                positions=None,
                retrieve_index=self._index[:requests],
                retrieve_next_token=self._none[:requests],
                retrieve_next_sibling=self._none[:requests],
                retrieve_cum_len=None,
                spec_steps=0,
                topk=1,
                draft_token_num=1,
                capture_hidden_mode=None,
                seq_lens_sum=None,
                seq_lens_cpu=None,
            )
            found = self._by_requests[requests] = Copies(made)
        return found.made("draft_token", tokens)


class DecodingTarget:
    """A target worker for the host's verification of roots: what it prepares as a verification is decoded.

    Positions, places and tokens are those of the verification; lengths count the token that is written. The host finds
    no graphs to prepare for on this runner, so that the decode prepares for its own.
    """

    def __init__(self, target_worker: Any) -> None:
        self._worker = target_worker
        self.model_runner = _WithoutGraphs(target_worker.model_runner)
        self._mode = compat.symbol("ForwardMode").DECODE

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        """As the host's, for the batch that its verification has made."""
        forward_batch.forward_mode, forward_batch.spec_info = self._mode, None
        forward_batch.seq_lens = forward_batch.seq_lens + 1
        if forward_batch.seq_lens_cpu is not None:
            forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu + 1
        if forward_batch.seq_lens_sum is not None:
            forward_batch.seq_lens_sum += forward_batch.batch_size
        return self._worker.forward_batch_generation(batch=batch, forward_batch=forward_batch, is_verify=is_verify)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class _WithoutGraphs:
    decode_cuda_graph_runner = None

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def decode_graphs(runner: Any, attn_backend: Any) -> Any:
    """Graphs of the host's decode for every batch that it captures, as it captures them without speculation.

    Its class takes the mode from the runner's algorithm and the hidden states from a server's flags.
    """
    full = compat.symbol("CaptureHiddenMode").FULL
    base: Any = runner._decode_cuda_graph_runner_cls()

    class DecodeGraphs(base):  # type: ignore[misc]
        def capture_prepare(self, *arguments: Any, **options: Any) -> Any:
            self.capture_hidden_mode = full
            return super().capture_prepare(*arguments, **options)

    algorithm = runner.spec_algorithm
    runner.spec_algorithm = compat.symbol("SpeculativeAlgorithm").NONE
    try:
        return DecodeGraphs(runner, attn_backend=attn_backend, speculative_num_steps=0, speculative_num_draft_tokens=1)
    finally:
        runner.spec_algorithm = algorithm
