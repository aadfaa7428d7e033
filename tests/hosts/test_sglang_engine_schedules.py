"""The worker with eaglex's engine under random schedules of the host, every verification against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_engine_host import Host, made_host
from fake_engine_parts import CONTEXT, Setting, TreeMaskMode

from eaglex.engine import DraftEngine
from eaglex.errors import ConfigError
from eaglex.hosts.sglang import kept_rows, steps
from eaglex.hosts.sglang.kept_rows import ROWS
from eaglex.hosts.sglang.translate import Verified
from eaglex.packed import DraftQuant, Precision
from eaglex.quantize import quantize

SETTINGS = {
    "chain": Setting(),
    "chain, no overlap": Setting(overlap=False),
    "chain, few rows per launch": Setting(max_rows=1),
    "chain, eager": Setting(graphs=False),
    "chain, no mask buffer": Setting(mask=None),
    "tree": Setting(topk=3, steps=3, nodes=9),
    "tree, no overlap": Setting(topk=3, steps=3, nodes=9, overlap=False),
    "tree, mask of the tree alone": Setting(topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY),
    "tree, mask too small": Setting(topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY, mask_fits=False),
    "tree, packed mask": Setting(topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY_BITPACKING),
    "tree, packed mask too small": Setting(
        topk=2, steps=3, nodes=7, mask=TreeMaskMode.QLEN_ONLY_BITPACKING, mask_fits=False
    ),
}


def played(host: Host, turns: int = 20) -> Host:
    for _ in range(turns):
        host.step()
    return host


@pytest.mark.parametrize("name", SETTINGS)
def test_every_verification_is_given_the_reference_draft(name: str) -> None:
    with made_host(SETTINGS[name], seed=len(name)) as host:
        played(host)
        assert host.started > host.setting.slots, "slots were not used again"
        assert host.drafted > host.verified / 2, "most requests were verified without a draft"


@pytest.mark.parametrize("precision", [Precision.FP8, Precision.INT4])
def test_a_draft_of_fewer_bits_is_the_reference_of_these_bits(precision: Precision) -> None:
    with made_host(Setting(options={"draft_quant": precision.value}), seed=7) as host:
        host.weights = quantize(host.weights, DraftQuant.parse(precision.value))
        assert not isinstance(host.weights.layers[0].gate_proj, torch.Tensor)
        played(host, 12)
        assert host.drafted > host.verified / 2


PAUSING = {
    "chain": Setting(pausing=True),
    "chain, no overlap": Setting(pausing=True, overlap=False),
    "tree": Setting(pausing=True, topk=3, steps=3, nodes=9, mask=TreeMaskMode.QLEN_ONLY),
    "no mask buffer": Setting(pausing=True, mask=None),
}


@pytest.mark.parametrize("name", PAUSING)
def test_drafts_after_a_pause_are_as_if_there_had_been_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While paused roots alone are verified, and K and V of every token are kept: the next draft is the reference's."""
    for constant, value in {"ENOUGH": 2, "SAMPLE": 2, "FIRST_TRIAL": 5, "WINDOW": 4}.items():
        monkeypatch.setattr(steps.Pausing, constant, value)
    with made_host(PAUSING[name], seed=len(name)) as host:
        chosen = host.worker._plan._choice
        chosen.table = steps.BreakEven(((1, 1.2), (4, 3.4)))
        played(host, 40)
        assert chosen.pauses > 1
        assert host.worker._plan.paused_cycles > 4
        assert set(host.widths) == {0, host.setting.steps}
        assert min(host.widths.values()) > 5
        assert set(host.decodes) == {"sampled", "verified"}
        assert host.drafted


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("overlap", [True, False])
def test_rows_of_a_steady_batch_are_written_together(rows: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for several decodes, and none is missing where a draft, a prompt or another batch comes in between."""
    monkeypatch.setattr(kept_rows, "ROWS", rows)
    for constant, value in {"ENOUGH": 2, "SAMPLE": 2, "FIRST_TRIAL": 11, "LAST_TRIAL": 11, "WINDOW": 4}.items():
        monkeypatch.setattr(steps.Pausing, constant, value)
    with made_host(Setting(pausing=True, overlap=overlap, slots=3, max_rows=128), seed=rows) as host:
        host.worker._plan._choice.table = steps.BreakEven(((1, 3.9),))
        launches = counted(host)
        whole_prompts(host, 2)
        decodes(host, 24)
        paused = host.worker._plan.paused_cycles
        assert host.drafted > 4, "pauses did not end"
        assert paused > 12
        host.worker._stream.join()
        assert len(launches) == paused if rows == 1 else len(launches) <= paused / min(rows, 10) + 4
        whole_prompts(host, 1)
        decodes(host, 10)
        host.running.pop(0)
        decodes(host, 10)
        assert set(host.widths) == {0, host.setting.steps}


def test_prompts_run_on_what_the_host_has_captured_for_them_while_drafting_pauses() -> None:
    with made_host(Setting(pausing=True), seed=4) as host:
        runner, seen = host.worker.target_worker.model_runner, []
        own, plain = runner.attn_backend, host.worker.target_worker.forward_batch_generation
        host.worker._plan._choice.paused = True
        whole_prompts(host, 1)
        decodes(host, 2)
        assert runner.attn_backend is not own, "nothing has paused"

        def forward(batch: Any, **given: Any) -> Any:
            seen.append((batch is None, runner.attn_backend is own, runner.context.spec.nodes))
            return plain(batch, **given)

        host.worker.target_worker.forward_batch_generation = forward
        whole_prompts(host, 1)
        decodes(host, 1)
        assert seen[0] == (False, True, host.setting.nodes)
        assert seen[-1] == (True, False, 1), "and a decode on its own again"
        assert runner.attn_backend is not own


def test_rows_that_wait_are_written_before_weights_change() -> None:
    with made_host(Setting(pausing=True), seed=4) as host:
        whole_prompts(host, 2)
        host.worker._plan._choice.table = steps.BreakEven(((1, 9.0),))
        host.worker._plan._choice.paused = True
        for _ in range(3):
            host.decode([])
        launches = counted(host)
        host.symbols["SchedulerWeightUpdaterManager"]().update_weights_from_disk(None)
        assert launches == [1]
        host.worker._plan._choice.paused = False
        host.decode([])
        host.decode([])
        assert host.drafted == 2


def test_tensors_of_every_shape_are_made_before_the_first_launch() -> None:
    """A forward would make them on its own stream, and a launch on another would not wait for them."""
    for setting in (Setting(adaptive=(0, 1, 3), max_rows=128), Setting(pausing=True, max_rows=128)):
        with made_host(setting) as host:
            made = set(host.worker._draft_worker.translator._row_starts)
            assert {1, ROWS, setting.nodes} <= made
            whole_prompts(host, 2)
            host.worker._plan._choice.paused = setting.pausing
            decodes(host, 12)
            assert host.widths[0] > 1
            assert set(host.worker._draft_worker.translator._row_starts) == made


def counted(host: Host) -> list[int]:
    """Grows by 1 with every launch after which nothing is drafted."""
    launches: list[int] = []
    plain = host.worker._draft_worker.draft_verified

    def draft_verified(verified: Verified, drafting: bool, stream: int) -> None:
        if not drafting:
            launches.append(1)
        plain(verified, drafting, stream)

    host.worker._draft_worker.draft_verified = draft_verified
    return launches


def decodes(host: Host, count: int) -> None:
    """So many forwards of the batch that runs, as far as there is room."""
    for _ in range(count):
        if max(request.length for request in host.running) < CONTEXT - 2 * host.setting.nodes:
            host.decode([])


def whole_prompts(host: Host, count: int) -> None:
    host.prefill(count)
    while any(request.unfinished for request in host.running):
        host.prefill(0)


def test_the_table_is_measured_at_start_and_leaves_no_trace() -> None:
    with made_host(Setting(pausing=True, max_rows=128)) as host:
        table = host.worker._plan._choice.table
        rows = host.worker._draft_worker.rows_kept  # in one launch: a decode pays for a part of it
        assert rows == ROWS
        # of fake_engine_parts.GraphRunner, and the clock's own 0.1
        wide, narrow = 1 + 0.16 * 4 + 0.2, 1 + 0.16 + 0.1 + 0.1 / rows
        assert table.at(1) == pytest.approx(wide / narrow)
        assert [batch for batch, _ in table.minimum] == [1, 2, 4], "powers of two alone"
        draft = host.worker._draft_worker
        assert sum(draft.engine.counters().values()) == 0
        assert draft.engine.results.drafted_for.tolist() == [-1] * (host.setting.slots + 1)
        assert not draft.draft_k[0].any()
        assert host.worker.graph_time_usage["target_verify"] > 0
        played(host, 10)


def test_pausing_without_the_hosts_graphs_is_refused() -> None:
    with pytest.raises(ConfigError, match="pausing=true"), made_host(Setting(pausing=True, graphs=False)):
        pass


@pytest.mark.parametrize("overlap", [True, False])
def test_adaptive_steps_take_the_front_of_a_longer_draft(overlap: bool) -> None:
    with made_host(Setting(adaptive=(0, 1, 3), overlap=overlap), seed=3) as host:
        played(host, 30)
        assert set(host.widths) == {0, 1, 3}
        assert host.drafted
        assert host.worker._plan._choice.parameters.told


def test_a_draft_that_is_never_joined_with_is_found_missing() -> None:
    """The schedules can fail: a worker that does not draft is caught by the first verification after a prompt."""
    with made_host() as host:
        host.worker._draft_worker.draft_prefilled = lambda prefilled, drafting, stream: None
        host.prefill(1)
        while any(request.unfinished for request in host.running):
            host.prefill(0)
        with pytest.raises(AssertionError, match="request 1"):
            host.decode([])


def test_locations_of_the_table_would_harm_a_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the host's out_cache_loc is passed on: without it some schedule overwrites a prefix that others share."""
    import dataclasses

    from eaglex.hosts.sglang.translate import Translator
    from eaglex.repeated import RepeatedRun

    plain = Translator.after_verify
    monkeypatch.setattr(
        Translator, "after_verify", lambda self, v, **kw: dataclasses.replace(plain(self, v, **kw), out_cache_loc=None)
    )
    monkeypatch.setattr(DraftEngine, "repeated_run", lambda self, batch: RepeatedRun(lambda *_: False, None, None))

    def harmed(seed: int) -> bool:
        with made_host(Setting(slots=2), seed) as host:
            try:
                played(host, 40)
            except AssertionError:
                return True
            return False

    assert any(harmed(seed) for seed in range(20))


def test_the_padding_slot_is_never_written() -> None:
    with made_host() as host:
        draft = host.worker._draft_worker
        played(host, 15)
        host.worker._stream.join()
        assert len(draft.draft_k[0]) == host.setting.pool + host.setting.page_size
        assert not draft.draft_k[0][0].any()
        assert draft.draft_k[0].any()
