"""Calls of one shape by addresses alone: results as of the calls that are checked, and other shapes turned away."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.models import make_config, random_weights

from eaglex.config import EngineLimits, MaskMode, SpeculationConfig
from eaglex.engine import DraftBatch, DraftEngine, VerifyTensors, _extension, _fields, _fill
from eaglex.errors import ConfigError
from eaglex.repeated import RepeatedAsk

GIVEN = ("aux_hidden_states", "input_ids", "num_valid", "req_pool_indices", "seq_lens", "out_cache_loc")
SPECULATION = SpeculationConfig(num_steps=3, topk=1, num_draft_tokens=4)


def engine() -> DraftEngine:
    config = make_config()
    pool = [torch.zeros((64, config.num_kv_heads, config.head_dim)) for _ in range(2 * config.num_layers)]
    return DraftEngine(
        config,
        SPECULATION,
        limits=EngineLimits(max_batch=4, max_rows=16, num_slots=5),
        weights=random_weights(config),
        req_to_token=torch.arange(5 * 12, dtype=torch.int32).view(5, 12),
        draft_k=pool[: config.num_layers],
        draft_v=pool[config.num_layers :],
    )


def batch(config_width: int, seed: int, requests: int = 2) -> DraftBatch:
    torch.manual_seed(seed)
    rows = 4 * requests
    return DraftBatch(
        aux_hidden_states=torch.randn(rows, config_width),
        input_ids=torch.randint(0, 30, (rows,), dtype=torch.int32),
        row_start=torch.arange(requests + 1, dtype=torch.int32) * 4,
        num_valid=torch.randint(1, 5, (requests,), dtype=torch.int32),
        draft_from=torch.ones(requests, dtype=torch.bool),
        req_pool_indices=torch.randperm(4)[:requests] + 1,
        seq_lens=torch.zeros(requests, dtype=torch.int64),
        out_cache_loc=torch.arange(rows) + 1,
    )


def trees(made: DraftEngine, given: DraftBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    requests = given.num_valid.shape[0]
    ids = {
        "req_pool_indices": given.req_pool_indices,
        "seq_lens": given.seq_lens + given.num_valid,
        "bonus_tokens": torch.arange(requests, dtype=torch.int32),
    }
    out = VerifyTensors.allocate(requests, 4, MaskMode.QLEN_ONLY)
    made.tree(out, **ids)
    return out.draft_tokens, ids


def test_repeated_calls_give_what_checked_calls_give() -> None:
    one, other = engine(), engine()
    width = one.config.aux_width
    repeated = other.repeated_run(batch(width, 0))
    out = VerifyTensors.allocate(2, 4, MaskMode.QLEN_ONLY)
    tree = None
    for seed in range(1, 6):
        given = batch(width, seed)
        one.run(given)
        assert repeated(*(getattr(given, name) for name in GIVEN), 0)
        for field in dataclasses.fields(one.results):
            a, b = getattr(one.results, field.name), getattr(other.results, field.name)
            assert a is None or torch.equal(a, b), field.name
        wanted, ids = trees(one, given)
        tree = tree or other.repeated_tree(out, **ids)
        assert tree(*ids.values(), 0)
        assert torch.equal(out.draft_tokens, wanted)
    assert int((one.results.num_nodes > 0).sum()) > 1


@pytest.mark.parametrize("name", GIVEN)
def test_another_shape_or_type_is_turned_away(name: str) -> None:
    made = engine()
    first = batch(made.config.aux_width, 0)
    repeated = made.repeated_run(first)
    given = {key: getattr(first, key) for key in GIVEN}
    other = given[name].double() if name == "aux_hidden_states" else given[name].to(torch.int16)
    longer = torch.cat((given[name], given[name]))
    strided = torch.stack((given[name], given[name]), -1)[..., 0]
    for wrong in (other, longer, strided):
        assert not repeated(*(given | {name: wrong}).values(), 0)
    assert sum(made.counters().values()) == 0
    assert repeated(*given.values(), 0)


def test_a_dedicated_drafter_is_asked_with_the_same_structure() -> None:
    """`RelayClient.repeated` without its client: the binary's own structure moves, or turns another shape away."""
    first, second = (batch(engine().config.aux_width, seed) for seed in (0, 1))
    asked: list[object] = []
    filled = _fill(_extension().BatchTensors(), **_fields(first))
    ask = RepeatedAsk(lambda *given, **lanes: not asked.append(given), filled, None)
    given = {name: getattr(second, name) for name in GIVEN}
    assert ask(*given.values(), slots=[1, 2], rewritten=[False, False], stream=7) is True
    assert asked == [(filled, [1, 2], 7)]
    wrong = given | {"seq_lens": second.seq_lens.to(torch.int16)}
    assert ask(*wrong.values(), slots=[1, 2], rewritten=[False, False], stream=7) is None
    assert len(asked) == 1


def test_what_cannot_be_repeated_is_named() -> None:
    made = engine()
    given = dataclasses.replace(batch(made.config.aux_width, 0), out_cache_loc=None)
    with pytest.raises(ConfigError, match="out_cache_loc"):
        made.repeated_run(given)


def test_the_function_of_a_repeated_call_says_what_it_takes_and_keeps_its_engine() -> None:
    made = engine()
    first = batch(made.config.aux_width, 0)
    made.run(first)
    run = made.repeated_run(first)
    given = [getattr(first, name) for name in GIVEN]
    with pytest.raises(TypeError, match="expected 6 tensors and a stream, got 6 arguments"):
        run.again(*given)
    with pytest.raises(TypeError, match="integer"):
        run.again(*given, "0")
    with pytest.raises(OverflowError):
        run.again(*given, -1)
    assert not run.again(*given[:-1], None, 0)
    results, bound = made.results, made._bound  # the tensors are Python's to keep
    results.drafted_for.fill_(-1)
    del made
    assert run.again(*given, 0)
    assert int((results.drafted_for >= 0).sum()) == 2
    assert bound
