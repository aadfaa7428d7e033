"""Sampled speculation emits the target's distribution, by each of its rules."""

import functools

import hf_pair
import pytest
import torch
from hf_pair import CHAIN, PROMPT, TREE, alone, small_host

from eaglex.config import Sampling, SpeculationConfig
from eaglex.hosts.draft_slots import DraftRows, tree_of
from eaglex.hosts.transformers import GenerateOptions, HostLimits

SAMPLED = {
    "tree": TREE,
    "chain": CHAIN,
    "rejection": SpeculationConfig(num_steps=2, sampling=Sampling.REJECTION),
}


def total_variation(counts, probs):
    return float((counts / counts.sum() - probs).abs().sum()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", SAMPLED)
def test_first_token_of_a_cycle_is_distributed_as_the_targets(shape):
    """Many verifications of one prefix: total variation below 0.01 for the token emitted."""
    speculation, slots, temperature, prompt = SAMPLED[shape], 60, 0.5, PROMPT[:3]
    host = small_host(speculation, limits=HostLimits(max_batch=slots, max_length=40))
    options = GenerateOptions(max_new_tokens=2, temperature=temperature, seed=5)
    with torch.inference_mode():
        cache = host.target.new_cache()
        _, aux = host.target.extend(cache, torch.tensor(prompt))
        requests = host._requests([prompt] * slots, options)
        acceptor, root = requests[0].acceptor, 6
        rejection = speculation.sampling is Sampling.REJECTION
        counts, drafted = torch.zeros(12), torch.zeros(12)
        for _ in range(18_000 // slots):
            if rejection or not drafted.sum():
                host.slots.run([
                    DraftRows(
                        slot=r.slot, length=0, aux_hidden_states=aux, next_tokens=[*prompt[1:], root],
                        temperature=temperature, uniforms=r.acceptor.uniforms(2) if rejection else None)
                    for r in requests])  # fmt: skip
                lengths = [len(prompt)] * slots
                trees = host.slots.trees([r.slot for r in requests], lengths, [root] * slots)
            tree = tree_of(trees, 0)
            if not drafted.sum():
                logits, _ = host.target.verify(cache, tree.draft_tokens, tree.positions, tree.mask)
                expected = torch.softmax(logits[0] / temperature, -1)
            for r in requests:
                chain = host.slots.chain(r.slot, len(prompt)) if rejection else None
                counts[acceptor.accept(tree, logits, chain).tokens[0]] += 1
                drafted[int(chain.tokens[0]) if rejection else int(tree.draft_tokens[1])] += 1
    assert total_variation(counts, expected) < 0.01
    assert total_variation(drafted, expected) > 0.05  # the draft alone would have been noticed


def uniformity(model, prompt, tokens, temperature):
    """Kolmogorov-Smirnov distance from uniform of each token's place in the target's distribution, likeliest first."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    ranked = torch.softmax(logits.double() / temperature, -1).sort(-1, descending=True)
    place = (ranked.indices == torch.tensor(tokens)[:, None]).int().argmax(-1, keepdim=True)
    below = ranked.values.cumsum(-1).gather(1, place) - ranked.values.gather(1, place)
    noise = torch.rand(place.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = (below + noise * ranked.values.gather(1, place)).flatten().sort().values
    steps = torch.arange(1, len(values) + 1) / len(values)
    return float((values - steps).abs().max())


@functools.cache
def long_pair():
    model = hf_pair.target_model(max_position_embeddings=2000, **hf_pair.SMALL)
    return model, hf_pair.draft_config(max_positions=2000, **hf_pair.SMALL_DRAFT)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SAMPLED)
def test_a_long_sample_is_the_targets(shape):
    """Every token is a fair draw: a fair text exceeds D = 1.95 / sqrt(n) once in a thousand; the seed is fixed."""
    model, config = long_pair()
    host = hf_pair.host(SAMPLED[shape], model=model, config=config)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=600, temperature=0.9, seed=3))
    assert output.statistics.accept_length > 1.05
    assert uniformity(model, PROMPT, output.tokens[0], 0.9) < 1.95 / 600**0.5
    assert uniformity(model, PROMPT, output.tokens[0], 1.2) > 1.95 / 600**0.5  # another temperature would be noticed


def test_a_seed_repeats_its_sample():
    options = GenerateOptions(max_new_tokens=20, temperature=1.0, seed=11)
    host = small_host(TREE, limits=HostLimits(max_batch=2))
    first, other = host.generate([PROMPT, PROMPT], options).tokens
    assert first != other
    assert host.generate([PROMPT], options).tokens == [first]


def test_a_tiny_temperature_is_greedy():
    host = small_host(TREE)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=20, temperature=1e-30))
    assert output.tokens == [alone(host, PROMPT, 20)]
