"""How clear the reference's decisions were: a draft whose decisive gap is below the rounding of float32 cannot be
compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eaglex import reference, reference_low_bit
from eaglex.config import SpeculationConfig


class Margin:
    """The smallest gap on which a decision of the reference hung."""

    def __init__(self) -> None:
        self.gap = math.inf

    def narrow(self, gap: float) -> None:
        self.gap = min(self.gap, gap)


@contextlib.contextmanager
def recorded() -> Iterator[Margin]:
    """Within: every ranking, every cut of the re-ranking and every draw of the reference narrows the margin.

    What a rescored head considers is a set: of each group that matters the gap behind the last that is offered, and of
    all that is offered the one behind the last that is rescored. A step's top-k and the frontier need their order, so
    all gaps down to the first loser count. `select` keeps a set, so only the gap between the last kept and the first
    dropped counts. A draw hangs on the distance from the uniform to the nearest edge, an early stop on that from the
    score to the threshold.
    """
    margin = Margin()
    top_k, select, inverse_cdf = reference.top_k, reference.select, reference.inverse_cdf
    falls_short, offered = reference.falls_short, reference_low_bit.offered

    def ranked(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        best = values.sort(-1, descending=True).values[:, : k + 1]
        if best.shape[1] > 1:
            margin.narrow(float((best[:, :-1] - best[:, 1:]).min()))
        return top_k(values, k)

    def cut(tokens: Tensor, parents: Tensor, scores: Tensor, count: int) -> reference.Draft:
        best = scores.sort(descending=True).values
        if 0 < count < len(best):
            margin.narrow(float(best[count - 1] - best[count]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "top_k", top_k)
            return select(tokens, parents, scores, count)

    def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
        running = weights.double().cumsum(0)
        margin.narrow(float((running / running[-1] - uniform.double()).abs().min()))
        return inverse_cdf(weights, uniform)

    def stopped(score: float, speculation: SpeculationConfig) -> bool:
        margin.narrow(abs(score - speculation.stop_score))
        return falls_short(score, speculation)

    def scanned(scan: Tensor, topk: int) -> Tensor:
        ids, size, count = offered(scan, topk), reference_low_bit.RESCORE_GROUP, max(2, topk)
        padded = torch.nn.functional.pad(scan, (0, -scan.shape[1] % size), value=-math.inf)
        groups = padded.view(len(scan), -1, size).sort(-1, descending=True).values
        least, first_out = scan.gather(1, ids).min(1).values, groups[:, :, count]
        matters = first_out >= least[:, None]
        if bool(matters.any()):
            margin.narrow(float((groups[:, :, count - 1] - first_out)[matters].min()))
        offers = groups[:, :, :count].flatten(1).sort(-1, descending=True).values
        if offers.shape[1] > ids.shape[1] and bool((offers[:, ids.shape[1]] > -math.inf).all()):
            margin.narrow(float((offers[:, ids.shape[1] - 1] - offers[:, ids.shape[1]]).min()))
        return ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_low_bit, "offered", scanned)
        patch.setattr(reference, "top_k", ranked)
        patch.setattr(reference, "select", cut)
        patch.setattr(reference, "falls_short", stopped)
        patch.setattr(reference, "inverse_cdf", drawn)
        yield margin


@contextlib.contextmanager
def kv_rounded_to(dtype: torch.dtype) -> Iterator[None]:
    """Within: the reference keeps K and V as a pool of that type would."""
    finite = reference._finite
    with pytest.MonkeyPatch.context() as patch:
        if dtype != torch.float32:
            patch.setattr(reference, "_finite", lambda x: finite(x).to(dtype).to(x.dtype))
        yield
