"""Bad prompts, options, targets and drafts: each a clear error before anything runs, or a loss of speed alone."""

import sys

import hf_pair
import pytest
import torch
import transformers
from hf_pair import CHAIN, PROMPT, TREE, alone, small_host

from eaglex.config import Sampling, SpeculationConfig
from eaglex.errors import ConfigError, DeviceError
from eaglex.hosts import plain
from eaglex.hosts.hf_target import HookedTarget, TargetFacts, read_facts
from eaglex.hosts.statistics import Statistics
from eaglex.hosts.transformers import Finish, GenerateOptions, HostLimits


def refuse_to_run(monkeypatch, host):
    def ran(*_, **__):
        pytest.fail("something was started")

    monkeypatch.setattr(host.target.model, "forward", ran)
    monkeypatch.setattr(host.slots, "run", ran)


BAD_PROMPTS = {
    "empty": ([[]], "prompt: expected at least one token, got none"),
    "fills-the-context": ([[1] * 160], "prompt: expected at most 159 tokens.*got 160"),
    "beyond-the-context": ([[1] * 500], "prompt: expected at most 159 tokens.*got 500"),
    "unknown-token": ([[1, 12]], "prompt: expected token ids in 0..11, got 12"),
    "negative-token": ([[1, -1]], "prompt: expected token ids in 0..11, got -1"),
    "text": (["the cat"], "prompt: expected token ids, got 't': tokenise texts first"),
    "float": ([[1, 2.0]], "prompt: expected token ids, got 2.0"),
    "none": ([], "prompts: expected 1..max_batch=1, got 0"),
    "too-many": ([[1], [2]], "prompts: expected 1..max_batch=1, got 2"),
}


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_bad_prompt_starts_nothing(prompts, message, monkeypatch):
    host = small_host(CHAIN)
    refuse_to_run(monkeypatch, host)
    with pytest.raises(ConfigError, match=message):
        host.generate(prompts, GenerateOptions())


def test_the_longest_prompt_gives_one_token():
    host = small_host(CHAIN)
    prompt = [1] * 159
    output = host.generate([prompt], GenerateOptions())
    assert output.tokens == [alone(host, prompt, 1)]
    assert output.finish == [Finish.CONTEXT]


BAD_DRAFTS = {
    "other-hidden": (
        {"target_hidden_size": 48},
        hf_pair.AUX,
        "target_hidden_size: expected 32.*got 48.*another target",
    ),
    "other-vocabulary": ({"vocab_size": 41}, hf_pair.AUX, "vocab_size: expected 40.*got 41"),
    "aux-width": ({"num_aux": 2}, hf_pair.AUX, r"aux_layer_ids: expected 2 output ids.*got \[0, 1, 2\]"),
    "aux-layer": ({}, (0, 1, 3), r"aux_layer_ids: expected output ids in 0..2, got \[3\]"),
    "aux-negative": ({}, (0, 1, -1), r"aux_layer_ids: expected output ids in 0..2, got \[-1\]"),
}


@pytest.mark.parametrize(("fields", "aux", "message"), BAD_DRAFTS.values(), ids=BAD_DRAFTS.keys())
def test_draft_of_another_target(fields, aux, message):
    with pytest.raises(ConfigError, match=message):
        hf_pair.host(CHAIN, config=hf_pair.draft_config(**fields), aux=aux)


def test_target_without_decoder_layers(monkeypatch):
    model = hf_pair.target_model()
    monkeypatch.setattr(model.model, "layers", torch.nn.Sequential(*model.model.layers))
    with pytest.raises(ConfigError, match=r"expected a list of 3 decoder layers to hook.*LlamaModel, got none"):
        HookedTarget(model, hf_pair.AUX)


def test_target_with_attention_that_takes_no_mask(monkeypatch):
    model = hf_pair.target_model()
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2", raising=False)
    with pytest.raises(ConfigError, match=r"attn_implementation: expected sdpa or eager.*got flash_attention_2"):
        HookedTarget(model, hf_pair.AUX)


def test_target_with_a_state_that_cannot_be_cut_back():
    config = transformers.Qwen3Config(
        **hf_pair.SIZES, layer_types=["full_attention", "linear_attention", "full_attention"]
    )
    with pytest.raises(ConfigError, match=r"layer_types.*got linear_attention"):
        TargetFacts.of(config)


BAD_OPTIONS = {
    "no-tokens": ({"max_new_tokens": 0}, "max_new_tokens: expected >= 1, got 0"),
    "cold": ({"temperature": -0.1}, "temperature: expected >= 0 and finite, got -0.1"),
    "not-a-number": ({"temperature": float("nan")}, "temperature: expected >= 0 and finite, got nan"),
    "infinite": ({"temperature": float("inf")}, "temperature: expected >= 0 and finite, got inf"),
    "seed": ({"seed": -1}, f"seed: expected in 0..{2**63 - 1}, got -1"),
    "seed-beyond-torch": ({"seed": 2**63}, f"seed: expected in 0..{2**63 - 1}, got {2**63}"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options(fields, message):
    with pytest.raises(ConfigError, match=message):
        GenerateOptions(**fields)


def test_rejection_sampling_needs_a_temperature():
    host = small_host(SpeculationConfig(num_steps=2, sampling=Sampling.REJECTION))
    with pytest.raises(ConfigError, match=r"temperature: expected > 0 with rejection sampling"):
        host.generate([PROMPT], GenerateOptions())


def test_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"transformers: expected the package.*pip install 'eaglex\[hf\]'"):
        read_facts("nowhere")


def test_a_head_that_never_hits_is_reported(caplog):
    """Its one word never comes: the text is right, and the warning says what to look at."""
    model, config = hf_pair.target_model(), hf_pair.draft_config(draft_vocab_size=1)
    text = plain.generate(HookedTarget(model, hf_pair.AUX), PROMPT, count=60)
    weights = hf_pair.draft_weights(config)
    weights.d2t[0] = next(token for token in range(40) if token not in text)
    host = hf_pair.host(CHAIN, model=model, config=config, weights=weights)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=60))
    assert output.tokens == [text]
    expected = "accept length stays at 1.0 after 32 drafts: wrong head or wrong auxiliary layers?"
    assert output.warnings == [expected]
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_a_head_that_hits_is_not_reported():
    found = Statistics(3)
    for i in range(200):
        found.record(2 if i % 10 == 0 else 1, had_draft=True)
    assert found.complaint() is None


def test_cycles_without_a_draft_are_no_reason_to_complain():
    found = Statistics(3)
    for _ in range(100):
        found.record(1, had_draft=False)
    assert found.complaint() is None


def test_a_head_of_nan_costs_speed_alone():
    config = hf_pair.draft_config(**hf_pair.SMALL_DRAFT)
    weights = hf_pair.draft_weights(config)
    weights.lm_head.fill_(float("nan"))
    host = small_host(TREE, weights=weights)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=20))
    assert output.tokens == [alone(host, PROMPT, 20)]
    assert output.lanes["not_finite"] == output.statistics.cycles
    assert output.statistics.drafts == 0


@pytest.mark.parametrize("launch", [0, 1, 4])
def test_a_drafter_that_fails_costs_speed_alone(launch, monkeypatch):
    host = small_host(TREE, limits=HostLimits(prompt_chunk=4))
    launches, run = [], host.slots.engine.run

    def failing(*arguments):
        launches.append(arguments)
        if len(launches) > launch:
            raise DeviceError("the device is gone")
        run(*arguments)

    monkeypatch.setattr(host.slots.engine, "run", failing)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=30))
    assert output.tokens == [alone(host, PROMPT, 30)]
    assert output.warnings == ["the drafter failed, going on without speculation: the device is gone"]
    assert len(launches) == launch + 1
    monkeypatch.undo()
    assert host.generate([PROMPT], GenerateOptions(max_new_tokens=30)).warnings == []
