"""DraftConfig out of config.json and the tensors' shapes. Where the two contradict each other: an error.

The tensors decide what a config often gets wrong without harm (num_hidden_layers); everything else that both state
must agree.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from eaglex import aux_layers, dialects, rope_fields
from eaglex.config import AuxNorm, DraftConfig, EmbeddingNorm, NextHidden, Residual
from eaglex.errors import CheckpointError, ConfigError
from eaglex.fields import Fields, agree

if TYPE_CHECKING:
    from eaglex.source import TensorInfo
    from eaglex.target import Target

Known = dict[str, "TensorInfo"]
_EPS = 1e-6  # LlamaConfig's default
_MAX_NAMES = 200  # a config has some dozens of fields; more are not compared
_SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "use_aux_norm",
    "norm_output",
    "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer",
    "draft_vocab_size",
    "target_hidden_size",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    *aux_layers.KEYS,
)
_REQUIRED = (
    "fc",
    "norm",
    "layers.0.hidden_norm",
    "layers.0.q_proj",
    "layers.0.k_proj",
    "layers.0.v_proj",
    "layers.0.o_proj",
    "layers.0.post_attention_layernorm",
    "layers.0.gate_proj",
    "layers.0.up_proj",
    "layers.0.down_proj",
)


def read(
    config: Fields, known: Known, target: Target | None, max_positions: int | None = None
) -> tuple[DraftConfig, list[str]]:
    """The config and notes for the report. `known` holds header entries by canonical name.

    Raises ConfigError (file, field, expected, actual) or CheckpointError (file, tensor, expected, actual).
    """
    layer = dialects.layer_fields(config)
    eagle = config.child(aux_layers.NESTED)
    spots = [*_distinct(config, layer), *([] if eagle is None else [eagle])]
    notes = _refuse_arithmetic(config, layer, eagle) + _misspelt(spots)
    where = str(next(iter(known.values())).file) if known else config.file
    if missing := [name for name in _REQUIRED if name not in known]:
        raise dialects.missing_error(missing, known, where)
    sizes = _Sizes(config, layer, known, target, notes)
    head_dim = sizes.head_dim()
    rope, rotary_dim, rope_notes = rope_fields.read(layer, head_dim)
    num_layers = sizes.num_layers()
    if eagle is not None and num_layers > 1 and eagle.flag("next_layer_regular") is False:
        eagle.fail("next_layer_regular", f"true for a draft of {num_layers} layers")
    eps = layer.number("rms_norm_eps")
    if eps is None:
        notes.append(f"rms_norm_eps is absent: {_EPS:g} is taken by default")
    try:
        built = DraftConfig(
            hidden_size=sizes.hidden,
            target_hidden_size=sizes.target_hidden,
            intermediate_size=sizes.intermediate(),
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            vocab_size=sizes.vocab(),
            draft_vocab_size=sizes.draft_vocab(),
            max_positions=max_positions or sizes.max_positions(),
            num_layers=num_layers,
            num_aux=sizes.num_aux(),
            rotary_dim=rotary_dim,
            rms_norm_eps=_EPS if eps is None else eps,
            aux_norm=_aux_norm(spots, known, notes),
            residual=_residual(spots),
            next_hidden=_next_hidden(spots),
            embedding_norm=_embedding_norm(eagle, known, where),
            rope=rope,
        )
    except ConfigError as error:
        text = str(error)
        raise error if text.startswith(config.file) else ConfigError(f"{config.file}: {text}") from None
    return built, notes + rope_notes


class _Sizes:
    """The sizes that config and tensors both state, each read once."""

    def __init__(self, config: Fields, layer: Fields, known: Known, target: Target | None, notes: list[str]) -> None:
        self.config, self.layer, self.known, self.target, self.notes = config, layer, known, target, notes
        self.hidden = self._required("hidden_size")
        self.heads = self._required("num_attention_heads")
        kv_heads = layer.integer("num_key_value_heads")
        self.kv_heads = self.heads if kv_heads is None else kv_heads
        for name in ("fc", "layers.0.q_proj", "layers.0.k_proj", "layers.0.v_proj", "layers.0.gate_proj"):
            if len(known[name].shape) != 2:
                raise CheckpointError(f"{known[name]}: expected 2 dimensions, got shape {list(known[name].shape)}")
        if known["fc"].shape[0] != self.hidden:
            layer.fail("hidden_size", f"{known['fc'].shape[0]}, the rows of {known['fc'].name}")
        self.target_hidden = self._target_hidden()

    def _required(self, name: str) -> int:
        value = self.layer.integer(name)
        if value is None:
            self.layer.fail(name, "an integer >= 1")
        return value

    def _target_hidden(self) -> int:
        written = agree([(f, "target_hidden_size") for f in _distinct(self.config, self.layer)], Fields.integer)
        if self.target is None:
            return written or self.hidden
        if written not in (None, self.target.hidden_size):
            self.config.fail(
                "target_hidden_size",
                f"{self.target.hidden_size}, the hidden_size of the target {self.target.file}",
                written,
            )
        return self.target.hidden_size

    def head_dim(self) -> int:
        q, k, v = (self.known[f"layers.0.{n}_proj"] for n in "qkv")
        per_head = [
            (info, info.shape[0], heads) for info, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        ]
        written = self.layer.integer("head_dim")
        for info, rows, heads in per_head:
            name = "num_attention_heads" if info is q else "num_key_value_heads"
            if written is not None and rows != written * heads:
                self.layer.fail("head_dim", f"{rows / heads:g} = {rows} rows of {info.name} / {name}={heads}", written)
            if rows % heads or rows // heads != q.shape[0] // self.heads:
                self.layer.fail(
                    name,
                    f"one head_dim for q, k and v; {info.name} has {rows} rows, {q.name} {q.shape[0]} for "
                    f"num_attention_heads={self.heads}",
                    heads,
                )
        head_dim = q.shape[0] // self.heads
        if written is None and head_dim * self.heads != self.hidden:
            self.notes.append(f"head_dim is absent: {head_dim} from {q.name}, not hidden_size / num_attention_heads")
        return head_dim

    def intermediate(self) -> int:
        rows = self.known["layers.0.gate_proj"].shape[0]
        name = "intermediate_size_mlp" if self.layer.text("model_type") == "llama4_text" else "intermediate_size"
        written = self.layer.integer(name)
        if written not in (None, rows):
            self.layer.fail(name, f"{rows}, the rows of {self.known['layers.0.gate_proj'].name}")
        return rows

    def num_layers(self) -> int:
        indices = {int(m[1]) for name in self.known if (m := re.match(r"layers\.(\d+)\.", name))}
        if indices != set(range(len(indices))):
            raise CheckpointError(
                f"{self.known['fc'].file}: layers: expected indices 0..{len(indices) - 1}, got {sorted(indices)[:8]}"
            )
        written = self.layer.integer("num_hidden_layers", 0)
        if written not in (None, len(indices)):
            self.notes.append(f"num_hidden_layers={written} of the config is ignored: the file holds {len(indices)}")
        return len(indices)

    def num_aux(self) -> int:
        fc = self.known["fc"]
        count, rest = divmod(fc.shape[1], self.target_hidden)
        if rest or count < 1:
            raise CheckpointError(
                f"{fc}: expected a width that is a multiple of the target's hidden size {self.target_hidden} "
                f"(target_hidden_size), got {list(fc.shape)}: the head of another target?"
            )
        written = agree([(self.config, n) for n in ("num_aux_hidden_states", "num_eagle_features")], Fields.integer)
        if written not in (None, count):
            raise CheckpointError(
                f"{fc}: expected {written} · {self.target_hidden} columns (num_aux_hidden_states · target hidden), "
                f"got {fc.shape[1]}"
            )
        return count

    def vocab(self) -> int:
        places = [(self.layer, "vocab_size"), (self.config, "target_vocab_size")]
        written = agree(places, Fields.integer)
        if self.target is not None and written not in (None, self.target.vocab_size):
            self.layer.fail(
                "vocab_size", f"{self.target.vocab_size}, the vocab_size of the target {self.target.file}", written
            )
        for name in ("embed_tokens", "t2d"):
            info = self.known.get(name)
            if info is not None and info.shape and written is None:
                written = info.shape[0]
            if info is not None and info.shape[:1] != (written,):
                raise CheckpointError(f"{info}: expected {written} rows (vocab_size), got shape {list(info.shape)}")
        if written is None and self.target is not None:
            written = self.target.vocab_size
        if written is None:
            self.layer.fail("vocab_size", "an integer >= 1")
        return written

    def draft_vocab(self) -> int:
        places = [
            (f, n) for f in _distinct(self.config, self.layer) for n in ("draft_vocab_size", "truncated_vocab_size")
        ]
        written = agree(places, Fields.integer)
        vocab = self.vocab()
        head = self.known.get("lm_head")
        rows = head.shape[0] if head is not None and head.shape else None
        if written is None:
            d2t = self.known.get("d2t")
            written = rows or (d2t.shape[0] if d2t is not None and d2t.shape else vocab)
            self.notes.append(f"draft_vocab_size is absent: {written} by the tensors")
        if rows is not None and rows != written:
            named = next(((f, n) for f, n in places if f.data.get(n) is not None), (self.config, "draft_vocab_size"))
            named[0].fail(named[1], f"{rows}, the rows of {head.name if head else 'lm_head'}", written)
        return written

    def max_positions(self) -> int:
        written = self.layer.integer("max_position_embeddings")
        if self.target is None:
            if written is None:
                self.layer.fail("max_position_embeddings", "an integer >= 1 (or give the target, whose context counts)")
            self.notes.append(
                f"max_position_embeddings={written} of the draft is taken, since no target is given; drafts often "
                "say 2048 "
                f"for a longer target"
            )
            return written
        if written != self.target.max_positions:
            self.notes.append(
                f"max_position_embeddings={written} of the draft is ignored: positions reach to the target's "
                f"{self.target.max_positions}"
            )
        return self.target.max_positions


def _distinct(config: Fields, layer: Fields) -> list[Fields]:
    return [config] if layer is config else [config, layer]


def _refuse_arithmetic(config: Fields, layer: Fields, eagle: Fields | None) -> list[str]:
    """Refuse what would change the arithmetic; notes for what a config copied from its target says in vain."""
    for fields in _distinct(config, layer):
        dialects.refuse_fields(fields, dialects.NEUTRAL)
    if eagle is not None:
        dialects.refuse_fields(eagle, dialects.EAGLE_NEUTRAL)
    activation = layer.text("hidden_act")
    copied = dialects.AUTOMODEL_ARCHITECTURE in config.texts("architectures")
    if activation not in (None, "silu", "swish"):
        layer.fail("hidden_act", "silu")
    window, used, kinds = layer.integer("sliding_window"), layer.flag("use_sliding_window"), layer.texts("layer_types")
    if copied:
        return (
            [f"sliding_window={window} is the target's, copied: the draft was trained with full attention"]
            if window
            else []
        )
    if window is not None and used is not False and (used or not kinds or "sliding_attention" in kinds):
        layer.fail("sliding_window", "none (eaglex's drafts attend to the whole prefix), or use_sliding_window false")
    return []


def _misspelt(spots: list[Fields]) -> list[str]:
    """Notes on unknown fields that look like a switch: a misspelt one would silently be its default."""
    found = []
    for fields in spots:
        for name in sorted(fields.data)[:_MAX_NAMES]:
            close = name not in _SWITCHES and difflib.get_close_matches(name[:64], _SWITCHES, n=1, cutoff=0.88)
            if close:
                found.append(f"{fields.where(name)} is not a field that eaglex knows: meant as {close[0]}?")
    return found


def _switch(spots: list[Fields], *names: str) -> bool | None:
    return agree([(f, n) for f in spots for n in names], Fields.flag)


def _aux_norm(spots: list[Fields], known: Known, notes: list[str]) -> AuxNorm:
    whole, each = _switch(spots, "norm_before_fc"), _switch(spots, "fc_norm", "use_aux_norm")
    has_whole = "aux_norms.whole" in known
    has_each = any(re.fullmatch(r"aux_norms\.\d+", name) for name in known)
    for name, flag, there, tensor in (
        ("norm_before_fc", whole, has_whole, "input_norm.weight"),
        ("fc_norm", each, has_each, "fc_norm.0.weight"),
    ):
        where = known["fc"].file
        if flag is None and there:
            notes.append(f"{name} is absent from the config, but its tensor is there: the norm is applied")
        elif flag is True and not there:
            raise CheckpointError(f"{where}: missing tensor {tensor}, which {name}=true asks for")
        elif flag is False and there:
            raise CheckpointError(
                f"{where}: {tensor}: expected none, since the config says {name}=false, got it present"
            )
    if has_whole and has_each:
        raise CheckpointError(
            f"{known['fc'].file}: expected norm_before_fc (input_norm) or fc_norm (fc_norm.i), got both"
        )
    return AuxNorm.WHOLE if has_whole else AuxNorm.EACH if has_each else AuxNorm.NONE


def _residual(spots: list[Fields]) -> Residual:
    return Residual.NORMED if _switch(spots, "norm_before_residual") else Residual.PRE_NORM


def _next_hidden(spots: list[Fields]) -> NextHidden:
    return NextHidden.NORMED if _switch(spots, "norm_output") else NextHidden.PRE_NORM


def _embedding_norm(eagle: Fields | None, known: Known, where: str) -> EmbeddingNorm:
    flag = None if eagle is None else eagle.flag("use_input_layernorm_in_first_layer")
    there = "layers.0.input_layernorm" in known
    if flag is False and there:
        assert eagle is not None
        eagle.fail(
            "use_input_layernorm_in_first_layer", f"true, since {known['layers.0.input_layernorm'].name} is there"
        )
    if not there and flag is not False:
        raise dialects.missing_error(["layers.0.input_layernorm"], known, where)
    return EmbeddingNorm.NORMED if there else EmbeddingNorm.NONE
