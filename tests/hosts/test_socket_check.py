"""What tools/socket_check.py calls equal: the judge of the runs on a GPU must be able to say no."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from socket_parts.cases import CASES, compared, shown


def served(algorithm: str, *, retracted: int = 0) -> dict[str, Any]:
    """Two passes of three requests and an aborted one."""
    requests: list[dict[str, Any]] = [
        {"ids": [number, 2, 3], "verify": 2, "correct": 1, "cached": 0, "retracted": retracted} for number in range(3)
    ]
    passes = [{"seconds": 1.0, "requests": [*copy.deepcopy(requests), {"aborted": True}]} for _ in range(2)]
    return {"algorithm": algorithm, "passes": passes}


def judged(name: str, change: Any, *, retracted: int = 0) -> dict[str, Any]:
    stock, ours = served("EAGLE3"), served("EAGLEX", retracted=retracted)
    change(ours["passes"][1]["requests"])
    row = compared(name, stock, ours, base=served("EAGLE3"))
    assert row["case"] in shown(row)
    return row


def nothing(requests: list[dict[str, Any]]) -> None:
    pass


def another_token(requests: list[dict[str, Any]]) -> None:
    requests[1]["ids"][2] = 9


def a_token_less(requests: list[dict[str, Any]]) -> None:
    requests[1]["ids"].pop()


def another_count(requests: list[dict[str, Any]]) -> None:
    requests[1]["correct"] = 0


def an_error(requests: list[dict[str, Any]]) -> None:
    requests[0] = {"error": "out of memory"}


def test_the_same_is_equal() -> None:
    row = judged("tree", nothing)
    assert row["equal"]
    assert (row["prompts"], row["tokens"], row["aborted"]) == (6, 18, 2)
    assert row["accept_length"] == {"EAGLE3": 1.5, "EAGLEX": 1.5}


@pytest.mark.parametrize("change", [another_token, a_token_less, another_count, an_error])
def test_what_differs_is_not(change: Any) -> None:
    assert not judged("tree", change)["equal"]


def test_after_a_retraction_tokens_may_move_and_are_listed() -> None:
    row = judged("tree, forced retraction", another_token, retracted=1)
    assert row["equal"]
    assert row["different_after_retraction"] == [[1, 1, 2, 3]]
    assert row["stock_differs_from_itself"] == []


@pytest.mark.parametrize("change", [another_token, an_error])
def test_without_one_they_may_not(change: Any) -> None:
    assert not judged("tree, forced retraction", change)["equal"]
    assert not judged("tree, 3 slots", change, retracted=1)["equal"]


def test_no_request_at_all_is_no_proof() -> None:
    empty = {"algorithm": "EAGLE3", "passes": []}
    assert not compared("tree", empty, empty | {"algorithm": "EAGLEX"})["equal"]


def test_every_case_has_a_base() -> None:
    assert {name.split(", ")[0] for name in CASES} == {"chain", "tree"}
