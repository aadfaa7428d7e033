"""What a checkpoint's config says of its low-bit matrices: compressed-tensors, ModelOpt and block-FP8, read strictly.

A scheme answers how the matrix of one module is stored. Which modules are packed is the tensors' word (packed_tensors);
the config must account for each of them, and what it describes beyond these layouts is refused by name.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from eaglex import dialects
from eaglex.fields import Fields, read_json
from eaglex.packed import GROUP

if TYPE_CHECKING:
    from eaglex.source import Source

MODELOPT_FILE = "hf_quant_config.json"
_BLOCK = [GROUP, GROUP]
_SUPPORTED = "compressed-tensors, modelopt or fp8"
# A pattern is untrusted, and some take exponential time; within these bounds none takes more than milliseconds.
_MAX_REPEATS, _MAX_NAME = 3, 200


class Layout(enum.Enum):
    """How one matrix [out, in] and its scales lie in the file."""

    FP8_TENSOR = "FP8, one scale"  # weight F8_E4M3 [out, in], scale [] or [1]
    FP8_ROW = "FP8, a scale per row"  # scale [out] or [out, 1]
    FP8_BLOCK = "FP8, a scale per 128 x 128 block"  # scale [ceil(out / 128), ceil(in / 128)]
    INT4_WORDS = "INT4 in words, a scale per 128 inputs"  # weight_packed I32 [out, in / 8], scale [out, ceil(in / 128)]
    INT4_ROW_PAIRS = "INT4 in pairs of rows, a scale per 128 inputs"  # weight U8 [out / 2, in]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """`layout(module)` for a module's full name, None where the config knows nothing of it; `place` is for errors."""

    label: str
    place: str
    layout: Callable[[str], Layout | None]
    scale_name: str = "weight_scale"


def read(source: Source, config: Fields, layer: Fields) -> Scheme | None:
    """The scheme of this checkpoint, None without one. Raises ConfigError for one that is not implemented."""
    if dialects.AUTOMODEL_ARCHITECTURE in config.texts("architectures"):
        return None  # its config is the target's, and so is the scheme
    for fields in (config, layer):
        for name in ("quantization_config", "compression_config"):
            scheme = fields.child(name)
            if scheme is not None and scheme.data:
                return _by_method(scheme)
    if MODELOPT_FILE in source.names:
        quantised = read_json(source.path(MODELOPT_FILE)).child("quantization")
        if quantised is not None and quantised.data.get("quant_algo") is not None:
            return _modelopt(quantised)
    return None


def _by_method(fields: Fields) -> Scheme:
    method = fields.text("quant_method")
    if method == "compressed-tensors":
        return _compressed(fields)
    if method == "modelopt" or (method is None and fields.data.get("quant_algo") is not None):
        return _modelopt(fields)
    if method == "fp8":
        return _fp8(fields)
    fields.fail("quant_method", _SUPPORTED)


def _fp8(fields: Fields) -> Scheme:
    """Hugging Face's and DeepSeek's: blocks with `weight_scale_inv`, or one `weight_scale`."""
    if fields.text("fmt") not in (None, "e4m3"):
        fields.fail("fmt", "e4m3")
    block = fields.integers("weight_block_size")
    if block not in (None, _BLOCK):
        fields.fail("weight_block_size", f"{_BLOCK} or none")
    layout = Layout.FP8_TENSOR if block is None else Layout.FP8_BLOCK
    return Scheme(
        label=f"fp8 ({layout.value})",
        place=f"{fields.file}: {fields.place}",
        layout=lambda module: layout,
        scale_name="weight_scale" if block is None else "weight_scale_inv",
    )


# ------------------------------------------------------------------------------------------------------------- ModelOpt

_MODELOPT = {
    "FP8": Layout.FP8_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": Layout.FP8_ROW,
    "W4A16_AWQ": Layout.INT4_ROW_PAIRS,
}


def _modelopt(fields: Fields) -> Scheme:
    algo = fields.text("quant_algo")
    place = f"{fields.file}: {fields.where('quant_algo')}"
    layout: Callable[[str], Layout | None]
    if algo == "MIXED_PRECISION":
        layers = fields.child("quantized_layers")
        if layers is None:
            fields.fail("quantized_layers", "an object with MIXED_PRECISION")
        each = {name: _modelopt_algo(entry) for name in layers.data if (entry := layers.child(name)) is not None}
        layout = each.get
    else:
        one = _modelopt_algo(fields)

        def layout(module: str) -> Layout | None:
            return one

    return Scheme(label=f"ModelOpt {algo}", place=place, layout=layout)


def _modelopt_algo(fields: Fields) -> Layout:
    layout = _MODELOPT.get(fields.text("quant_algo") or "")
    if layout is None:
        fields.fail("quant_algo", f"{', '.join(_MODELOPT)} (eaglex reads no other)")
    if layout is Layout.INT4_ROW_PAIRS:
        if fields.integer("group_size") not in (None, GROUP):
            fields.fail("group_size", str(GROUP))
        if fields.flag("has_zero_point"):
            fields.fail("has_zero_point", "false")
    return layout


# --------------------------------------------------------------------------------------------------- compressed-tensors

_FORMATS = ("float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "dense")


@dataclasses.dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    layout: Layout


def _compressed(fields: Fields) -> Scheme:
    written = fields.text("format")
    if written not in (None, *_FORMATS):
        fields.fail("format", f"one of {', '.join(_FORMATS)}")
    if fields.text("quantization_status") not in (None, "compressed", "frozen"):
        fields.fail("quantization_status", "compressed or frozen")
    for name in ("sparsity_config", "transform_config"):
        other = fields.child(name)
        if other is not None and other.data and other.data.get("format") != "dense":
            fields.fail(name, "none (eaglex does not implement it)")
    groups = fields.child("config_groups")
    if groups is None or not groups.data:
        fields.fail("config_groups", "an object with at least one group")
    read_groups = [_group(entry) for name in groups.data if (entry := groups.child(name)) is not None]
    ignored = [_matcher(fields, "ignore", text) for text in fields.texts("ignore")]
    matchers = [([_matcher(groups, "targets", t) for t in group.targets], group.layout) for group in read_groups]

    def layout(module: str) -> Layout | None:
        if any(match(module) for match in ignored):
            return None
        return next((found for targets, found in matchers if any(match(module) for match in targets)), None)

    label = f"compressed-tensors {written or ''} ({'; '.join(sorted({g.layout.value for g in read_groups}))})"
    return Scheme(label=label, place=f"{fields.file}: {groups.place}", layout=layout)


def _group(fields: Fields) -> _Group:
    weights = fields.child("weights")
    if weights is None:
        fields.fail("weights", "an object")
    if weights.flag("symmetric") is False:
        weights.fail("symmetric", "true")
    if weights.data.get("actorder") not in (None, False, "weight", "static"):
        weights.fail("actorder", "none, weight or static")
    kind = (weights.text("type") or "int", weights.integer("num_bits") or 8)
    if kind == ("float", 8):
        strategy = weights.text("strategy") or "tensor"
        layouts = {"tensor": Layout.FP8_TENSOR, "channel": Layout.FP8_ROW, "block": Layout.FP8_BLOCK}
        if strategy not in layouts:
            weights.fail("strategy", f"{', '.join(layouts)} with 8 bits", strategy)
        if strategy == "block" and weights.integers("block_structure") != _BLOCK:
            weights.fail("block_structure", str(_BLOCK))
        return _Group(tuple(fields.texts("targets")), layouts[strategy])
    if kind != ("int", 4):
        weights.fail("num_bits", "8 with type float, 4 with type int (eaglex reads no other)", f"{kind[1]} {kind[0]}")
    if weights.text("strategy") not in (None, "group"):
        weights.fail("strategy", "group with 4 bits")
    if weights.integer("group_size", -1) != GROUP:
        weights.fail("group_size", str(GROUP))
    return _Group(tuple(fields.texts("targets")), Layout.INT4_WORDS)


def _matcher(fields: Fields, name: str, text: str) -> Callable[[str], bool]:
    """A target as compressed-tensors means it: a class name, `re:` and a pattern from the start, or a full name."""
    if not text.startswith("re:"):
        return lambda module: text in ("Linear", module)
    plain = re.sub(r"\\.", "", text)
    if len(re.findall(r"[*+]", plain)) > _MAX_REPEATS or re.search(r"[{]|\)[*+?]", plain):
        fields.fail(name, f"a pattern of at most {_MAX_REPEATS} repetitions of single characters", text)
    try:
        pattern = re.compile(text.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        fields.fail(name, f"a regular expression behind re: ({error})", text)
    return lambda module: len(module) <= _MAX_NAME and pattern.match(module) is not None
