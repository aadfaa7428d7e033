"""The pair of models in models/tiny: files, sizes, tokenizer, and its accept length over plain PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"
sys.path.insert(0, str(ROOT / "tools"))

transformers = pytest.importorskip("transformers")
from tiny import evaluate  # noqa: E402

AUX_LAYER_IDS = [1, 3, 4]


@pytest.fixture(scope="module")
def target():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="module")
def prompts():
    return json.loads((TINY / "prompts.json").read_text())


@pytest.fixture(scope="module")
def figures():
    return json.loads((TINY / "figures.json").read_text())


@pytest.fixture(scope="module")
def head(target):
    return evaluate.PlainHead(TINY / "draft", target.model.embed_tokens.weight.detach())


def test_pair_is_small():
    size = sum(p.stat().st_size for part in ("target", "draft") for p in (TINY / part).iterdir())
    assert size < 24_000_000


def test_target_splits_over_eight_ranks(target):
    config = target.config
    assert type(target).__name__ == "LlamaForCausalLM"
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (8, 8, 8)
    assert config.head_dim == 64
    for size in (config.hidden_size, config.intermediate_size, config.vocab_size):
        assert size % 8 == 0


def test_tokenizer_round_trip(tokenizer, target, prompts):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == target.config.vocab_size
    texts = [p["prompt"] for p in prompts] + ["  two\n\n\tx = 1234567  # naïve, 日本語, \U0001f40d\r\n", " "]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 1
        assert tokenizer.decode(ids[1:]) == text
        # Padding's id never stands for text, so generate(pad_token_id=0) without a mask hides nothing.
        assert 0 not in ids


def test_draft_file_is_specforge(target):
    config = json.loads((TINY / "draft" / "config.json").read_text())
    hidden, inner, draft_vocab = config["hidden_size"], 8 * 64, config["draft_vocab_size"]
    wide = config["intermediate_size"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == AUX_LAYER_IDS
    assert hidden == target.config.hidden_size
    assert config["vocab_size"] == target.config.vocab_size
    expected = {
        "fc.weight": [hidden, 3 * hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [draft_vocab, hidden],
        "d2t": [draft_vocab],
        "t2d": [config["vocab_size"]],
        **{f"midlayer.{n}.weight": [hidden] for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"midlayer.self_attn.{n}_proj.weight": [inner, 2 * hidden] for n in "qkv"},
        "midlayer.self_attn.o_proj.weight": [hidden, inner],
        "midlayer.mlp.gate_proj.weight": [wide, hidden],
        "midlayer.mlp.up_proj.weight": [wide, hidden],
        "midlayer.mlp.down_proj.weight": [hidden, wide],
    }
    with safe_open(TINY / "draft" / "model.safetensors", framework="pt") as stored:
        assert {n: stored.get_slice(n).get_shape() for n in stored.keys()} == expected  # noqa: SIM118
        types = {n: stored.get_tensor(n).dtype for n in stored.keys()}  # noqa: SIM118
        ids = stored.get_tensor("d2t") + torch.arange(draft_vocab)
        in_draft = stored.get_tensor("t2d")
    assert types.pop("d2t") == torch.int64
    assert types.pop("t2d") == torch.bool
    assert set(types.values()) == {torch.bfloat16}
    assert draft_vocab < config["vocab_size"]
    assert torch.equal(ids, in_draft.nonzero().squeeze(-1))


@torch.no_grad()
def test_plain_head_is_the_head_that_was_trained(target, head):
    """The unrolled training form and the chain of the measurement draft the same tokens."""
    from tiny import files
    from tiny.model import Shape, Target

    cpu, shape = torch.device("cpu"), Shape()
    trained, ids = files.read_draft(TINY / "draft", shape, cpu)
    own: Target = files.read_target(TINY / "target", shape, cpu)
    tokens = torch.randint(3, shape.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    result = target(input_ids=tokens, output_hidden_states=True)
    hidden, aux = own(tokens)
    torch.testing.assert_close(own.lm_head(hidden), result.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(aux, torch.cat([result.hidden_states[i + 1] for i in AUX_LAYER_IDS], dim=-1))
    chain, _ = head.extend(aux[0, :39], tokens[0, 1:], [], 5)
    text = torch.cat([tokens, torch.tensor([chain])], dim=1)
    rows = torch.cat([aux, torch.zeros(1, 5, aux.shape[-1])], dim=1)
    unrolled = trained.unroll(rows, own.model.embed_tokens(text), 5)
    assert [int(ids[step[0, 38].argmax()]) for step in unrolled] == chain


def test_accept_length_and_losslessness(target, tokenizer, head, prompts, figures):
    """Measure the short form of the figures anew, and compare the text with the target's own generate()."""
    quick = figures["quick"]
    chosen = [tokenizer(p["prompt"])["input_ids"] for p in prompts[: quick["prompts"]]]
    found = evaluate.measure(target, head, chosen, new_tokens=quick["new_tokens"])
    for prompt, output in zip(chosen, found.outputs, strict=True):
        ids = torch.tensor([prompt])
        alone = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=quick["new_tokens"])
        assert output == alone[0, len(prompt) :].tolist()
    assert found.acceptance == sorted(found.acceptance, reverse=True)
    # Other CPUs round differently and a near tie may fall the other way; a wrong head moves this by far more.
    assert found.accept_length == pytest.approx(quick["accept_length"], abs=0.15)


def test_figures_pass_the_bar(figures):
    assert figures["accept_length"] >= 3.0
    assert min(figures["distinct_4_per_output"], figures["distinct_4_pooled"]) >= 0.5


def test_wrong_aux_layers_lower_the_accept_length(target, tokenizer, head, prompts):
    """The measurement can fail: with another reading of the layer ids the chain is refused far more often."""
    chosen = [tokenizer(p["prompt"])["input_ids"] for p in prompts[:2]]
    right = evaluate.measure(target, head, chosen, new_tokens=48)
    wrong = evaluate.PlainHead(TINY / "draft", head.embed_tokens)
    wrong.aux_layer_ids = [i + 2 for i in AUX_LAYER_IDS]
    assert evaluate.measure(target, wrong, chosen, new_tokens=48).accept_length < right.accept_length - 0.3


def test_bits_per_byte(target, tokenizer, prompts, figures):
    texts = [p["prompt"] + p["continuation"] for p in prompts]
    assert evaluate.bits_per_byte(target, tokenizer, texts) == pytest.approx(
        figures["bits_per_byte_of_prompts_json"], abs=0.005
    )
