"""Public EAGLE-3 checkpoints, read strictly: a dialect loads with exact numbers or is refused by name.

`examine` reads JSON and headers (and d2t, t2d) and decides everything; `load` then reads the tensors. Nothing large
is allocated before every check has passed, and nothing is guessed in silence: each default and each ignored field is
a line of the report.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglex import aux_layers, dialects, draft_config, packed_tensors, quant_schemes, vocabulary
from eaglex.aux_layers import AuxConvention, AuxLayers
from eaglex.config import AuxNorm, DraftConfig
from eaglex.errors import CheckpointError, ConfigError, ShapeError
from eaglex.fields import Fields, read_json, shown
from eaglex.packed import part_of
from eaglex.packed_tensors import PackedInfo
from eaglex.source import CONFIG, TensorInfo, open_source
from eaglex.target import Target, read_target
from eaglex.weights import DraftWeights, LayerWeights, expected_shapes

if TYPE_CHECKING:
    import torch

__all__ = ["AuxConvention", "AuxLayers", "Checkpoint", "Facts", "examine", "load"]

_log = logging.getLogger(__name__)
_FLOATS = ("BF16", "F16", "F32")
_CONFIG_BYTES = 64 * 2**10  # a draft's config has some kilobytes; this much is read in under 100 ms, whatever it holds
_MAPS = ("d2t", "t2d")
_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of a checkpoint before its weights are read; str() is the report.

    `tensors` maps canonical names (DraftWeights.named()) to header entries, those borrowed from the target included;
    `borrowed` names the latter, `absent` those that need a target and have none.
    """

    label: str
    dialect: dialects.Dialect
    architectures: tuple[str, ...]
    config: DraftConfig
    aux: AuxLayers
    dtype: str
    tensors: Mapping[str, TensorInfo]
    d2t: torch.Tensor | None
    borrowed: tuple[str, ...]
    absent: tuple[str, ...]
    notes: tuple[str, ...]
    file_bytes: int

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report: one line per fact, then one per note."""
        c, rope = self.config, self.config.rope
        scaling = "" if rope.scaling.value == "none" else f", {rope.scaling.value} scaling, factor {rope.factor:g}"
        if rope.original_max_position_embeddings:
            scaling += f" over {rope.original_max_position_embeddings}"
        turned = "" if c.rotary_dim == c.head_dim else f", first {c.rotary_dim} of {c.head_dim}"
        return [
            f"checkpoint: {self.label}",
            f"dialect: {self.dialect.value}; architectures {', '.join(self.architectures) or 'not given'}; "
            f"{self.dtype.lower()}",
            f"shapes: hidden {c.hidden_size}, target hidden {c.target_hidden_size}, intermediate "
            f"{c.intermediate_size}, heads "
            f"{c.num_heads}/{c.num_kv_heads} of {c.head_dim}, layers {c.num_layers}",
            f"vocabulary: {c.vocab_size}, draft {c.draft_vocab_size}, "
            f"{'identity' if self.d2t is None else 'd2t holds differences'}",
            f"switches: aux_norm {c.aux_norm.value}, residual {c.residual.value}, next_hidden {c.next_hidden.value}, "
            f"embedding_norm {c.embedding_norm.value}, rms_norm_eps {c.rms_norm_eps:g}",
            f"rope: theta {rope.theta}{scaling}{turned}; positions 0..{c.max_positions - 1}",
            str(self.aux),
            *(f"note: {note}" for note in self.notes),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded draft: what it is, its tensors, the target's layers that feed it, and the facts to print."""

    config: DraftConfig
    weights: DraftWeights
    aux: AuxLayers
    facts: Facts

    @property
    def report(self) -> str:
        """What was found, assumed and ignored, line by line."""
        return str(self.facts)


def examine(
    path_or_hub_id: str | Path,
    *,
    target: str | Path | None = None,
    aux_layer_ids: Sequence[int] | None = None,
    convention: AuxConvention | None = None,
    max_positions: int | None = None,
    overrides: Mapping[str, object] | None = None,
    revision: str | None = None,
    target_revision: str | None = None,
) -> Facts:
    """Read and check everything but the weights themselves; see `load` for the arguments and errors."""
    source = open_source(path_or_hub_id, revision)
    if CONFIG not in source.names:
        raise CheckpointError(f"{source.label}: expected {CONFIG}, got none")
    config = _override(read_json(source.path(CONFIG), max_bytes=_CONFIG_BYTES), overrides or {})
    tensors = source.tensors()
    layer = dialects.layer_fields(config)
    dialects.refuse_families(config, layer, tensors)
    scheme = quant_schemes.read(source, config, layer)
    tensors, packed_notes = packed_tensors.collect(tensors, scheme)
    known, ignored = dialects.canonical(tensors)
    goal = None if target is None else read_target(target, target_revision)
    draft, notes = draft_config.read(config, known, goal, max_positions)
    aux = aux_layers.resolve(
        config,
        speculators=layer is not config,
        num_aux=draft.num_aux,
        argument=aux_layer_ids,
        num_target_layers=None if goal is None else goal.num_layers,
        convention=convention,
    )
    if "aux_norms.whole" in known:
        known["aux_norms.0"] = known.pop("aux_norms.whole")
    borrowed, absent = _borrow(config, known, draft, goal, notes)
    notes += packed_notes
    dtype = _check_tensors(known, draft, borrowed, absent, notes)
    notes += _dtype_note(layer, config, dtype)
    d2t, map_notes = vocabulary.read_d2t(
        known.get("d2t"), known.get("t2d"), draft.vocab_size, draft.draft_vocab_size, source.label
    )
    if ignored:
        notes.append(f"ignored tensors, of no use to a draft: {', '.join(sorted(ignored))}")
    if goal is not None and goal.quantization is not None and scheme is None:
        notes.append(f"the target is quantised ({goal.quantization}); the draft is not and stays {dtype.lower()}")
    return Facts(
        label=source.label,
        dialect=dialects.recognise(config, layer, tensors),
        architectures=tuple(config.texts("architectures")),
        config=draft,
        aux=aux,
        dtype=dtype,
        d2t=d2t,
        borrowed=borrowed,
        absent=absent,
        notes=(*notes, *map_notes, *aux.notes),
        tensors={name: info for name, info in known.items() if name not in _MAPS},
        file_bytes=sum(info.nbytes for info in tensors.values()),
    )


def load(
    path_or_hub_id: str | Path,
    *,
    target: str | Path | None = None,
    aux_layer_ids: Sequence[int] | None = None,
    convention: AuxConvention | None = None,
    max_positions: int | None = None,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, object] | None = None,
    revision: str | None = None,
    target_revision: str | None = None,
    held: Mapping[str, torch.Tensor] | None = None,
) -> Checkpoint:
    """Load an EAGLE-3 draft of any public Llama-type dialect from a folder or a Hub id `owner/name`.

    HF_HUB_OFFLINE=1 is respected. `revision` is the draft's on the Hub, `target_revision` its target's.

    `target` (folder or Hub id) gives the context length, the number of layers, and embed_tokens and lm_head where the
    draft shares them. `aux_layer_ids` replaces the config's (output ids unless `convention` says otherwise);
    `convention` alone re-reads the config's. `max_positions` replaces the context length. `dtype` converts the
    weights. `overrides` replaces fields of config.json, dotted names for nested ones, None to remove; it is how to
    load a checkpoint whose config is known to be wrong. `held` are tensors of the target by their canonical names
    (embed_tokens, lm_head), in the dtype wanted: where the draft shares them they are taken as they are, not read.

    The report goes to the log, level info. Raises CheckpointError (files and tensors) or ConfigError (fields), before
    any weight is read.
    """
    import torch

    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ConfigError(f"dtype: expected torch.bfloat16, torch.float16 or torch.float32, got {dtype}")
    facts = examine(
        path_or_hub_id,
        target=target,
        aux_layer_ids=aux_layer_ids,
        convention=convention,
        max_positions=max_positions,
        overrides=overrides,
        revision=revision,
        target_revision=target_revision,
    )
    _log.info("%s", facts)
    if facts.absent:
        raise CheckpointError(
            f"{facts.label}: missing tensor {', '.join(f'{n}.weight' for n in facts.absent)}: the draft shares it with "
            f"its target; pass target="
        )
    wanted = dtype or {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[facts.dtype]
    given = {name: tensor for name, tensor in (held or {}).items() if name in facts.borrowed}
    read = {name: given[name] if name in given else _read(name, info, wanted) for name, info in facts.tensors.items()}
    layers = [LayerWeights(**_layer(read, i)) for i in range(facts.config.num_layers)]
    norms = (
        0
        if facts.config.aux_norm is AuxNorm.NONE
        else 1
        if facts.config.aux_norm is AuxNorm.WHOLE
        else facts.config.num_aux
    )
    weights = DraftWeights(
        embed_tokens=read["embed_tokens"],
        fc=read["fc"],
        aux_norms=[read[f"aux_norms.{i}"] for i in range(norms)],
        layers=layers,
        norm=read["norm"],
        lm_head=read["lm_head"],
        d2t=facts.d2t,
    )
    try:
        weights.check(facts.config)
    except ShapeError as error:
        raise CheckpointError(f"{facts.label}: {error}") from error
    return Checkpoint(config=facts.config, weights=weights, aux=facts.aux, facts=facts)


def _dtype_note(layer: Fields, config: Fields, dtype: str) -> list[str]:
    for fields, name in ((config, "dtype"), (config, "torch_dtype"), (layer, "dtype"), (layer, "torch_dtype")):
        written = fields.text(name)
        if written is not None and _DTYPE_NAMES.get(written.removeprefix("torch.")) != dtype:
            return [f"{fields.where(name)}={shown(written)} of the config is ignored: the tensors are {dtype.lower()}"]
    return []


def _read(name: str, info: TensorInfo, dtype: torch.dtype) -> Any:
    """A tensor, or a packed matrix where that may be one."""
    if not isinstance(info, PackedInfo):
        return info.read().to(dtype)
    packed = info.pack()
    if part_of(name) is not None:
        return packed
    from eaglex.reference_low_bit import unpacked

    return unpacked(packed).to(dtype)


def _layer(read: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {field.name: read.get(f"layers.{index}.{field.name}") for field in dataclasses.fields(LayerWeights)}


def _override(config: Fields, overrides: Mapping[str, object]) -> Fields:
    data: dict[str, Any] = dict(config.data)
    for dotted, value in overrides.items():
        *path, name = dotted.split(".")
        inner = data
        for step in path:
            if not isinstance(inner.get(step, {}), dict):
                raise ConfigError(
                    f"overrides: {dotted}: expected {step} to be an object in {config.file}, got {inner[step]!r}"
                )
            inner[step] = dict(inner.get(step, {}))
            inner = inner[step]
        inner[name] = value
    return Fields(data, config.file)


def _borrow(
    config: Fields, known: dict[str, TensorInfo], draft: DraftConfig, target: Target | None, notes: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add the target's embed_tokens and lm_head where the draft has none: (names added, names still absent)."""
    layer = dialects.layer_fields(config)
    tied = layer.flag("tie_word_embeddings") or config.flag("tie_word_embeddings") or False
    if "lm_head" in known and tied:
        notes.append("tie_word_embeddings=true is ignored: the draft has an lm_head of its own")
    if "lm_head" not in known and "embed_tokens" in known and tied and draft.draft_vocab_size == draft.vocab_size:
        known["lm_head"] = known["embed_tokens"]
        notes.append("lm_head is the draft's own embed_tokens (tie_word_embeddings)")
    borrowed, absent = [], []
    for name in ("embed_tokens", "lm_head"):
        if name in known:
            continue
        if name == "lm_head" and draft.draft_vocab_size != draft.vocab_size:
            raise CheckpointError(
                f"{known['fc'].file}: missing tensor lm_head.weight: with draft_vocab_size={draft.draft_vocab_size} != "
                f"vocab_size={draft.vocab_size} neither the target's head nor tie_word_embeddings can stand in for it"
            )
        if target is None:
            absent.append(name)
            notes.append(f"{name} is not in the checkpoint: it is shared with the target, which was not given")
            continue
        info = target.embed_tokens() if name == "embed_tokens" else target.lm_head()
        if draft.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{known['fc'].file}: missing tensor {name}.weight: the target's has width {target.hidden_size}, "
                f"the draft needs hidden_size={draft.hidden_size}"
            )
        known[name] = info
        borrowed.append(name)
        notes.append(f"{name} is the target's ({info.name} of {target.source.label}), since the checkpoint has none")
    return tuple(borrowed), tuple(absent)


def _check_tensors(
    known: Mapping[str, TensorInfo],
    draft: DraftConfig,
    borrowed: tuple[str, ...],
    absent: tuple[str, ...],
    notes: list[str],
) -> str:
    """Names, shapes and types against the config; the one dtype of the draft's own weights that are not packed."""
    expected = expected_shapes(draft)
    expected.pop("d2t")
    where = str(known["fc"].file)
    if missing := sorted(expected.keys() - known.keys() - set(absent)):
        raise dialects.missing_error(missing, dict(known), where)
    first = known["norm" if isinstance(known["fc"], PackedInfo) else "fc"]
    dtype = first.dtype
    for name, info in known.items():
        if name in _MAPS:
            continue
        if name not in expected:
            raise CheckpointError(
                f"{info}: unexpected tensor: expected exactly {len(expected)} tensors for this config"
            )
        if info.shape != expected[name]:
            raise CheckpointError(f"{info}: expected shape {list(expected[name])}, got {list(info.shape)}")
        if isinstance(info, PackedInfo):
            if part_of(name) is None:
                notes.append(f"{info.name} is {info.dtype} in the file and is unpacked to {dtype.lower()}")
            continue
        if info.dtype not in _FLOATS:
            raise CheckpointError(f"{info}: expected dtype {', '.join(_FLOATS)}, got {info.dtype}")
        if info.dtype != dtype and name not in borrowed:
            raise CheckpointError(f"{info}: expected dtype {dtype} like {first.name}, got {info.dtype}")
    return dtype
