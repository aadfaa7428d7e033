"""Toy checkpoints of public dialects and traps, each with its known answer, through every runner there is.

The folder is tests/cases, or EAGLEX_CASES=DIR for another of the same format (its README.md describes it). A `load`
case must give exactly its tokens, its facts and its lines of the report; a `refuse` case must raise an error that
names what is wrong.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eaglex import reference
from eaglex.checkpoint import Checkpoint, examine, load
from eaglex.config import EngineLimits, NextHidden, Residual, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine
from eaglex.errors import EaglexError

FOLDER = Path(os.environ.get("EAGLEX_CASES") or Path(__file__).parent / "cases")
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
CASES = EXPECTED["cases"]
LOADED = [case for case in CASES if case["outcome"] == "load"]
REFUSED = [case for case in CASES if case["outcome"] == "refuse"]

# Facts by their name in expected.json; names that are not here are about the runners' output, or are new to this test.
FACTS = {
    "hidden": lambda c: c.config.hidden_size,
    "target_hidden": lambda c: c.config.target_hidden_size,
    "heads": lambda c: c.config.num_heads,
    "kv": lambda c: c.config.num_kv_heads,
    "head_dim": lambda c: c.config.head_dim,
    "layers": lambda c: c.config.num_layers,
    "vocab": lambda c: c.config.vocab_size,
    "draft_vocab": lambda c: c.config.draft_vocab_size,
    "num_aux": lambda c: c.config.num_aux,
    "norm_before_residual": lambda c: c.config.residual is Residual.NORMED,
    "norm_output": lambda c: c.config.next_hidden is NextHidden.NORMED,
    "file_weight_bytes": lambda c: c.facts.file_bytes,
    "draft_id_to_target_id_first8": lambda c: target_ids(c)[:8].tolist(),
}


def target_ids(checkpoint):
    ids = torch.arange(checkpoint.config.draft_vocab_size)
    return ids if checkpoint.weights.d2t is None else ids + checkpoint.weights.d2t


def run_reference(checkpoint, probe, steps):
    """Tokens of a greedy chain, and the logits it starts from."""
    config, weights = checkpoint.config, checkpoint.weights
    cache = reference.DraftCache.empty(config, weights.fc.dtype, start=int(probe["positions"][0]))
    logits, hidden = reference.extend(config, weights, cache, probe["aux"], probe["ids"])
    drafted = reference.draft(config, weights, cache, logits, hidden, SpeculationConfig(num_steps=steps))
    return drafted.tokens.tolist(), logits


def run_engine(checkpoint, probe, steps):
    """The same through the C++ engine on the CPU; positions before the probe's first have no KV slot."""
    config, weights, rows, start = checkpoint.config, checkpoint.weights, len(probe["ids"]), int(probe["positions"][0])
    limits = EngineLimits(max_batch=1, max_rows=rows, num_slots=2)
    req_to_token = torch.full((2, start + rows), -1, dtype=torch.int32)
    req_to_token[1, start:] = torch.arange(rows)
    pool = [[torch.zeros(rows, config.num_kv_heads, config.head_dim) for _ in range(config.num_layers)] for _ in "kv"]
    engine = DraftEngine(
        config,
        SpeculationConfig(num_steps=steps),
        limits=limits,
        weights=weights,
        req_to_token=req_to_token,
        draft_k=pool[0],
        draft_v=pool[1],
    )
    engine.run(
        DraftBatch(
            aux_hidden_states=probe["aux"],
            input_ids=probe["ids"],
            row_start=torch.tensor([0, rows], dtype=torch.int32),
            num_valid=torch.tensor([rows], dtype=torch.int32),
            draft_from=torch.tensor([True]),
            req_pool_indices=torch.tensor([1], dtype=torch.int32),
            seq_lens=torch.tensor([start], dtype=torch.int32),
        )
    )
    assert int(engine.results.drafted_for[1]) == start + rows
    return engine.results.draft_tokens[1, : int(engine.results.num_nodes[1])].tolist(), None


RUNNERS = {"reference": run_reference, "engine": run_engine}


def target_of(case):
    return FOLDER / case["target"] if case.get("target") else None


def loaded(case, dtype=None) -> Checkpoint:
    return load(FOLDER / case["id"], target=target_of(case), dtype=dtype)


def ids(cases):
    return [case["id"] for case in cases]


def alternatives(texts):
    """must_report and must_name: groups of spellings, one of each group must be there; a flat list is one group."""
    return [texts] if all(isinstance(text, str) for text in texts) else texts


def test_the_folder_has_cases():
    assert CASES
    assert {case["outcome"] for case in CASES} <= {"load", "refuse"}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("case", LOADED, ids=ids(LOADED))
def test_tokens(case, runner):
    checkpoint = loaded(case, torch.float32)
    probe = load_file(FOLDER / case["id"] / "probe.safetensors")
    positions = probe["positions"].tolist()
    assert positions == list(range(positions[0], positions[0] + len(positions)))
    tokens, logits = RUNNERS[runner](checkpoint, probe, case["facts"].get("num_draft_steps", EXPECTED["probe_steps"]))
    assert tokens == case["facts"]["tokens"]
    assert tokens not in [wrong["tokens"] for wrong in case.get("must_not", [])]
    if logits is not None and "first_logits_top5" in case["facts"]:
        for token, value in case["facts"]["first_logits_top5"]:
            assert float(logits[token]) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize("case", LOADED, ids=ids(LOADED))
def test_facts(case):
    checkpoint = loaded(case)
    known = {name: FACTS[name](checkpoint) for name in case["facts"] if name in FACTS}
    assert len(known) >= 8
    assert known == {name: case["facts"][name] for name in known}
    assert checkpoint.config.rope.theta == case["facts"]["rope"]["theta"]
    folder = target_of(case) or FOLDER / case["id"]
    target = json.loads((folder / "config.json").read_text())
    assert checkpoint.config.max_positions == target["max_position_embeddings"]
    stored = load_file(FOLDER / case["id"] / "model.safetensors")
    (fc,) = [tensor for name, tensor in stored.items() if name.endswith("fc.weight")]
    assert checkpoint.weights.fc.dtype is fc.dtype
    assert torch.equal(checkpoint.weights.fc, fc)


@pytest.mark.parametrize("case", LOADED, ids=ids(LOADED))
def test_report(case):
    report = loaded(case).report
    for group in alternatives(case.get("must_report", [])) if case.get("must_report") else []:
        assert any(text in report for text in group), f"none of {group} in:\n{report}"


@pytest.mark.parametrize("case", REFUSED, ids=ids(REFUSED))
@pytest.mark.parametrize("read", [load, examine])
def test_refused(case, read):
    with pytest.raises(EaglexError) as caught:
        read(FOLDER / case["id"], target=target_of(case))
    for group in alternatives(case["must_name"]):
        assert any(text in str(caught.value) for text in group)


@pytest.mark.parametrize("case", LOADED, ids=ids(LOADED))
def test_known_wrong_readings_differ(case):
    """The case can tell its traps apart: what must not come out is never what must."""
    assert all(wrong["tokens"] != case["facts"]["tokens"] for wrong in case.get("must_not", []))
