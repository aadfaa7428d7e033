"""What is not exactly a known dialect is refused by file, field, expected and actual, before a weight is read."""

import json
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from eaglex.checkpoint import examine, load
from eaglex.errors import CheckpointError, ConfigError, EaglexError
from eaglex.source import TensorInfo


def refused(toy, target, *named, error=EaglexError, **arguments):
    with pytest.raises(error) as caught:
        load(toy.write(), target=target, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    for text in named:
        assert text in message
    return message


CONFIGS = {
    "hidden_size-missing": ({"hidden_size": None}, "hidden_size: expected an integer >= 1, got null"),
    "hidden_size-float": ({"hidden_size": 32.0}, "hidden_size: expected an integer"),
    "hidden_size-bool": ({"hidden_size": True}, "hidden_size: expected an integer"),
    "hidden_size-other": ({"hidden_size": 64}, "hidden_size: expected 32, the rows of fc.weight, got 64"),
    "hidden_size-huge": ({"hidden_size": 10**30}, "hidden_size: expected 32"),
    "heads": ({"num_attention_heads": 3}, "num_attention_heads"),
    "kv_heads": ({"num_key_value_heads": 4}, "num_key_value_heads"),
    "head_dim": (
        {"head_dim": 80},
        "head_dim: expected 8 = 32 rows of midlayer.self_attn.q_proj.weight / num_attention_heads=4, got 80",
    ),
    "intermediate_size": ({"intermediate_size": 64}, "intermediate_size: expected 48"),
    "vocab_size-of-target": ({"vocab_size": 256}, "vocab_size: expected 128, the vocab_size of the target"),
    "draft_vocab_size": ({"draft_vocab_size": 41}, "draft_vocab_size: expected 40, the rows of lm_head.weight, got 41"),
    "truncated_vocab_size": ({"truncated_vocab_size": 41}, "truncated_vocab_size"),
    "target_hidden_size": ({"target_hidden_size": 64}, "target_hidden_size: expected 32"),
    "num_aux": ({"num_aux_hidden_states": 4}, "fc.weight: expected 4 · 32 columns"),
    "eps": ({"rms_norm_eps": 1.5}, "rms_norm_eps: expected in (0, 1), got 1.5"),
    "eps-text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a finite number"),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act: expected silu, got "gelu"'),
    "attention_bias": ({"attention_bias": True}, "attention_bias: expected false"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias: expected false"),
    "softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected none"),
    "logit_scale": ({"logit_scale": 0.5}, "logit_scale: expected 1"),
    "window": ({"sliding_window": 512}, "sliding_window: expected none"),
    "quantised": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        'quantization_config.quant_method: expected compressed-tensors, modelopt or fp8, got "bitsandbytes"',
    ),
    "norm_before_fc-missing": (
        {"norm_before_fc": True},
        "missing tensor input_norm.weight, which norm_before_fc=true asks for",
    ),
    "fc_norm-missing": ({"fc_norm": True}, "missing tensor fc_norm.0.weight"),
    "switch-contradicts": (
        {"norm_output": True, "eagle_config": {"norm_output": False}},
        "eagle_config.norm_output: expected true as in norm_output",
    ),
    "switch-text": ({"norm_before_residual": "yes"}, "norm_before_residual: expected true or false"),
    "first-norm": (
        {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
        "use_input_layernorm_in_first_layer: expected true",
    ),
    "last-norm": ({"eagle_config": {"use_last_layernorm": False}}, "eagle_config.use_last_layernorm: expected true"),
    "mtp-norm": ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm: expected false"),
    "no-aux": ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state: expected true"),
    "parallel": ({"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step: expected 0 or 1"),
    "mla": ({"kv_lora_rank": 512}, "kv_lora_rank=512: expected a Llama-type EAGLE-3 draft, got an MLA draft"),
    "mla-architecture": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}, "an MLA draft"),
    "p-eagle": ({"architectures": ["PEagleDraftModel"]}, "a parallel-drafting head (P-EAGLE, PARD)"),
    "p-eagle-flag": ({"parallel_drafting": True}, "parallel_drafting=true: expected"),
    "medusa": ({"medusa_num_heads": 4}, "a Medusa model"),
    "dflash": ({"architectures": ["DFlashDraftModel"]}, "a block-diffusion draft"),
    "eagle-1": ({"architectures": ["LlamaForCausalLMEagle"]}, "an EAGLE-1 or EAGLE-2 head"),
    "gemma": ({"model_type": "gemma3_text"}, "Gemma"),
    "unknown": ({"architectures": ["FalconForCausalLMEagle3"]}, "architectures: expected one of"),
    "speculators-flat": ({"speculators_model_type": "eagle3"}, "transformer_layer_config: expected an object"),
    "context": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": None},
        "original_max_position_embeddings",
    ),
}


@pytest.mark.parametrize(("change", "named"), CONFIGS.values(), ids=CONFIGS.keys())
def test_config(toy, target, change, named):
    toy.config |= change
    refused(toy, target, "config.json" if "tensor" not in named and "fc.weight:" not in named else "", named)


ROPE = {
    "longrope": (
        {"rope_scaling": {"type": "longrope", "factor": 4.0, "short_factor": [1], "long_factor": [2]}},
        "rope_scaling.type",
        "longrope",
    ),
    "su": ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope_scaling.rope_type", "su"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type", "dynamic"),
    "unknown-v5": ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type", "proportional"),
    "theta-twice": ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta", "10000"),
    "theta-zero": ({"rope_theta": 0}, "rope_theta", "0"),
    "types-differ": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "rope_scaling.rope_type",
        "linear",
    ),
    "places-differ-factor": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
        "rope_parameters.factor",
        "expected 2.0 as in rope_scaling.factor, got 4.0",
    ),
    "places-differ": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "llama3"}},
        "rope_type",
        "llama3",
    ),
    "linear-factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "linear"),
    "factor-small": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor", "0.5"),
    "llama3-original": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        "rope_scaling.original_max_position_embeddings",
        "llama3",
    ),
    "llama3-factors": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            }
        },
        "rope_scaling.high_freq_factor",
        "4.0",
    ),
    "unknown-key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, "rope_scaling.alpha", "3"),
    "per-layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "rope_parameters.full_attention",
        "all layers",
    ),
    "partial": ({"partial_rotary_factor": 0.4}, "partial_rotary_factor", "head_dim=8"),
    "partial-above": ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "1.5"),
    "rotary_dim": ({"rotary_dim": 4}, "rotary_dim", "expected 8"),
    "interleaved": ({"rope_interleave": True}, "rope_interleave", "false"),
    "not-an-object": ({"rope_scaling": "yarn"}, "rope_scaling", "an object"),
}


@pytest.mark.parametrize(("change", "field", "named"), ROPE.values(), ids=ROPE.keys())
def test_rope(toy, target, change, field, named):
    toy.config |= change
    refused(toy, target, "config.json", f"{field}: expected", named, error=ConfigError)


def drop(name):
    return lambda toy: toy.tensors.pop(name)


def put(name, make):
    return lambda toy: toy.tensors.update({name: make(toy)})


TENSORS = {
    "missing-norm": (drop("norm.weight"), "missing tensor norm.weight"),
    "missing-hidden_norm": (drop("midlayer.hidden_norm.weight"), "missing tensor midlayer.hidden_norm.weight"),
    "missing-input_layernorm": (
        drop("midlayer.input_layernorm.weight"),
        "missing tensor midlayer.input_layernorm.weight",
    ),
    "missing-lm_head": (
        drop("lm_head.weight"),
        "missing tensor lm_head.weight: with draft_vocab_size=40 != vocab_size=128",
    ),
    "missing-d2t": (drop("d2t"), "d2t: expected [40] I64"),
    "bias": (
        put("midlayer.self_attn.q_proj.bias", lambda t: t.normal(32)),
        "midlayer.self_attn.q_proj.bias: unexpected tensor",
    ),
    "fc-bias": (put("fc.bias", lambda t: t.normal(32)), "fc.bias: unexpected tensor"),
    "q_norm": (
        put("midlayer.self_attn.q_norm.weight", lambda t: t.normal(8)),
        "midlayer.self_attn.q_norm.weight: unexpected tensor",
    ),
    "twice": (put("layers.0.hidden_norm.weight", lambda t: t.normal(32)), "expected each tensor once"),
    "hole": (
        lambda t: (t.rename("^midlayer", "layers.0"), t.add_layer(2)),
        "layers: expected indices 0..1, got [0, 2]",
    ),
    "second-incomplete": (put("layers.1.mlp.up_proj.weight", lambda t: t.normal(48, 32)), "missing tensor layers.1."),
    "shape-o_proj": (
        put("midlayer.self_attn.o_proj.weight", lambda t: t.normal(32, 31)),
        "o_proj.weight: expected shape [32, 32], got [32, 31]",
    ),
    "shape-v_proj": (put("midlayer.self_attn.v_proj.weight", lambda t: t.normal(8, 64)), "num_key_value_heads"),
    "shape-1d": (
        put("midlayer.self_attn.q_proj.weight", lambda t: t.normal(32)),
        "expected 2 dimensions, got shape [32]",
    ),
    "shape-fc": (put("fc.weight", lambda t: t.normal(32, 95)), "a multiple of the target's hidden size 32"),
    "shape-embed": (put("embed_tokens.weight", lambda t: t.normal(127, 32)), "embed_tokens.weight: expected 128 rows"),
    "fp8": (
        put("midlayer.mlp.up_proj.weight", lambda t: t.normal(48, 32).to(torch.float8_e4m3fn)),
        "expected dtype BF16, F16, F32, got F8_E4M3",
    ),
    "mixed": (
        put("norm.weight", lambda t: t.normal(32).float()),
        "norm.weight: expected dtype BF16 like fc.weight, got F32",
    ),
    "flag-false": (
        lambda t: (t.tensors.update({"input_norm.weight": t.normal(96)}), t.config.update(norm_before_fc=False)),
        "norm_before_fc=false",
    ),
    "both-norms": (
        lambda t: t.tensors.update(
            {"input_norm.weight": t.normal(96)} | {f"fc_norm.{i}.weight": t.normal(32) for i in range(3)}
        ),
        "expected norm_before_fc (input_norm) or fc_norm",
    ),
    "fc_norm-two": (
        lambda t: t.tensors.update({f"fc_norm.{i}.weight": t.normal(32) for i in range(2)}),
        "missing tensor fc_norm.2.weight",
    ),
    "mla": (put("midlayer.self_attn.kv_a_proj_with_mqa.weight", lambda t: t.normal(8, 64)), "an MLA draft"),
    "p-eagle": (put("mask_hidden", lambda t: t.normal(1, 96)), "a parallel-drafting head"),
    "moe": (put("midlayer.mlp.experts.0.up_proj.weight", lambda t: t.normal(8, 32)), "a mixture-of-experts draft"),
    "mtp": (put("eh_proj.weight", lambda t: t.normal(32, 64)), "next-token-prediction"),
}


@pytest.mark.parametrize(("spoil", "named"), TENSORS.values(), ids=TENSORS.keys())
def test_tensors(toy, target, spoil, named):
    spoil(toy)
    refused(toy, target, named)


def test_eagle_1_head(toy, target):
    toy.rename("^midlayer", "layers.0")
    toy.config["architectures"] = ["LlamaForCausalLM"]
    for name in (
        "layers.0.hidden_norm.weight",
        "layers.0.input_layernorm.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    ):
        del toy.tensors[name]
    toy.tensors |= {"fc.weight": toy.normal(32, 64), "fc.bias": toy.normal(32)}
    toy.tensors |= {
        f"layers.0.self_attn.{n}_proj.weight": toy.normal(rows, 32) for n, rows in (("q", 32), ("k", 16), ("v", 16))
    }
    refused(toy, target, "an EAGLE-1 or EAGLE-2 head")


D2T = {
    "absolute": (lambda d, t: (d + torch.arange(40), t), "absolute target ids that t2d marks"),
    "absolute-alone": (lambda d, t: (d + torch.arange(40), None), "d2t: expected"),
    "range": (
        lambda d, t: (d.index_fill(0, torch.tensor([39]), 500), None),
        "d2t[39]: expected 39 + d2t[39] in 0..127, got 500",
    ),
    "negative": (lambda d, t: (d.index_fill(0, torch.tensor([0]), -1), None), "d2t[0]"),
    "twice": (lambda d, t: (d.index_fill(0, torch.tensor([1]), int(d[0]) - 1), None), "a different target id for each"),
    "t2d-other": (lambda d, t: (d, t.roll(1)), "t2d contradicts d2t"),
    "t2d-count": (lambda d, t: (d, ~t), "t2d: expected 40 target ids marked"),
    "t2d-shape": (lambda d, t: (d, t[:-1]), "t2d: expected"),
    "t2d-values": (lambda d, t: (d, t.long() * 7), "t2d: expected only 0 and 1"),
    "float": (lambda d, t: (d.float(), t), "d2t: expected dtype I64 or I32, got F32"),
    "short": (lambda d, t: (d[:-1], t), "d2t: expected shape [40], got [39]"),
    "2d": (lambda d, t: (d[None], t), "d2t: expected"),
    "extreme": (lambda d, t: (d.index_fill(0, torch.tensor([3]), 2**63 - 1), None), "d2t[3]"),
}


@pytest.mark.parametrize(("spoil", "named"), D2T.values(), ids=D2T.keys())
def test_d2t(toy, target, spoil, named):
    d2t, t2d = spoil(toy.tensors["d2t"], toy.tensors["t2d"])
    toy.tensors.pop("t2d")
    toy.tensors |= {"d2t": d2t} | ({} if t2d is None else {"t2d": t2d})
    refused(toy, target, named, error=CheckpointError)


def test_d2t_low_absolute_without_t2d_is_refused(toy, target):
    toy.tensors |= {"d2t": torch.arange(40) * 2}  # every id + index is in range, and both readings are possible
    del toy.tensors["t2d"]
    refused(toy, target, "they look like absolute ids")


def test_d2t_with_increasing_differences_is_settled_by_t2d(toy, target):
    """Every third id: strictly increasing differences, which t2d proves to be differences."""
    ids = torch.arange(40) * 3
    toy.tensors |= {"d2t": ids - torch.arange(40), "t2d": torch.zeros(128, dtype=torch.bool).index_fill_(0, ids, True)}
    assert torch.equal(load(toy.write(), target=target).weights.d2t + torch.arange(40), ids)


def test_int32_d2t_is_exact(toy, target):
    toy.tensors["d2t"] = toy.tensors["d2t"].int()
    assert load(toy.write(), target=target).weights.d2t.dtype is torch.int64


def test_head_of_another_target(toy, make_target):
    refused(toy, make_target(hidden=48), "eagle_aux_hidden_state_layer_ids", "expected 2 ids")
    refused(toy, make_target(hidden=40), "multiple of the target's hidden size 40", "the head of another target?")


def test_target_too_wide_to_share_its_embedding(make_toy, make_target):
    toy = make_toy(target_hidden=48)
    del toy.tensors["embed_tokens.weight"]
    refused(toy, make_target(hidden=48), "missing tensor embed_tokens.weight: the target's has width 48")


def test_shared_tensors_need_the_target(toy):
    del toy.tensors["embed_tokens.weight"]
    refused(toy, None, "missing tensor embed_tokens.weight", "pass target=")
    assert examine(toy.folder).absent == ("embed_tokens",)


def test_pickle_is_refused_with_its_conversion(toy, target):
    folder = toy.write()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even looked at")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin") as caught:
        load(folder, target=target)
    torch.save(toy.tensors, folder / "pytorch_model.bin")
    command = shlex.split(str(caught.value)[str(caught.value).index("python -c") :])
    subprocess.run([sys.executable, *command[1:]], cwd=folder, check=True, timeout=60)
    assert torch.equal(load(folder, target=target).weights.fc, toy.tensors["fc.weight"])


FILES = {
    "no-config": (lambda f: (f / "config.json").unlink(), "expected config.json"),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), "expected model.safetensors"),
    "json": (lambda f: (f / "config.json").write_text("{"), "expected valid JSON"),
    "json-list": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object, got list"),
    "json-twice": (lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}'), 'the key "a" twice'),
    "json-bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}\x00"), "expected valid JSON"),
    "json-deep": (lambda f: (f / "config.json").write_text("[" * 60000), "expected valid JSON"),
    "json-digits": (
        lambda f: (f / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}"),
        "expected valid JSON",
    ),
    "json-long": (
        lambda f: (f / "config.json").write_text('{"a": "' + "x" * 2**16 + '"}'),
        "config.json: expected at most 65536 bytes, got 655",
    ),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-7]),
        "expected a whole safetensors file",
    ),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "expected a whole safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "expected a whole safetensors file"),
    "index-escape": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../x.safetensors"}}'),
        "weight_map",
    ),
    "index-empty": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "weight_map: expected an object"),
    "index-lies": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "model.safetensors"}}'),
        "unlisted",
    ),
    "modelopt-quantised": (
        lambda f: (f / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP4"}}'),
        "quant_algo",
    ),
}


@pytest.mark.parametrize(("spoil", "named"), FILES.values(), ids=FILES.keys())
def test_files(toy, target, spoil, named):
    spoil(toy.write())
    with pytest.raises(EaglexError) as caught:
        load(toy.folder, target=target)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("path", "named"), [("nowhere", "neither"), ("/nowhere/at/all", "neither"), (__file__, "got a file")]
)
def test_no_such_checkpoint(path, named):
    with pytest.raises(CheckpointError, match=named):
        load(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "x"}, "vocab_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_target_config(toy, make_target, change, named):
    refused(toy, make_target(**change), "target", named)


def test_target_without_an_embedding(toy, target):
    save_file({"other.weight": torch.zeros(1)}, target / "model.safetensors")
    del toy.tensors["embed_tokens.weight"]
    refused(toy, target, "embed_tokens.weight of the target", "model.embed_tokens.weight")


def test_target_with_a_packed_head(toy, target):
    packed = {
        "model.embed_tokens.weight": torch.zeros(128, 32, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(128, 32, dtype=torch.uint8),
    }
    save_file(packed, target / "model.safetensors")
    for name in ("lm_head.weight", "d2t", "t2d"):
        del toy.tensors[name]
    toy.config["draft_vocab_size"] = 128
    refused(toy, target, "lm_head.weight: expected dtype")


def test_checks_read_no_weights(toy, target, monkeypatch):
    """Everything but the two small vocabulary maps is judged by its header."""
    read = TensorInfo.read
    monkeypatch.setattr(
        TensorInfo, "read", lambda info: read(info) if info.name in ("d2t", "t2d") else pytest.fail(f"{info} was read")
    )
    assert examine(toy.write(), target=target).config.hidden_size == 32
    toy.tensors["embed_tokens.weight"] = torch.zeros(128, 31, dtype=torch.bfloat16)
    refused(toy, target, "embed_tokens.weight: expected shape [128, 32], got [128, 31]")


def test_override_through_a_value_is_refused(toy, target):
    refused(toy, target, "overrides: hidden_size.x", overrides={"hidden_size.x": 1}, error=ConfigError)


def test_mrope_is_text_only(toy, target):
    toy.config["rope_scaling"] = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]}
    loaded = load(toy.write(), target=target)
    assert loaded.config.rope.scaling.value == "none"
    assert "text only" in loaded.report


ROPE_LOADS = {
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        ("llama3", 8.0, 8192),
    ),
    "yarn-old": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        ("yarn", 4.0, 1024),
    ),
    "yarn-no-original": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("yarn", 4.0, 4096)),
    "yarn-no-factor": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}},
        ("yarn", 4.0, 1024),
    ),
    "linear-v5": (
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ("linear", 2.0, 0),
    ),
    "both": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ("linear", 2.0, 0),
    ),
    "default-and-scaling-null": ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, ("none", 1.0, 0)),
}


@pytest.mark.parametrize(("change", "expected"), ROPE_LOADS.values(), ids=ROPE_LOADS.keys())
def test_rope_loads(toy, target, change, expected):
    toy.config |= change
    rope = load(toy.write(), target=target).config.rope
    assert (rope.scaling.value, rope.factor, rope.original_max_position_embeddings) == expected


def test_partial_rotary(toy, target):
    toy.config["partial_rotary_factor"] = 0.5
    assert load(toy.write(), target=target).config.rotary_dim == 4


def test_written_json_is_what_was_read(toy, target):
    """The toy itself is a valid checkpoint: what the tests above refuse is their one change."""
    assert json.loads((toy.write() / "config.json").read_text()) == toy.config
    load(toy.folder, target=target)
    load(toy.folder)
