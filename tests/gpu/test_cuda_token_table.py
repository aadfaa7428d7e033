"""What the first layer makes of each token that can be drafted (EngineLimits.token_table_bytes): with the table and
without it, and where the embeddings change under it.

bench/check_drafted.cuh holds the kernel to a plain one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import EVERY_INT4, random_weights
from support.rig import Layout
from support.streamed import StreamedRig, make_streamed_config
from test_cuda_fast import CHAIN, SHAPES, TREE, drive, schedule

from eaglex.config import SpeculationConfig
from eaglex.packed import DraftQuant
from eaglex.quantize import quantize
from eaglex.weights import DraftWeights

pytestmark = pytest.mark.gpu

LAYOUT: dict[str, Any] = {"num_slots": 40, "max_batch": 32, "max_rows": 512}


class HeldWeights(StreamedRig):
    """Keeps the weights on the device, as a host keeps the embedding that its target shares."""

    def weights_there(self) -> DraftWeights:
        self.held = super().weights_there()
        return self.held


def make_rig(name: str, speculation: SpeculationConfig, quant: str, **layout: int) -> HeldWeights:
    config = make_streamed_config(**SHAPES[name])
    weights = quantize(random_weights(config, dtype=torch.bfloat16), DraftQuant.parse(quant))
    return HeldWeights(config, speculation, weights=weights, layout=Layout(**(LAYOUT | layout)))


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("quant", ["none", EVERY_INT4])
@pytest.mark.parametrize("name", SHAPES)
def test_without_a_table_the_error_is_at_most_twice_pytorchs(name, quant, speculation) -> None:
    rig, other = (make_rig(name, speculation, quant, token_table_bytes=size) for size in (0, 2**30))
    config = rig.config
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    assert other.engine.prepared_bytes - rig.engine.prepared_bytes == 2 * config.draft_vocab_size * width
    for request in range(32):
        rig.join(request, 1 + request)
    assert sum(rig.compare(rig.cycle(list(asks))) for asks in schedule(speculation.num_draft_tokens)) > 100


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_table_that_would_be_larger_is_not_made(speculation) -> None:
    rig = make_rig("gqa", speculation, "none")
    bytes_of_table = 2 * rig.config.draft_vocab_size * 12 * 64
    for limit, made in ((bytes_of_table - 1, 0), (bytes_of_table, bytes_of_table)):
        other = make_rig("gqa", speculation, "none", token_table_bytes=limit)
        assert other.engine.prepared_bytes == rig.engine.prepared_bytes - bytes_of_table + made


@pytest.mark.parametrize("quant", ["none", "fp8", "int4"])
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_embeddings_may_change_where_they_lie(speculation, quant) -> None:
    """As a host's update of weights changes them: behind embeddings_changed() drafts are those of a new engine, graphs
    and all; without it they are not, or the table would not be used.
    """
    asks = schedule(speculation.num_draft_tokens)
    fresh, told, untold = (make_rig("gqa", speculation, quant) for _ in range(3))
    drive(told, asks[:2]), drive(untold, asks[:2])
    fresh.weights.embed_tokens.copy_(fresh.weights.embed_tokens.flip(0))
    fresh.engine = fresh.build()
    for rig in (told, untold):  # as if nothing had run
        rig.requests.clear()
        for name, tensor in vars(rig.engine.results).items():
            if tensor is not None:
                tensor.copy_(vars(fresh.engine.results)[name])
        rig.held.embed_tokens.copy_(rig.held.embed_tokens.flip(0))
        for pool, before in zip(rig._pool, (rig.draft_k, rig.draft_v), strict=True):
            for now, then in zip(pool, before, strict=True):
                now.copy_(then)
    told.engine.embeddings_changed()
    expected, seen, stale = (drive(rig, asks) for rig in (fresh, told, untold))

    def same(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
        return all(torch.equal(x, y) for a, b in zip(left, right, strict=True) for x, y in zip(a, b, strict=True))

    assert same(seen, expected)
    assert not same(stale, expected)
