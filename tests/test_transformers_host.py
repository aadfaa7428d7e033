"""The Hugging Face host: its target, its cycle and its greedy output against the target alone and the reference."""

import hf_pair
import pytest
import torch
from hf_pair import CHAIN, PROMPT, SHAPES, TREE, alone, small_host

from eaglex import reference
from eaglex.config import SpeculationConfig
from eaglex.hosts import plain
from eaglex.hosts.hf_target import HookedTarget, decoder_layers
from eaglex.hosts.transformers import Finish, GenerateOptions, HostLimits


@pytest.mark.parametrize("family", hf_pair.FAMILIES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_greedy_output_is_the_targets_own(family, shape):
    host = small_host(SHAPES[shape], family, limits=HostLimits(prompt_chunk=3))
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=40))
    assert output.tokens == [alone(host, PROMPT, 40)]
    assert output.finish == [Finish.MAX_NEW_TOKENS]
    assert len(set(output.tokens[0])) > 4
    assert output.statistics.accept_length > 1
    assert output.lanes["held"] == 2  # the prompt came in three chunks
    assert output.lanes["drafted"] == output.statistics.cycles


def test_no_steps_is_plain_decoding():
    host = small_host(SpeculationConfig(num_steps=0))
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=12))
    assert output.tokens == [alone(host, PROMPT, 12)]
    assert output.statistics.accept_length == 1


def test_the_plain_loop_is_transformers_own():
    host = small_host(CHAIN)
    options = GenerateOptions(max_new_tokens=20)
    assert plain.decode(host.target, PROMPT, count=20, options=options).tokens == alone(host, PROMPT, 20)


def test_requests_of_one_batch_do_not_touch_each_other():
    prompts = [PROMPT, [3], [11, 0, 0, 2, 8, 1, 1, 6, 5, 4]]
    host = small_host(TREE, limits=HostLimits(max_batch=3, max_length=60))
    together = host.generate(prompts, GenerateOptions(max_new_tokens=25))
    assert together.tokens == [alone(host, prompt, 25) for prompt in prompts]
    for slot, prompt in enumerate(prompts):
        single = small_host(TREE).generate([prompt], GenerateOptions(max_new_tokens=25))
        assert single.tokens[0] == together.tokens[slot]
    again = host.generate(prompts[::-1], GenerateOptions(max_new_tokens=25))
    assert again.tokens == together.tokens[::-1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_new_tokens(count):
    host = small_host(TREE)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=count))
    assert output.tokens == [alone(host, PROMPT, count)]


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_context_ends(shape):
    model = hf_pair.target_model(max_position_embeddings=24, **hf_pair.SMALL)
    config = hf_pair.draft_config(max_positions=24, **hf_pair.SMALL_DRAFT)
    host = hf_pair.host(SHAPES[shape], model=model, config=config)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=100))
    assert output.tokens == [alone(host, PROMPT, 24 - len(PROMPT))]
    assert output.finish == [Finish.CONTEXT]
    assert output.lanes["bad_index"] == 0
    assert output.lanes["no_room"] > 0


def cycles_of(host, prompt, count):
    """What each call of on_tokens brought, the first token first."""
    pieces = []
    host.generate([prompt], GenerateOptions(max_new_tokens=count), on_tokens=lambda _, tokens: pieces.append(tokens))
    return pieces


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_end_of_text_inside_a_draft(shape):
    """The first token of a piece of several was drafted; made the end of text, nothing behind it may come out."""
    host = small_host(SHAPES[shape])
    for start in range(12):
        prompt = [start, *PROMPT]
        pieces = cycles_of(host, prompt, 60)
        so_far = []
        for piece in pieces:
            if len(piece) > 1 and piece[0] not in so_far:
                break
            so_far += piece
        else:
            continue
        eos = frozenset(piece[:1])
        output = host.generate([prompt], GenerateOptions(max_new_tokens=60, eos_token_ids=eos))
        assert output.tokens == [[*so_far, piece[0]]]
        assert output.tokens == [alone(host, prompt, 60, eos)]
        assert output.finish == [Finish.EOS]
        assert output.statistics.emitted == len(output.tokens[0]) - 1
        return
    pytest.fail("no prompt accepts a drafted token that is new")


def test_end_of_text_as_first_token_runs_no_draft():
    host = small_host(CHAIN)
    first = alone(host, PROMPT, 1)
    output = host.generate([PROMPT], GenerateOptions(eos_token_ids=frozenset(first)))
    assert output.tokens == [first]
    assert output.statistics.cycles == 0
    assert output.lanes["drafted"] == 0
    assert output.tokens_per_second == 0


def test_end_of_text_is_the_generation_configs():
    host = small_host(CHAIN)
    third = alone(host, PROMPT, 3)[2]
    host.target.model.generation_config.eos_token_id = [third, 999]
    assert host.target.eos_token_ids == {third, 999}
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=30))
    assert output.tokens[0][-1] == third
    assert len(output.tokens[0]) <= 3


@pytest.mark.parametrize("family", hf_pair.FAMILIES)
def test_a_tree_forward_equals_one_forward_per_path(family):
    """Logits and captured layers of every node against a plain forward of its path; the last layer before the norm."""
    model = hf_pair.target_model(family)
    target = HookedTarget(model, hf_pair.AUX)
    drafted = reference.Draft(
        torch.tensor([4, 9, 1, 30, 2, 2, 17]), torch.tensor([0, 0, 1, 1, 2, 3, 5]), torch.zeros(7)
    )
    tree = reference.tree(drafted, 25, len(PROMPT), 9)  # the last node is a pad
    cache = target.new_cache()
    with torch.inference_mode():
        target.extend(cache, torch.tensor(PROMPT))
        logits, aux = target.verify(cache, tree.draft_tokens, tree.positions, tree.mask)
        for node in range(8):
            path = tree.mask[node].nonzero().flatten()
            full = model(input_ids=torch.tensor([PROMPT + tree.draft_tokens[path].tolist()]), output_hidden_states=True)
            torch.testing.assert_close(logits[node], full.logits[0, -1], rtol=1e-4, atol=1e-4)
            parts = aux[node].split(model.config.hidden_size)
            torch.testing.assert_close(parts[0], full.hidden_states[1][0, -1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(parts[1], full.hidden_states[2][0, -1], rtol=1e-4, atol=1e-4)
            # hidden_states ends with the normed output; what is captured is in front of the norm.
            normed = decoder_norm(model)(parts[2])
            torch.testing.assert_close(normed, full.hidden_states[3][0, -1], rtol=1e-4, atol=1e-4)
        target.keep(cache, len(PROMPT), [0, 1, 3, 6])
        kept = target.new_cache()
        target.extend(kept, torch.tensor([*PROMPT, 25, 4, 1, 2]))
    for layer, expected in zip(cache.layers, kept.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-4)


def decoder_norm(model):
    return model.get_decoder().norm


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_draft_is_the_references(shape, monkeypatch):
    """After each launch, the slot's draft equals the reference's from a plain forward of all tokens so far."""
    host = small_host(SHAPES[shape], limits=HostLimits(prompt_chunk=4))
    config, weights = (
        hf_pair.draft_config(**hf_pair.SMALL_DRAFT),
        hf_pair.draft_weights(hf_pair.draft_config(**hf_pair.SMALL_DRAFT)),
    )
    drafts, run = [], host.slots.run

    def recording(rows):
        run(rows)
        results = host.slots.engine.results
        n = int(results.num_nodes[1])
        drafts.append(
            (int(results.drafted_for[1]), results.draft_tokens[1, :n].clone(), results.parents[1, :n].clone())
        )

    monkeypatch.setattr(host.slots, "run", recording)
    tokens = PROMPT + host.generate([PROMPT], GenerateOptions(max_new_tokens=30)).tokens[0]
    with torch.inference_mode():
        _, aux = host.target.extend(host.target.new_cache(), torch.tensor(tokens))
    assert [length for length, drafted, _ in drafts if length < len(PROMPT) and len(drafted)] == []
    drafts = [d for d in drafts if len(d[1])]
    assert len(drafts) > 5
    for length, drafted, parents in drafts:
        cache = reference.DraftCache.empty(config, torch.float32)
        logits, hidden = reference.extend(config, weights, cache, aux[:length], torch.tensor(tokens[1 : length + 1]))
        expected = reference.draft(config, weights, cache, logits, hidden, SHAPES[shape])
        assert drafted.tolist() == expected.tokens.tolist()
        assert parents.tolist() == expected.parents.tolist()


def test_statistics_count_what_was_emitted():
    host = small_host(TREE)
    pieces = cycles_of(host, PROMPT, 50)
    output = host.generate([PROMPT], GenerateOptions(max_new_tokens=50))
    found = output.statistics
    lengths = [len(piece) for piece in pieces[1:]]
    assert found.cycles == len(lengths)
    assert found.emitted >= sum(lengths)  # the last cycle may be cut by max_new_tokens
    assert found.emitted - found.reached[0] >= found.cycles
    assert found.accept_length == pytest.approx(1 + sum(found.acceptance_per_position))
    assert found.reached[0] == sum(length > 1 for length in [*lengths[:-1], found.emitted - sum(lengths[:-1])])
    assert set(output.cycle_us) == {"tree", "verify", "accept", "compact", "host", "draft"}
    assert set(output.prompt_us) == {"prefill", "extend"}
    assert sum(output.cycle_us.values()) * found.cycles / 1e6 <= output.decode_seconds
    assert output.tokens_per_second == pytest.approx(49 / output.decode_seconds)


def test_hooks_do_not_stay(monkeypatch):
    host = small_host(CHAIN)
    host.generate([PROMPT], GenerateOptions(max_new_tokens=4))
    layers = decoder_layers(host.target.model)
    assert [len(layer._forward_hooks) for layer in layers] == [0] * 3
    monkeypatch.setattr(layers[2], "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        host.generate([PROMPT], GenerateOptions(max_new_tokens=4))
    assert [len(layer._forward_hooks) for layer in layers] == [0] * 3
