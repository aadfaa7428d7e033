"""The target alone, twice: a loop of single-token forwards to be timed against, and transformers' own `generate`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eaglex.hosts.acceptance import Acceptor
from eaglex.hosts.hf_target import HookedTarget, attention_kernels, transformers
from eaglex.hosts.transformers import GenerateOptions


@dataclasses.dataclass(kw_only=True)
class PlainOutput:
    """The target's own continuation; seconds of wall time behind its first token."""

    tokens: list[int]
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens behind the first one over the time since then; 0 where there are none."""
        count = len(self.tokens) - 1
        return count / self.decode_seconds if count and self.decode_seconds > 0 else 0.0


@torch.inference_mode()
def decode(
    target: HookedTarget,
    prompt: Sequence[int],
    *,
    count: int,
    options: GenerateOptions,
    on_token: Callable[[], object] | None = None,
) -> PlainOutput:
    """Exactly `count` tokens with the model alone: no hooks, no mask, nothing of eaglex in the forward."""
    model, cache, acceptor = target.model, target.new_cache(), Acceptor(options.temperature, options.seed)

    def forward(ids: Sequence[int]) -> int:
        inputs: dict[str, Any] = {target.cache_argument: cache}
        with attention_kernels(target.device):
            logits = model(input_ids=torch.tensor([list(ids)], device=target.device), use_cache=True, **inputs).logits
        return acceptor.first(logits[0, -1])

    tokens = [forward(prompt)]
    begun = time.perf_counter()
    while len(tokens) < count:
        tokens.append(forward(tokens[-1:]))
        if on_token is not None:
            on_token()
    return PlainOutput(tokens=tokens, decode_seconds=time.perf_counter() - begun)


@torch.inference_mode()
def generate(
    target: HookedTarget, prompt: Sequence[int], *, count: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """Up to `count` greedy tokens by transformers' `generate`, without the penalties of the model's own config."""
    ids = torch.tensor([list(prompt)], device=target.device)
    ends = sorted(eos)
    config = transformers().GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=count,
        max_length=None,
        use_cache=True,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    # What is unset would be filled from the model's own generation config.
    kept, target.model.generation_config = target.model.generation_config, config
    try:
        # An explicit mask of ones: pad tokens are real tokens of a prompt here.
        with attention_kernels(target.device):
            out = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        target.model.generation_config = kept
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def margin(target: HookedTarget, tokens: Sequence[int]) -> float:
    """Distance of the two largest logits behind `tokens`: how near to a tie the target's choice of the next one is."""
    logits = target.model(input_ids=torch.tensor([list(tokens)], device=target.device), use_cache=False).logits[0, -1]
    best = logits.float().topk(2).values
    return float(best[0] - best[1])
