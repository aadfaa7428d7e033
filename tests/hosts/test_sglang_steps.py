"""The decision whether to draft, and how far: pauses, trials, margins, and that every rank decides alike."""

from __future__ import annotations

import ast
import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_source import class_def, methods, parameters

from eaglex.errors import ConfigError
from eaglex.hosts.sglang import break_even, steps
from eaglex.hosts.sglang.steps import Adaptive, Always, BreakEven, Pausing, StepPlan

TABLE = BreakEven(((1, 1.5), (8, 2.0), (64, 3.0)))


class Server:
    """Verifications one after the other; results are known two later. `length` tokens each, bonus token included."""

    def __init__(self, choice: steps.Choice) -> None:
        self.plan = StepPlan(choice)
        self.waiting: list[tuple[int, int]] = []
        self.verified: list[int] = []

    def run(self, count: int, length: float, batch: int = 1) -> list[int]:
        """Steps of each verification; a draft is accepted to `length` on average, by turns."""
        for number in range(count):
            checked = self.plan.verification(batch)
            tokens = int(length * (number + 1)) - int(length * number) if checked else 1
            self.waiting.append((tokens - 1, batch))
            if len(self.waiting) > 2:
                correct, size = self.waiting.pop(0)
                self.plan.observe([correct] * size, size)
            self.verified.append(checked)
        return self.verified[-count:]


def test_the_table_takes_the_next_larger_batch() -> None:
    assert [TABLE.at(batch) for batch in (1, 2, 8, 9, 64, 500)] == [1.5, 2.0, 2.0, 3.0, 3.0, 3.0]
    for wrong in ((), ((2, 1.0), (1, 1.0)), ((1, 0.0),), ((1, 1.0), (1, 2.0))):
        with pytest.raises(ConfigError, match="break-even"):
            BreakEven(wrong)


def test_a_draft_that_pays_is_never_paused() -> None:
    server = Server(Pausing(5, TABLE))
    assert set(server.run(2000, 1.6)) == {5}
    assert server.plan.paused_cycles == 0


def test_a_draft_that_does_not_pay_is_paused_and_tried_again_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    choice = Pausing(5, TABLE)
    server = Server(choice)
    with caplog.at_level(logging.INFO):
        took = server.run(20000, 1.0)
    assert len([line for line in caplog.messages if "pauses" in line]) == 1
    trials = sum(took[i] == 5 and took[i - 1] == 0 for i in range(1, len(took)))
    assert trials == choice.pauses - 1 == 3  # after 2048, 4096, 8192
    assert sum(one == 5 for one in took) == 4 * (37 + 2)  # 1 + 2 * 1.5 / sqrt(37) < 1.5; results come two later
    assert server.plan.paused_cycles > 0.98 * len(took)


@pytest.mark.parametrize(("least", "batch", "verifications"), [(2.5, 1, 8), (2.2, 1, 8), (1.9, 1, 12), (1.9, 64, 8)])
def test_what_accepts_nothing_is_not_tried_for_long(least: float, batch: int, verifications: int) -> None:
    """1 + 3 / sqrt(requests) is below break-even, after eight verifications at the earliest; results come two later."""
    took = Server(Pausing(5, BreakEven(((64, least),)))).run(80, 1.0, batch=batch)
    assert sum(one == 5 for one in took) == verifications + 2


def test_a_less_clear_case_takes_as_many_as_are_enough() -> None:
    took = Server(Pausing(5, BreakEven(((1, 2.2),)))).run(80, 1.9)
    assert sum(one == 5 for one in took) == Pausing.SAMPLE + 2


def test_a_trial_that_pays_ends_the_pause() -> None:
    server = Server(Pausing(5, TABLE))
    server.run(100, 1.0)
    assert server.run(1, 3.0) == [0]
    took = server.run(2100, 3.0)
    first = took.index(5)
    assert first < Pausing.FIRST_TRIAL
    assert set(took[first:]) == {5}


def test_a_disturbed_gpu_does_not_make_a_draft_seem_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was measured beside engines that came up: the decode was disturbed, the verification was not."""
    monkeypatch.setattr(break_even, "batches", lambda wide, narrow, limit: [4])
    monkeypatch.setattr(break_even, "replay", lambda state, batch: lambda: state)
    disturbed = iter([1.0, 1.3, 1.4, 1.1])  # of the decode, by pass

    class Trials:
        def trial(self, requests: int, nodes: int, *, drafting: bool) -> Callable[[], object]:
            return lambda: 900e-6 if drafting else 160e-6

        def end_trials(self) -> None: ...

    def clock(action: Callable[[], object]) -> float:
        found = action()
        if isinstance(found, float):
            return found
        return 4.9e-3 * next(disturbed) if found is narrow else verification

    def table(decode_is_quick_once: bool) -> float:
        nonlocal disturbed
        disturbed = iter([1.0, 1.3, 1.4, 1.1] if decode_is_quick_once else [1.3, 1.4, 1.3, 1.4])
        states: Any = {5: SimpleNamespace(nodes=6), 0: narrow}
        measured = break_even.measure(states, Trials(), steps=5, clock=clock, limit=4, rows=16)
        return measured.at(4)

    narrow, verification = SimpleNamespace(nodes=1), 5.1e-3
    assert table(True) == pytest.approx((5.1 + 0.9) / (4.9 + 0.01))
    assert table(False) == pytest.approx((4.9 * 1.3 + 0.9) / (4.9 * 1.3 + 0.01)), "more than 1 token, whatever disturbs"


def test_another_batch_may_end_a_pause_at_once() -> None:
    server = Server(Pausing(5, TABLE))
    server.run(100, 2.4, batch=64)
    assert server.run(3, 2.4, batch=64) == [0, 0, 0]
    assert server.run(3, 2.4, batch=4) == [0, 5, 5], "the first has no draft yet"
    assert server.run(2, 2.4, batch=64)[-1] == 0, "what was known is not forgotten"


def test_near_the_break_even_nothing_flaps() -> None:
    choice = Pausing(5, TABLE)
    rng = random.Random(1)
    server = Server(choice)
    for _ in range(300):
        server.run(1, 1.5 + rng.choice((-0.02, 0.02)))
    assert choice.pauses <= 1


def test_verifications_without_a_draft_do_not_count() -> None:
    choice = Pausing(5, TABLE)
    choice.observe([0, 0], 0, 2)
    assert not choice.window
    choice.observe([1, 2], 5, 2)
    assert list(choice.window) == [(5, 2)]


def test_ranks_decide_alike() -> None:
    """From accept counts, batches and one table alone: no clock, no rank."""
    rng = random.Random(7)
    ranks = [Server(Pausing(5, TABLE)) for _ in range(2)]
    for _ in range(400):
        length, batch = rng.uniform(1, 4), rng.choice((1, 8, 64))
        assert len({tuple(rank.run(10, length, batch)) for rank in ranks}) == 1
    names = {node.id for node in ast.walk(ast.parse(Path(steps.__file__).read_text())) if isinstance(node, ast.Name)}
    assert not names & {"time", "torch", "rank", "os"}


def test_always() -> None:
    server = Server(Always(3))
    assert set(server.run(50, 1.0)) == {3}


def test_adaptive_steps_need_a_draft_first() -> None:
    class Parameters:
        def __init__(self) -> None:
            self.told: list[int] = []
            self.wanted = 0

        def get_steps_for_batch(self, batch_size: int) -> int:
            return self.wanted

        def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
            self.told.append(batch_size)

    parameters = Parameters()
    server = Server(Adaptive(parameters))
    assert server.run(3, 1.0) == [0, 0, 0]
    assert parameters.told == [1]
    parameters.wanted = 3
    assert server.run(3, 2.0) == [0, 3, 3]
    assert parameters.told == [1], "roots alone, for want of a draft, say nothing about the draft"


def test_the_hosts_rule_is_asked_as_it_is_defined(running_host: Path) -> None:
    rule = methods(class_def(running_host, "sglang.srt.speculative.adaptive_spec_params", "AdaptiveSpeculativeParams"))
    assert parameters(rule["__init__"]) == ["self", "initial_steps", "cfg_path="]
    assert parameters(rule["get_steps_for_batch"]) == ["self", "batch_size"]
    assert parameters(rule["on_verify_complete"]) == ["self", "num_correct_drafts_per_req", "batch_size"]
    assert parameters(rule["set_cuda_graph_bs"]) == ["self", "cuda_graph_bs"]
    assert parameters(rule["cuda_graph_bs_for_step"]) == ["self", "step"]
    assert "candidate_steps" in rule


def test_the_hosts_graphs_are_built_and_replayed_as_it_defines_them(running_host: Path) -> None:
    runner = methods(
        class_def(running_host, "sglang.srt.model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner")
    )
    assert parameters(runner["__init__"]) == [
        "self", "model_runner", "*", "attn_backend=", "speculative_num_steps=", "speculative_num_draft_tokens=",
    ]  # fmt: skip
    assert parameters(runner["_make_graph_key"]) == ["self", "size", "stream_idx=", "variant_label="]
    assert "self.capture_bs" in ast.unparse(runner["__init__"])
    for file, name in (("full", "FullCudaGraphBackend"), ("breakable", "BreakableCudaGraphBackend")):
        module = f"sglang.srt.model_executor.runner_backend.{file}_cuda_graph_backend"
        backend = methods(class_def(running_host, module, name))
        assert parameters(backend["replay"])[:3] == ["self", "shape_key", "static_forward_batch"]
        body = "".join(map(ast.unparse, backend["replay"].body))
        assert "static_forward_batch" not in body, "a replay needs a batch"
        assert parameters(backend["replay_session"]) == ["self"]
    target = methods(class_def(running_host, "sglang.srt.model_executor.model_runner", "ModelRunner"))
    assert parameters(target["_get_attention_backend"]) == ["self", "init_new_workspace="]
    assert parameters(target["_decode_cuda_graph_runner_cls"]) == ["self"]
    context = methods(class_def(running_host, "sglang.srt.runtime_context", "RuntimeContext"))
    assert parameters(context["override"]) == ["self", "source", "**fields"]
