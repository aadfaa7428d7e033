"""Every public dialect loads to the same tensors and the same config as the one that it was written from."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eaglex.checkpoint import load
from eaglex.config import AuxNorm, EmbeddingNorm, NextHidden, Residual
from eaglex.dialects import Dialect
from eaglex.errors import CheckpointError, ConfigError


def same_weights(a, b):
    left, right = dict(a.weights.named()), dict(b.weights.named())
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_specforge(toy, target):
    loaded = load(toy.write(), target=target)
    assert loaded.facts.dialect is Dialect.SPECFORGE
    assert torch.equal(loaded.weights.layers[0].q_proj, toy.tensors["midlayer.self_attn.q_proj.weight"])
    assert torch.equal(loaded.weights.embed_tokens, toy.tensors["embed_tokens.weight"])
    assert torch.equal(loaded.weights.d2t, toy.tensors["d2t"])
    assert loaded.weights.fc.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("prefix", "eagle", "architecture", "dialect"),
    [
        ("layers.0.", None, "LlamaForCausalLMEagle3", Dialect.SGLANG),
        (
            "layers.0.",
            {
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_aux_hidden_state": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "eagle_aux_hidden_state_layer_ids": [],
            },
            "LlamaForCausalLMEagle3",
            Dialect.MODELOPT,
        ),
        ("layers.0.", None, "LlamaForCausalLM", Dialect.SGLANG),
    ],
)
def test_layers(make_toy, target, prefix, eagle, architecture, dialect):
    origin = load(make_toy("origin").write(), target=target)
    toy = make_toy()
    toy.rename(r"^midlayer\.", prefix)
    toy.config["architectures"] = [architecture]
    if eagle is not None:
        toy.config["eagle_config"] = eagle | {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    loaded = load(toy.write(), target=target)
    assert loaded.facts.dialect is dialect
    assert loaded.config == origin.config
    assert same_weights(loaded, origin)


def test_automodel_with_what_it_copies_from_the_target(make_toy, target):
    origin = load(make_toy("origin").write(), target=target)
    toy = make_toy()
    toy.rename(r"^midlayer\.", "layers.0.")
    toy.rename(r"^(layers|fc|norm|embed_tokens)\.", r"model.\1.")
    toy.config |= {
        "architectures": ["LlamaEagle3DraftModel"],
        "num_hidden_layers": 12,
        "model_type": "qwen3",
        "sliding_window": 128,
        "quantization_config": {"quant_method": "fp8"},
        "layer_types": ["sliding_attention", "full_attention"],
        "target_hidden_size": 32,
        "tie_word_embeddings": True,
    }
    loaded = load(toy.write(), target=target)
    assert loaded.facts.dialect is Dialect.AUTOMODEL
    assert loaded.config == origin.config
    assert same_weights(loaded, origin)
    assert "num_hidden_layers=12" in loaded.report
    assert "sliding_window=128" in loaded.report


def test_speculators(make_toy, target):
    origin = load(make_toy("origin").write(), target=target)
    toy = make_toy()
    toy.rename(r"^midlayer\.", "layers.0.")
    toy.tensors["verifier_lm_head.weight"] = toy.normal(128, 32)
    toy.tensors["verifier_norm.weight"] = toy.normal(32)
    toy.nest()
    loaded = load(toy.write(), target=target)
    assert loaded.facts.dialect is Dialect.SPECULATORS
    assert loaded.config.residual is Residual.NORMED
    assert same_weights(loaded, origin)
    assert "verifier_lm_head.weight" in loaded.report


@pytest.mark.parametrize(
    "names",
    [
        ("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"),
        ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"),
    ],
)
@pytest.mark.parametrize("flag", ["fc_norm", "use_aux_norm", None])
def test_eagle_3_1(toy, target, names, flag):
    gammas = [toy.normal(32) for _ in names]
    toy.tensors |= dict(zip(names, gammas, strict=True))
    toy.config |= {"norm_output": True} | ({flag: True} if flag else {})
    loaded = load(toy.write(), target=target)
    assert loaded.config.aux_norm is AuxNorm.EACH
    assert loaded.config.next_hidden is NextHidden.NORMED
    assert all(torch.equal(a, b) for a, b in zip(loaded.weights.aux_norms, gammas, strict=True))
    assert ("fc_norm is absent" in loaded.report) == (flag is None)


def test_norm_before_fc(toy, target):
    toy.tensors["input_norm.weight"] = toy.normal(96)
    toy.config["norm_before_fc"] = True
    loaded = load(toy.write(), target=target)
    assert loaded.config.aux_norm is AuxNorm.WHOLE
    assert torch.equal(loaded.weights.aux_norms[0], toy.tensors["input_norm.weight"])


def test_no_norm_of_the_embedding(toy, target):
    del toy.tensors["midlayer.input_layernorm.weight"]
    toy.config["eagle_config"] = {"use_input_layernorm_in_first_layer": False}
    loaded = load(toy.write(), target=target)
    assert loaded.config.embedding_norm is EmbeddingNorm.NONE
    assert loaded.weights.layers[0].input_layernorm is None


def test_two_layers(toy, target):
    toy.rename(r"^midlayer\.", "layers.0.")
    toy.add_layer()
    loaded = load(toy.write(), target=target)
    assert loaded.config.num_layers == 2
    assert loaded.weights.layers[1].hidden_norm is None
    assert loaded.weights.layers[1].q_proj.shape == (32, 32)


@pytest.mark.parametrize("count", [40, 36, 0])
def test_num_hidden_layers_is_the_tensors(toy, target, count):
    toy.config["num_hidden_layers"] = count
    loaded = load(toy.write(), target=target)
    assert loaded.config.num_layers == 1
    assert f"num_hidden_layers={count}" in loaded.report


def test_embedding_and_head_of_the_target(toy, make_target):
    target = make_target(tied=True)
    del toy.tensors["embed_tokens.weight"], toy.tensors["lm_head.weight"], toy.tensors["d2t"], toy.tensors["t2d"]
    toy.config["draft_vocab_size"] = 128
    loaded = load(toy.write(), target=target)
    assert torch.equal(loaded.weights.embed_tokens, loaded.weights.lm_head)
    assert loaded.facts.borrowed == ("embed_tokens", "lm_head")
    assert "lm_head is the target's" in loaded.report


def test_own_tied_head(toy, target):
    for name in ("lm_head.weight", "d2t", "t2d"):
        del toy.tensors[name]
    toy.config |= {"draft_vocab_size": 128, "tie_word_embeddings": True}
    loaded = load(toy.write(), target=target)
    assert torch.equal(loaded.weights.lm_head, toy.tensors["embed_tokens.weight"])


@pytest.mark.parametrize("key", ["truncated_vocab_size", None])
def test_draft_vocabulary_under_another_name(toy, target, key):
    del toy.config["draft_vocab_size"]
    if key:
        toy.config[key] = 40
    assert load(toy.write(), target=target).config.draft_vocab_size == 40


def test_wider_target(make_toy, make_target):
    toy = make_toy(target_hidden=48)
    loaded = load(toy.write(), target=make_target(hidden=48))
    assert (loaded.config.target_hidden_size, loaded.config.num_aux, loaded.config.aux_width) == (48, 3, 144)


def test_nested_text_config_of_a_multimodal_target(toy, make_target):
    target = make_target()
    text = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 5}})
    )
    del toy.tensors["embed_tokens.weight"]
    embed = toy.normal(128, 32)
    save_file(
        {"language_model.model.embed_tokens.weight": embed, "vision.embed_tokens.weight": toy.normal(3, 3)},
        target / "model.safetensors",
    )
    loaded = load(toy.write(), target=target)
    assert torch.equal(loaded.weights.embed_tokens, embed)


def test_shards(toy, target):
    folder = toy.write()
    names = sorted(toy.tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: toy.tensors[n].contiguous() for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    loaded = load(folder, target=target)
    assert torch.equal(loaded.weights.fc, toy.tensors["fc.weight"])


def test_dtype_converts(toy, target):
    with pytest.raises(ConfigError, match=r"^dtype: expected torch.bfloat16, .* got torch.int8$"):
        load(toy.write(), target=target, dtype=torch.int8)
    loaded = load(toy.write(), target=target, dtype=torch.float32)
    assert all(t.dtype is torch.float32 for name, t in loaded.weights.named() if name != "d2t")
    assert torch.equal(loaded.weights.fc, toy.tensors["fc.weight"].float())


def test_quantised_target_is_not_inherited(toy, make_target):
    loaded = load(toy.write(), target=make_target(quantization_config={"quant_method": "fp8"}))
    assert loaded.weights.fc.dtype is torch.bfloat16
    assert "fp8" in loaded.report


def test_context_is_the_targets(toy, make_target):
    toy.config["max_position_embeddings"] = 2048
    loaded = load(toy.write(), target=make_target(max_position_embeddings=131072))
    assert loaded.config.max_positions == 131072
    assert "max_position_embeddings=2048" in loaded.report
    assert load(toy.write(), target=make_target(), max_positions=777).config.max_positions == 777


def test_overrides_load_a_wrong_config(toy, target):
    toy.config["head_dim"] = 80
    loaded = load(
        toy.write(),
        target=target,
        overrides={"head_dim": 8, "eagle_config.eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    )
    assert loaded.config.head_dim == 8
    assert loaded.aux.output_ids == (1, 2, 3)


def test_a_misspelt_switch_is_reported(toy, target):
    toy.config["norm_before_residul"] = True
    assert "norm_before_residul is not a field that eaglex knows: meant as norm_before_residual?" in (
        load(toy.write(), target=target).report
    )


def test_first_tokens_as_draft_vocabulary(toy, target):
    """Differences of zero are no identity where the draft has fewer tokens."""
    toy.tensors |= {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": torch.arange(128) < 40}
    assert torch.equal(load(toy.write(), target=target).weights.d2t, torch.zeros(40, dtype=torch.int64))


def test_target_that_says_nothing_of_tying(toy, make_target):
    target = make_target(tied=True)
    sizes = json.loads((target / "config.json").read_text())
    del sizes["tie_word_embeddings"]
    (target / "config.json").write_text(json.dumps(sizes))
    for name in ("lm_head.weight", "d2t", "t2d"):
        del toy.tensors[name]
    toy.config["draft_vocab_size"] = 128
    loaded = load(toy.write(), target=target)
    assert "lm_head is the target's (model.embed_tokens.weight" in loaded.report


def test_layers_after_the_first_must_be_regular(toy, target):
    toy.rename(r"^midlayer\.", "layers.0.")
    toy.add_layer()
    toy.config["eagle_config"] = {"next_layer_regular": False}
    with pytest.raises(ConfigError, match=r"eagle_config\.next_layer_regular: expected true for a draft of 2 layers"):
        load(toy.write(), target=target)


def test_dtype_is_the_tensors(toy, target):
    toy.config["torch_dtype"] = "float16"
    loaded = load(toy.write(), target=target)
    assert loaded.weights.fc.dtype is torch.bfloat16
    assert 'torch_dtype="float16" of the config is ignored' in loaded.report


def test_refusal_names_every_sign(toy, target):
    """A family is refused with all that speaks for it, and unknown tensors are all named."""
    toy.config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512}
    toy.tensors["midlayer.self_attn.kv_b_proj.weight"] = toy.normal(8, 8)
    with pytest.raises(CheckpointError) as caught:
        load(toy.write(), target=target)
    for sign in ("Eagle3DeepseekV2ForCausalLM", "kv_lora_rank=512", "tensor midlayer.self_attn.kv_b_proj.weight"):
        assert sign in str(caught.value)


def test_unknown_tensors_are_all_named(toy, target):
    toy.tensors |= {f"midlayer.self_attn.{n}_norm.weight": toy.normal(8) for n in "qk"}
    with pytest.raises(
        CheckpointError, match=r"k_norm\.weight, midlayer\.self_attn\.q_norm\.weight: unexpected tensor"
    ):
        load(toy.write(), target=target)


def test_quantised_draft_is_refused_by_its_scheme(toy, target):
    """Not by the names of its scales, which are unknown tensors as well."""
    toy.config["quantization_config"] = {"quant_method": "awq"}
    toy.tensors["midlayer.mlp.up_proj.weight_scale"] = toy.normal(1)
    with pytest.raises(ConfigError, match=r'quant_method: expected compressed-tensors.*got "awq"'):
        load(toy.write(), target=target)


def test_report_is_logged(toy, target, caplog):
    with caplog.at_level("INFO", logger="eaglex"):
        loaded = load(toy.write(), target=target)
    assert loaded.report in caplog.text
