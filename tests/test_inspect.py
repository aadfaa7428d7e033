"""`eaglex inspect` and the command line around it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eaglex import cli
from eaglex.checkpoint import examine, load
from eaglex.config import DraftConfig
from eaglex.inspect import cost
from eaglex.packed import DraftQuant, Precision
from eaglex.quantize import quantize

CASES = Path(__file__).parent / "cases"
DRAFT, TARGET = str(CASES / "C01_midlayer_d2t"), str(CASES / "_target")

# EAGLE-3 for Llama-3.1-8B: 374 million parameters per step, 749 MB in bf16.
LLAMA_8B = DraftConfig(
    hidden_size=4096,
    target_hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    draft_vocab_size=32000,
    max_positions=131072,
)


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_cost_of_a_known_draft():
    c = cost(LLAMA_8B, "BF16")
    assert c.step_bytes == pytest.approx(749e6, rel=0.002)
    assert c.floor_us(4.8) == pytest.approx(156, abs=0.5)
    assert c.fuse_bytes == 2 * 4096 * 3 * 4096
    assert c.embedding_bytes == 2 * 128256 * 4096
    assert c.kv_bytes_per_token == 2 * 2 * 8 * 128
    assert cost(LLAMA_8B, "F32").step_bytes == 2 * c.step_bytes


def test_cost_counts_the_tensors_that_are_loaded():
    facts = examine(DRAFT, target=TARGET)
    c = cost(facts.config, facts.dtype)
    tensors = {name: t for name, t in load(DRAFT, target=TARGET).weights.named() if name != "d2t"}
    assert c.parameters == sum(t.numel() for t in tensors.values())
    embedding = tensors.pop("embed_tokens")
    assert c.embedding_bytes == embedding.nbytes
    assert c.weights_bytes == sum(t.nbytes for t in tensors.values())
    assert c.step_bytes + c.fuse_bytes == c.weights_bytes + embedding[0].nbytes


def test_cost_by_precision():
    """FP8 a byte and 4 per row, INT4 half a byte and 2 per 128 inputs; fc, norms and embedding as they were."""
    plain = cost(LLAMA_8B, "BF16")
    heads = 32000 * 4096
    eight = cost(LLAMA_8B, "BF16", DraftQuant.parse("head=fp8"))
    assert plain.step_bytes - eight.step_bytes == 2 * heads - (heads + 4 * 32000)
    four = cost(LLAMA_8B, "BF16", DraftQuant.parse("head=int4"))
    rescored = 8 * 4096 * 2  # rows that a step reads again of those that the head was made from, all kept beside it
    assert plain.step_bytes - four.step_bytes == 2 * heads - (heads // 2 + 2 * 32000 * 32) - rescored
    assert four.weights_bytes - plain.weights_bytes == heads // 2 + 2 * 32000 * 32
    assert (plain.fuse_bytes, plain.embedding_bytes) == (four.fuse_bytes, four.embedding_bytes)
    assert plain.kv_bytes_per_token == four.kv_bytes_per_token
    every = cost(LLAMA_8B, "BF16", DraftQuant.every(Precision.INT4))
    assert every.step_bytes == pytest.approx(749e6 / 4 * 1.031, rel=0.002)


@pytest.mark.parametrize("word", ["fp8", "int4", "head=fp8,mlp=int4", "head=int4,qkv=fp8"])
def test_cost_counts_the_packed_tensors_that_are_made(word):
    quant = DraftQuant.parse(word)
    facts = examine(DRAFT, target=TARGET)
    made = quantize(load(DRAFT, target=TARGET).weights, quant)
    tensors = {name: t.nbytes for name, t in made.named() if name not in ("d2t", "embed_tokens")}
    assert cost(facts.config, facts.dtype, quant).weights_bytes == sum(tensors.values())


def test_report_by_precision(capsys):
    code, out, _ = run(capsys, "inspect", DRAFT, "--target", TARGET, "--bandwidth", "4.8", "--draft-quant", "mlp=int4")
    assert code == 0
    line = next(text for text in out.splitlines() if text.startswith("draft_quant"))
    assert line.startswith("draft_quant: mlp=int4; --draft-quant would read per step with none ")
    assert line.count(" us)") == 3
    options = ["--bandwidth", "2", "--draft-quant", "fp8", "--json"]
    code, out, _ = run(capsys, "inspect", DRAFT, "--target", TARGET, *options)
    found = json.loads(out)
    assert found["draft_quant"] == "head=int4,mlp=fp8,qkv=fp8,o=fp8"
    assert found["step_bytes"] == found["by_draft_quant"]["fp8"]["step_bytes"]
    assert found["step_floor_us"] == found["by_draft_quant"]["fp8"]["step_floor_us"]
    assert found["by_draft_quant"]["none"]["step_floor_us"] == found["by_draft_quant"]["none"]["step_bytes"] / 2e6


def test_report(capsys):
    code, out, _ = run(capsys, "inspect", DRAFT, "--target", TARGET, "--bandwidth", "4.8")
    assert code == 0
    for text in (
        "midlayer.*",
        "hidden 64",
        "draft 96",
        "capture_before",
        "default",
        "step floor",
        "KV 128 B per token",
    ):
        assert text in out


def test_json(capsys):
    code, out, _ = run(capsys, "inspect", DRAFT, "--target", TARGET, "--bandwidth", "2", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["dialect"] == "specforge"
    assert found["config"]["hidden_size"] == 64
    assert found["config"]["residual"] == "pre_norm"
    assert found["aux_layers"] == {
        "ids": [2, 4, 5],
        "convention": "capture_before",
        "origin": "default [2, N/2, N-3]",
        "output_ids": [1, 3, 4],
    }
    assert found["from_target"] == ["embed_tokens"]
    assert found["file_bytes"] == sum(t.nbytes for t in load_file(f"{DRAFT}/model.safetensors").values())
    assert found["step_floor_us"] == pytest.approx(found["step_bytes"] / 2e6)


def test_without_target(capsys):
    code, out, _ = run(capsys, "inspect", DRAFT, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["missing_without_target"] == ["embed_tokens"]
    assert found["aux_layers"]["output_ids"] is None
    assert found["step_floor_us"] is None


def test_aux_layers_by_option(capsys):
    options = ("--aux-layer-ids", "2,5,8", "--convention", "capture_before", "--json")
    _, out, _ = run(capsys, "inspect", DRAFT, "--target", TARGET, *options)
    assert json.loads(out)["aux_layers"]["output_ids"] == [1, 4, 7]


@pytest.mark.parametrize(
    ("path", "named"),
    [(str(CASES / "C43_renamed_tensor"), "hidden_norm"), ("nowhere", "neither"), ("", "got ''"),
     (str(CASES), "config.json")],
)  # fmt: skip
def test_an_error_is_one_line(capsys, path, named):
    code, out, err = run(capsys, "inspect", path, "--target", TARGET)
    assert code == 1
    assert out == ""
    assert err.startswith("eaglex: error: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["inspect"], ["inspect", DRAFT, "--bandwidth", "0"], ["inspect", DRAFT, "--bandwidth", "inf"],
     ["inspect", DRAFT, "--bandwidth", "fast"], ["inspect", DRAFT, "--aux-layer-ids", "1,x"]],
)  # fmt: skip
def test_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: eaglex" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("eaglex ")


def test_inspect_reads_no_weights(capsys, monkeypatch):
    from eaglex.source import TensorInfo

    small = TensorInfo.read

    def read(info):
        assert info.name in ("d2t", "t2d")
        return small(info)

    monkeypatch.setattr(TensorInfo, "read", read)
    assert run(capsys, "inspect", DRAFT, "--target", TARGET)[0] == 0
    assert isinstance(examine(DRAFT).d2t, torch.Tensor)
