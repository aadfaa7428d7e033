"""Which tokens of a draft a target accepts, per request, by the rules of eaglex.reference."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from eaglex.config import Sampling
from eaglex.reference import (
    Accepted,
    Draft,
    VerifyTree,
    inverse_cdf,
    verify_greedy,
    verify_rejection,
    verify_target_only,
)


@dataclasses.dataclass
class Acceptor:
    """One request's choice of tokens: greedy at temperature 0, else sampled with random numbers of its own seed.

    Two ranks with the same seed and equal logits accept the same tokens.
    """

    temperature: float
    seed: int
    sampling: Sampling = Sampling.GREEDY
    d2t: Tensor | None = None  # [Vd] on the CPU, for rejection sampling

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)

    def first(self, logits: Tensor) -> int:
        """The token after the prompt, from logits [V]."""
        if self.temperature == 0:
            return int(logits.argmax())
        return int(inverse_cdf(self._probs(logits), self._uniform()[0]))

    def uniforms(self, count: int) -> Tensor:
        """[count] float32 in [0, 1) for the draft's own draws."""
        return torch.rand(count, generator=self._random)

    def accept(self, tree: VerifyTree, logits: Tensor, chain: Draft | None) -> Accepted:
        """Verify one tree by the target's logits [N, V]; rejection sampling needs the drawn `chain` besides."""
        if self.temperature == 0:
            return verify_greedy(tree, logits.argmax(-1).cpu())
        probs, uniforms, final = self._probs(logits), self._uniform(len(logits)), self._uniform()[0]
        if self.sampling is Sampling.REJECTION:
            assert chain is not None
            return verify_rejection(chain, self.d2t, probs, uniforms, final)
        return verify_target_only(tree, probs, uniforms, final)

    def _probs(self, logits: Tensor) -> Tensor:
        shifted = logits.float() - logits.float().amax(-1, keepdim=True)  # a tiny temperature must not overflow
        return torch.softmax(shifted / self.temperature, -1).cpu()

    def _uniform(self, count: int = 1) -> Tensor:
        return torch.rand(count, generator=self._random, dtype=torch.float64)
