"""tools/divergences.py without a model: which tokens part, and how near they were."""

from __future__ import annotations

import divergences
import pytest


@pytest.mark.parametrize(("value", "step"), [(10.0, 0.0625), (7.9, 0.03125), (16.0, 0.125), (-10.0, 0.0625)])
def test_the_distance_of_bfloat16_numbers(value: float, step: float) -> None:
    import torch

    here = torch.tensor(value, dtype=torch.bfloat16)
    assert divergences.spacing(value) == step
    assert torch.nextafter(here, torch.tensor(torch.inf * value, dtype=torch.bfloat16)) - here in (step, -step)


def test_each_request_that_parts_has_its_margin() -> None:
    requests = [{"ids": [number]} for number in range(4)]
    none = [{"ids": [5, 6, 7]}, {"ids": [5, 6]}, {"aborted": True}, {"ids": [0, 2]}]
    lane = [{"ids": [5, 6, 7]}, {"ids": [5, 1]}, {"ids": [1]}, {"ids": [0, 1, 3]}]
    asked: list[list[int]] = []

    def logits_of(ids: list[int]) -> list[float]:
        asked.append(ids)
        return [9.0, 8.5, 10.0, 9.5, 1.0, 1.0, 9.75]

    one, other = divergences.rows_of(requests, none, lane, logits_of)
    assert asked == [[1, 5], [3, 0]]
    assert one == {
        "request": 1, "place": 1, "tokens": [6, 1], "margin": 1.25, "gap": 0.25, "spacing": 0.0625, "near": False
    }  # fmt: skip
    assert (other["margin"], other["near"]) == (1.5, False)
    assert "2 part from no speculation; 0 between" in divergences.summary("EAGLE3", [one, other], "none")
    assert divergences.summary("EAGLEX", [], "EAGLE3").startswith("EAGLEX: 0 part from EAGLE3;")
