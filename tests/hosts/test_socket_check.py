"""tools/socket_check.py without a GPU: its judge must be able to say no, and its stages must not overlap."""

from __future__ import annotations

import copy
import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import socket_check
from socket_check import Process, until
from socket_parts.cases import CASES, SHAPES, compared, misshapen, repeated, shown, workload, workload_of
from socket_parts.engine import write


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


def test_a_process_can_be_stopped_and_goes_on(tmp_path: Path) -> None:
    """While another engine is timed."""
    ticks = tmp_path / "ticks"
    tool = tmp_path / "tool.py"
    tool.write_text(f"import time\nwhile True:\n    open({str(ticks)!r}, 'a').write('.')\n    time.sleep(0.01)\n")
    process = Process([], tmp_path / "one.json", "0", 1)
    process.start(str(tool))
    try:
        assert until(ticks.is_file, 20)
        process.signal(signal.SIGSTOP)
        time.sleep(0.2)
        before = ticks.stat().st_size
        time.sleep(0.3)
        assert ticks.stat().st_size == before
        process.signal(signal.SIGCONT)
        assert until(lambda: ticks.stat().st_size > before, 20)
        process.signal(signal.SIGSTOP)
    finally:
        process.kill()
    assert process.over


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


def test_what_an_algorithm_says_twice_is_held_against_itself() -> None:
    first, again = served("EAGLE3"), served("EAGLE3")
    assert repeated([first, again]) == {"passes": [], "runs": []}
    another_token(first["passes"][1]["requests"])
    assert repeated([first, again]) == {"passes": [1], "runs": [[1, 1, 1]]}
    row = compared("chain, sampled", first, served("EAGLEX")) | {"itself": {"EAGLE3": repeated([first, again])}}
    assert "EAGLE3 from itself" in shown(row)


def test_all_requests_of_a_sampled_case_are_sampled(tmp_path: Path) -> None:
    """A greedy one beside them would change how the host draws their first tokens."""
    numpy.save(tmp_path / "prompts.npy", numpy.arange(4000) % 1000)
    sampled, greedy = (workload(tmp_path / "prompts.npy", float(flag)) for flag in (True, False))
    assert [request["temperature"] for request in sampled] == [0.8] * 145
    assert len({request["sampling_seed"] for request in sampled}) == 145
    assert all("temperature" not in request for request in greedy)
    assert [request["ids"] for request in sampled] == [request["ids"] for request in greedy]
    assert sum("abort" in request for request in sampled) == 8


def test_requests_of_a_structured_case_ask_for_a_shape(tmp_path: Path) -> None:
    numpy.save(tmp_path / "prompts.npy", numpy.arange(4000) % 1000)
    requests = workload_of("tree, structured", tmp_path / "prompts.npy")
    asked = [tuple(request["features"]) for request in requests]
    assert set(asked) == {("regex",), ("ebnf",), ("json_schema",), ()}
    assert not any(request["ignore_eos"] for request in requests)


RIGHT = {
    "regex": ("ab cd.", "a b."), "ebnf": ("f(a, b_1)", "f(a,b)"),
    "json_schema": ('{"name": "a", "size": 3, "tags": ["red"]}', '{"name": "a", "size": 3, "tags": ["pink"]}'),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: next(iter(shape)))
def test_an_answer_of_another_shape_is_seen(shape: dict[str, str]) -> None:
    right, wrong = RIGHT[next(iter(shape))]
    assert not misshapen(shape, right)
    assert misshapen(shape, wrong)
    assert misshapen(shape, right[:-1])
    assert not misshapen({"stop": ["."]}, wrong)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What happens to engines that are up at once and serve at once: (what, engine)."""
    seen: list[tuple[str, str]] = []
    alive = SimpleNamespace(poll=lambda: None)

    def start(self: Any) -> None:
        seen.append(("start", self.result.stem))
        self.process = alive
        write(self.result.with_suffix(".ready"), True)

    def go(self: Any, number: int = 0) -> None:
        seen.append(("go", self.result.stem))
        timed = self.arguments[0] == "time_one"
        write(self.result.with_suffix(f".round{number}") if timed else self.result, served(self.arguments[2]))

    def kill(self: Any) -> None:
        if self.process is not None:
            seen.append(("kill", self.result.stem))
        self.process = None

    for name, function in (("start", start), ("go", go), ("kill", kill)):
        monkeypatch.setattr(socket_check.Process, name, function)
    monkeypatch.setattr(socket_check, "about", lambda out: {"gpus": ["one", "two"]})
    monkeypatch.setattr(socket_check, "quiet", lambda: seen.append(("load", "")) or True)
    return seen


def test_stages_do_not_overlap(events: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASES", "tree; chain, two GPUs; tree, two GPUs")
    assert socket_check.run(tmp_path, tmp_path, tmp_path) == 0
    pairs = [f"{kind}-two_GPUs-{a}" for kind in ("chain", "tree") for a in ("EAGLE3", "EAGLEX")]
    single, timed = [f"tree-{a}" for a in ("EAGLE3", "EAGLEX")], [f"time-{a}" for a in ("EAGLE3", "EAGLEX")]
    expected = [("start", name) for name in timed + pairs]
    for name in pairs:
        expected += [("go", name), ("kill", name)]
    expected += [("start", name) for name in single] + [("go", name) for name in single]
    expected += [("kill", name) for name in single] + [("load", "")] + 2 * [("go", name) for name in timed]
    assert events[: len(expected)] == expected


def test_engines_on_two_gpus_have_all_the_time_that_nothing_else_needs(
    events: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS", "240")
    monkeypatch.setenv("SECONDS_TO_TIME", "80")
    alone = socket_check.Plan(tmp_path, tmp_path, tmp_path, ["chain, two GPUs"], 2)
    assert 159 < alone.left("TIME", "SERVE") <= 160
    beside = socket_check.Plan(tmp_path, tmp_path, tmp_path, ["chain, two GPUs", "chain"], 2)
    assert beside.left("TIME", "SERVE") <= 10


def test_a_case_can_run_twice(events: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASES", "chain, sampled")
    monkeypatch.setenv("REPEATS", "2")
    monkeypatch.setenv("NO_TIMES", "1")
    assert socket_check.run(tmp_path, tmp_path, tmp_path) == 0
    assert len({name for what, name in events if what == "go"}) == 4
    (row,) = json.loads((tmp_path / "socket.json").read_text())["cases"]
    assert row["itself"] == {"EAGLE3": {"passes": [], "runs": []}, "EAGLEX": {"passes": [], "runs": []}}
