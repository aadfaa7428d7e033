"""Verification is lossless: greedy speculation is plain greedy decoding, sampled speculation has the target's
distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eaglex import reference
from eaglex.reference import Accepted, Draft

VOCAB = 5
DRAWS = (
    2**13
)  # scrambled Sobol points: their error falls almost like 1/n, random numbers would need a hundred times as many


@st.composite
def drafts(draw: st.DrawFn, vocab: int, most: int) -> Draft:
    """Any tree: parents before children, siblings of different tokens as a draft's top-k has them."""
    tokens, parents, taken = [], [], set()
    for node in range(1, draw(st.integers(0, most)) + 1):
        parent = draw(st.integers(0, node - 1))
        free = [t for t in range(vocab) if (parent, t) not in taken]
        if not free:
            parent = node - 1
            free = list(range(vocab))
        token = draw(st.sampled_from(free))
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
    return Draft(
        torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64), torch.zeros(len(tokens))
    )


def paths_of(tree: reference.VerifyTree) -> list[list[int]]:
    """Tokens from the root to each node."""
    order = tree.mask.long()
    return [[int(tree.draft_tokens[j]) for j in order[i].nonzero().flatten()] for i in range(len(order))]


@given(data=st.data(), vocab=st.integers(1, 4), seed=st.integers(0, 999), n=st.integers(1, 10))
@settings(max_examples=60)
def test_greedy_speculation_is_greedy_decoding(data, vocab, seed, n) -> None:
    """The target is a random table over the last two tokens, the draft is any tree whatever: the text does not
    change.
    """
    table = torch.randint(0, vocab, (vocab, vocab), generator=torch.Generator().manual_seed(seed)).tolist()
    plain = [0, 0]
    for _ in range(30):
        plain.append(table[plain[-2]][plain[-1]])
    text, cycles = [0, 0], 0
    while len(text) < len(plain):
        tree = reference.tree(data.draw(drafts(vocab, n + 2)), text[-1], len(text) - 1, n)
        contexts = [text[:-1] + path for path in paths_of(tree)]
        accepted = reference.verify_greedy(tree, torch.tensor([table[c[-2]][c[-1]] for c in contexts]))
        assert accepted.accept_length == len(accepted.nodes) >= 1
        text += accepted.tokens
        cycles += 1
    assert text[: len(plain)] == plain


def test_greedy_speculation_accepts_what_matches() -> None:
    """By hand: 3 → {4 → 6, 5 → {7, 8}}; the target says 5, then 8, then 9."""
    draft = Draft(torch.tensor([4, 5, 6, 7, 8]), torch.tensor([0, 0, 1, 2, 2]), torch.zeros(5))
    tree = reference.tree(draft, 3, 10, 6)
    accepted = reference.verify_greedy(tree, torch.tensor([5, 0, 8, 0, 0, 9]))
    assert accepted == Accepted(nodes=[0, 2, 5], tokens=[5, 8, 9])


def test_pads_are_never_accepted() -> None:
    """A pad repeats the bonus token; a target that repeats it too must not land on the pad."""
    tree = reference.tree(Draft(torch.tensor([1]), torch.tensor([0]), torch.zeros(1)), 3, 10, 5)
    assert reference.verify_greedy(tree, torch.full((5,), 3)).nodes == [0]


def sobol(dimensions: int) -> Tensor:
    return torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=11).draw(DRAWS, dtype=torch.float64)


class Target:
    """p(x1) and p(x2 | x1) over a small vocabulary, with one token that is impossible."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.softmax(1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64), -1)
        self.second = torch.softmax(1.5 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64), -1)
        self.second[:, 3] = 0
        self.second /= self.second.sum(-1, keepdim=True)
        self.third = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)

    def joint(self) -> Tensor:
        return self.first[:, None] * self.second


def total_variation(target: Target, verify: Callable[[Tensor], Accepted], points: Tensor) -> float:
    """Half the L1 distance of the first two tokens' joint distribution; where only one was emitted the target
    goes on by itself.
    """
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    running = target.second.cumsum(-1)
    for point in points:
        tokens = verify(point).tokens
        one = tokens[0]
        two = (
            tokens[1]
            if len(tokens) > 1
            else int(torch.searchsorted(running[one], point[0], right=True).clamp(max=VOCAB - 1))
        )
        counts[one, two] += 1
    return float((counts / len(points) - target.joint()).abs().sum()) / 2


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([0, 1], [0, 1]), ([2, 0, 1, 3], [0, 0, 1, 1]), ([0, 1, 2, 3, 4, 4, 2], [0, 0, 0, 0, 0, 1, 3]), ([3, 3], [0, 0])],
    ids=["chain", "tree", "all children", "twins"],
)
def test_target_only_has_the_targets_distribution(tokens, parents) -> None:
    target = Target(seed=len(tokens))
    draft = Draft(torch.tensor(tokens), torch.tensor(parents), torch.zeros(len(tokens)))
    n = len(tokens) + 1
    tree = reference.tree(draft, 0, 7, n)
    probs = torch.stack(
        [target.first] + [target.second[path[-1]] if len(path) == 2 else target.third for path in paths_of(tree)[1:]]
    )

    def verify(point: Tensor) -> Accepted:
        return reference.verify_target_only(tree, probs, point[2:], point[1])

    if tokens == [3, 3]:
        with pytest.raises(AssertionError):
            assert total_variation(target, verify, sobol(n + 2)[:2048]) < 0.01
    else:
        assert total_variation(target, verify, sobol(n + 2)) < 0.01


@pytest.mark.parametrize(
    "d2t", [torch.tensor([0, 0, 1]), torch.tensor([2, 2, 2]), None], ids=["0, 1, 3", "2, 3, 4", "the whole vocabulary"]
)
def test_rejection_has_the_targets_distribution(d2t) -> None:
    """The draft's vocabulary is a part of the target's: what the draft cannot say comes from the residual."""
    target = Target(seed=3)
    size = VOCAB if d2t is None else len(d2t)
    ids = torch.arange(size) + (0 if d2t is None else d2t)
    generator = torch.Generator().manual_seed(17)
    logits = 2 * torch.randn(1 + VOCAB, size, generator=generator, dtype=torch.float64)
    temperature = 1.3

    def verify(point: Tensor) -> Accepted:
        _, first = reference.sample(logits[:1], temperature, point[1])
        one = int(ids[first])
        _, second = reference.sample(logits[1 + one][None], temperature, point[2])
        two = int(ids[second])
        q = torch.softmax(torch.stack([logits[0], logits[1 + one]]) / temperature, -1)
        chain = Draft(torch.tensor([one, two]), torch.tensor([0, 1]), torch.zeros(2), q)
        p = torch.stack([target.first, target.second[one], target.third])
        return reference.verify_rejection(chain, d2t, p, point[3:5], point[5])

    assert total_variation(target, verify, sobol(6)) < 0.01


def test_rejection_at_temperature_zero_is_greedy() -> None:
    """A target of one certain token accepts it and nothing else, and corrects to it."""
    p = torch.nn.functional.one_hot(torch.tensor([1, 4, 2]), VOCAB).double()
    q = torch.nn.functional.one_hot(torch.tensor([1, 3]), VOCAB).double()
    chain = Draft(torch.tensor([1, 3]), torch.tensor([0, 1]), torch.zeros(2), q)
    for u in (0.0, 0.5, 0.999):
        accepted = reference.verify_rejection(chain, None, p, torch.full((2,), u), torch.tensor(u))
        assert accepted == Accepted(nodes=[0, 1], tokens=[1, 4])


@given(
    weights=st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=1, max_size=6),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=80)
def test_inverse_cdf_never_draws_the_impossible(weights, uniform) -> None:
    if sum(weights) == 0:
        return
    index = int(reference.inverse_cdf(torch.tensor(weights), torch.tensor(uniform)))
    assert weights[index] > 0
    assert sum(weights[:index]) / sum(weights) <= uniform + 1e-6
