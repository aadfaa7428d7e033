"""The draft's side of a host without a KV pool of its own: DraftEngine with its slots, its table and its prefix KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eaglex.config import DraftConfig, EngineLimits, MaskMode, Sampling, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine, VerifyTensors, current_stream
from eaglex.packed import PackedWeight
from eaglex.reference import Draft, VerifyTree
from eaglex.weights import DraftWeights, LayerWeights


@dataclasses.dataclass(kw_only=True)
class DraftRows:
    """What one request brings to a cycle."""

    slot: int
    length: int  # before these rows
    aux_hidden_states: Tensor  # [rows, A·Ht]; the first num_valid count
    next_tokens: list[int]  # [num_valid]: for each row the token after it
    draft_from: bool = True
    temperature: float = 0.0
    uniforms: Tensor | None = None  # [K] float32, with rejection sampling


class DraftSlots:
    """A DraftEngine for `max_batch` requests of up to `max_length` positions; request slots 1..max_batch.

    Each slot owns max_length KV slots. Weights are moved to `device`, where everything lives.
    """

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        *,
        speculation: SpeculationConfig,
        max_batch: int,
        max_length: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self.config, self.speculation, self.device = config, speculation, device
        limits = EngineLimits(max_batch=max_batch, max_rows=max_rows, num_slots=max_batch + 1)
        weights = to_device(weights, device)
        table = torch.full((limits.num_slots, max_length), -1, dtype=torch.int32, device=device)
        table[1:] = torch.arange(max_batch * max_length, dtype=torch.int32, device=device).view(max_batch, max_length)

        def pool() -> list[Tensor]:
            shape = (max_batch * max_length, config.num_kv_heads, config.head_dim)
            return [torch.zeros(shape, dtype=weights.fc.dtype, device=device) for _ in range(config.num_layers)]

        self.d2t = None if weights.d2t is None else weights.d2t.cpu()
        self.engine = DraftEngine(
            config, speculation, limits=limits, weights=weights, req_to_token=table, draft_k=pool(), draft_v=pool()
        )

    def warm_up(self) -> None:
        """To be called once before the first cycle."""
        self.engine.warm_up()

    def run(self, rows: Sequence[DraftRows]) -> None:
        """One cycle for these requests: their rows enter the draft, which drafts from the last valid one of each."""
        sampled = self.speculation.sampling is Sampling.REJECTION
        self.engine.run(batch_of(rows, device=self.device, sampled=sampled), current_stream(self.device))

    def skip(self, rows: Sequence[DraftRows]) -> None:
        """A cycle of a draft that has failed: old drafts are for other lengths, so there is nothing to do."""

    def take_warnings(self) -> list[str]:
        """What is to be told since the last call: nothing that is not raised."""
        return []

    def bridge_counters(self) -> dict[str, int] | None:
        """None: there is no bridge."""
        return None

    def close(self) -> None:
        """Nothing to end here."""

    def counters(self) -> dict[str, int]:
        """Requests per outcome since the start, as `DraftEngine.counters`."""
        return self.engine.counters()

    def trees(self, slots: Sequence[int], lengths: Sequence[int], bonus_tokens: Sequence[int]) -> VerifyTensors:
        """The verifier's tensors [B, N] for these requests, on the device."""
        out = VerifyTensors.allocate(len(slots), self.speculation.num_draft_tokens, MaskMode.QLEN_ONLY, self.device)
        self.engine.tree(
            out,
            req_pool_indices=self._ints(slots, torch.int64),
            seq_lens=self._ints(lengths, torch.int64),
            bonus_tokens=self._ints(bonus_tokens, torch.int64),
            stream=current_stream(self.device),
        )
        return out

    def chain(self, slot: int, length: int) -> Draft:
        """The slot's drawn chain with its probabilities; empty where none was made for this length."""
        results = self.engine.results
        assert results.draft_probs is not None
        n = int(results.num_nodes[slot]) if int(results.drafted_for[slot]) == length else 0
        return Draft(
            results.draft_tokens[slot, :n].cpu(),
            results.parents[slot, :n].long().cpu(),
            results.scores[slot, :n].cpu(),
            results.draft_probs[slot, :n].cpu(),
        )

    def _ints(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def batch_of(rows: Sequence[DraftRows], *, device: torch.device, sampled: bool = False) -> DraftBatch:
    """The engine's batch of these requests, on `device`."""
    starts = [0]
    input_ids: list[int] = []
    for r in rows:
        count = r.aux_hidden_states.shape[0]
        starts.append(starts[-1] + count)
        input_ids += [*r.next_tokens, *[0] * (count - len(r.next_tokens))]

    def ints(values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return DraftBatch(
        aux_hidden_states=torch.cat([r.aux_hidden_states for r in rows]).to(device),
        input_ids=ints(input_ids, torch.int64),
        row_start=ints(starts, torch.int32),
        num_valid=ints([len(r.next_tokens) for r in rows], torch.int32),
        draft_from=torch.tensor([r.draft_from for r in rows], device=device),
        req_pool_indices=ints([r.slot for r in rows], torch.int64),
        seq_lens=ints([r.length for r in rows], torch.int64),
        temperatures=torch.tensor([r.temperature for r in rows], device=device) if sampled else None,
        uniforms=torch.stack([r.uniforms for r in rows if r.uniforms is not None]).to(device) if sampled else None,
    )


def tree_of(tensors: VerifyTensors, index: int) -> VerifyTree:
    """Request `index` of the verifier's tensors, on the CPU, as the reference's rules read it."""
    return VerifyTree(
        tensors.draft_tokens[index].cpu(),
        tensors.positions[index].cpu(),
        tensors.mask[index].cpu(),
        tensors.retrieve_next_token[index].cpu(),
        tensors.retrieve_next_sibling[index].cpu(),
    )


def to_device(weights: DraftWeights, device: torch.device) -> DraftWeights:
    """The same weights on `device`; tensors that are there already are shared."""

    def here(weight: Any) -> Any:
        if weight is None or isinstance(weight, PackedWeight):
            return None if weight is None else weight.to(device)
        return weight.detach().to(device).contiguous()

    def fields_of(part: DraftWeights | LayerWeights) -> dict[str, Any]:
        return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}

    layers = [LayerWeights(**{name: here(t) for name, t in fields_of(layer).items()}) for layer in weights.layers]
    rest = {name: here(t) for name, t in fields_of(weights).items() if name not in ("layers", "aux_norms")}
    return DraftWeights(**rest, layers=layers, aux_norms=[here(gamma) for gamma in weights.aux_norms])
