"""One request with a context of 8k to 128k: attention then spreads a single row's keys over the whole device.

Shapes are small, so that a reference in float64 may look at all keys; K and V are random.
"""

from __future__ import annotations

import pytest
import torch
from support.rig import Ask, Layout
from support.streamed import PlainChainRig, StreamedRig, make_streamed_config

from eaglex.config import SpeculationConfig

pytestmark = pytest.mark.gpu

CHAIN = SpeculationConfig(num_steps=3)
TREE = SpeculationConfig(num_steps=3, topk=4, num_draft_tokens=12)
ROOM = 131_072
LENGTHS = (8_191, 16_384, 65_537, ROOM - 20)  # around powers of two, where splits and pages end
HEADS = {  # few, since the reference's time is that of their keys
    "gqa 2 of 64": {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1},
    "gqa 2 of 128": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1},
    "mha of 96": {"head_dim": 96, "num_heads": 2, "num_kv_heads": 2},  # two, as o_proj's columns stream in chunks of 64
    "mha of 256": {"head_dim": 256, "num_heads": 1, "num_kv_heads": 1},
}


def filled(kind: type[StreamedRig], speculation: SpeculationConfig, heads: dict[str, int]) -> StreamedRig:
    """A request for each length, in pages of 64; two slots beside them stay empty."""
    config = make_streamed_config(max_positions=ROOM, **heads)
    rig = kind(config, speculation, layout=Layout(num_slots=len(LENGTHS) + 2, max_batch=2, page_size=64))
    for request, length in enumerate(LENGTHS):
        rig.fill(request, 1 + request, length, seed=request)
    return rig


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_one_request(heads, speculation) -> None:
    """Each of the lengths alone, from graphs and raw in turn, judged by float64."""
    rig = filled(StreamedRig, speculation, heads)
    for request in range(len(LENGTHS)):
        assert rig.compare(rig.cycle([Ask(request, 4, 2)], enqueue=request % 2 == 1)) == 1
    assert rig.engine.counters()["drafted"] == len(LENGTHS)


def test_the_plain_chain(monkeypatch) -> None:
    monkeypatch.setenv("EAGLEX_CHAIN", "plain")
    rig = filled(PlainChainRig, TREE, HEADS["gqa 2 of 128"])
    for request in range(len(LENGTHS)):
        assert rig.compare(rig.cycle([Ask(request, 4, 2)])) == 1


def test_a_far_key_counts() -> None:
    """A key that is left out is not missed among a hundred thousand: so the value of one becomes very large, at either
    end of the context and between, and the draft must follow.
    """
    rig = filled(StreamedRig, CHAIN, HEADS["gqa 2 of 128"])
    request = len(LENGTHS) - 1
    batch, slot, length = rig.batch([Ask(request, 1)]), 1 + request, LENGTHS[-1]
    rig.engine.run(batch)
    before = rig.engine.results.scores[slot].clone()
    k, v = rig._pool[0][0], rig._pool[1][0]
    for position in (0, 1, 8_191, length // 2, length - 4_097, length - 1):
        place = int(rig.table[slot, position])
        kept = k[place].clone(), v[place].clone()
        v[place] = v[place] + 3e4  # seen by whoever attends to it at all: a weight of 1e-5 moves a head by 0.3
        rig.engine.run(batch)
        now = rig.engine.results.scores[slot].clone()
        assert not torch.equal(now, before), f"position {position} of {length} is not attended to"
        k[place], v[place] = kept
    rig.engine.run(batch)
    assert torch.equal(rig.engine.results.scores[slot], before)
