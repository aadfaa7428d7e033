"""Counters of the engine and of pauses, as the host's /metrics shows them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine_host import made_host
from fake_engine_parts import Setting
from host_source import class_def, members
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from eaglex.engine import LaneStatus
from eaglex.hosts.sglang import metrics, steps
from eaglex.hosts.sglang.metrics import EVERY, Metrics

CPU = torch.device("cpu")


def sample(registry: Any, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, {"model_name": "tiny", "tp_rank": "0", **labels}) or 0.0


def counted(**values: int) -> torch.Tensor:
    return torch.tensor([values.get(status.name.lower(), 0) for status in LaneStatus])


def test_counters_are_added_up_now_and_then() -> None:
    registry = CollectorRegistry()
    made = Metrics("tiny", 0, device=CPU, entered=contextlib.nullcontext, registry=registry)
    for number in range(1, 2 * EVERY):
        made.after_launch(counted(drafted=number, no_room=1))
    assert sample(registry, "eaglex:lanes_total", outcome="drafted") == EVERY
    made.after_launch(counted(drafted=500, no_room=3, not_finite=2))
    assert sample(registry, "eaglex:lanes_total", outcome="drafted") == 500
    assert sample(registry, "eaglex:lanes_total", outcome="no_room") == 3
    assert sample(registry, "eaglex:lanes_total", outcome="not_finite") == 2
    assert b'outcome="padded"' not in generate_latest(registry), "what never happened has no line"


def test_falls_of_a_dedicated_drafter_are_counted() -> None:
    registry = CollectorRegistry()
    made = Metrics("tiny", 0, device=CPU, entered=contextlib.nullcontext, registry=registry)
    for gone in (1, 1, 3):
        made.drafter({"late": 0, "gone": gone, "returns": gone - 1})
    assert sample(registry, "eaglex:drafter_total", event="gone") == 3
    assert sample(registry, "eaglex:drafter_total", event="returns") == 2


def test_another_engine_counts_on() -> None:
    registry = CollectorRegistry()
    made = Metrics("tiny", 0, device=CPU, entered=contextlib.nullcontext, registry=registry)
    for count in (7, 2):
        for _ in range(EVERY):
            made.after_launch(counted(drafted=count))
        made.restart()
    assert sample(registry, "eaglex:lanes_total", outcome="drafted") == 9


def test_a_copy_is_looked_at_only_when_it_has_come_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return Event.done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    registry = CollectorRegistry()
    made = Metrics("tiny", 0, device=CPU, entered=contextlib.nullcontext, registry=registry)
    made._gpu = True
    for number in range(3 * EVERY):
        made.after_launch(counted(drafted=number + 1))
    assert sample(registry, "eaglex:lanes_total", outcome="drafted") == 0
    Event.done = True
    made.after_launch(counted(drafted=1000))
    assert sample(registry, "eaglex:lanes_total", outcome="drafted") == EVERY, "of when it was copied"


def test_a_server_with_metrics_counts_its_drafts_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "EVERY", 1)
    before = {
        outcome: sample(REGISTRY, "eaglex:lanes_total", outcome=outcome) for outcome in ("drafted", "held")
    }  # fmt: skip
    paused_before = sample(REGISTRY, "eaglex:paused_cycles_total")
    for constant, value in {"ENOUGH": 1, "SAMPLE": 1, "FIRST_TRIAL": 5}.items():
        monkeypatch.setattr(steps.Pausing, constant, value)
    with made_host(Setting(pausing=True, metrics=True, overlap=False), seed=2) as host:
        host.worker._plan._choice.table = steps.BreakEven(((1, 3.5),))
        for _ in range(25):
            host.step()
        engine = host.worker._draft_worker.engine.counters()
        assert engine["held"] > 0
        for outcome, value in before.items():
            assert sample(REGISTRY, "eaglex:lanes_total", outcome=outcome) - value == engine[outcome], outcome
        cycles = host.worker._plan.paused_cycles
        assert sample(REGISTRY, "eaglex:paused_cycles_total") - paused_before == cycles > 0


def test_only_where_the_host_has_metrics_on(running_host: Path) -> None:
    with made_host() as host:
        assert host.worker._draft_worker.metrics is None
    assert {"enable_metrics", "served_model_name"} <= members(
        class_def(running_host, "sglang.srt.server_args", "ServerArgs")
    )
    collector = (running_host / "srt" / "observability" / "metrics_collector.py").read_text()
    assert "from prometheus_client import" in collector
    assert "eaglex:" not in collector
