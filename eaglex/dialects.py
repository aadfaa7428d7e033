"""The dialects of public EAGLE-3 checkpoints: tensor names, how each is recognised, and what is refused.

Tables only, with the small functions that read them; docs/checkpoints.md shows the same tables with their reasons.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Iterable

from eaglex.errors import CheckpointError, ConfigError
from eaglex.fields import Fields, shown
from eaglex.source import TensorInfo

_MAX_ARCHITECTURES = 16  # each is compared with every pattern below
_MAX_NAMED = 12  # tensors that one error names


class Dialect(enum.Enum):
    """Who wrote the checkpoint, as far as names and config tell."""

    SPECFORGE = "SafeAI / SpecForge (midlayer.*)"
    SGLANG = "SGLang-converted (layers.N.*)"
    MODELOPT = "ModelOpt (layers.N.*, eagle_config)"
    AUTOMODEL = "NeMo Automodel (model.layers.N.*)"
    SPECULATORS = "speculators (layers.N.*, nested transformer_layer_config)"


NESTED_CONFIG = "transformer_layer_config"
# Its config is the target's, copied whole: leftovers there mean nothing.
AUTOMODEL_ARCHITECTURE = "LlamaEagle3DraftModel"
_MODELOPT_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular")

# The numbers are Llama's under all of these names where the tensors fit; SafeAI publishes under base models' names.
LLAMA_TYPE = frozenset(
    {
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3Deep",
        "Eagle3Speculator",
        "Eagle3DraftModel",
        AUTOMODEL_ARCHITECTURE,
        "Qwen2ForCausalLMEagle3",
        "Qwen3ForCausalLMEagle3",
        "Eagle3Qwen2ForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
    }
)

_TOP = {
    "embed_tokens.weight": "embed_tokens",
    "fc.weight": "fc",
    "norm.weight": "norm",
    "lm_head.weight": "lm_head",
    "d2t": "d2t",
    "t2d": "t2d",
    "input_norm.weight": "aux_norms.whole",
    "aux_norm_low.weight": "aux_norms.0",
    "aux_norm_mid.weight": "aux_norms.1",
    "aux_norm_high.weight": "aux_norms.2",
}
_LAYER = {
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}
# Training leftovers that no engine reads: the verifier's head and norm, and a table that follows from rope_theta.
IGNORED = re.compile(r"(verifier_\w+(\.weight)?|.*rotary_emb\.inv_freq)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A family of draft models that eaglex knows and does not run; any one sign is enough."""

    sentence: str
    architectures: str = r"(?!)"
    model_types: str = r"(?!)"
    fields: tuple[str, ...] = ()
    tensors: str = r"(?!)"


REFUSALS = (
    Refusal(
        sentence="an MLA draft (kv_lora_rank, as in DeepSeek and Kimi); eaglex runs Llama-type attention only",
        architectures=r".*(Deepseek|KimiK|MistralLarge3|MLA).*",
        fields=("kv_lora_rank", "q_lora_rank"),
        tensors=r".*\b(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|kv_a_layernorm)\b.*",
    ),
    Refusal(
        sentence="a parallel-drafting head (P-EAGLE, PARD); eaglex drafts autoregressively",
        architectures=r".*(PEagle|Pard).*",
        model_types=r"p_?eagle|pard",
        fields=("parallel_drafting", "pard_token", "ptd_token_id"),
        tensors=r".*\b(mask_hidden|mask_embedding)\b.*",
    ),
    Refusal(
        sentence="a block-diffusion draft (DFlash, DSpark, Domino); eaglex drafts autoregressively",
        architectures=r".*(DFlash|DSpark|Domino).*",
        model_types=r"d_?flash|dspark|domino",
        fields=("dflash_config", "dspark_config"),
    ),
    Refusal(
        sentence="a Medusa model; eaglex runs EAGLE-3 heads",
        architectures=r".*Medusa.*",
        model_types=r"medusa",
        fields=("medusa_num_heads",),
        tensors=r"(medusa_head\..*|\d+\.\d+\.(linear\.)?weight)",
    ),
    Refusal(
        sentence="an MLP or LSTM speculator; eaglex runs EAGLE-3 heads",
        architectures=r".*(MLPSpeculator|LSTMSpeculator).*",
        model_types=r"mlp_?speculator|arctic.*",
    ),
    Refusal(
        sentence="a next-token-prediction (MTP) layer; eaglex runs EAGLE-3 heads",
        architectures=r".*(MTP|NextN).*",
        model_types=r".*mtp.*",
        tensors=r".*\b(eh_proj|enorm|hnorm)\b.*",
    ),
    Refusal(
        sentence="an EAGLE-1 or EAGLE-2 head (it reads the last layer alone); eaglex runs EAGLE-3 heads",
        architectures=r"(Eagle(?!3)\w*ForCausalLM|\w+ForCausalLMEagle|EagleModel|EagleSpeculator)",
        model_types=r"eagle",
    ),
    Refusal(sentence="a mixture-of-experts draft; eaglex runs dense ones", tensors=r".*\bmlp\.(experts|gate)\b\.?.*"),
    Refusal(
        sentence="a Gemma-type draft, whose norms multiply by 1 + weight; eaglex runs Llama's",
        architectures=r".*Gemma.*",
        model_types=r"gemma.*",
    ),
)

# Fields that change the arithmetic, with the values under which they do not; anything else is refused by name.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "bias": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "is_causal": (True,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "attention_multiplier": (),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "rotary_pct": (1,),
    "rotary_percent": (1,),
    "position_embedding_type": ("rope",),
    "pretraining_tp": (1,),
}
EAGLE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
}


def canonical(tensors: dict[str, TensorInfo]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Canonical name → tensor, and the ignored names; CheckpointError for an unknown name or two for one tensor.

    Canonical names are DraftWeights.named()'s, plus t2d and aux_norms.whole (the norm over the concatenation).
    """
    known: dict[str, TensorInfo] = {}
    ignored: list[str] = []
    unknown: list[TensorInfo] = []
    for name, info in tensors.items():
        plain = name.removeprefix("model.")
        if IGNORED.fullmatch(plain):
            ignored.append(name)
            continue
        key = _canonical_name(plain)
        if key is None:
            unknown.append(info)
        elif key in known:
            raise CheckpointError(f"{info}: expected each tensor once, got {known[key].name} as well")
        else:
            known[key] = info
    if unknown:
        _refuse_unknown(unknown, known)
    return known, ignored


def recognise(config: Fields, layer: Fields, tensors: Iterable[str]) -> Dialect:
    """Whose dialect this is. It decides names, convention and what is printed, never the numbers of a tensor."""
    if layer is not config:
        return Dialect.SPECULATORS
    names = list(tensors)
    if any(name.startswith("midlayer.") for name in names):
        return Dialect.SPECFORGE
    if any(name.startswith("model.") for name in names) or AUTOMODEL_ARCHITECTURE in config.texts("architectures"):
        return Dialect.AUTOMODEL
    eagle = config.child("eagle_config")
    return (
        Dialect.MODELOPT if eagle is not None and any(key in eagle.data for key in _MODELOPT_KEYS) else Dialect.SGLANG
    )


def refuse_families(config: Fields, layer: Fields, tensors: dict[str, TensorInfo]) -> None:
    """Raise, with a sentence and the signs, for a checkpoint of another family or of an unknown architecture."""
    architectures = config.texts("architectures")
    if len(architectures) > _MAX_ARCHITECTURES:
        config.fail("architectures", f"at most {_MAX_ARCHITECTURES} names", len(architectures))
    for refusal in REFUSALS:
        if signs := _signs(refusal, config, layer, tensors):
            raise CheckpointError(
                f"{config.file}: {', '.join(signs)}: expected a Llama-type EAGLE-3 draft, got {refusal.sentence}"
            )
    if _reads_one_layer(tensors):
        raise CheckpointError(
            f"{tensors['fc.weight']}: expected fc over several hidden states, got {list(tensors['fc.weight'].shape)} "
            f"and no hidden_norm: an EAGLE-1 or EAGLE-2 head (it reads the last layer alone); eaglex runs EAGLE-3 heads"
        )
    unknown = [name for name in architectures if name not in LLAMA_TYPE]
    if unknown:
        config.fail("architectures", f"one of {', '.join(sorted(LLAMA_TYPE))}", unknown)


def _signs(refusal: Refusal, config: Fields, layer: Fields, tensors: Iterable[str]) -> list[str]:
    """What in this checkpoint speaks for that family: fields with their values, tensors by name."""
    architectures = config.texts("architectures")
    signs = [f"architectures={shown(n)}" for n in architectures if re.fullmatch(refusal.architectures, n)]
    if AUTOMODEL_ARCHITECTURE not in architectures:  # its config is its target's: only names and tensors count
        for fields, name in ((config, "speculators_model_type"), (layer, "model_type")):
            value = fields.text(name)
            if value is not None and re.fullmatch(refusal.model_types, value):
                signs.append(f"{fields.where(name)}={shown(value)}")
        for fields in [config] if layer is config else [config, layer]:
            present = [name for name in refusal.fields if fields.data.get(name) not in (None, False)]
            signs += [f"{fields.where(name)}={shown(fields.data[name])}" for name in present]
    found = sorted(name for name in tensors if re.fullmatch(refusal.tensors, name))
    return signs + [f"tensor {name}" for name in found[:_MAX_NAMED]]


def _reads_one_layer(tensors: dict[str, TensorInfo]) -> bool:
    fc, query = tensors.get("fc.weight"), tensors.get("layers.0.self_attn.q_proj.weight")
    if fc is None or query is None or len(fc.shape) != 2 or any("hidden_norm" in name for name in tensors):
        return False
    return fc.shape[1] == 2 * fc.shape[0] and query.shape[1:] == fc.shape[:1]


def refuse_fields(fields: Fields, table: dict[str, tuple[object, ...]]) -> None:
    """Raise ConfigError for a present field of `table` whose value is not one of the neutral ones."""
    for name, neutral in table.items():
        value = fields.data.get(name)
        if value is not None and not any(
            value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
        ):
            allowed = " or ".join(shown(n) for n in neutral) or "none"
            fields.fail(name, f"{allowed} (eaglex does not implement it)")


def missing_error(names: list[str], known: dict[str, TensorInfo], where: str) -> CheckpointError:
    """The error for canonical names that the checkpoint lacks, in its own spelling."""
    return CheckpointError(f"{where}: missing tensor {', '.join(spelled(name, known) for name in names)}")


def spelled(name: str, known: dict[str, TensorInfo]) -> str:
    """A canonical name as this checkpoint would spell it, by the example of the tensors that it has."""
    if name.startswith("layers."):
        _, index, leaf = name.split(".")
        spelled_leaf = next(n for n in _LAYER if n.removesuffix(".weight").endswith(leaf))
        for key, info in known.items():
            if key.startswith(f"layers.{index}."):
                return re.sub(r"((layers\.\d+|midlayer)\.).*", lambda m: m[1] + spelled_leaf, info.name)
        return f"layers.{index}.{spelled_leaf}"
    if name.startswith("aux_norms."):
        return "input_norm.weight" if name.endswith("whole") else name.replace("aux_norms", "fc_norm") + ".weight"
    plain = next((n for n, key in _TOP.items() if key == name), name)
    prefixed = name not in ("lm_head", "d2t", "t2d") and any(i.name.startswith("model.") for i in known.values())
    return f"model.{plain}" if prefixed else plain


def _canonical_name(name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    if match := re.fullmatch(r"fc_norm\.(\d+)\.weight", name):
        return f"aux_norms.{int(match[1])}"
    match = re.fullmatch(r"layers\.(\d{1,4})\.(.*)", re.sub(r"^midlayer\.", "layers.0.", name))
    if match and match[2] in _LAYER:
        return f"layers.{int(match[1])}.{match[2].removesuffix('.weight').split('.')[-1]}"
    return None


def _refuse_unknown(unknown: list[TensorInfo], known: dict[str, TensorInfo]) -> None:
    names = sorted(info.name for info in unknown)
    required = ["fc", "norm", *(f"layers.0.{n.removesuffix('.weight').split('.')[-1]}" for n in sorted(_LAYER))]
    absent = [spelled(name, known) for name in required if name not in known]
    near = difflib.get_close_matches(names[0], absent, n=1)
    hint = f"; missing {', '.join(absent[:3])}" if absent else ""
    meant = f" (meant as {near[0]}?)" if near else ""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    raise CheckpointError(
        f"{unknown[0].file.name}: {', '.join(names[:_MAX_NAMED])}{more}: unexpected tensor{meant}{hint}: expected "
        f"exactly the tensors of a Llama-type EAGLE-3 draft"
    )


def layer_fields(config: Fields) -> Fields:
    """The object that holds the decoder layer's sizes: the nested one of speculators, else the config itself."""
    nested = config.child(NESTED_CONFIG)
    if nested is None:
        if config.data.get("speculators_model_type") is not None or "Eagle3Speculator" in config.texts("architectures"):
            raise ConfigError(
                f"{config.file}: {NESTED_CONFIG}: expected an object in a speculators checkpoint, got none"
            )
        return config
    return nested
