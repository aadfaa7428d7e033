"""`--draft-quant auto`: what is measured, what is chosen by it, and the command with it."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re

import hf_pair
import pytest
import torch
from rank_processes import Ranks
from support.models import ROPES, make_config, random_weights, rejection

from eaglex import generate
from eaglex.cli import main
from eaglex.config import SpeculationConfig
from eaglex.engine import DraftEngine
from eaglex.errors import ConfigError
from eaglex.hosts import auto_quant, calibration
from eaglex.hosts.auto_quant import Measured, Score
from eaglex.hosts.draft_slots import to_device
from eaglex.hosts.hf_target import HookedTarget
from eaglex.packed import Auto, DraftQuant, PackedWeight, Part, Precision
from eaglex.quantize import quantize
from eaglex.reference import DraftCache, extend
from eaglex.reference import draft as reference_draft

CPU = torch.device("cpu")
CHAIN = SpeculationConfig(num_steps=4)
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 8, "head_dim": 32}


@pytest.fixture(scope="module")
def draft():
    config = make_config(**WIDE)
    return config, random_weights(config)


def chosen(draft, speculation=CHAIN, **changes):
    config, weights = draft
    text = dataclasses.replace(calibration.stand_ins(config, weights), **changes)
    return auto_quant.choose(config, weights, speculation, text=text, device=CPU)


def by_bytes(per_byte, fixed=1e-3):
    """Seconds of a cycle that reads its weights at that rate, instead of the CPU's own."""

    def seconds(self, weights):
        return fixed + per_byte * sum(w.nbytes for name, w in weights.named() if name.startswith(("layers", "lm_head")))

    return seconds


def table(choice):
    """recipe → (MB per cycle, ms, same best in %, accept length, tokens per second), and the starred recipe."""
    rows, starred = {}, None
    for line in choice.lines:
        row = re.match(r"([* ]) (\S.*?)  +([\d.]+) +([\d.]+) +([\d.]+)% +([\d.]+) +([\d.]+)$", line)
        if row is not None:
            rows[row[2]] = tuple(float(n) for n in row.groups()[2:])
            starred = row[2] if row[1] == "*" else starred
    return rows, starred


# ---------------------------------------------------------------------------------------------------------- the choice


def test_low_bits_where_bytes_are_time(draft, monkeypatch) -> None:
    """On a device that is bound by memory, with a target as fast as the draft, fewer bits win; the table says so."""
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(1e-8))
    choice = chosen(draft, verify_seconds=1e-3)
    rows, starred = table(choice)
    assert len(rows) >= 10
    assert "head=int4" in rows, "its best are scored again"
    assert max(rows["head=int4"][0], rows["head=fp8"][0]) < rows["as stored"][0]
    assert choice.quant.mlp is Precision.INT4, "most bytes, and little that differs"
    assert starred == str(choice.quant)
    assert rows[starred][4] >= 0.995 * max(row[4] for row in rows.values())
    assert rows[starred][4] > 1.1 * rows["as stored"][4]
    assert rows["as stored"][2] == 100
    assert f"draft_quant: {choice.quant}: +" in choice.lines[-1]
    assert "ms instead of" in choice.lines[-1]
    assert "random tokens, with embeddings for hidden states" in choice.lines[0]
    assert "(assumed)" in choice.lines[0]
    assert chosen(draft, verify_seconds=1e-3) == choice, "the same times give the same choice"


def test_nothing_where_low_bits_are_slower(draft, monkeypatch) -> None:
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(-1e-10))
    choice = chosen(draft, verify_seconds=1e-3)
    assert choice.quant == DraftQuant()
    assert table(choice)[1] == "as stored"
    nothing = r"as stored: nothing gains more than 0.5%, the least that counts; \S+ comes next with -\d"
    assert re.search(nothing, choice.lines[-1])


def test_a_slow_target_wants_agreement(draft, monkeypatch) -> None:
    """The same savings beside a verification of a second are nothing, and a lost token is dear."""
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(1e-9))
    assert chosen(draft, verify_seconds=1.0).quant == DraftQuant()
    assert chosen(draft, verify_seconds=1e-4).quant != DraftQuant()


def test_without_a_target_a_verification_is_some_cycles(draft, monkeypatch) -> None:
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(0, fixed=2e-3))
    choice = chosen(draft)
    assert "a verification is taken for 4 cycles as stored, 8.000 ms" in choice.lines[0]
    assert choice.quant == DraftQuant()


def test_packed_parts_stay(draft, monkeypatch) -> None:
    config, weights = draft
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(1e-8))
    packed = quantize(weights, DraftQuant.parse("mlp=fp8,qkv=fp8,o=fp8"))
    choice = chosen((config, packed), verify_seconds=1e-3)
    assert (choice.quant.mlp, choice.quant.qkv, choice.quant.o) == (None, None, None)
    assert choice.quant.head is not None
    assert set(table(choice)[0]) == {"as stored", "head=fp8", "head=int4"}
    none = chosen((config, quantize(weights, DraftQuant.parse("fp8"))))
    assert none.lines[-1] == "draft_quant: as stored: no part is left to be quantised"


def test_an_odd_width_has_no_int4(monkeypatch) -> None:
    config = make_config(intermediate_size=41)
    rows, _ = table(chosen((config, random_weights(config))))
    assert "mlp=fp8" in rows
    assert not any("mlp=int4" in name for name in rows)


def test_time_is_bounded(draft, monkeypatch) -> None:
    monkeypatch.setattr(auto_quant, "SECONDS", 0.0)
    choice = chosen(draft)
    assert choice.quant == DraftQuant()
    assert "not measured, as 0 s were over: mlp=fp8, mlp=int4, " in choice.lines[-2]


def planted(seconds, same_best, quant=None, accept=None) -> Measured:
    return Measured(quant=quant or DraftQuant(), nbytes=0, seconds=seconds, same_best=same_best, accept=accept)


SCORE = Score(num_steps=3, verify_seconds=1.0, accept=0.5, loss=0.4)


def test_the_score() -> None:
    assert SCORE.accept_length(1.0) == 1 + 0.5 + 0.25 + 0.125
    assert SCORE.accept_length(0.75) == pytest.approx(1 + 0.45 + 0.45**2 + 0.45**3)
    assert SCORE.of(planted(0.5, 1.0)) == pytest.approx(1.875 / 1.5)


def test_of_near_equals_the_one_that_agrees_most() -> None:
    slow, near = planted(0.503, 1.0), planted(0.5, 0.9999)
    assert auto_quant._first_of_equals([near, slow], SCORE) is slow
    assert auto_quant._first_of_equals([near, planted(0.6, 1.0)], SCORE) is near
    twins = [planted(0.5, 0.9), planted(0.5, 0.9)]
    assert auto_quant._first_of_equals(twins, SCORE) is twins[0]


def test_differences_within_the_noise_do_not_count(draft, monkeypatch) -> None:
    """The draft as stored took 2 ms and then 3: another that takes 1.9 is no faster."""
    times = iter([2e-3, *[1.9e-3] * 8, 3e-3, *[1.9e-3] * 3])
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", lambda *_: next(times))
    choice = chosen(draft, verify_seconds=1e-3)
    assert choice.quant == DraftQuant()
    assert "nothing gains more than 33.3%, what two runs as stored are apart" in choice.lines[-1]


def test_the_best_sum_is_that_of_all_81(draft) -> None:
    """Against every recipe scored one by one, by savings and losses that are known."""
    saved = {Part.HEAD: (0.1, 0.16), Part.MLP: (0.3, 0.35), Part.QKV: (0.02, 0.01), Part.O_PROJ: (-0.01, 0.005)}
    lost = {Part.HEAD: (0.02, 0.3), Part.MLP: (0.01, 0.05), Part.QKV: (0.01, 0.03), Part.O_PROJ: (0.0, 0.0)}
    stored = planted(1.0, 1.0)
    alone = {
        (part, precision): planted(1.0 - saved[part][i], 1 - lost[part][i])
        for part in Part
        for i, precision in enumerate((Precision.FP8, Precision.INT4))
    }
    best = {}
    for recipe in itertools.product((None, 0, 1), repeat=4):
        chosen_parts = [(part, i) for part, i in zip(Part, recipe, strict=True) if i is not None]
        seconds = 1.0 - sum(saved[part][i] for part, i in chosen_parts)
        best[recipe] = SCORE.rate(seconds, 1 - sum(lost[part][i] for part, i in chosen_parts))
    top = max(best.values())
    found = auto_quant._best_sum(stored, alone, SCORE)
    key = tuple(None if p is None else (Precision.FP8, Precision.INT4).index(p) for p in dataclasses.astuple(found))
    assert best[key] >= (1 - auto_quant.NEAR) * top
    assert (found.head, found.mlp) == (Precision.FP8, Precision.INT4)


def test_losses_are_those_of_the_text() -> None:
    """Ten points lost by half a point each time: a twentieth of one, over what was accepted; never a gain."""
    text = calibration.CalibrationText(
        aux_hidden_states=torch.empty(0), input_ids=torch.empty(0), counted=0, origin="", verify_seconds=2.0
    )
    stored = planted(1.0, 1.0, accept=0.8)
    known = auto_quant._Known(5)
    score = auto_quant._score(stored, [planted(1.0, 0.9, accept=0.76), planted(1.0, 0.8, accept=0.72)], text, known)
    assert (score.accept, score.verify_seconds) == (0.8, 2.0)
    assert score.loss == pytest.approx(0.12 / 0.3 / 0.8)
    lucky = auto_quant._score(stored, [planted(1.0, 0.9, accept=0.9)], text, known)
    assert lucky.loss == auto_quant.LOSS / 2
    assert auto_quant._score(planted(1.0, 1.0, accept=0.0), [], text, known).accept == auto_quant.ACCEPT


@pytest.mark.parametrize("length", [1.0, 1.3, 2.48, 4.0, 6.0])
def test_a_measured_accept_length_is_kept(length) -> None:
    """The best token of each row says little of a chain's later ones: 80 % here, whatever the accept length."""
    text = calibration.CalibrationText(
        aux_hidden_states=torch.empty(0), input_ids=torch.empty(0), counted=0, origin="", verify_seconds=2.0
    )
    score = auto_quant._score(planted(1.0, 1.0, accept=0.8), [], text, auto_quant._Known(5, length))
    assert score.accept_length(1.0) == pytest.approx(length, abs=1e-6)


# ----------------------------------------------------------------------------------------------------- what is measured


def test_agreement_is_that_of_the_reference(draft) -> None:
    """Row by row through `extend`, against the bench's one forward."""
    config, weights = draft
    text = calibration.stand_ins(config, weights)
    bench = auto_quant._Bench(config, weights, CHAIN, text, CPU)
    quant = DraftQuant.parse("head=int4,mlp=int4,qkv=int4,o=int4")
    found = bench.measure(quant)

    def best(made):
        cache = DraftCache.empty(config, torch.float32)
        rows = zip(text.aux_hidden_states.split(1), text.input_ids.split(1), strict=True)
        one, firsts = SpeculationConfig(num_steps=1), []
        for aux, ids in rows:
            firsts.append(reference_draft(config, made, cache, *extend(config, made, cache, aux, ids), one).tokens)
        return torch.cat(firsts)

    same = (best(weights) == best(quantize(weights, quant))).float().mean()
    assert found.same_best == pytest.approx(float(same), abs=0.01)
    assert 0.5 < found.same_best < 1
    packed = [w for _, w in quantize(weights, quant).named() if isinstance(w, PackedWeight)]
    norms = 4 * (4 * config.hidden_size)
    rows = 8 * 4 * config.hidden_size  # of the head that are read again
    assert found.nbytes == 4 * (sum(w.nbytes for w in packed) + norms + rows) + weights.fc.nbytes


@pytest.mark.parametrize("speculation", [CHAIN, SpeculationConfig(num_steps=4, topk=3, num_draft_tokens=9)],
                         ids=["chain", "tree"])  # fmt: skip
def test_the_accept_length_is_that_of_chains_from_each_row(speculation) -> None:
    """By the reference, on a text that goes on as the draft says from every fourth row on."""
    config = make_config(**WIDE, max_positions=160)
    weights = random_weights(config)
    text, first = calibration.stand_ins(config, weights), 100
    cache, chains = DraftCache.empty(config, torch.float32), []
    for aux, ids in zip(text.aux_hidden_states.split(1), text.input_ids.split(1), strict=True):
        logits, hidden = extend(config, weights, cache, aux, ids)
        chains.append(reference_draft(config, weights, cache, logits, hidden, CHAIN).tokens)
    said = torch.cat(chains[first::4])
    text = dataclasses.replace(text, counted=len(chains) - first, follows=said)
    hits = [(chain == said[row : row + 4]).long().cumprod(0).sum() for row, chain in enumerate(chains[first:-4])]
    expected = 1 + float(torch.stack(hits).float().mean())
    assert 1.9 < expected < 3, "a quarter of the rows hits whole, the others seldom"
    assert auto_quant._Bench(config, weights, speculation, text, CPU).accept_length() == pytest.approx(expected)
    short = dataclasses.replace(text, counted=3, follows=said[-3:])
    assert auto_quant._Bench(config, weights, speculation, short, CPU).accept_length() is None


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_the_reference_runs_where_the_weights_are(rope) -> None:
    """The meta device stands for a GPU: a tensor that is made on the CPU does not mix with its tensors."""
    config, meta = make_config(rope=rope), torch.device("meta")
    weights = random_weights(config)
    text = calibration.stand_ins(config, weights)
    packed = to_device(quantize(weights, DraftQuant.parse("int4")), meta)
    bench = auto_quant._Bench.__new__(auto_quant._Bench)
    bench.config, bench.speculation, bench.device, bench.counted = config, CHAIN, meta, 5
    bench.aux, bench.ids = text.aux_hidden_states.to(meta), text.input_ids.to(meta)
    assert bench._best(packed).shape == (5,)


def test_a_broken_part_is_not_chosen(draft, monkeypatch) -> None:
    """A head whose few bits are noise: fast, and refused for its agreement."""
    config, weights = draft
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(1e-8))

    def broken(weights, quant, **options):
        made = quantize(weights, quant, **options)
        if quant.head is not None:
            noise = torch.randn(45, 256, generator=torch.Generator().manual_seed(0))
            made = dataclasses.replace(made, lm_head=noise, lm_head_rows=None)
        return made

    monkeypatch.setattr(auto_quant, "quantize", broken)
    choice = chosen((config, weights), verify_seconds=1e-3)
    assert choice.quant.head is None
    assert choice.quant.mlp is not None


@pytest.mark.parametrize("speculation", [CHAIN, SpeculationConfig(num_steps=3, topk=3, num_draft_tokens=9),
                                         rejection(3), SpeculationConfig(num_steps=0)],
                         ids=["chain", "tree", "rejection", "none"])  # fmt: skip
def test_cycles_are_run(draft, speculation, monkeypatch) -> None:
    """Real engines; every timed cycle drafts (but with no steps), none is refused for want of room."""
    engines = []
    made = DraftEngine.__init__

    def kept(self, *args, **options):
        made(self, *args, **options)
        engines.append(self)

    monkeypatch.setattr(DraftEngine, "__init__", kept)
    monkeypatch.setattr(auto_quant, "_ROUND_SECONDS", 0.0)
    monkeypatch.setattr(auto_quant, "_LEAST_ROUND", 0.0)
    choice = chosen(draft, speculation)
    assert len(engines) >= 11
    for engine in engines:
        counts = engine.counters()
        assert counts.pop("drafted") == (7 if speculation.num_steps else 0), counts
        assert counts["no_room"] == counts["bad_index"] == counts["not_finite"] == 0
    assert all(row[1] > 0 for row in table(choice)[0].values())


@pytest.mark.parametrize("equal", [True, False])
def test_stand_ins(equal) -> None:
    config = make_config(target_hidden_size=24 if equal else 16)
    weights = random_weights(config)
    text = calibration.stand_ins(config, weights)
    assert text.aux_hidden_states.shape == (128, config.aux_width)
    assert text.follows is None
    again = calibration.stand_ins(config, weights)
    assert torch.equal(text.aux_hidden_states, again.aux_hidden_states)
    assert torch.equal(text.input_ids, again.input_ids)
    assert float(text.aux_hidden_states.square().mean()) == pytest.approx(1, abs=0.05)
    if equal:
        first = text.aux_hidden_states[:, :24]
        normed = weights.embed_tokens / weights.embed_tokens.square().mean(1, keepdim=True).sqrt()
        assert bool((torch.cdist(first, normed).amin(1) < 1e-2).all()), "embeddings, normed"


@pytest.mark.parametrize("prompt", [[1, 7, 3, 5, 2, 9, 4], [3], list(range(12)) * 12], ids=["short", "one", "long"])
def test_the_targets_own_text(prompt) -> None:
    """Rows are those of one forward over the text, which is the target's greedy one, and so is what follows."""
    target = HookedTarget(hf_pair.target_model(**hf_pair.SMALL), hf_pair.AUX)
    text = calibration.target_text(target, prompt, nodes=6, context=160)
    ids = text.input_ids.tolist()
    count = text.counted + 1
    assert count == 77
    start = prompt[-(160 - 6 - 77):]
    tokens = [*start, *hf_pair.plain.generate(target, start, count=count)]
    assert ids == tokens[1:-1]
    assert text.follows is not None
    assert text.follows.tolist() == tokens[len(start) + 1 :]
    aux = target.extend(target.new_cache(), torch.tensor(tokens[:-2]))[1]
    torch.testing.assert_close(text.aux_hidden_states, aux, rtol=1e-3, atol=1e-4)
    assert text.verify_seconds is not None
    assert text.verify_seconds > 0
    assert len(ids) + 6 <= 160


def test_a_slow_target_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(calibration, "SECONDS", 0.0)
    target = HookedTarget(hf_pair.target_model(**hf_pair.SMALL), hf_pair.AUX)
    assert calibration.target_text(target, [1, 2], nodes=6, context=160).counted == calibration.LEAST - 1


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hf_pair.save_pair_of_eight(tmp_path_factory.mktemp("pair"))


def command(pair, *options):
    paths = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    return ["generate", *paths, "--prompt", "the a cat dog", "--max-new-tokens", "16", "--json", "--check", *options]


def test_generate(pair, capsys, monkeypatch) -> None:
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(1e-6))
    assert main(command(pair, "--draft-quant", "auto")) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["lossless"] is True
    assert found["draft_quant"] not in ("auto", "as stored")
    assert "eaglex: draft_quant auto: 76 rows of the target's own text" in printed.err
    assert f"eaglex: draft_quant: {found['draft_quant']}: +" in printed.err
    lengths = {found["accept_length"]}
    assert main(command(pair, "--draft-quant", found["draft_quant"])) == 0
    assert {json.loads(capsys.readouterr().out)["accept_length"]} == lengths, "the recipe is what was run"


def test_on_two_ranks(pair, capsys, monkeypatch, tmp_path) -> None:
    """Rank 0 measures, on stand-ins, and says so alone."""
    monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", by_bytes(1e-6))
    assert main(command(pair)) == 0
    expected = json.loads(capsys.readouterr().out)
    with Ranks(2, lambda rank: main(command(pair, "--draft-quant", "auto")), tmp_path) as ranks:
        ended = ranks.wait()
    assert [rank.code for rank in ended] == [0, 0], ended
    found = json.loads(ended[0].out)
    assert found["tokens"] == expected["tokens"]
    assert found["draft_quant"] not in ("auto", "as stored")
    assert "128 rows of random tokens" in ended[0].err
    assert (ended[1].out, ended[1].err) == ("", "")


def test_not_with_a_dedicated_drafter_nor_without_weights(pair, capsys) -> None:
    options = argparse.Namespace(draft_quant=Auto.AUTO, hot_vocab=None, drafter_device=None)
    with pytest.raises(ConfigError, match=r"^placement: expected rank0 with draft_quant, got dedicated$"):
        generate._check_dedicated(options, CHAIN)
    with pytest.raises(SystemExit):
        main(["inspect", str(pair / "draft"), "--draft-quant", "auto"])
    assert "got auto, which measures and so needs the weights" in capsys.readouterr().err
