"""What tools/engine_check.py calls equal."""

from __future__ import annotations

from typing import Any

import engine_check
import pytest
from engine_check import ENGINE, HOST, LANES, judged, lane_environment, table
from socket_parts import cases
from socket_parts.paired import differences
from test_socket_check import served

from eaglex.hosts.sglang import options
from eaglex.hosts.sglang.options import Drafter
from eaglex.packed import DraftQuant


def judged_after(lane: str, change: Any) -> dict[str, Any]:
    stock, ours = served("EAGLE3"), served("EAGLEX")
    for one in ours["passes"]:
        change(one["requests"])
    row = judged("chain", stock, ours, lane)
    assert row["case"] in table({"cases": [row]})[2]
    return row


def same(requests: list[dict[str, Any]]) -> None:
    pass


def another_token(requests: list[dict[str, Any]]) -> None:
    requests[1]["ids"][2] = 9


def fewer_accepted(requests: list[dict[str, Any]]) -> None:
    requests[1]["correct"] -= 1


def failed(requests: list[dict[str, Any]]) -> None:
    requests[0] = {"error": "died"}


@pytest.mark.parametrize("lane", [HOST, ENGINE])
def test_equal_is_equal(lane: str) -> None:
    assert judged_after(lane, same)["equal"]


@pytest.mark.parametrize("lane", [HOST, ENGINE])
@pytest.mark.parametrize("change", [another_token, failed, fewer_accepted])
def test_a_difference_is_seen(lane: str, change: Any) -> None:
    assert not judged_after(lane, change)["equal"]


def test_the_engine_may_accept_a_little_otherwise() -> None:
    """1 of 300 accepted tokens: within 1 % for the engine; the comparison worker owes equal counts."""

    def one_fewer(requests: list[dict[str, Any]]) -> None:
        requests[1]["correct"] -= 1

    for lane, equal in ((ENGINE, True), (HOST, False)):
        stock, ours = served("EAGLE3"), served("EAGLEX")
        for result in (stock, ours):
            for one in result["passes"]:
                for request in one["requests"][:3]:
                    request["correct"] = 100
        one_fewer(ours["passes"][0]["requests"])
        assert judged("chain", stock, ours, lane)["equal"] is equal


def test_a_tree_may_round_otherwise_where_the_trees_differ() -> None:
    stock, ours = served("EAGLE3"), served("EAGLEX")
    another_token(ours["passes"][1]["requests"])
    assert not judged("tree", stock, ours, ENGINE)["equal"], "the same trees, and another token"
    for result, verifications in ((stock, 1000), (ours, 1001)):
        for request in result["passes"][1]["requests"][:3]:
            request |= {"verify": verifications, "correct": 500}
    row = judged("tree", stock, ours, ENGINE)
    assert row["equal"]
    assert row["rounded_otherwise"] == row["different"] == [[1, 1, 2, 3]]
    assert "rounding" in table({"cases": [row]})[2]
    assert not judged("chain", stock, ours, ENGINE)["equal"], "a chain's window has one order"


def test_a_lane_that_did_not_serve_is_missing() -> None:
    row = {"case": "chain", "lane": ENGINE, "equal": False, "missing": [ENGINE]}
    assert "not served: EAGLEX engine" in table({"cases": [row]})[2]


def test_only_one_lane_runs_the_engine() -> None:
    chosen = {lane: options.read(lane_environment(lane)).drafter for lane in LANES}
    assert chosen == {"EAGLE3": Drafter.HOST, HOST: Drafter.HOST, ENGINE: Drafter.ENGINE}
    assert [engine_check.algorithm_of(lane) for lane in LANES] == ["EAGLE3", "EAGLEX", "EAGLEX"]


def test_weight_updates_are_judged_by_the_engine_alone() -> None:
    def passes(*changes: Any) -> dict[str, Any]:
        made = served("EAGLEX")
        first = made["passes"][0]["requests"]
        runs = [[dict(one, ids=list(one.get("ids", []))) if "ids" in one else one for one in first] for _ in changes]
        for run, change in zip(runs, changes, strict=True):
            change(run)
        return {"passes": [{"requests": run, "seconds": 1.0} for run in runs]}

    def equal(name: str, *changes: Any) -> bool:
        assert engine_check.lanes_of(name) == (ENGINE,)
        row = engine_check.judged_alone(name, passes(*changes))
        assert name in table({"cases": [row]})[2]
        return bool(row["equal"])

    name = "chain, weight updates"  # disk, tensor, distributed
    assert equal(name, same, same, another_token, same)
    assert not equal(name, same, another_token, another_token, same)
    assert not equal(name, same, same, another_token, another_token)
    assert not equal(name, same, same, same, same), "the update changed nothing"
    name = "chain, weight updates by IPC"  # tensor, ipc
    assert equal(name, same, another_token, same)
    assert not equal(name, same, another_token, another_token), "the first embedding has not come back"
    assert equal("chain, memory saver", same, same)
    assert not equal("chain, memory saver", same, another_token)


@pytest.mark.parametrize("lane", engine_check.FEWER_BITS)
def test_fewer_bits_owe_the_tokens_and_most_of_the_accept_length(lane: str) -> None:
    assert lane in engine_check.lanes_of("chain, many prompts")
    chosen = options.read(lane_environment(lane))
    assert chosen.drafter is Drafter.ENGINE
    assert chosen.draft_quant == DraftQuant.parse("fp8" if "fp8" in lane else "int4")

    def accepted(part: float) -> Any:
        def change(requests: list[dict[str, Any]]) -> None:
            for request in requests[:3]:
                request |= {"verify": 1000, "correct": 1000 * (2 * part - 1)}

        return change

    least = engine_check.FEWER_BITS[lane]
    for part, equal in ((least + 0.01, True), (least - 0.01, False)):
        stock, ours = served("EAGLE3"), served("EAGLEX")
        for run, length in ((stock, 1.0), (ours, part)):
            for one in run["passes"]:
                accepted(length)(one["requests"])
        assert judged("chain, many prompts", stock, ours, lane)["equal"] is equal
    assert not judged_after(lane, another_token)["equal"]


def test_what_is_excused_depends_on_the_case_and_the_lane() -> None:
    """Without overlap a penalty's outcome depends on windows alone, and the comparison worker's are EAGLE3's."""

    def row_of(name: str, lane: str, mark: dict[str, Any], **counts: int) -> dict[str, Any]:
        stock, ours = served("EAGLE3"), served("EAGLEX")
        for run in (stock, ours):
            for request in run["passes"][0]["requests"][:3]:
                request |= {"verify": 1000, "correct": 500}
        another_token(ours["passes"][0]["requests"])
        ours["passes"][0]["requests"][1] |= mark | counts
        return judged(name, stock, ours, lane)

    features, mixed = engine_check.CONTROLLED
    penalised, other = {"feature": "presence_penalty"}, {"correct": 501}
    assert row_of("chain, features", ENGINE, penalised)["equal"], "timing"
    assert not row_of(features, ENGINE, penalised)["equal"], "the same windows"
    assert row_of(features, ENGINE, penalised, **other)["equal"]
    assert not row_of(features, HOST, penalised, **other)["equal"]
    assert not row_of(features, ENGINE, {"feature": "stop"}, **other)["equal"]
    assert not row_of(mixed, ENGINE, {})["equal"]
    assert row_of(mixed, ENGINE, {}, **other)["equal"]
    assert not row_of(mixed, HOST, {}, **other)["equal"]
    assert row_of(mixed, ENGINE, {"sampled": True})["equal"], "its first token depends on what it is beside"
    assert engine_check.lanes_of(mixed) == engine_check.ALL_LANES


def test_eaglex_parts_from_no_speculation_no_more_often_than_eagle3_does() -> None:
    none, stock, ours = served("EAGLE3"), served("EAGLE3"), served("EAGLEX")
    another_token(stock["passes"][0]["requests"])
    another_token(ours["passes"][0]["requests"])
    runs = {engine_check.STOCK: stock, ENGINE: ours}
    rows = engine_check.against_none("chain, many prompts", none, runs)
    assert [row["equal"] for row in rows] == [True, True]
    assert [len(row["different"]) for row in rows] == [1, 1]
    assert "no more often" in "".join(table({"cases": rows}))
    another_token(ours["passes"][1]["requests"])
    assert [row["equal"] for row in engine_check.against_none("chain, many prompts", none, runs)] == [True, False]
    assert engine_check.lanes_of("chain, many prompts")[-1] == engine_check.NONE
    for place in (0, 2):  # 4 in all, where 2 x 1 + 3 may; then 6
        ours["passes"][0]["requests"][place]["ids"][0] += 50
    adaptive = engine_check.against_none("chain, adaptive", none, runs)
    assert [len(row["different"]) for row in adaptive] == [1, 4]
    assert [row["equal"] for row in adaptive] == [True, True]
    for place in (0, 2):
        ours["passes"][1]["requests"][place]["ids"][0] += 50
    assert [row["equal"] for row in engine_check.against_none("chain, adaptive", none, runs)] == [True, False]


def test_what_is_penalised_depends_on_timing() -> None:
    stock, ours = served("EAGLE3"), served("EAGLEX")
    another_token(ours["passes"][0]["requests"])
    ours["passes"][0]["requests"][1]["feature"] = "presence_penalty"
    row = judged("chain, features", stock, ours, ENGINE)
    assert row["equal"]
    assert len(row["excused"]) == 1


def test_acceptance_by_position() -> None:
    # of ten verifications two had no right draft, three one and five two
    assert cases.by_position([2, 3, 5]) == [0.8, 0.625]
    assert cases.by_position([4]) == cases.by_position([]) == []


def histograms(run: dict[str, Any], *found: list[int]) -> dict[str, Any]:
    for one in run["passes"]:
        for request, histogram in zip(one["requests"], found, strict=False):
            request["histogram"] = histogram
    return run


def test_acceptance_by_position_is_paired_by_prompt() -> None:
    """Of one prompt 10 of 100 drafts more: the ratio's error is that of what the prompts differ by, not of either."""
    stock = [[50, 50], [20, 80], [90, 10]]
    assert differences(stock, stock) == [(0.0, 0.0)]
    ((found, error),) = differences(stock, [[40, 60], [20, 80], [90, 10]])
    assert found == pytest.approx(150 / 140 - 1, abs=1e-5)
    # what each prompt adds to the difference of the two ratios, by hand: d_i = (h'_i - r' n_i - h_i + r n_i) / n
    r, other = 140 / 300, 150 / 300
    parts = [(60 - 50 - (other - r) * 100) / 300, -(other - r) * 100 / 300, -(other - r) * 100 / 300]
    by_hand = (1.5 * sum(part * part for part in parts)) ** 0.5 / r
    assert error == pytest.approx(by_hand, abs=1e-5)
    assert differences([[1, 2, 3]], [[1, 2, 3]])[1] == (0.0, float("inf"))
    with pytest.raises(ValueError, match="expected as many as EAGLE3's 3, got 1"):
        differences(stock, stock[:1])


@pytest.mark.parametrize(("third", "equal"), [([100, 100, 2000], True), ([100, 160, 1940], False)])
def test_every_position_is_held_to_one_per_cent(third: list[int], equal: bool) -> None:
    """60 of 2100 drafts at the second position, 2.9 %, are 1 % of the accept length."""
    stock = histograms(served("EAGLE3"), *[[100, 100, 2000]] * 3)
    ours = histograms(served("EAGLEX"), *[third] * 3)
    row = judged("chain, acceptance", stock, ours, ENGINE)
    assert row["equal"] is equal
    assert "differs by" in table({"cases": [row]})[2]
    assert not judged("chain, acceptance", served("EAGLE3"), served("EAGLEX"), ENGINE)["equal"], "nothing was counted"
    assert judged("chain, many prompts", stock, ours, ENGINE)["equal"]


@pytest.mark.parametrize("name", ["chain, small pool", "chain, forced retraction"])
def test_a_case_about_retraction_has_some(name: str) -> None:
    assert not judged(name, served("EAGLE3", retracted=1), served("EAGLEX"), ENGINE)["equal"]
    row = judged(name, served("EAGLE3"), served("EAGLEX", retracted=2), ENGINE)
    assert row["equal"]
    assert "12 retractions (EAGLE3 0)" in table({"cases": [row]})[2]
