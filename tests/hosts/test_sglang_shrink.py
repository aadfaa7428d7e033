"""The worker with a draft in fewer bits and with a smaller head: it drafts what the reference drafts with that."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine_host import Host, made_host
from fake_engine_parts import TINY, Setting

from eaglex.config import SpeculationConfig
from eaglex.errors import ConfigError
from eaglex.hosts import auto_quant
from eaglex.hosts.sglang.shrink import Shrink, Wanted
from eaglex.hot_vocab import HotVocab, Ranking, cut
from eaglex.packed import DraftQuant, PackedWeight
from eaglex.quantize import quantize


@pytest.fixture
def ranking(tmp_path: Path) -> Path:
    counts = torch.arange(2048).flip(0)
    Ranking(counts=counts, held_out=torch.zeros_like(counts), source="a test").write(tmp_path / "hot.json")
    return tmp_path / "hot.json"


def played(host: Host, quant: str, hot: Path | None = None) -> None:
    """Every verification is compared with the reference's draft, from weights made here."""
    if hot is not None:
        made = cut(host.config, host.weights, Ranking.read(hot), 600)
        host.config, host.weights = made.config, made.weights
    host.weights = quantize(host.weights, DraftQuant.parse(quant))
    for _ in range(12):
        host.step()
    assert host.drafted > host.verified / 2


def test_few_bits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eaglex")
    with made_host(Setting(options={"draft_quant": "int4"})) as host:
        assert "EAGLEX: the draft's matrices: head=int4,mlp=int4,qkv=int4,o=int4." in caplog.messages
        held = [kept for kept in host.worker._draft_worker.engine._bound if isinstance(kept, PackedWeight)]
        assert len(held) == 8
        played(host, "int4")


def test_a_smaller_head(caplog: pytest.LogCaptureFixture, ranking: Path) -> None:
    caplog.set_level(logging.INFO, "eaglex")
    chosen = {"draft_quant": "head=fp8", "hot_vocab": f"600:{ranking}"}
    with made_host(Setting(topk=3, steps=3, nodes=9, options=chosen)) as host:
        assert host.worker._draft_worker.config.draft_vocab_size == 600
        assert any("600 of 1,792 head rows" in line and "a loss of" in line for line in caplog.messages)
        played(host, "head=fp8", ranking)


def test_auto_measures_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins, as the target cannot be run yet; weights that the host loads anew get the same precisions."""
    caplog.set_level(logging.INFO, "eaglex")
    seconds = {DraftQuant.parse("mlp=fp8"): 1e-4}
    measure = auto_quant._Bench.measure

    def timed(self: Any, quant: DraftQuant) -> auto_quant.Measured:
        monkeypatch.setattr(auto_quant._Bench, "_cycle_seconds", lambda *_: seconds.get(quant, 1e-2))
        return measure(self, quant)

    monkeypatch.setattr(auto_quant._Bench, "measure", timed)
    with made_host(Setting(options={"draft_quant": "auto"})) as host:
        draft = host.worker._draft_worker
        assert any("no target could be run" in line for line in caplog.messages)
        assert any(line.startswith("EAGLEX: draft_quant: mlp=fp8: +") for line in caplog.messages)
        caplog.clear()
        host.symbols["SchedulerWeightUpdaterManager"]().update_weights_from_disk(None)
        assert not any("rows of" in line for line in caplog.messages)
        assert len([kept for kept in draft.engine._bound if isinstance(kept, PackedWeight)]) == 3
        played(host, "mlp=fp8")


def test_what_stays_the_targets(ranking: Path) -> None:
    chain, both = SpeculationConfig(num_steps=3), ("embed_tokens", "lm_head")

    def shared(names: tuple[str, ...] = both, **options: Any) -> tuple[str, ...]:
        return Shrink(Wanted(**options), str(TINY / "draft"), speculation=chain).shared(names)

    four, hot = DraftQuant.parse("head=int4"), HotVocab(size=5, file=str(ranking))
    assert shared() == both
    assert shared(quant=DraftQuant.parse("mlp=int4")) == both
    assert shared(quant=DraftQuant.parse("head=none")) == both
    assert shared(quant=DraftQuant.parse("head=fp8")) == ("embed_tokens",)
    assert shared(quant=four) == ("embed_tokens", "lm_head_rows")
    assert shared(("embed_tokens",), quant=four) == ("embed_tokens",)
    assert shared(hot_vocab=hot) == shared(hot_vocab=hot, quant=four) == ("embed_tokens",)


def test_a_rescored_head_reads_the_targets_own_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it is copied or counted but the INT4 matrix, and an update of the target's makes both anew."""
    caplog.set_level(logging.INFO, "eaglex")
    cases = TINY.parent.parent / "tests" / "cases"
    setting = Setting(
        draft=cases / "C02_no_lm_head_full_vocab", target=cases / "_target", options={"draft_quant": "head=int4"}
    )
    with made_host(setting) as host:
        draft, model = host.worker._draft_worker, host.worker.target_worker.model_runner.model

        def rows() -> torch.Tensor:
            bound = [kept for kept in draft.engine._bound if isinstance(kept, torch.Tensor)]
            found = [kept for kept in bound if kept.data_ptr() == model.head.data_ptr()]
            assert len(found) == 1
            return found[0]

        assert rows().shape == host.weights.lm_head.shape
        assert any("the draft shares embed_tokens and lm_head_rows with the target" in m for m in caplog.messages)
        four = quantize(host.weights, DraftQuant.parse("head=int4"))
        shared = (host.weights.embed_tokens.nbytes, host.weights.lm_head.nbytes)
        whole = sum(tensor.nbytes for _, tensor in host.weights.named())
        assert draft.memory.planned["weights"] == whole - sum(shared) + four.lm_head.nbytes
        played(host, "head=int4")
        before = draft.engine
        host.symbols["SchedulerWeightUpdaterManager"]().update_weights_from_disk(None)
        host.step()
        assert draft.engine is not before
        assert rows().data_ptr() == model.head.data_ptr()


def test_a_ranking_that_is_not_there() -> None:
    with (
        pytest.raises(ConfigError, match="hot_vocab: expected a ranking at nowhere.json"),
        made_host(Setting(options={"hot_vocab": "5:nowhere.json"})),
    ):
        pass
