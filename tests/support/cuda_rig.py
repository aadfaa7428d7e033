"""The rig with its engine on a GPU: tensors cross at the engine's door, reference and comparison stay on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from eaglex import reference
from eaglex.config import DraftConfig
from eaglex.engine import DraftBatch, DraftEngine, DraftResults
from eaglex.weights import DraftWeights
from support.models import assemble
from support.rig import Ask, Rig


def moved(owner: Any, device: str) -> Any:
    """A dataclass of tensors with those on `device`; strides of rows are kept."""
    return dataclasses.replace(owner, **{
        field.name: value.to(device) for field in dataclasses.fields(owner)
        if isinstance(value := getattr(owner, field.name), Tensor)})


def moved_weights(weights: DraftWeights, config: DraftConfig, device: str) -> DraftWeights:
    tensors = {name: tensor.to(device) for name, tensor in weights.named() if name != "d2t"}
    return assemble(tensors, config, None if weights.d2t is None else weights.d2t.to(device))


class CudaRig(Rig):
    """`table`, `draft_k` and `draft_v` are the host's copies of what lies on the device."""

    device = "cuda"

    def build(self) -> DraftEngine:
        self._table = self.table.to(self.device, copy=True)
        self._pool = [[t.to(self.device, copy=True) for t in tensors] for tensors in (self.draft_k, self.draft_v)]
        return DraftEngine(
            self.config, self.speculation, limits=self.limits, weights=self.weights_there(),
            req_to_token=self._table, draft_k=self._pool[0], draft_v=self._pool[1])

    def weights_there(self) -> DraftWeights:
        return moved_weights(self.weights, self.config, self.device)

    @property
    def results(self) -> DraftResults:
        return moved(self.engine.results, "cpu")  # type: ignore[no-any-return]

    def batch(self, asks: list[Ask | None]) -> DraftBatch:
        self._table.copy_(self.table)
        batch = super().batch(asks)
        aux = batch.aux_hidden_states
        wide = torch.zeros(aux.shape[0], aux.stride(0), dtype=aux.dtype, device=self.device)
        wide[:, : aux.shape[1]] = aux.to(self.device)
        return dataclasses.replace(moved(batch, self.device), aux_hidden_states=wide[:, : aux.shape[1]])

    def fill(self, request: int, slot: int, length: int, seed: int = 0) -> None:
        """A request that has `length` positions of random K and V, in the engine's pool and the reference's cache."""
        self.join(request, slot)
        generator = torch.Generator().manual_seed(seed)
        shape = (length, self.config.num_kv_heads, self.config.head_dim)
        at = self.table[slot, :length].long()
        held = self.requests[request]
        held.length = length
        pools = zip((self.draft_k, self.draft_v), self._pool, (held.cache.k, held.cache.v), strict=True)
        for host, device, cached in pools:
            for layer in range(self.config.num_layers):
                values = torch.randn(shape, generator=generator).to(host[layer].dtype)
                host[layer][at] = values
                device[layer].copy_(host[layer])
                cached[layer] = values.double()

    def fetch_pool(self) -> None:
        for host, device in zip((self.draft_k, self.draft_v), self._pool, strict=True):
            for to, source in zip(host, device, strict=True):
                to.copy_(source)


def chain_log_probs(config: DraftConfig, weights: DraftWeights, cache: reference.DraftCache, aux: Tensor, ids: Tensor,
                    tokens: Tensor) -> Tensor:
    """Log-probabilities [K, Vd] of each step of a given chain, computed in the weights' own type."""
    past = len(cache)
    logits, hidden = reference.extend(config, weights, cache, aux.to(weights.fc.dtype), ids)
    rows = [reference.rescore(config, weights, logits[None], hidden[None], 1)[0][0]]
    for step, token in enumerate(tokens[:-1]):
        visible = torch.ones(1, cache.rows + 1, dtype=torch.bool)
        logits, hidden = reference.forward(
            config, weights, cache, hidden.view(1, -1), token.view(1), torch.tensor([past + len(ids) + step]), visible)
        rows.append(reference.rescore(config, weights, logits, hidden, 1)[0][0])
    return torch.log_softmax(torch.stack(rows).double(), -1)
