"""Checkpoints that carry low-bit weights: written here byte by byte from known numbers, loaded to exactly those."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file
from support.rig import Ask, Rig

from eaglex import packed_tensors, quant_schemes
from eaglex.checkpoint import load
from eaglex.config import SpeculationConfig
from eaglex.errors import CheckpointError, ConfigError, EaglexError
from eaglex.inspect import cost
from eaglex.packed import PackedWeight, Precision
from eaglex.quant_schemes import Layout, Scheme
from eaglex.reference_low_bit import unpacked
from eaglex.source import open_source

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP8_ROW = WEIGHTS | {"strategy": "channel"}
FP8_TENSOR = WEIGHTS | {"strategy": "tensor"}
FP8_BLOCK = WEIGHTS | {"strategy": "block", "block_structure": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": None}
NUMBERS = torch.Generator().manual_seed(5)


def compressed(weights=FP8_ROW, **changes):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if weights.get("num_bits") == 4 else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head", "fc"],
        "kv_cache_scheme": None,
    } | changes


def fp8(rows, width, scale_shape, dtype=torch.float32):
    """Random finite e4m3 bytes and scales that are powers of two times small primes."""
    bits = torch.randint(0, 126, (rows, width), generator=NUMBERS) + 128 * torch.randint(0, 2, (rows, width))
    scales = torch.randint(1, 8, scale_shape, generator=NUMBERS) / 64
    return bits.to(torch.uint8).view(torch.float8_e4m3fn), scales.to(dtype)


def int4(rows, width, dtype=torch.bfloat16):
    """Numbers -8..7 and scales [rows, groups]."""
    numbers = torch.randint(-8, 8, (rows, width), generator=NUMBERS)
    scales = torch.randint(1, 8, (rows, math.ceil(width / 128)), generator=NUMBERS) / 64
    return numbers, scales.to(dtype)


def words(numbers):
    """compressed-tensors: eight numbers plus 8 per int32, the first in the lowest bits."""
    rows, width = numbers.shape
    packed = torch.zeros(rows, width // 8, dtype=torch.int64)
    for k in range(width):
        packed[:, k // 8] |= (numbers[:, k] + 8) << 4 * (k % 8)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def row_pairs(numbers):
    """ModelOpt: rows 2j (low half) and 2j + 1 of one column per byte, in two's complement."""
    packed = torch.zeros(numbers.shape[0] // 2, numbers.shape[1], dtype=torch.uint8)
    for row in range(numbers.shape[0]):
        packed[row // 2] |= ((numbers[row] % 16) << 4 * (row % 2)).to(torch.uint8)
    return packed


def pack(kind, name, rows, width):
    """Tensors of one matrix in that layout, and the matrix that they mean."""
    if kind is Layout.INT4_WORDS:
        numbers, scales = int4(rows, width)
        tensors = {"weight_packed": words(numbers), "weight_scale": scales, "weight_shape": torch.tensor([rows, width])}
    elif kind is Layout.INT4_ROW_PAIRS:
        numbers, scales = int4(rows, width, torch.float32)
        tensors = {"weight": row_pairs(numbers), "weight_scale": scales}
    else:
        blocks = (math.ceil(rows / 128), math.ceil(width / 128))
        shape = {Layout.FP8_TENSOR: (), Layout.FP8_ROW: (rows, 1), Layout.FP8_BLOCK: blocks}[kind]
        numbers, scales = fp8(rows, width, shape)
        tensors = {"weight": numbers, "weight_scale": scales}
    meant = torch.empty(rows, width)
    for o in range(rows):
        for k in range(width):
            if kind is Layout.FP8_BLOCK:
                scale = scales[o // 128, k // 128]
            elif kind in (Layout.FP8_TENSOR, Layout.FP8_ROW):
                scale = scales.reshape(-1)[o if kind is Layout.FP8_ROW else 0]
            else:
                scale = scales[o, k // 128]
            meant[o, k] = float(numbers[o, k]) * float(scale)
    return {f"{name}.{n}": t for n, t in tensors.items()}, meant


def spoken(toy, kind, names):
    """Replace these modules' weights by packed ones; what each means by name."""
    meant = {}
    for name in names:
        plain = toy.tensors.pop(f"{name}.weight")
        tensors, meant[name] = pack(kind, name, *plain.shape)
        toy.tensors |= tensors
    return meant


LINEAR = [f"midlayer.{n}" for n in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj")]  # fmt: skip
SCHEMES = {
    "ct-channel": (compressed(FP8_ROW), Layout.FP8_ROW),
    "ct-tensor": (compressed(FP8_TENSOR), Layout.FP8_TENSOR),
    "ct-block": (compressed(FP8_BLOCK), Layout.FP8_BLOCK),
    "ct-int4": (compressed(INT4), Layout.INT4_WORDS),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, Layout.FP8_TENSOR),
    "modelopt-channel": ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, Layout.FP8_ROW),
    "modelopt-int4": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128, "has_zero_point": False},
        Layout.INT4_ROW_PAIRS,
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Layout.FP8_TENSOR),
}


@pytest.mark.parametrize(("scheme", "kind"), SCHEMES.values(), ids=SCHEMES.keys())
def test_a_draft_in_each_scheme(toy, target, scheme, kind):
    meant = spoken(toy, kind, LINEAR)
    toy.config["quantization_config"] = scheme
    loaded = load(toy.write(), target=target)
    wanted = Precision.INT4 if kind in (Layout.INT4_WORDS, Layout.INT4_ROW_PAIRS) else Precision.FP8
    for name, matrix in meant.items():
        packed = getattr(loaded.weights.layers[0], name.split(".")[-1])
        assert isinstance(packed, PackedWeight)
        assert packed.precision is wanted
        assert torch.equal(unpacked(packed), matrix)
        assert loaded.facts.tensors[f"layers.0.{name.split('.')[-1]}"].nbytes == packed.nbytes
    assert torch.equal(loaded.weights.lm_head, toy.tensors["lm_head.weight"])
    held = {name: w.nbytes for name, w in loaded.weights.named() if name not in ("d2t", "embed_tokens")}
    facts = loaded.facts
    assert cost(facts.config, facts.dtype, stored=facts.tensors).weights_bytes == sum(held.values())
    assert "7 packed matrices, taken with exactly their numbers" in loaded.report
    assert "bf16" in loaded.report


def test_block_fp8_of_deepseek(toy, target):
    """Its scales are called weight_scale_inv."""
    meant = spoken(toy, Layout.FP8_BLOCK, LINEAR)
    for name in LINEAR:
        toy.tensors[f"{name}.weight_scale_inv"] = toy.tensors.pop(f"{name}.weight_scale")
    toy.config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    loaded = load(toy.write(), target=target)
    assert torch.equal(unpacked(loaded.weights.layers[0].up_proj), meant["midlayer.mlp.up_proj"])


@pytest.mark.parametrize(("scheme", "kind"), SCHEMES.values(), ids=SCHEMES.keys())
def test_a_draft_of_each_scheme_drafts(toy, target, scheme, kind):
    """From the file to the engine's tokens, which are the reference's."""
    spoken(toy, kind, LINEAR)
    toy.config["quantization_config"] = scheme
    loaded = load(toy.write(), target=target, dtype=torch.float32)
    speculation = SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=6)
    rig = Rig(loaded.config, speculation, weights=loaded.weights)
    for request in range(4):
        rig.join(request, 1 + request)
    assert rig.compare(rig.cycle([Ask(request, 5 + request) for request in range(4)])) > 0


def test_modelopts_own_file_with_a_scheme_per_layer(toy, target):
    eight = spoken(toy, Layout.FP8_TENSOR, LINEAR[4:6])
    four = spoken(toy, Layout.INT4_ROW_PAIRS, ["lm_head"])
    layers = {name: {"quant_algo": "FP8"} for name in eight}
    layers["lm_head"] = {"quant_algo": "W4A16_AWQ", "group_size": 128}
    toy.write()
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    (toy.folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    loaded = load(toy.folder, target=target)
    assert torch.equal(unpacked(loaded.weights.lm_head), four["lm_head"])
    assert torch.equal(unpacked(loaded.weights.layers[0].up_proj), eight["midlayer.mlp.up_proj"])
    assert torch.equal(loaded.weights.layers[0].q_proj, toy.tensors["midlayer.self_attn.q_proj.weight"])


def test_groups_of_two_schemes(toy, target):
    eight, four = spoken(toy, Layout.FP8_ROW, LINEAR[:4]), spoken(toy, Layout.INT4_WORDS, LINEAR[4:])
    scheme = compressed(format="mixed-precision", ignore=["lm_head", "fc"])
    scheme["config_groups"] = {
        "a": {"targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"], "weights": FP8_ROW},
        "b": {"targets": ["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj", "re:.*down_proj"], "weights": INT4},
    }
    toy.config["quantization_config"] = scheme
    loaded = load(toy.write(), target=target)
    for name, matrix in (eight | four).items():
        assert torch.equal(unpacked(getattr(loaded.weights.layers[0], name.split(".")[-1])), matrix)


def test_fc_is_unpacked(toy, target):
    """Drafts whose fc is FP8 as well exist; it is read once per cycle, and kept in 16 bits."""
    meant = spoken(toy, Layout.FP8_ROW, [*LINEAR, "fc"])
    toy.config["quantization_config"] = compressed(ignore=["lm_head"])
    loaded = load(toy.write(), target=target)
    assert torch.equal(loaded.weights.fc, meant["fc"].bfloat16())
    assert "fc.weight is FP8 in the file and is unpacked to bf16" in loaded.report


def test_scales_of_activations_are_noted(toy, target):
    spoken(toy, Layout.FP8_TENSOR, LINEAR)
    toy.tensors |= {f"{name}.input_scale": torch.tensor(0.5) for name in LINEAR}
    toy.tensors["midlayer.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    toy.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert "8 scales of inputs or KV are not used" in load(toy.write(), target=target).report


def test_a_scheme_without_a_packed_tensor_is_noted(toy, target):
    toy.config["quantization_config"] = {"quant_method": "fp8"}
    loaded = load(toy.write(), target=target)
    assert "fp8 (FP8, one scale) of the config is ignored: no tensor is packed" in loaded.report
    assert torch.equal(loaded.weights.layers[0].q_proj, toy.tensors["midlayer.self_attn.q_proj.weight"])


@pytest.mark.parametrize("kind", Layout)
@pytest.mark.parametrize("width", [128, 304])
def test_wide_matrices(tmp_path, kind, width):
    """Several groups and blocks, the last ones shorter."""
    tensors, meant = pack(kind, "m", 150, width)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    scheme = Scheme(label="x", place="y", layout=lambda module: kind)
    found, _ = packed_tensors.collect(open_source(tmp_path).tensors(), scheme)
    info = found["m.weight"]
    assert list(found) == ["m.weight"]
    assert info.shape == (150, width)
    packed = info.pack()
    packed.check("m", (150, width))
    assert torch.equal(unpacked(packed), meant)
    assert info.nbytes == packed.nbytes


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(toy, target, *named, error=EaglexError):
    with pytest.raises(error) as caught:
        load(toy.write(), target=target)
    message = str(caught.value)
    assert "\n" not in message
    for text in named:
        assert text in message, message
    return message


def group(**changes):
    return compressed(INT4 | changes)


CONFIGS = {
    "method": ({"quant_method": "gptq", "bits": 4}, "quant_method: expected compressed-tensors, modelopt or fp8"),
    "method-absent": ({"bits": 4}, 'quant_method: expected compressed-tensors, modelopt or fp8, got null'),
    "format": (compressed(format="marlin-24"), 'format: expected one of float-quantized, naive-quantized, pack'),
    "nvfp4": (compressed(format="nvfp4-pack-quantized"), 'format: expected one of'),
    "status": (compressed(quantization_status="calibration"), "quantization_status: expected compressed or frozen"),
    "sparse": (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: expected none"),
    "rotated": (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config: expected none"),
    "no-groups": (compressed(config_groups={}), "config_groups: expected an object with at least one group"),
    "no-weights": (compressed(config_groups={"g": {"targets": ["Linear"]}}), "g.weights: expected an object"),
    "group-size": (group(group_size=32), "weights.group_size: expected 128, got 32"),
    "group-null": (group(group_size=None), "weights.group_size: expected 128, got null"),
    "asymmetric": (group(symmetric=False), "weights.symmetric: expected true, got false"),
    "actorder": (group(actorder="group"), 'weights.actorder: expected none, weight or static, got "group"'),
    "int4-channel": (group(strategy="channel"), 'weights.strategy: expected group with 4 bits, got "channel"'),
    "int8": (group(num_bits=8), 'weights.num_bits: expected 8 with type float, 4 with type int'),
    "fp4": (group(type="float"), 'got "4 float"'),
    "fp8-group": (compressed(FP8_ROW | {"strategy": "group"}), "weights.strategy: expected tensor, channel, block"),
    "block": (compressed(FP8_BLOCK | {"block_structure": [64, 64]}), "block_structure: expected [128, 128]"),
    "pattern": (compressed(ignore=["re:("]), "ignore: expected a regular expression behind re:"),
    "pattern-slow": (compressed(ignore=["re:(a*)*b"]), "ignore: expected a pattern of at most 3 repetitions"),
    "pattern-many": (compressed(ignore=["re:.*.*.*.*x"]), "ignore: expected a pattern of at most 3 repetitions"),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "quant_algo: expected FP8, FP8_PER_CHANNEL_PER_TOKEN, W4A16_AWQ (eaglex reads no other), got \"NVFP4\"",
    ),
    "modelopt-group": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64},
        "quantization_config.group_size: expected 128, got 64",
    ),
    "modelopt-zero": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": True},
        "has_zero_point: expected false, got true",
    ),
    "modelopt-mixed": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        "quantized_layers: expected an object with MIXED_PRECISION",
    ),
    "fp8-fmt": ({"quant_method": "fp8", "fmt": "e5m2"}, 'quantization_config.fmt: expected e4m3, got "e5m2"'),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [1, 32]},
        "quantization_config.weight_block_size: expected [128, 128] or none, got [1, 32]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "named"), CONFIGS.values(), ids=CONFIGS.keys())
def test_schemes_that_are_not_implemented(toy, target, scheme, named):
    toy.config["quantization_config"] = scheme
    refused(toy, target, named, "config.json", error=ConfigError)


def test_a_scheme_in_modelopts_own_file(toy, target):
    toy.write()
    (toy.folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization\.quant_algo: expected FP8, .*W4A8_AWQ"):
        load(toy.folder, target=target)


UP = "midlayer.mlp.up_proj"


def put(suffix, make):
    def change(tensors):
        tensors[f"{UP}.{suffix}"] = make(tensors.get(f"{UP}.{suffix}"))

    return change


def drop(suffix):
    return lambda tensors: tensors.pop(f"{UP}.{suffix}")


TENSORS = {
    "scale-missing": (FP8_ROW, drop("weight_scale"), "up_proj.weight_scale: expected weight, weight_scale", "missing"),
    "scale-alone": (FP8_ROW, drop("weight"), f"{UP}.weight: expected weight, weight_scale for FP8", "missing"),
    "zero-point": (
        INT4,
        put("weight_zero_point", lambda _: torch.zeros(48, 1, dtype=torch.int8)),
        f"{UP}.weight_zero_point: expected weight_packed, weight_scale, weight_shape for INT4",
        "beside",
    ),
    "order": (INT4, put("weight_g_idx", lambda _: torch.zeros(32)), "weight_g_idx: expected", "beside"),
    "pre-scale": (FP8_ROW, put("pre_quant_scale", lambda _: torch.ones(32)), "pre_quant_scale: expected", "beside"),
    "second-scale": (FP8_ROW, put("weight_scale_2", lambda _: torch.ones(1)), "weight_scale_2: expected", "beside"),
    "bias": (FP8_ROW, put("bias", lambda _: torch.ones(48)), f"{UP}.bias: expected", "beside"),
    "type": (FP8_ROW, put("weight", lambda t: t.view(torch.int8)), f"{UP}.weight: expected dtype F8_E4M3", "got I8"),
    "e5m2": (
        FP8_ROW,
        put("weight", lambda t: t.float().to(torch.float8_e5m2)),
        f"{UP}.weight: expected dtype F8_E4M3 for FP8, a scale per row, got F8_E5M2",
    ),
    "int4-type": (INT4, put("weight_packed", lambda t: t.long()), "weight_packed: expected dtype I32", "got I64"),
    "scale-shape": (
        FP8_ROW,
        put("weight_scale", lambda t: t[:5].contiguous()),
        f"{UP}.weight_scale: expected shape [48] or [48, 1] for FP8, a scale per row of [48, 32], got [5, 1]",
    ),
    "tensor-scale": (FP8_TENSOR, put("weight_scale", lambda t: torch.ones(48)), "expected shape [] or [1]", "got [48]"),
    "int4-scale": (INT4, put("weight_scale", lambda t: torch.ones(48, 2)), "expected shape [48, 1]", "got [48, 2]"),
    "scale-type": (FP8_ROW, put("weight_scale", lambda t: t.double()), "weight_scale: expected dtype F32", "got F64"),
    "scale-nan": (
        FP8_ROW, put("weight_scale", lambda t: t * math.nan), "weight_scale: expected finite scales, got NaN"),
    "value-nan": (
        FP8_ROW,
        put("weight", lambda t: torch.full_like(t.view(torch.uint8), 255).view(torch.float8_e4m3fn)),
        f"{UP}.weight: expected finite values, got NaN",
    ),
    "rank": (FP8_ROW, put("weight", lambda t: t.flatten()), f"{UP}.weight: expected 2 dimensions, got shape [1536]"),
    "shape": (
        INT4, put("weight_packed", lambda t: t[:, :3].contiguous()), "expected shape [48, 32], got [48, 24]"),
    "shape-lies": (
        INT4,
        put("weight_shape", lambda t: torch.tensor([48, 30])),
        f"{UP}.weight_shape: expected [48, 32] as of {UP}.weight_packed, got [48, 30]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_that_do_not_fit_their_scheme(toy, target, case):
    weights, change, *named = case
    kinds = {"tensor": Layout.FP8_TENSOR, "channel": Layout.FP8_ROW, "group": Layout.INT4_WORDS}
    spoken(toy, kinds[weights["strategy"]], LINEAR)
    toy.config["quantization_config"] = compressed(weights)
    change(toy.tensors)
    refused(toy, target, *named, "model.safetensors", error=CheckpointError)


def test_a_packed_matrix_that_the_scheme_leaves_out(toy, target):
    spoken(toy, Layout.FP8_ROW, ["lm_head"])
    toy.config["quantization_config"] = compressed()
    place = "quantization_config.config_groups describes none for lm_head"
    refused(toy, target, "lm_head.weight", "expected a plain matrix", place, error=CheckpointError)


def test_packed_tensors_without_a_scheme(toy, target):
    spoken(toy, Layout.FP8_ROW, LINEAR)
    refused(toy, target, "weight_scale", "unexpected tensor", error=CheckpointError)


def test_headers_are_enough_to_refuse(toy, target, monkeypatch):
    """Nothing of a packed matrix is read before all is known to fit."""
    spoken(toy, Layout.INT4_WORDS, LINEAR)
    toy.config["quantization_config"] = compressed(INT4)
    toy.config["intermediate_size"] = 64
    monkeypatch.setattr(packed_tensors.PackedInfo, "pack", lambda self: pytest.fail("a matrix was read"))
    refused(toy, target, "intermediate_size: expected 48, the rows of midlayer.mlp.gate_proj.weight, got 64")


def test_every_layout_is_written_somewhere():
    assert {kind for _, kind in SCHEMES.values()} == set(Layout)
    assert re.search("compressed-tensors", quant_schemes._SUPPORTED)
