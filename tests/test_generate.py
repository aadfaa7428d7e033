"""`eaglex generate`: its options, its output, its check, and the refusal of bad input."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import hf_pair
import pytest
import safetensors.torch
import torch

from eaglex import generate
from eaglex.cli import main
from eaglex.hosts import hf_target, plain
from eaglex.text_stream import TextStream

TEXT = "the cat sees a house under"
KEYS = {
    "text", "accept_length", "acceptance_per_position", "tokens_per_second", "tokens_per_second_without", "phases_us",
    "lossless",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hf_pair.save_pair(tmp_path_factory.mktemp("pair"))


def command(pair, *options, prompt=TEXT):
    asked = [] if prompt is None else ["--prompt", prompt]
    target = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    return main(["generate", *target, *asked, "--max-new-tokens", "20", *options])


def result(capsys):
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


SHAPES = {
    "chain": ([], 5, 1, 6),
    "tree": (["--topk", "4", "--num-steps", "3"], 3, 4, 16),
    "wide": (["--topk", "3", "--num-steps", "2", "--num-draft-tokens", "7"], 2, 3, 7),
    "plain": (["--num-steps", "0"], 0, 1, 1),
}


@pytest.mark.parametrize(("options", "steps", "topk", "count"), SHAPES.values(), ids=SHAPES.keys())
def test_json_and_check(pair, capsys, options, steps, topk, count):
    assert command(pair, "--json", "--check", *options) == 0
    found = result(capsys)
    assert found.keys() >= KEYS
    assert found["lossless"] is True
    assert (found["num_steps"], found["topk"], found["num_draft_tokens"]) == (steps, topk, count)
    assert len(found["acceptance_per_position"]) == steps
    assert found["accept_length"] == pytest.approx(1 + sum(found["acceptance_per_position"]))
    assert len(found["tokens"]) == 20
    assert len(found["text"].split()) == 20
    assert found["tokens_per_second"] > 0
    assert found["tokens_per_second_without"] > 0
    assert found["phases_us"].keys() == {"tree", "verify", "accept", "compact", "host", "draft"}
    assert all(us > 0 for us in found["phases_us"].values())


def test_the_text_streams_and_the_figures_follow(pair, capsys, monkeypatch):
    assert command(pair, "--json") == 0
    expected = result(capsys)
    pieces = []
    monkeypatch.setattr(generate, "_write", pieces.append)
    assert command(pair) == 0
    assert pieces[0] == TEXT
    assert len(pieces) > 10  # not all at once
    assert "".join(pieces) == TEXT + expected["text"] + "\n"
    figures = capsys.readouterr().out
    for name in ("accept length", "acceptance", "tokens per second", "ms per cycle", "ms for the prompt", "lossless"):
        assert f"\n{name} " in figures
    assert "yes: every token is the target's own choice (20 tokens, ended by max_new_tokens)" in figures


def test_no_baseline(pair, capsys):
    assert command(pair, "--json", "--no-baseline") == 0
    found = result(capsys)
    assert found["tokens_per_second_without"] is None
    assert found["lossless"] is None
    assert command(pair, "--no-baseline", "--check") == 0
    assert "yes: every token" in capsys.readouterr().out


@pytest.mark.parametrize("how", [[], ["--topk", "3"]], ids=["chain", "tree"])
def test_stop_below_changes_speed_alone(pair, capsys, how):
    texts = []
    for stop in ("0", "0.2", "0.999"):
        assert command(pair, "--json", "--check", "--stop-below", stop, *how) == 0
        found = result(capsys)
        assert found["lossless"] is True
        texts.append(found["text"])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("how", [[], ["--topk", "3"], ["--sampling", "rejection"]], ids=["chain", "tree", "rejection"])
def test_sampling_repeats_with_its_seed(pair, capsys, how):
    texts = []
    for seed in ("4", "4", "5"):
        assert command(pair, "--json", "--temperature", "1.0", "--seed", seed, *how) == 0
        found = result(capsys)
        assert found["lossless"] is None
        texts.append(found["text"])
    assert texts[0] == texts[1] != texts[2]


def test_check_fails_on_another_token(pair, capsys, monkeypatch):
    own = plain.generate

    def other(*arguments, **options):
        tokens = own(*arguments, **options)
        return [*tokens[:7], (tokens[7] + 1) % 40, *tokens[8:]]

    monkeypatch.setattr(plain, "generate", other)
    assert command(pair, "--check") == 1
    captured = capsys.readouterr()
    assert "lossless           NO" in captured.out
    assert "error: not lossless: token 7: expected [" in captured.err
    assert "the target's two best logits are" in captured.err


def test_a_difference_from_the_timed_loop_is_told(pair, capsys, monkeypatch):
    own = plain.decode

    def other(*arguments, **options):
        output = own(*arguments, **options)
        return dataclasses.replace(output, tokens=[*output.tokens[:-1], 0])

    monkeypatch.setattr(plain, "decode", other)
    assert command(pair, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["lossless"] is False
    assert "warning: not lossless" in captured.err
    assert command(pair, "--check") == 1


def test_prompt_from_a_file(pair, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text(TEXT)
    assert command(pair, "--json", "--prompt-file", str(tmp_path / "prompt.txt"), prompt=None) == 0
    assert result(capsys)["prompt"] == TEXT


def test_prompt_from_standard_input(pair, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    assert command(pair, "--json", "--prompt-file", "-", prompt=None) == 0
    assert result(capsys)["prompt"] == TEXT


def run_piped(pair, **stdin):
    """The command as a program of its own."""
    options = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--max-new-tokens", "3", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = [sys.executable, "-m", "eaglex", "generate", *options]
    return subprocess.run(process, capture_output=True, text=True, timeout=90, check=False, env=environment, **stdin)


def test_a_piped_prompt_is_taken(pair):
    found = run_piped(pair, input=TEXT)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["prompt"] == TEXT


def test_a_silent_pipe_is_not_waited_for(pair):
    reader, writer = os.pipe()
    try:
        found = run_piped(pair, stdin=reader)
    finally:
        os.close(reader)
        os.close(writer)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["prompt"] == generate.PROMPT


def test_characters_of_several_tokens_come_whole():
    class Bytes:
        def decode(self, tokens, *, skip_special_tokens):
            assert skip_special_tokens
            return bytes(tokens).decode(errors="replace")

    pieces = []
    stream = TextStream(Bytes(), list(b"hello "), pieces.append)
    for token in "né→x".encode():
        stream.put([token])
    stream.end()
    assert [piece for piece in pieces if piece] == ["n", "é", "→", "x", "\n"]
    assert stream.text == "né→x"


def edited(pair, folder, part, **fields):
    """A copy of the pair in which `part`'s config.json has other fields."""
    for name in ("target", "draft"):
        (folder / name).mkdir()
        for file in (pair / name).iterdir():
            (folder / name / file.name).symlink_to(file)
    path = folder / part / "config.json"
    config = json.loads(path.read_text()) | fields
    path.unlink()
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture
def _nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(hf_target, "load_model", lambda *_, **__: pytest.fail("the target was loaded"))


BAD_OPTIONS = {
    "no-steps": (["--num-steps", "-1"], "num_steps: expected in 0..16, got -1"),
    "too-deep": (["--num-steps", "17"], "num_steps: expected in 0..16, got 17"),
    "no-branch": (["--topk", "0"], "topk: expected in 1..16, got 0"),
    "few-nodes": (["--num-draft-tokens", "3"], "num_draft_tokens: expected in 6..6 for num_steps=5, topk=1, got 3"),
    "stop-below": (["--stop-below", "1"], "stop_below: expected in [0, 1), got 1.0"),
    "no-nodes": (["--num-draft-tokens", "0"], "num_draft_tokens: expected >= num_steps + 1 = 6, got 0"),
    "more-nodes-than-candidates": (
        ["--topk", "2", "--num-steps", "1", "--num-draft-tokens", "9"],
        "num_draft_tokens: expected in 2..3",
    ),
    "no-tokens": (["--max-new-tokens", "0"], "max_new_tokens: expected >= 1, got 0"),
    "cold": (["--temperature", "-1"], "temperature: expected >= 0 and finite, got -1.0"),
    "rejection-greedy": (["--sampling", "rejection"], "temperature: expected > 0 with rejection sampling, got 0"),
    "rejection-tree": (
        ["--sampling", "rejection", "--temperature", "1", "--topk", "2"],
        "topk: expected 1 with rejection sampling, got 2",
    ),
    "check-sampled": (["--check", "--temperature", "1"], "check: expected temperature 0"),
    "device": (["--device", "tpu9"], "device: expected cpu, cuda or cuda:N, got tpu9"),
    "other-device": (["--device", "meta"], "device: expected cpu, cuda or cuda:N, got meta"),
    "seed": (["--seed", str(2**70)], f"seed: expected in 0..{2**63 - 1}, got {2**70}"),
    "alone-dedicated": (["--placement", "dedicated"], "placement: expected rank0 without torchrun, got dedicated"),
    "drafter-device": (["--drafter-device", "cpu"], "drafter_device: expected none with placement rank0, got cpu"),
    "hot-vocab": (["--hot-vocab=-5:r.json"], "hot_vocab: expected N >= 1, FILE or N:FILE, got '-5:r.json'"),
    "aux-beyond": (["--aux-layer-ids", "0,1,4"], "expected ids in 0..2"),
    "aux-count": (["--aux-layer-ids", "0,1"], "expected 3 aux layer ids"),
}


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options(pair, capsys, options, message):
    assert command(pair, *options) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("eaglex: error: ")
    assert message in captured.err


BAD_PROMPTS = {
    "empty": ("", "prompt: expected a text, got an empty one"),
    "no-tokens": (" ", "prompt: expected at least one token, got none"),
    "too-long": (
        "cat " * 160,
        "prompt: expected at most 159 tokens, so that one fits behind it",
    ),
}


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_bad_prompts(pair, capsys, prompt, message):
    assert command(pair, prompt=prompt) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_no_prompt_file(pair, capsys, tmp_path):
    assert command(pair, "--prompt-file", str(tmp_path / "none"), prompt=None) == 1
    assert "--prompt-file: expected a readable file in UTF-8, got" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert command(pair, "--prompt-file", str(tmp_path / "binary"), prompt=None) == 1
    assert "--prompt-file: expected a readable file in UTF-8, got" in capsys.readouterr().err


BAD_PAIRS = {
    "other-hidden": ("draft", {"target_hidden_size": 64}, "target_hidden_size"),
    "other-vocabulary": ("draft", {"vocab_size": 50}, "vocab_size"),
    "target-vocabulary": ("target", {"vocab_size": 64}, "vocab_size"),
    "unknown-target": ("target", {"model_type": "no-such-model"}, "target: expected a model folder or Hub id that"),
    "linear-attention": (
        "target",
        {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer_types: expected only full_attention, sliding_attention",
    ),
}


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(("part", "fields", "message"), BAD_PAIRS.values(), ids=BAD_PAIRS.keys())
def test_bad_pairs(pair, capsys, tmp_path, part, fields, message):
    assert command(edited(pair, tmp_path, part, **fields)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("eaglex: error: ")
    assert message in captured.err


def test_target_that_is_no_language_model(pair, capsys, tmp_path):
    """Its config reads, but there is no causal language model of that kind."""
    folder = edited(pair, tmp_path, "target", model_type="vit", num_hidden_layers=3)
    assert command(folder) == 1
    assert "eaglex: error: target" in capsys.readouterr().err


def test_target_with_a_tensor_missing(pair, capsys, tmp_path):
    """transformers would make up the weights that a file lacks."""
    folder = edited(pair, tmp_path, "target")
    path = folder / "target" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path.unlink()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    assert command(folder) == 1
    assert "expected all weights in" in capsys.readouterr().err


def test_target_with_a_tensor_of_another_shape(pair, capsys, tmp_path):
    folder = edited(pair, tmp_path, "target")
    path = folder / "target" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "model.layers.1.self_attn.q_proj.weight"
    rows, width = tensors[name].shape
    tensors[name] = tensors[name][1:].contiguous()
    path.unlink()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    assert command(folder) == 1
    assert f"target: {name}: expected shape [{rows}, {width}], got [{rows - 1}, {width}]" in capsys.readouterr().err


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_target_that_is_not_there(pair, capsys, tmp_path):
    assert main(["generate", "--target", str(tmp_path / "no"), "--draft", str(pair / "draft"), "--prompt", "x"]) == 1
    assert f"expected a model folder or Hub id, got {tmp_path / 'no'}: no such folder" in capsys.readouterr().err


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_what_is_wrong_with_a_targets_field_is_told(pair, capsys, tmp_path):
    """transformers names the field in one line and what is wrong with it in the next."""
    assert command(edited(pair, tmp_path, "target", num_attention_heads=7)) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "attention heads (7)" in error


def test_target_that_is_no_safetensors_file(pair, capsys, tmp_path):
    folder = edited(pair, tmp_path, "target")
    path = folder / "target" / "model.safetensors"
    path.unlink()
    path.write_bytes(b"x" * 100)
    assert command(folder) == 1
    assert "eaglex: error: " in capsys.readouterr().err


def test_half_a_pair(capsys):
    assert main(["generate", "--target", "somewhere"]) == 1
    assert "--target and --draft: expected both or neither, got target=somewhere, draft=None" in capsys.readouterr().err


def test_the_repositorys_pair_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "PAIR", tmp_path)
    assert main(["generate", "--prompt", "x"]) == 1
    assert "--target and --draft: expected both where the repository's pair is not at" in capsys.readouterr().err


def test_head_that_never_hits_is_warned_of(capsys, tmp_path):
    config = hf_pair.draft_config(draft_vocab_size=2)
    weights = hf_pair.draft_weights(config)
    text = plain.generate(hf_target.HookedTarget(hf_pair.target_model(), hf_pair.AUX), [0, 2, 4, 1, 8, 14], count=60)
    unused = [token for token in range(40) if token not in text][:2]
    weights.d2t.copy_(torch.tensor(unused) - torch.arange(2))
    pair = hf_pair.save_pair(tmp_path, config=config, weights=weights)
    assert command(pair, "--max-new-tokens", "60", "--json", "--check") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    expected = "accept length stays at 1.0 after 32 drafts: wrong head or wrong auxiliary layers?"
    assert found["warnings"] == [expected]
    assert captured.err == f"eaglex: warning: {expected}\n"


def test_the_demo(capsys):
    """What `make demo` runs: a chain of 5 on the built-in prompt."""
    assert main(["generate", "--check", "--json", "--prompt", generate.PROMPT]) == 0
    found = result(capsys)
    assert found["lossless"] is True
    assert found["accept_length"] >= 3.0
    assert len(found["tokens"]) > 64
    assert found["warnings"] == []


@pytest.mark.parametrize("options", [["--topk", "4", "--num-draft-tokens", "24"], ["--topk", "2", "--num-steps", "8"]])
def test_the_pair_with_trees(capsys, options):
    assert main(["generate", "--check", "--json", "--no-baseline", "--prompt", generate.PROMPT, *options]) == 0
    found = result(capsys)
    assert found["lossless"] is True
    assert found["accept_length"] >= 3.0


def test_the_pair_with_auxiliary_layers_in_the_wrong_order(capsys):
    """The silent mistake that costs people weeks: the text stays right, the accept length falls."""
    base = ["generate", "--check", "--json", "--no-baseline", "--prompt", generate.PROMPT]
    assert main(base) == 0
    right = result(capsys)
    assert main([*base, "--aux-layer-ids", "4,3,1"]) == 0
    wrong = result(capsys)
    assert wrong["text"] == right["text"]
    assert wrong["accept_length"] < right["accept_length"] - 1


def test_the_python_of_the_demo_page():
    page = (generate.PAIR.parent.parent / "docs" / "demo.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False, env=environment,
        cwd=generate.PAIR.parent.parent,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert float(found.stdout.split()[-1]) > 1
