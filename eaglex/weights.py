"""The tensors of an EAGLE-3 draft model under their one canonical name, checked against a DraftConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eaglex.config import AuxNorm, EmbeddingNorm
from eaglex.errors import ShapeError
from eaglex.packed import PackedWeight, Precision, part_of

if TYPE_CHECKING:
    import torch

    from eaglex.config import DraftConfig
    from eaglex.packed import Weight

    Tensor = torch.Tensor


@dataclasses.dataclass(kw_only=True)
class LayerWeights:
    """One decoder layer. The first reads 2H (embedding, hidden state), later ones H; [out, in] as in nn.Linear."""

    input_layernorm: Tensor | None  # [H]; in the first layer the norm of the embedding, None where it is not normed
    hidden_norm: Tensor | None  # [H]; first layer only
    q_proj: Weight  # [num_heads·head_dim, 2H or H]
    k_proj: Weight  # [num_kv_heads·head_dim, 2H or H]
    v_proj: Weight  # [num_kv_heads·head_dim, 2H or H]
    o_proj: Weight  # [H, num_heads·head_dim]
    post_attention_layernorm: Tensor  # [H]
    gate_proj: Weight  # [I, H]
    up_proj: Weight  # [I, H]
    down_proj: Weight  # [H, I]


@dataclasses.dataclass(kw_only=True)
class DraftWeights:
    """All tensors of the draft. `d2t` holds differences: target id = draft id + d2t[draft id]; None is the identity."""

    embed_tokens: Tensor  # [vocab, H]
    fc: Tensor  # [H, num_aux·target_hidden]
    aux_norms: list[Tensor]  # [] | [[num_aux·Ht]] | num_aux × [Ht], by DraftConfig.aux_norm
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    lm_head: Weight  # [draft_vocab, H]
    # [draft_vocab, H] beside an INT4 lm_head: what it was made from, by which the best of its scores are made exact
    # (reference_low_bit.with_exact_best). None where there is no such thing; then the INT4 scores are all there is.
    lm_head_rows: Tensor | None = None
    d2t: Tensor | None = None  # [draft_vocab] int64

    def named(self) -> Iterator[tuple[str, Weight]]:
        """Every tensor that is there, with its canonical name, d2t last."""
        yield "embed_tokens", self.embed_tokens
        yield "fc", self.fc
        for i, gamma in enumerate(self.aux_norms):
            yield f"aux_norms.{i}", gamma
        for i, layer in enumerate(self.layers):
            for field in dataclasses.fields(layer):
                tensor = getattr(layer, field.name)
                if tensor is not None:
                    yield f"layers.{i}.{field.name}", tensor
        yield "norm", self.norm
        yield "lm_head", self.lm_head
        if self.lm_head_rows is not None:
            yield "lm_head_rows", self.lm_head_rows
        if self.d2t is not None:
            yield "d2t", self.d2t

    def check(self, config: DraftConfig) -> None:
        """Raise ShapeError, naming the tensor, unless these are exactly the tensors that `config` describes."""
        expected = expected_shapes(config)
        if self.lm_head_rows is not None:
            if not isinstance(self.lm_head, PackedWeight) or self.lm_head.precision is not Precision.INT4:
                raise ShapeError("lm_head_rows: expected none unless lm_head is int4, got rows beside another lm_head")
            expected["lm_head_rows"] = expected["lm_head"]
        if self.d2t is None:
            if config.draft_vocab_size != config.vocab_size:
                raise ShapeError(
                    f"d2t: expected [{config.draft_vocab_size}] int64 since draft_vocab_size="
                    f"{config.draft_vocab_size} != vocab_size={config.vocab_size}, got none"
                )
            del expected["d2t"]
        actual = dict(self.named())
        for name in sorted(expected.keys() ^ actual.keys()):
            here = "missing" if name in expected else "present"
            raise ShapeError(
                f"{name}: expected to be {'present' if name in expected else 'absent'} for this config, got {here}"
            )
        for name, tensor in actual.items():
            if isinstance(tensor, PackedWeight):
                if part_of(name) is None:
                    raise ShapeError(f"{name}: expected a tensor, got a packed matrix of {tensor.precision.value}")
                tensor.check(name, expected[name])
            elif not hasattr(tensor, "shape"):
                raise ShapeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        dtype = self.fc.dtype
        for name, tensor in actual.items():
            if isinstance(tensor, PackedWeight):
                continue
            if tuple(tensor.shape) != expected[name]:
                raise ShapeError(f"{name}: expected shape {list(expected[name])}, got {list(tensor.shape)}")
            if name != "d2t" and tensor.dtype != dtype:
                raise ShapeError(f"{name}: expected dtype {dtype} like fc, got {tensor.dtype}")
        if self.d2t is not None:
            self._check_d2t(config.vocab_size)

    def _check_d2t(self, vocab_size: int) -> None:
        assert self.d2t is not None
        if str(self.d2t.dtype) != "torch.int64":
            raise ShapeError(f"d2t: expected dtype torch.int64, got {self.d2t.dtype}")
        target = self.d2t + self.d2t.new_ones(self.d2t.shape[0]).cumsum(0) - 1
        bad = ((target < 0) | (target >= vocab_size)).nonzero()
        if len(bad):
            first = int(bad[0])
            raise ShapeError(f"d2t[{first}]: expected a target id in 0..{vocab_size - 1}, got {int(target[first])}")
        ordered, order = target.sort(stable=True)
        twice = (ordered[1:] == ordered[:-1]).nonzero()
        if len(twice):  # two siblings with one token: sampled verification would no longer be lossless
            first = int(order[int(twice[0]) + 1])
            raise ShapeError(f"d2t[{first}]: expected a target id of its own, got {int(target[first])} again")


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every tensor of a draft with this config, d2t included."""
    hidden, inter = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, hidden), "fc": (hidden, config.aux_width)}
    if config.aux_norm is AuxNorm.WHOLE:
        shapes["aux_norms.0"] = (config.aux_width,)
    elif config.aux_norm is AuxNorm.EACH:
        shapes |= {f"aux_norms.{i}": (config.target_hidden_size,) for i in range(config.num_aux)}
    for i in range(config.num_layers):
        width = 2 * hidden if i == 0 else hidden
        layer: dict[str, tuple[int, ...]] = {
            "q_proj": (config.q_size, width),
            "k_proj": (config.kv_size, width),
            "v_proj": (config.kv_size, width),
            "o_proj": (hidden, config.q_size),
            "post_attention_layernorm": (hidden,),
            "gate_proj": (inter, hidden),
            "up_proj": (inter, hidden),
            "down_proj": (hidden, inter),
        }
        if i == 0:
            layer["hidden_norm"] = (hidden,)
        if i > 0 or config.embedding_norm is EmbeddingNorm.NORMED:
            layer["input_layernorm"] = (hidden,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | {"norm": (hidden,), "lm_head": (config.draft_vocab_size, hidden), "d2t": (config.draft_vocab_size,)}
