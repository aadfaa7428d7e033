"""The judge of 16-bit drafts lets rounding pass and nothing else: each fault that is planted here is found."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from support.judge import Judge
from support.models import random_weights
from support.rig import Ask, Layout
from support.streamed import StreamedRig, make_streamed_config

from eaglex import reference
from eaglex.config import SpeculationConfig
from eaglex.packed import DraftQuant
from eaglex.quantize import quantize

CHAIN = SpeculationConfig(num_steps=4)
TREE = SpeculationConfig(num_steps=4, topk=3, num_draft_tokens=12)


class OnTheCpu(StreamedRig):
    """bf16 weights, rows and pool; the CPU backend keeps activations in float32, so its errors are small."""

    device = "cpu"

    def check_backend(self) -> None:
        pass


def judged(speculation: SpeculationConfig, drafts: int = 12):
    """Requests past their prompts: (rig, outcomes of a cycle that the engine has run but nobody judged)."""
    rig = OnTheCpu(make_streamed_config(), speculation, layout=Layout(num_slots=drafts + 1, max_batch=drafts,
                                                                      max_rows=200))
    for request in range(drafts):
        rig.join(request, 1 + request)
    rig.compare(rig.cycle([Ask(r, 9) for r in range(drafts)]))
    rig.judge = Judge(rig.config, speculation)
    return rig, rig.cycle([Ask(r, 5, 1 + r % 5) for r in range(drafts)])


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_right_drafts_pass(speculation) -> None:
    rig, outcomes = judged(speculation)
    assert rig.compare(outcomes) == 12
    rig.judge.ENOUGH = 1
    rig.judge.check()
    assert rig.judge.worst < 0.03
    assert max(rig.judge.regrets) < 0.02
    rig.compare_pool()


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("head", [0, 1])
def test_a_wrong_key_of_one_head_is_found(speculation, head) -> None:
    """Keys of one of two KV heads, each a position off, in an engine that is else right."""
    rig, _ = judged(speculation)
    for request in rig.requests.values():
        at = rig.table[request.slot, : request.length].long()
        keys = rig._pool[0][0]
        keys[at, head] = keys[at, head].roll(1, 0)
    rig.judge.ENOUGH = 1
    with pytest.raises(AssertionError, match="by depth|is off by"):
        rig.compare(rig.cycle([Ask(r, 5, 1 + r % 5) for r in range(12)]))


class OnePercentOff(OnTheCpu):
    """The engine's last norm is 1 % too large."""

    def build(self):
        right = self.weights
        self.weights = dataclasses.replace(right, norm=(right.norm.float() * 1.01).bfloat16())
        try:
            return super().build()
        finally:
            self.weights = right


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_norm_that_is_one_percent_off_is_found(speculation) -> None:
    rig = OnePercentOff(make_streamed_config(), speculation, layout=Layout(num_slots=13, max_batch=12, max_rows=200))
    for request in range(12):
        rig.join(request, 1 + request)
    rig.judge.ENOUGH = 1
    with pytest.raises(AssertionError, match="by depth"):
        rig.compare(rig.cycle([Ask(r, 9) for r in range(12)]))


class Rescored(OnTheCpu):
    """The reference has a rescored head, and the engine what `served` makes of it."""

    served = staticmethod(lambda weights: weights)

    def build(self):
        right = self.weights
        self.weights = self.served(right)
        try:
            return super().build()
        finally:
            self.weights = right


class ScanAlone(Rescored):
    """The engine drafts by the INT4 scores."""

    served = staticmethod(lambda weights: dataclasses.replace(weights, lm_head_rows=None))


class NextRow(Rescored):
    """The engine rescores by the rows of other ids."""

    served = staticmethod(lambda weights: dataclasses.replace(weights, lm_head_rows=weights.lm_head_rows.roll(1, 0)))


class AnyId(Rescored):
    """The engine drafts by a head that is exact throughout: right scores, but no scan would find all its ids."""

    served = staticmethod(
        lambda weights: dataclasses.replace(weights, lm_head=weights.lm_head_rows, lm_head_rows=None))


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("kind", "error"), [(Rescored, None), (ScanAlone, "by depth|is off by|found"),
                                             (NextRow, "by depth|is off by|found")])
def test_a_rescored_head(kind, error, speculation) -> None:
    config = make_streamed_config()
    weights = quantize(random_weights(config, dtype=torch.bfloat16), DraftQuant.parse("head=int4"))
    rig = kind(config, speculation, weights=weights, layout=Layout(num_slots=25, max_batch=24, max_rows=300))
    for request in range(24):
        rig.join(request, 1 + request)
    rig.judge.ENOUGH = 1
    with pytest.raises(AssertionError, match=error) if error else contextlib.nullcontext():
        rig.compare(rig.cycle([Ask(r, 9) for r in range(24)]))
        rig.compare(rig.cycle([Ask(r, 5, 1 + r % 5) for r in range(24)]))


def test_a_token_that_no_scan_can_have_found() -> None:
    """Right scores and choices of an exact head: the last of each top-k may lie behind what an INT4 scan offers."""
    config = make_streamed_config()
    weights = quantize(random_weights(config, dtype=torch.bfloat16), DraftQuant.parse("head=int4"))
    tree = SpeculationConfig(num_steps=2, topk=16, num_draft_tokens=40)
    rig = AnyId(config, tree, weights=weights, layout=Layout(num_slots=25, max_batch=24, max_rows=300))
    weights.lm_head_rows[100:] = 0  # what the engine has
    weights.lm_head_rows[300:308] = 10 * weights.lm_head_rows[:8]
    for request in range(24):
        rig.join(request, 1 + request)
    with pytest.raises(AssertionError, match="which no scan can have found"):
        rig.compare(rig.cycle([Ask(r, 9) for r in range(24)]))


def test_a_depth_that_few_drafts_reach() -> None:
    """Errors of an H200: depths 6 and 7 are two paths. In all drafts, or 3.5 times as large, they are a fault."""
    judge = Judge(make_streamed_config(), SpeculationConfig(num_steps=8, topk=3, num_draft_tokens=30))
    judge.regrets = [0.0] * 42
    judge.nodes = torch.tensor([0, 126, 377, 374, 318, 20, 2, 1, 0])
    judge.drafts = torch.tensor([0, 42, 42, 42, 42, 12, 2, 1, 0])
    theirs = torch.tensor([0, 0.0102, 0.0158, 0.0214, 0.0260, 0.0310, 0.0221, 0.0596, 0], dtype=torch.float64)
    error = torch.tensor([0, 0.0068, 0.0110, 0.0162, 0.0223, 0.0394, 0.0972, 0.1633, 0], dtype=torch.float64)
    judge.allowed, judge.error, judge.worst_at = theirs.square() * judge.nodes, error.square() * judge.nodes, error
    judge.check()
    for depth in range(1, 8):
        judge.error = error.square() * judge.nodes
        judge.error[depth] *= 3.5**2
        with pytest.raises(AssertionError, match="by depth"):
            judge.check()
    judge.error, judge.drafts[1:8] = error.square() * judge.nodes, 42
    with pytest.raises(AssertionError, match="by depth"):
        judge.check()


def spoiled(rig, outcome, **changes: torch.Tensor) -> None:
    rig.judge = Judge(rig.config, rig.speculation)
    rig.judge.take(dataclasses.replace(rig.drafted(outcome.slot), **changes), outcome.exact, outcome.plain)
    rig.judge.check_choices()


def test_each_part_of_a_draft_counts() -> None:
    rig, outcomes = judged(TREE)
    outcome = outcomes[0]
    drafted = rig.drafted(outcome.slot)
    spoiled(rig, outcome)
    with pytest.raises(AssertionError, match="a score is off"):
        spoiled(rig, outcome, scores=drafted.scores - 0.3)
    with pytest.raises(AssertionError, match="has token"):
        spoiled(rig, outcome, tokens=drafted.tokens.clone().index_fill(0, torch.tensor([0, 1]), int(drafted.tokens[0])))
    # Another token with a score of its own: the score may be right, the choice is not.
    tokens = drafted.tokens.clone()
    targets = torch.arange(rig.config.draft_vocab_size) + rig.weights.d2t
    worse = torch.log_softmax(outcome.exact.logits, -1).argsort(descending=True)[20]
    tokens[0] = targets[worse]
    with pytest.raises(AssertionError, match="is off by"):
        spoiled(rig, outcome, tokens=tokens)
    # The best leaf is missing, and nothing is in its place.
    leaves = [i for i in range(11) if i + 1 not in drafted.parents.tolist()]
    best = max(leaves, key=lambda i: float(drafted.scores[i]))
    kept = [i for i in range(11) if i != best]
    parents = drafted.parents.clone()
    parents[parents > best + 1] -= 1
    rig.judge = Judge(rig.config, dataclasses.replace(TREE, num_draft_tokens=11))
    rig.judge.take(reference.Draft(drafted.tokens[kept], parents[kept], drafted.scores[kept]), outcome.exact,
                   outcome.plain)
    with pytest.raises(AssertionError, match="a choice is off"):
        rig.judge.check_choices()
