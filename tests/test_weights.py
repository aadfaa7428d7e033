"""Weights that disagree with the configuration: refused by name, in Python and in C++."""

from __future__ import annotations

import re

import pytest
import torch
from support.models import make_config, random_weights
from support.raw import RawEngine
from support.rig import Rig

from eaglex.config import AuxNorm, EmbeddingNorm, SpeculationConfig
from eaglex.errors import ShapeError
from eaglex.weights import DraftWeights, expected_shapes

CONFIG = make_config(num_layers=2, aux_norm=AuxNorm.EACH)
SPECULATION = SpeculationConfig(num_steps=2)
NAMES = sorted(expected_shapes(CONFIG))


def reach(weights: object, name: str) -> tuple[object, str | int]:
    """Where the tensor of that canonical name lives: owner and attribute or index."""
    parts = name.split(".")
    if parts[0] == "layers":
        return weights.layers[int(parts[1])], parts[2]
    return (weights.aux_norms, int(parts[1])) if parts[0] == "aux_norms" else (weights, parts[0])


def put(weights: object, name: str, value: object) -> None:
    owner, key = reach(weights, name)
    if isinstance(owner, list):
        owner[key] = value
    else:
        setattr(owner, key, value)


def taken(weights: DraftWeights, name: str) -> torch.Tensor:
    owner, key = reach(weights, name)
    return owner[key] if isinstance(owner, list) else getattr(owner, key)


def spoiled(kind: str, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    if kind == "another type":
        return tensor.to(torch.int32 if name == "d2t" else torch.bfloat16)
    if kind == "one more":
        return torch.cat([tensor, tensor[:1]])
    if kind == "transposed":
        return tensor.T.contiguous() if tensor.dim() == 2 else tensor[:, None]
    return None


def check(config, weights, name: str, *, message: str = "") -> None:
    """Both DraftWeights.check and the engine's constructor name the tensor."""
    for attempt in (lambda: weights.check(config), lambda: Rig(config, SPECULATION, weights=weights)):
        with pytest.raises(ShapeError, match=message or rf"^{re.escape(name)}(\[\d+\])?: expected .+, got .+"):
            attempt()


@pytest.mark.parametrize("kind", ["another type", "one more", "transposed", "missing"])
@pytest.mark.parametrize("name", NAMES)
def test_each_tensor(name, kind) -> None:
    weights = random_weights(CONFIG)
    tensor = taken(weights, name)
    if kind == "transposed" and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
        pytest.skip("square: its transpose has the same shape")
    if kind == "missing":
        if name.startswith("aux_norms"):
            del weights.aux_norms[-1]
            name = "aux_norms.2"
        else:
            put(weights, name, None)
        if name in ("embed_tokens", "fc", "norm", "lm_head") or "proj" in name or "post_attention" in name:
            # Not optional in the dataclass; C++ is asked below.
            with pytest.raises(ShapeError, match=rf"^{name}: expected (a tensor, got NoneType|to be present)"):
                weights.check(CONFIG)
            return
    else:
        put(weights, name, spoiled(kind, name, tensor))
    # All types are compared with fc's, so a changed fc puts the blame on the others.
    check(
        CONFIG,
        weights,
        name,
        message=r"expected dtype torch.bfloat16 like fc" if (name, kind) == ("fc", "another type") else "",
    )


@pytest.mark.parametrize("kind", ["another type", "one more", "transposed", "missing", "a stride"])
@pytest.mark.parametrize("name", [*NAMES, "inv_freq"])
def test_each_tensor_in_cpp(name, kind) -> None:
    rig = Rig(CONFIG, SPECULATION)
    raw = RawEngine(rig)
    tensor = raw._inv_freq if name == "inv_freq" else taken(rig.weights, name)
    if kind == "transposed" and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
        pytest.skip("square: its transpose has the same shape")
    value = torch.stack([tensor, tensor], -1)[..., 0] if kind == "a stride" else spoiled(kind, name, tensor)
    blamed = "embed_tokens" if (name, kind) == ("fc", "another type") else name
    weights = raw.weights
    if name.startswith("aux_norms"):
        norms: list[object] = list(rig.weights.aux_norms)
        norms[int(name[-1])] = value
        weights.aux_norms = norms
    elif name.startswith("layers"):
        # The list is copied at the boundary: change a layer, then hand all over again.
        layers = list(weights.layers)
        setattr(layers[int(name.split(".")[1])], name.split(".")[2], value)
        weights.layers = layers
    else:
        setattr(weights, name, value)
    with pytest.raises(ShapeError, match=rf"^{re.escape(blamed)}: expected .+, got .+"):
        raw.build()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"aux_norm": AuxNorm.NONE}, "aux_norms.0"),
        ({"aux_norm": AuxNorm.WHOLE}, "aux_norms.1"),
        ({"embedding_norm": EmbeddingNorm.NONE}, "layers.0.input_layernorm"),
        ({"num_layers": 1}, "layers.1.down_proj"),
        ({"num_layers": 3}, "layers.2.down_proj"),
    ],
    ids=str,
)
def test_tensors_that_the_config_does_not_know(changes, name) -> None:
    """Present where it says absent, and a layer too many or too few."""
    values = {"num_layers": 2, "aux_norm": AuxNorm.EACH}
    what = "present.*missing" if name == "layers.2.down_proj" else "absent.*present"
    check(
        make_config(**(values | changes)),
        random_weights(CONFIG),
        name,
        message=rf"^{re.escape(name)}: expected to be {what}",
    )


def test_an_extra_norm_in_cpp() -> None:
    raw = RawEngine(Rig(CONFIG, SPECULATION))
    layers = list(raw.weights.layers)
    layers[1].hidden_norm = torch.ones(24)
    raw.weights.layers = layers
    with pytest.raises(
        ShapeError, match=r"^layers\.1\.hidden_norm: expected to be absent for this config, got \[24\] float32"
    ):
        raw.build()


@pytest.mark.parametrize(
    ("index", "value", "target"), [(0, -1, -1), (44, 16, 60), (7, 2**40, 2**40 + 7), (3, -(2**40), 3 - 2**40)]
)
def test_d2t_out_of_range(index, value, target) -> None:
    weights = random_weights(CONFIG)
    weights.d2t[:] = 0
    weights.d2t[index] = value
    check(CONFIG, weights, "d2t", message=rf"^d2t\[{index}\]: expected a target id in 0\.\.59, got {target}$")


def test_two_draft_ids_for_one_target_id() -> None:
    """Siblings with the same token would make sampled verification emit it too often."""
    weights = random_weights(CONFIG)
    weights.d2t[:] = 0
    weights.d2t[7] = -4
    check(CONFIG, weights, "d2t", message=r"^d2t\[7\]: expected a target id of its own, got 3 again$")


def test_a_reduced_vocabulary_needs_d2t() -> None:
    weights = random_weights(CONFIG)
    weights.d2t = None
    check(
        CONFIG,
        weights,
        "d2t",
        message=r"^d2t: expected \[45\] int64 since draft_vocab_size=45 != vocab_size=60, got none",
    )


def test_a_full_vocabulary_may_be_permuted() -> None:
    """d2t is allowed with a full vocabulary, and is obeyed."""
    config = make_config(draft_vocab_size=60)
    weights = random_weights(config)
    weights.check(config)
    weights.d2t = torch.arange(59, -1, -1) - torch.arange(60)
    weights.check(config)


def test_weights_that_require_a_gradient_are_borrowed_without_it() -> None:
    weights = random_weights(CONFIG)
    for _, tensor in weights.named():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    Rig(CONFIG, SPECULATION, weights=weights)


def test_named_lists_what_expected_shapes_describes() -> None:
    for changes in ({}, {"aux_norm": AuxNorm.WHOLE}, {"embedding_norm": EmbeddingNorm.NONE, "num_layers": 3}):
        config = make_config(**changes)
        named = {name: tuple(tensor.shape) for name, tensor in random_weights(config).named()}
        assert named == expected_shapes(config)
