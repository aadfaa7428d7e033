"""Acceptance by position of two engines that served the same prompts, each prompt against itself."""

from __future__ import annotations

import math

Histogram = list[int]  # verifications of a request by how many of their drafts were right


def reached_and_right(found: Histogram, place: int) -> tuple[int, int]:
    """Verifications whose drafts before `place` (from 0) were right, and those in which the one at it was too."""
    return sum(found[place:]), sum(found[place + 1 :])


def differences(stock: list[Histogram], ours: list[Histogram]) -> list[tuple[float, float]]:
    """For each position the relative difference of acceptance, ours less stock's, and its standard error.

    Acceptance is a ratio of sums over prompts, so the error is that of the difference of two ratio estimators
    (linearised; Cochran, Sampling Techniques, 6.3) over what each prompt gives to both: their drafts follow the same
    tokens, so most of what makes one prompt easier than another is in both and falls away.
    Positions that an engine never reached or never had right end the list.
    """
    if len(stock) != len(ours):
        raise ValueError(f"prompts: expected as many as EAGLE3's {len(stock)}, got {len(ours)}")
    found: list[tuple[float, float]] = []
    for place in range(max(map(len, (*stock, *ours)), default=0) - 1):
        a, b = ([reached_and_right(one, place) for one in side] for side in (stock, ours))
        (reached_a, right_a), (reached_b, right_b) = ([sum(column) for column in zip(*x, strict=True)] for x in (a, b))
        if not right_a or not right_b:
            break
        first, second = right_a / reached_a, right_b / reached_b
        parts = [
            (hit_b - second * tried_b) / reached_b - (hit_a - first * tried_a) / reached_a
            for (tried_a, hit_a), (tried_b, hit_b) in zip(a, b, strict=True)
        ]
        count = len(parts)
        error = math.sqrt(count / (count - 1) * sum(part * part for part in parts)) if count > 1 else math.inf
        found.append((round(second / first - 1, 5), round(error / first, 5)))
    return found
