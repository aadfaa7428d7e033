"""RoPE out of a config: rope_theta, rope_scaling (old and new keys), rope_parameters (transformers 5)."""

from __future__ import annotations

from eaglex.config import RopeConfig, RopeScaling
from eaglex.fields import Fields, agree, shown

_DEFAULT_THETA = 10000.0  # LlamaConfig's
_MROPE_KEYS = {"mrope_section", "mrope_interleaved"}
_KNOWN = _MROPE_KEYS | {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "finetuned",
    "long_factor",
    "short_factor",
    "short_mscale",
    "long_mscale",  # longrope's, refused by its type
}


def read(layer: Fields, head_dim: int) -> tuple[RopeConfig, int, list[str]]:
    """RopeConfig, rotary_dim and notes for the report. ConfigError names an unknown scaling, key or a contradiction.

    mrope gives text one position on all three axes, so for text it is plain RoPE; that is what a draft runs, and a
    note says so.
    """
    notes: list[str] = []
    scaling, parameters = layer.child("rope_scaling"), layer.child("rope_parameters")
    for fields in filter(None, (scaling, parameters)):
        _check_keys(fields)
    if scaling is not None and parameters is not None:
        for key in sorted(_KNOWN & scaling.data.keys() & parameters.data.keys() - {"type"}):
            if scaling.data[key] is not None and parameters.data[key] not in (None, scaling.data[key]):
                parameters.fail(key, f"{shown(scaling.data[key])} as in {scaling.where(key)}")
    spots = [f for f in (layer, parameters, scaling) if f is not None]
    theta = agree([(f, "rope_theta") for f in spots], lambda f, n: f.number(n, 1.0))
    if theta is None:
        theta = _DEFAULT_THETA
        notes.append(f"rope_theta is absent: {theta:g} is taken by default")
    rotary_dim = _rotary_dim(layer, spots, head_dim)
    kinds = {f: kind for f in (parameters, scaling) if f is not None and (kind := _kind(f)) is not None}
    if len(set(kinds.values())) > 1 and parameters is not None and scaling is not None:
        parameters.fail("rope_type", f"{shown(kinds[scaling])} as in {scaling.where('rope_type')}", kinds[parameters])
    source, kind = next(iter(kinds.items()), (None, "default"))
    if any(
        _MROPE_KEYS & f.data.keys() or "mrope" in (f.data.get("type"), f.data.get("rope_type"))
        for f in spots
        if f is not layer
    ):
        notes.append(
            "mrope: the draft runs plain RoPE, which is equal for text only; requests with images must not be "
            "drafted for"
        )
    if kind == "default" or source is None:
        return RopeConfig(theta=theta), rotary_dim, notes
    try:
        return _scaled(layer, source, RopeScaling(kind), theta, notes), rotary_dim, notes
    except ValueError as error:
        if "is not a valid" not in str(error):
            raise
        name = "rope_type" if source.data.get("rope_type") is not None else "type"
        source.fail(name, "default, linear, llama3, yarn or mrope for text", kind)


def _scaled(layer: Fields, source: Fields, kind: RopeScaling, theta: float, notes: list[str]) -> RopeConfig:
    original = source.integer("original_max_position_embeddings") or layer.integer("original_max_position_embeddings")
    longest = layer.integer("max_position_embeddings")
    factor = source.number("factor", 1.0)
    if kind is not RopeScaling.LINEAR and original is None:
        if kind is RopeScaling.LLAMA3 or longest is None:
            source.fail("original_max_position_embeddings", f"an integer >= 1 for {kind.value}")
        original = longest
        notes.append(
            f"{source.where('original_max_position_embeddings')} is absent: max_position_embeddings={longest} is "
            "taken, "
            f"as Hugging Face does"
        )
    if factor is None:
        if kind is not RopeScaling.YARN or longest is None or original is None or longest < original:
            source.fail("factor", f"a finite number >= 1 for {kind.value}")
        factor = longest / original
        notes.append(
            f"{source.where('factor')} is absent: max_position_embeddings / original_max_position_embeddings = "
            f"{factor:g} is taken"
        )
    if kind is RopeScaling.LINEAR:
        return RopeConfig(theta=theta, scaling=kind, factor=factor)
    assert original is not None
    if kind is RopeScaling.LLAMA3:
        low, high = source.number("low_freq_factor"), source.number("high_freq_factor")
        if low is None or high is None or not high > low > 0:
            source.fail(
                "high_freq_factor" if low else "low_freq_factor",
                "high_freq_factor > low_freq_factor > 0 for llama3",
                [low, high],
            )
        return RopeConfig(
            theta=theta,
            scaling=kind,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    attention_factor = source.number("attention_factor")
    if attention_factor == 0:
        source.fail("attention_factor", "> 0")
    truncate = source.flag("truncate")
    if theta <= 1:
        layer.fail("rope_theta", "> 1 for yarn", theta)
    return RopeConfig(
        theta=theta,
        scaling=kind,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_positive(source, "beta_fast", 32.0),
        beta_slow=_positive(source, "beta_slow", 1.0),
        mscale=source.number("mscale") or 0.0,
        mscale_all_dim=source.number("mscale_all_dim") or 0.0,
        attention_factor=attention_factor,
        truncate=True if truncate is None else truncate,
    )


def _positive(source: Fields, name: str, default: float) -> float:
    return source.number(name) or default  # 0 means the default, as in Hugging Face's reading


def _kind(fields: Fields) -> str | None:
    new, old = fields.text("rope_type"), fields.text("type")
    if "mrope" in (new, old):
        plain = {k for k in (new, old) if k not in (None, "mrope")}
        if plain - {"default"}:
            fields.fail("rope_type", "mrope over default", sorted(str(k) for k in plain))
        return "default"
    if new is not None and old is not None and new != old:
        fields.fail("rope_type", f"{shown(old)} as in {fields.where('type')}", new)
    return new or old


def _check_keys(fields: Fields) -> None:
    unknown = sorted(k for k, v in fields.data.items() if v is not None and k not in _KNOWN)
    if unknown:
        fields.fail(unknown[0], "a known RoPE parameter (one schedule for all layers)")


def _rotary_dim(layer: Fields, spots: list[Fields], head_dim: int) -> int:
    factor = agree([(f, "partial_rotary_factor") for f in spots], Fields.number)
    rotary_dim = head_dim if factor is None else int(head_dim * min(factor, 2.0))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        layer.fail("partial_rotary_factor", f"an even part of head_dim={head_dim}", factor)
    written = layer.integer("rotary_dim")
    if written not in (None, rotary_dim):
        layer.fail("rotary_dim", f"{rotary_dim} = partial_rotary_factor · head_dim={head_dim}")
    return rotary_dim
