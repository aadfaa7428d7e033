"""tools/precision.py: its measures find what is planted, and the repository's pair keeps its head in few bits."""

from __future__ import annotations

import dataclasses
import json

import hf_pair
import precision
import pytest
import torch

from eaglex import reference
from eaglex.checkpoint import load
from eaglex.config import SpeculationConfig
from eaglex.hosts import hf_target
from eaglex.hosts.transformers import GenerateOptions
from eaglex.hot_vocab import Ranking
from eaglex.packed import DraftQuant, PackedWeight, Precision
from eaglex.quantize import quantize
from eaglex.reference_low_bit import product

ROWS = 24


@pytest.fixture(scope="module")
def draft():
    config, weights = precision.random_draft("Llama-3.1-8B", 32, None)
    aux = torch.randn(ROWS, config.aux_width, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(ROWS)
    return config, weights, aux, ids


def test_rows_are_those_of_extend(draft) -> None:
    config, weights, aux, ids = draft
    cache = reference.DraftCache.empty(config, torch.float32)
    logits, _ = reference.extend(config, weights, cache, aux, ids)
    rows, allowed = precision.teacher_forced(config, weights, aux, ids)
    torch.testing.assert_close(rows[-1], logits, rtol=1e-4, atol=1e-4)
    assert allowed.shape == rows.shape


def test_agreement_is_whole_for_equal_logits_and_finds_a_difference(draft) -> None:
    config, weights, aux, ids = draft
    plain, every = precision.teacher_forced(config, weights, aux, ids)
    same = precision.Agreement.of((plain, every), plain)
    assert same.top1 == 1
    assert same.cosine == pytest.approx(1)
    assert same.kl == pytest.approx(0, abs=1e-6)
    assert precision.Agreement.of((plain.roll(1, 1), every), plain).top1 < 0.1
    assert precision.Agreement.of((plain * 2, every), plain).kl > 0.1
    second = plain.argsort(1, descending=True)[:, 1:]
    assert precision.Agreement.of((plain, second), plain).top1 == 0, "the best may not be drafted"


def test_a_scale_that_is_wrong_shows(draft) -> None:
    """One group of inputs scaled by two, as a kernel with an index off by one might: far below honest INT4."""
    config, weights, aux, ids = draft
    plain, _ = precision.teacher_forced(config, weights, aux, ids)
    made = quantize(weights, DraftQuant.parse("int4"))
    honest = precision.Agreement.of(precision.teacher_forced(config, made, aux, ids), plain)
    head = made.layers[0].down_proj
    assert isinstance(head, PackedWeight)
    scales = head.scales.clone()
    scales[:, 1] = scales[:, 0]
    scales = scales.roll(1, 0)
    broken = dataclasses.replace(made.layers[0], down_proj=PackedWeight(values=head.values, scales=scales))
    spoilt = dataclasses.replace(made, layers=[broken])
    wrong = precision.Agreement.of(precision.teacher_forced(config, spoilt, aux, ids), plain)
    assert honest.cosine > 0.99
    assert wrong.kl > 1.5 * honest.kl


def test_heavy_tails_have_unit_deviation() -> None:
    _, weights = precision.random_draft("Llama-3.1-8B", 32, 5.0)
    head = weights.lm_head
    assert isinstance(head, torch.Tensor)
    assert float(head.std()) == pytest.approx(2 / 128**0.5, rel=0.03)
    assert float(head.abs().max() / head.std()) > 8


def test_a_pair_of_random_models(tmp_path, capsys) -> None:
    """The whole command. Its walk over the drafts from every row gives what `generate` accepts, cycle by cycle."""
    model = hf_pair.target_model(**hf_pair.SMALL)
    config = hf_pair.draft_config(**hf_pair.SMALL_DRAFT)
    weights = hf_pair.draft_weights(config)
    folder = hf_pair.save_pair(tmp_path, model=model, config=config, weights=weights)
    prompt = "the cat sees a dog"
    (folder / "prompts.json").write_text(json.dumps([{"prompt": prompt}]))
    Ranking(counts=torch.ones(12).long(), held_out=torch.zeros(12).long(), source="x").write(tmp_path / "hot.json")
    options = ["--new-tokens", "60", "--num-steps", "3", "--output", str(tmp_path / "out.json")]
    options += ["--hot-vocab", f"9:{tmp_path / 'hot.json'}", "--hot-vocab", f"1:{tmp_path / 'hot.json'}"]
    assert precision.main(["pair", str(folder), *options]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found) == {"none", *precision.QUANTS, *precision.MIXED, "hot vocabulary 9", "hot vocabulary 1"}
    assert found["hot vocabulary 9"] == found["none"], "all nine rows kept"
    assert found["hot vocabulary 1"]["accept_length"] < found["none"]["accept_length"]
    assert found["none"]["top1"] == 1
    assert found["none"]["against_none"] == 0
    assert "1 texts, 57 rows drafted from, 64 teacher-forced, chain of 3" in capsys.readouterr().out

    host = hf_pair.host(SpeculationConfig(num_steps=3), model=model, config=config, weights=weights)
    statistics = host.generate([[0, 2, 4, 1, 3]], GenerateOptions(max_new_tokens=60)).statistics
    assert statistics.accept_length > 1.1, "a pair that never hits would prove nothing"
    assert found["none"]["accept_length"] == pytest.approx(statistics.accept_length, abs=0.15)  # but for the text's end


def test_walk() -> None:
    assert precision.walk([torch.tensor([3.0, 9, 9, 1, 2]), torch.tensor([1.0, 4, 9])]) == (3 + 1 + 2 + 1 + 4) / 5


# ------------------------------------------------------------------------------------------------ the repository's pair


@pytest.fixture(scope="module")
def tiny():
    """The pair's draft, and rows of its own held-out texts."""
    folder = hf_pair_folder()
    loaded = load(folder / "draft", target=folder / "target", dtype=torch.float32)
    model = hf_target.load_model(folder / "target", dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.aux.output_ids is not None
    target = hf_target.HookedTarget(model, loaded.aux.output_ids, "target")
    tokenizer = hf_target.load_tokenizer(folder / "target")
    texts = json.loads((folder / "prompts.json").read_text())[:6]
    rows = [precision._rows(target, tokenizer(t["prompt"] + t["continuation"])["input_ids"][:160]) for t in texts]
    return loaded, rows


def hf_pair_folder():
    from eaglex.generate import PAIR

    if not (PAIR / "draft").is_dir():
        pytest.skip(f"no pair at {PAIR}")
    return PAIR


def forced(config, weights, rows):
    """Logits and ids that may be drafted, of all texts."""
    each = [precision.teacher_forced(config, weights, *row) for row in rows]
    return tuple(torch.cat(parts) for parts in zip(*each, strict=True))


BOUNDS = [
    (precision.EVERY_FP8, 0.95, 0.9993), ("fp8", 0.95, 0.998), (precision.MIXED[0], 0.85, 0.995), ("int4", 0.80, 0.99)
]  # fmt: skip


@pytest.mark.parametrize(("quant", "top1", "cosine"), BOUNDS)
def test_the_repositorys_head_in_few_bits(tiny, quant, top1, cosine) -> None:
    """Bounds well below what was measured (docs/precision.md); a wrong scale or nibble falls far through them."""
    loaded, rows = tiny
    plain, _ = forced(loaded.config, loaded.weights, rows)
    made = quantize(loaded.weights, DraftQuant.parse(quant))
    found = precision.Agreement.of(forced(loaded.config, made, rows), plain)
    assert found.top1 > top1
    assert found.cosine > cosine
    x = torch.randn(3, loaded.config.hidden_size)
    error = product(x, made.lm_head) - x @ loaded.weights.lm_head.T
    most = 0.15 if made.lm_head.precision is Precision.INT4 else 0.04
    assert 0 < float(error.norm() / (x @ loaded.weights.lm_head.T).norm()) < most


def test_a_rescored_head_keeps_more_than_eight_bits(tiny) -> None:
    """The best tokens of the pair: 99.7 % with INT4 and rescoring, 97.8 % in FP8, 92.9 % in INT4 alone."""
    loaded, rows = tiny
    plain, _ = forced(loaded.config, loaded.weights, rows)
    four = quantize(loaded.weights, DraftQuant.parse("head=int4"))
    eight = quantize(loaded.weights, DraftQuant.parse("head=fp8"))
    alone = dataclasses.replace(four, lm_head_rows=None)
    kept = [precision.Agreement.of(forced(loaded.config, made, rows), plain).top1 for made in (four, eight, alone)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0.99
    assert kept[2] < 0.96
