"""The hot vocabulary: counting, the ranking's file, cutting a head, and the engine and host with a cut one."""

from __future__ import annotations

import io
import json
from collections import Counter

import hf_pair
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import make_config, random_weights
from support.rig import Ask, Rig

from eaglex import hot_vocab_command, reference
from eaglex.cli import main
from eaglex.config import SpeculationConfig
from eaglex.errors import ConfigError, EaglexError
from eaglex.hot_vocab import Counting, HotVocab, Ranking, cut
from eaglex.packed import DraftQuant, PackedWeight
from eaglex.quantize import quantize


def ranking(counts, held_out=None) -> Ranking:
    counts = torch.tensor(counts)
    held = torch.zeros_like(counts) if held_out is None else torch.tensor(held_out)
    return Ranking(counts=counts, held_out=held, source="a test")


# ------------------------------------------------------------------------------------------------------------- counting


@given(st.lists(st.lists(st.integers(0, 19), max_size=700), max_size=30))
def test_blocks_do_not_matter(blocks) -> None:
    """Every tenth run of a thousand tokens is held out, wherever one block ends and the next begins."""
    counting = Counting(20)
    for block in blocks:
        counting.add(block, "x")
    tokens = [token for block in blocks for token in block]
    aside = Counter(t for i, t in enumerate(tokens) if i // 1000 % 10 == 9)
    ranked = Counter(t for i, t in enumerate(tokens) if i // 1000 % 10 != 9)
    assert counting.counts.tolist() == [ranked[i] for i in range(20)]
    assert counting.held_out.tolist() == [aside[i] for i in range(20)]


def test_held_out_runs() -> None:
    counting = Counting(3)
    counting.add([0] * 9000 + [1] * 1000 + [2] * 5, "x")
    assert counting.counts.tolist() == [9000, 0, 5]
    assert counting.held_out.tolist() == [0, 1000, 0]


@pytest.mark.parametrize("bad", [-1, 3])
def test_ids_out_of_range(bad) -> None:
    with pytest.raises(ConfigError, match=rf"^a.jsonl: expected token ids in 0\.\.2, got {bad}$"):
        Counting(3).add([0, bad], "a.jsonl")


def test_nothing_to_rank() -> None:
    with pytest.raises(ConfigError, match=r"^a.txt: expected text, got no token$"):
        Counting(3).ranking("a.txt")


# ------------------------------------------------------------------------------------------------------------- the file


def test_write_and_read(tmp_path) -> None:
    made = ranking([0, 5, 0, 9, 2], [0, 1, 3, 0, 0])
    made.write(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["tokens"] == [[3, 9, 0], [1, 5, 1], [4, 2, 0], [2, 0, 3]]
    found = Ranking.read(tmp_path / "r.json")
    assert torch.equal(found.counts, made.counts)
    assert torch.equal(found.held_out, made.held_out)
    assert found.source == "a test"


FILES = {
    "format": ({"format": "other"}, 'format: expected "eaglex hot vocabulary 1", got "other"'),
    "vocab-absent": ({"vocab_size": None}, "vocab_size: expected an integer"),
    "vocab-huge": ({"vocab_size": 10**12}, "vocab_size: expected an integer"),
    "tokens-absent": ({"tokens": None}, "tokens: expected a list of [id, count, held-out count]"),
    "tokens-empty": ({"tokens": []}, "tokens: expected a list of"),
    "tokens-pairs": ({"tokens": [[1, 2]]}, "tokens: expected a list of"),
    "tokens-text": ({"tokens": [[1, 2, "3"]]}, "tokens: expected a list of"),
    "tokens-negative": ({"tokens": [[1, -2, 3]]}, "tokens: expected a list of"),
    "tokens-huge": ({"tokens": [[1, 2**80, 3]]}, "tokens: expected a list of"),
    "id-out": ({"tokens": [[5, 1, 1]]}, "tokens: expected ids in 0..4, got 5"),
    "id-twice": ({"tokens": [[1, 1, 1], [1, 2, 2]]}, "tokens: expected id 1 at most once, got 2"),
}


@pytest.mark.parametrize(("change", "named"), FILES.values(), ids=FILES.keys())
def test_a_file_that_is_no_ranking(tmp_path, change, named) -> None:
    ranking([1, 2, 3, 4, 5]).write(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text()) | change
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(EaglexError) as caught:
        Ranking.read(tmp_path / "r.json")
    assert named in str(caught.value)
    assert "r.json" in str(caught.value)


def test_words() -> None:
    assert HotVocab.parse("32000") == HotVocab(size=32000)
    assert HotVocab.parse("a/b.json") == HotVocab(file="a/b.json")
    assert HotVocab.parse("7:a/b:c.json") == HotVocab(size=7, file="a/b:c.json")
    for bad in ("", "0", "7:", "-5:r.json", "1.5:r.json", "-5"):
        with pytest.raises(ConfigError, match=r"^hot_vocab: expected N"):
            HotVocab.parse(bad)


def test_the_default_file_lies_beside_the_draft(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"hot_vocab: expected a ranking at .*\.json, got no such file; make one"):
        HotVocab.parse("4").ranking(tmp_path)
    ranking([1, 2]).write(tmp_path / "hot_vocab.json")
    assert HotVocab.parse("4").ranking(tmp_path).counts.tolist() == [1, 2]


# -------------------------------------------------------------------------------------------------------------- the cut


@pytest.mark.parametrize("quant", ["none", "fp8", "int4"])
def test_cut_a_reduced_head(quant) -> None:
    """The kept rows are the most frequent target ids of those that the head has, in their old order."""
    config = make_config()
    weights = quantize(random_weights(config), DraftQuant.parse(f"head={quant}"))
    targets = (torch.arange(45) + weights.d2t).tolist()
    counts = torch.randint(0, 6, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    made = cut(config, weights, ranking(counts), 20)
    kept = sorted(sorted(range(45), key=lambda i: (-counts[targets[i]], targets[i]))[:20])
    assert made.config.draft_vocab_size == 20
    assert (torch.arange(20) + made.weights.d2t).tolist() == [targets[i] for i in kept]
    head, before = made.weights.lm_head, weights.lm_head
    if isinstance(head, PackedWeight):
        assert torch.equal(head.values.view(torch.uint8), before.values.view(torch.uint8)[kept])
        assert torch.equal(head.scales, before.scales[kept])
        assert head.values.dtype is before.values.dtype
    else:
        assert torch.equal(head, before[kept])
    made.weights.check(made.config)
    covered = sum(counts[targets[i]] for i in kept) / sum(counts)
    assert made.after == pytest.approx(covered)
    assert made.before == pytest.approx(sum(counts[t] for t in targets) / sum(counts))
    assert f"a loss of {100 * (made.before - made.after):.2f} points" in made.note


def test_cut_a_full_head_and_draft_with_it() -> None:
    """The engine with the cut head drafts what the reference drafts with it, in the target's ids."""
    config = make_config(draft_vocab_size=60)
    weights = random_weights(config)
    weights.d2t = None
    made = cut(config, weights, ranking([*range(60)]), 25)
    assert (torch.arange(25) + made.weights.d2t).tolist() == list(range(35, 60))
    rig = Rig(made.config, SpeculationConfig(num_steps=3, topk=2, num_draft_tokens=7), weights=made.weights)
    rig.join(0, 1)
    outcomes = rig.cycle([Ask(0, 6)])
    assert rig.compare(outcomes, clear=0) == 1
    assert int(outcomes[0].drafted.tokens.min()) >= 35


def test_logits_of_kept_tokens_are_unchanged() -> None:
    config = make_config()
    weights = random_weights(config)
    made = cut(config, weights, ranking([1] * 60), 45)
    hidden = torch.randn(2, 24)
    assert made.note.endswith("a loss of 0.00 points")
    assert torch.equal(reference.head(config, weights, hidden)[0], reference.head(config, made.weights, hidden)[0])


def test_held_out_text_judges() -> None:
    config = make_config(draft_vocab_size=60)
    weights = random_weights(config)
    weights.d2t = None
    counts, held = [0] * 60, [0] * 60
    counts[1], counts[2], held[2], held[3] = 5, 4, 3, 1
    made = cut(config, weights, ranking(counts, held))
    assert made.config.draft_vocab_size == 2
    assert (made.before, made.after) == (1.0, 0.75)
    assert "cover 75.00% of held-out text, all rows 100.00%: a loss of 25.00 points" in made.note
    more = cut(config, weights, ranking(counts, held), 5)
    assert (torch.arange(5) + more.weights.d2t).tolist() == [0, 1, 2, 3, 4]
    assert "; 3 of them never occur there" in more.note


def test_cuts_that_cannot_be() -> None:
    config = make_config()
    weights = random_weights(config)
    with pytest.raises(ConfigError, match=r"hot_vocab: expected a ranking of vocab_size=60, got 61 of a test: made"):
        cut(config, weights, ranking([1] * 61), 5)
    for size in (0, 46):
        with pytest.raises(ConfigError, match=rf"hot_vocab: expected 1\.\.45 tokens, the draft vocabulary, got {size}"):
            cut(config, weights, ranking([1] * 60), size)
    other = [1] * 60
    for target in (torch.arange(45) + weights.d2t).tolist():
        other[target] = 0
    with pytest.raises(ConfigError, match=r"the draft vocabulary, got 0"):
        cut(config, weights, ranking(other))


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return hf_pair.save_pair(tmp_path_factory.mktemp("pair"))


def words(*ids: int) -> str:
    names = [*hf_pair.WORDS, *(f"w{i}" for i in range(len(hf_pair.WORDS), 40))]
    return " ".join(names[i] for i in ids)


def test_text_and_records(pair, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(hot_vocab_command, "_BLOCK", 7)  # words and lines across blocks
    (tmp_path / "a.txt").write_text(f"{words(3, 3, 3)}\n{words(5, 5)}\n{words(25)}")
    records = [{"tokens": [7, 7, 7, 7]}, {"text": words(2)}, {"tokens": [], "text": words(2)}]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(r) for r in records) + "\n\n")
    out = tmp_path / "r.json"
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    assert main(["hot-vocab", *files, "--tokenizer", str(pair / "target"), "--output", str(out)]) == 0
    found = Ranking.read(out)
    assert {i: n for i, n in enumerate(found.counts.tolist()) if n} == {2: 2, 3: 3, 5: 2, 7: 4, 25: 1}
    assert found.source == "a.txt, b.jsonl"
    assert "12 tokens ranked, 0 held out; 5 of 40 occur" in capsys.readouterr().out


def test_a_dotted_field(pair, tmp_path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"choices": [{"text": words(4, 4)}], "tokens": [9]}))
    out = tmp_path / "r.json"
    options = ["--tokenizer", str(pair / "target"), "--output", str(out), "--field", "choices.0.text"]
    assert main(["hot-vocab", str(tmp_path / "b.jsonl"), *options]) == 0
    assert int(Ranking.read(out).counts[4]) == 2


def test_a_servers_ids(pair, tmp_path, capsys) -> None:
    """As SGLang's /generate answers; an empty list, or one of other things, is no text."""
    record = {"text": words(1), "output_ids": [4, 4, 4], "meta_info": {"ids": [], "mixed": [1, "a"]}}
    (tmp_path / "b.jsonl").write_text(json.dumps(record))
    out = tmp_path / "r.json"
    options = ["--tokenizer", str(pair / "target"), "--output", str(out), "--field"]
    assert main(["hot-vocab", str(tmp_path / "b.jsonl"), *options, "output_ids"]) == 0
    counts = Ranking.read(out).counts
    assert (int(counts[4]), int(counts.sum())) == (3, 3)
    for field in ("meta_info.ids", "meta_info.mixed", "meta_info"):
        assert main(["hot-vocab", str(tmp_path / "b.jsonl"), *options, field]) == 1
        assert f"or a text in `{field}`, got" in capsys.readouterr().err


def test_progress_is_that_of_the_bytes(pair, tmp_path, monkeypatch) -> None:
    """The bar's whole is the files' size, and block by block it gets there; of standard input it knows no end."""
    seen = []

    class Bar:
        def __init__(self, total, *_, **__):
            seen.append([total])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, count):
            seen[-1].append(count)

    monkeypatch.setattr("eaglex.hosts.progress.bar", Bar)
    monkeypatch.setattr(hot_vocab_command, "_BLOCK", 64)
    text = f"{words(3, 5)}\n" * 40
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": words(2)}) + "\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    options = ["--tokenizer", str(pair / "target"), "--output", str(tmp_path / "r.json")]
    assert main(["hot-vocab", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), *options]) == 0
    assert main(["hot-vocab", "-", *options]) == 0
    assert int(Ranking.read(tmp_path / "r.json").counts[5]) == 40
    files, piped = seen
    assert files[0] == sum(files[1:]) == sum((tmp_path / name).stat().st_size for name in ("a.txt", "b.jsonl"))
    assert piped[0] is None
    assert sum(piped[1:]) == len(text)
    assert max(files[1:-1]) <= 64, "no block is larger, however long the text"


def test_a_character_across_blocks() -> None:
    text = "ä€😀 " * 40
    for size in (1, 2, 3, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hot_vocab_command, "_BLOCK", size)
            assert "".join(hot_vocab_command._blocks(io.BytesIO(text.encode()), lambda n: None)) == text


BAD = {
    "absent": ("nowhere.txt", None, "expected a readable file"),
    "latin": ("a.txt", b"gar\xe7on", "expected a readable file in UTF-8"),
    "cut-off": ("a.txt", b"gar\xc3", "expected a readable file in UTF-8"),
    "empty": ("a.txt", b"", "expected text, got no token"),
    "no-json": ("a.jsonl", b"hello\n", "a.jsonl:1: expected a JSON object"),
    "no-text": ("a.jsonl", b'{"text": "the"}\n{"other": 1}\n', "a.jsonl:2: expected `tokens`, or a text in `text`"),
    "list": ("a.jsonl", b"[1, 2]\n", "a.jsonl:1: expected `tokens`, or a text in `text`"),
    "ids-of-text": ("a.jsonl", b'{"tokens": ["a"]}\n', 'a.jsonl:1: tokens: expected a list of token ids, got ["a"]'),
    "id": ("a.jsonl", b'{"tokens": [1, 4000]}\n', "expected token ids in 0..39, got 4000"),
    "id-huge": ("a.jsonl", b'{"tokens": [1, 99999999999999999999]}\n', "expected token ids"),
}


@pytest.mark.parametrize(("name", "data", "named"), BAD.values(), ids=BAD.keys())
def test_bad_files(pair, tmp_path, capsys, name, data, named) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    out = tmp_path / "r.json"
    code = main(["hot-vocab", str(tmp_path / name), "--tokenizer", str(pair / "target"), "--output", str(out)])
    assert code == 1
    assert named in capsys.readouterr().err
    assert not out.exists()


def test_the_end_of_an_empty_text_is_no_text(tmp_path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")

    class Tokenizer:
        eos_token_id = 3

    found = hot_vocab_command._tokens(str(tmp_path / "empty.txt"), Tokenizer(), None, lambda n: None)
    assert list(found) == [[]]


def test_the_result_must_be_writable(pair, tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text("the cat")
    out = tmp_path / "no" / "r.json"
    options = ["--tokenizer", str(pair / "target"), "--output", str(out)]
    assert main(["hot-vocab", str(tmp_path / "a.txt"), *options]) == 1
    assert "expected a file that can be written" in capsys.readouterr().err


def test_generate_with_a_smaller_draft(pair, tmp_path, capsys) -> None:
    """Text to ranking to draft: the output is still the target's own."""
    (tmp_path / "a.txt").write_text(words(*range(30), *range(10)))
    out = tmp_path / "r.json"
    options = ["--tokenizer", str(pair / "target"), "--output", str(out)]
    assert main(["hot-vocab", str(tmp_path / "a.txt"), *options]) == 0
    capsys.readouterr()
    sides = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompt", "the cat sees"]
    command = ["generate", *sides, "--max-new-tokens", "20", "--json", "--check"]
    assert main([*command, "--hot-vocab", f"12:{out}", "--draft-quant", "head=int4,mlp=fp8"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["lossless"] is True
    assert found["draft_vocab_size"] == 12
    assert found["draft_quant"] == "head=int4,mlp=fp8"
    assert "hot vocabulary: 12 of 32 head rows by a.txt; they cover" in printed.err
    assert main([*command, "--hot-vocab", "12"]) == 1
    assert "hot_vocab: expected a ranking at" in capsys.readouterr().err
    assert main([*command, "--hot-vocab", f"2:{out}", "--topk", "4", "--num-steps", "2"]) == 1
    assert "topk: expected <= draft_vocab_size=2, got 4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--draft-quant", "int3"])
    assert "draft_quant: expected none, fp8, int4, or head, mlp" in capsys.readouterr().err
