"""Every tensor that crosses the boundary: a wrong type, shape, stride, rank or no tensor is refused with its name, in
Python and in C++.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from support.models import make_config, rejection
from support.raw import RawEngine, fields
from support.rig import Ask, Rig
from torch import Tensor

from eaglex.config import MaskMode, SpeculationConfig
from eaglex.engine import DraftBatch, VerifyTensors
from eaglex.errors import ConfigError, DeviceError, ShapeError

TREE = SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=6)
CONFIG = make_config(num_layers=2)


def spoiled(tensor: Tensor) -> Iterator[tuple[str, object]]:
    """The tensor in every way that is not as it should be."""
    other = torch.int32 if tensor.dtype in (torch.float32, torch.bool, torch.int64) else torch.float32
    if tensor.dtype == torch.int64:
        other = torch.float32
    yield "nothing", None
    yield "no tensor", "a string"
    yield "another type", tensor.to(other)
    yield "an unknown type", tensor.to(torch.float64)
    yield "one more", torch.cat([tensor, tensor[:1]])
    yield "another rank", tensor[None]
    yield "five dimensions", tensor[(None,) * (5 - tensor.dim())]
    yield "a stride", torch.stack([tensor, tensor], -1)[..., 0]
    yield "on another device", tensor.to("meta")


KINDS = [
    "nothing",
    "no tensor",
    "another type",
    "an unknown type",
    "one more",
    "another rank",
    "five dimensions",
    "a stride",
    "on another device",
]


def spoil(tensor: Tensor, kind: str) -> object:
    return dict(spoiled(tensor))[kind]


def refuses(field: str, *, kinds: type[Exception] | tuple[type[Exception], ...] = ShapeError):
    """An error that begins with the field and says what was expected and what came."""
    return pytest.raises(kinds, match=rf"^{re.escape(field)}( rows| requests)?(\[\d\])?: expected .+, got .+")


# ---- one cycle's input

BATCH = [f.name for f in dataclasses.fields(DraftBatch)]
# Where one tensor's size defines what the others must have, the others are at fault.
BLAMED = {("aux_hidden_states", "one more"): "input_ids", ("num_valid", "one more"): "row_start"}


def sampled_rig() -> Rig:
    rig = Rig(CONFIG, rejection(3))
    for request in range(3):
        rig.join(request, 1 + request)
    return rig


@pytest.mark.parametrize("raw", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", BATCH)
def test_batch(field, kind, raw) -> None:
    rig = sampled_rig()
    batch = rig.batch([Ask(0, 4), Ask(1, 3), Ask(2, 1)])
    setattr(batch, field, spoil(getattr(batch, field), kind))
    with refuses(BLAMED.get((field, kind), field)):
        if raw:
            engine = RawEngine(rig)
            engine.build().run(engine.batch(batch))
        else:
            rig.engine.enqueue(batch)
    assert sum(rig.engine.counters().values()) == 0


@pytest.mark.parametrize(
    ("asks", "message"),
    [(7, "num_valid requests: expected in 1..6, got 7"), (0, "aux_hidden_states rows: expected in 1..96, got 0")],
)
def test_more_or_fewer_requests_than_planned(asks, message) -> None:
    rig = sampled_rig()
    batch = rig.batch([Ask(0, 1)] * max(asks, 1))
    if asks == 0:
        batch = DraftBatch(**{name: None if value is None else value[:0] for name, value in fields(batch).items()})
    with pytest.raises((ConfigError, ShapeError), match=re.escape(message)):
        rig.engine.run(batch)


def test_more_rows_than_planned() -> None:
    rig = sampled_rig()
    with pytest.raises(ConfigError, match=re.escape("aux_hidden_states rows: expected in 1..96, got 97")):
        rig.engine.run(rig.batch([Ask(0, 97)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_may_lie_apart_but_not_overlap(dtype, rows) -> None:
    rig = sampled_rig()
    batch = rig.batch([Ask(0, rows)])
    width = CONFIG.aux_width
    good = torch.zeros(rows, width + 7, dtype=dtype)[:, 3 : 3 + width]
    rig.engine.run(dataclasses.replace(batch, aux_hidden_states=good))
    for bad in (good[:, :1].expand(rows, width), torch.zeros(1, width).expand(rows, width), torch.zeros(width, rows).T):
        if rows > 1:
            with refuses("aux_hidden_states"):
                rig.engine.run(dataclasses.replace(batch, aux_hidden_states=bad))


@pytest.mark.parametrize("name", ["temperatures", "uniforms"])
@pytest.mark.parametrize("raw", [False, True], ids=["python", "cpp"])
def test_sampling_inputs_without_sampling(name, raw) -> None:
    rig = Rig(CONFIG, TREE)
    rig.join(0, 1)
    batch = dataclasses.replace(rig.batch([Ask(0, 4)]), **{name: torch.zeros(1, 3)})
    engine = RawEngine(rig)
    message = rf"^{name}: expected nothing without rejection sampling, got \[1, 3\] float32 on cpu"
    with pytest.raises(ConfigError, match=message):
        engine.build().enqueue(engine.batch(batch)) if raw else rig.engine.run(batch)


# ---- bound at construction

BOUND = ["req_to_token", "draft_tokens", "parents", "scores", "num_nodes", "drafted_for", "counters", "draft_probs"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", BOUND)
def test_bound_tensors(field, kind) -> None:
    raw = RawEngine(sampled_rig())
    with refuses(field):
        setattr(raw.tensors, field, spoil(raw.bound()[field], kind))
        raw.build()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["draft_k", "draft_v"])
@pytest.mark.parametrize("raw", [False, True], ids=["python", "cpp"])
def test_pool(field, kind, layer, raw) -> None:
    """All layers, keys and values, of one type and size; the first layer's keys set the size."""
    rig = sampled_rig()
    pools = list(getattr(rig, field))
    pools[layer] = spoil(pools[layer], kind)
    first = (field, layer, kind) == ("draft_k", 0, "one more")
    with refuses("draft_v[0]" if first else f"{field}[{layer}]"):
        if raw:
            engine = RawEngine(rig)
            setattr(engine.tensors, field, pools)
            engine.build()
        else:
            setattr(rig, field, pools)
            rig.build()


@pytest.mark.parametrize("field", ["draft_k", "draft_v"])
@pytest.mark.parametrize("value", [[], None, "missing one"])
def test_pool_of_too_few_layers(field, value) -> None:
    rig = sampled_rig()
    setattr(rig, field, getattr(rig, field)[:1] if value == "missing one" else value)
    with refuses(field):
        rig.build()


def test_draft_probs_without_sampling() -> None:
    raw = RawEngine(Rig(CONFIG, TREE))
    raw.tensors.draft_probs = torch.zeros(8, 3, 45)
    with pytest.raises(
        ConfigError, match=r"^draft_probs: expected nothing without rejection sampling, got \[8, 3, 45\]"
    ):
        raw.build()


def test_a_device_that_is_not_there() -> None:
    raw = RawEngine(Rig(CONFIG, TREE))
    with pytest.raises(DeviceError, match=r"^device: expected cpu.*, got tpu:3"):
        raw.binary.DraftEngine(
            device="tpu",
            index=3,
            config=raw.config,
            speculation=raw.speculation,
            limits=raw.limits,
            weights=raw.weights,
            tensors=raw.tensors,
        )


# ---- the verifier's side

VERIFY = [f.name for f in dataclasses.fields(VerifyTensors) if f.name != "mask_mode"]
IDS = ["req_pool_indices", "seq_lens", "bonus_tokens"]


@pytest.mark.parametrize("raw", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("mode", MaskMode)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", VERIFY + IDS)
def test_verify(field, kind, mode, raw) -> None:
    rig = Rig(CONFIG, TREE)
    out = VerifyTensors.allocate(3, 6, mode, total_length=12)
    ids = {
        "req_pool_indices": torch.tensor([1, 2, 3]),
        "seq_lens": torch.tensor([3, 4, 5]),
        "bonus_tokens": torch.tensor([7, 8, 9]),
    }
    if field in IDS:
        ids[field] = spoil(ids[field], kind)
    else:
        setattr(out, field, spoil(getattr(out, field), kind))
    if (field, kind, mode) == ("mask", "one more", MaskMode.FULL):
        rig.engine.tree(out, **ids)  # the flat mask may be longer than it must
        return
    with refuses("positions" if (field, kind) == ("draft_tokens", "one more") else field):
        if raw:
            engine = RawEngine(rig)
            engine.build().tree(engine.verify(out, **ids))
        else:
            rig.engine.tree(out, **ids)


@pytest.mark.parametrize("raw", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([3, 4, 6], "mask: expected at least 186 elements for these seq_lens, got 180"),
        ([-1, 4, 9], "seq_lens: expected in 0..1073741824, got -1"),
        ([3, 4, 2**62], "seq_lens: expected in 0..1073741824, got 4611686018427387904"),
    ],
    ids=str,
)
def test_a_full_mask_that_is_too_short(lens, message, raw) -> None:
    """The flat mask's size depends on lengths; on the CPU they can be read before anything is written."""
    rig = Rig(CONFIG, TREE)
    out = VerifyTensors.allocate(3, 6, MaskMode.FULL, total_length=12)
    ids = {
        "req_pool_indices": torch.tensor([1, 2, 3]),
        "seq_lens": torch.tensor(lens),
        "bonus_tokens": torch.tensor([7, 8, 9]),
    }
    engine = RawEngine(rig)
    with pytest.raises((ConfigError, ShapeError), match=re.escape(message)):
        engine.build().tree(engine.verify(out, **ids)) if raw else rig.engine.tree(out, **ids)


@pytest.mark.parametrize(
    ("batch", "n", "message"),
    [(7, 6, "draft_tokens requests: expected in 1..6, got 7"), (1, 65, "num_draft_tokens: expected in 1..64, got 65")],
)
def test_verify_beyond_the_limits(batch, n, message) -> None:
    rig = Rig(CONFIG, TREE)
    out = VerifyTensors.allocate(batch, min(n, 64), MaskMode.QLEN_ONLY)
    if n > 64:
        out = dataclasses.replace(out, draft_tokens=torch.zeros(batch, n, dtype=torch.int64))
    ids = torch.zeros(batch, dtype=torch.int64)
    with pytest.raises(ConfigError, match=re.escape(message)):
        rig.engine.tree(out, req_pool_indices=ids, seq_lens=ids, bonus_tokens=ids)
