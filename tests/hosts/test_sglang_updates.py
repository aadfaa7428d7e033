"""Updates of the target's weights, and which of its revisions is read: what the draft shares stays the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine_host import Host, made_host
from fake_engine_parts import Setting
from test_sglang_dedicated import OPTIONS, Tolerant, alone, started

from eaglex import checkpoint, drafter, reference
from eaglex.engine import DraftEngine
from eaglex.errors import CheckpointError

CASES = Path(__file__).parent.parent / "cases"
SHARES_ALL = Setting(draft=CASES / "C02_no_lm_head_full_vocab", target=CASES / "_target")


def running(host: Host) -> Any:
    """Two requests run; the host's updater."""
    host.prefill(2)
    while any(request.unfinished for request in host.running):
        host.prefill(0)
    return host.symbols["SchedulerWeightUpdaterManager"]()


def decoded(host: Host, *, drafts: bool) -> None:
    """One more verification, without `drafts` of roots alone."""
    before = host.drafted
    if not drafts:
        for request in host.running:
            request.expected = reference.Draft.none()
    host.decode([])
    assert (host.drafted > before) is drafts


def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every reading of the draft's files."""
    found, plain = [], checkpoint.load

    def load(*arguments: Any, **options: Any) -> Any:
        found.append(1)
        return plain(*arguments, **options)

    monkeypatch.setattr(checkpoint, "load", load)
    return found


@pytest.mark.parametrize("in_place", [True, False])
def test_an_embedding_is_renewed_without_another_engine(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with made_host() as host:
        updater, draft = running(host), host.worker._draft_worker
        engine, again, model = draft.engine, loads(monkeypatch), host.worker.target_worker.model_runner.model
        told: list[DraftEngine] = []
        monkeypatch.setattr(DraftEngine, "embeddings_changed", lambda self: told.append(self))
        assert draft.facts.borrowed == ("embed_tokens",)
        if in_place:
            model.embed.mul_(0.5)
        else:  # a host may also put another tensor there
            model.embed = model.embed * 0.5
        updater.update_weights_from_tensor(None)
        host.weights.embed_tokens = model.embed[: host.config.vocab_size].clone()
        host.decode([])  # a draft by the old embedding is verified
        for _ in range(3):
            decoded(host, drafts=True)
        for _ in range(8):
            host.step()
        assert draft.engine is engine
        assert told == [engine], "what it has computed from the embeddings is old"
        assert not again


def test_an_update_in_pieces_makes_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head that is the target's, which lies in the engine in an order of its own."""
    with made_host(SHARES_ALL, seed=3) as host:
        updater, draft = running(host), host.worker._draft_worker
        engine, again, model = draft.engine, loads(monkeypatch), host.worker.target_worker.model_runner.model
        for _ in range(5):
            model.head.mul_(0.9)
            updater.update_weights_from_tensor(None)
        assert draft.engine is engine
        host.weights.lm_head = model.head[: host.config.vocab_size].clone()
        decoded(host, drafts=False)  # the new engine has none
        assert draft.engine is not engine
        for _ in range(3):
            decoded(host, drafts=True)
        assert len(again) == 1


def test_an_engine_that_cannot_be_made_again_costs_drafts_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(self: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with made_host(SHARES_ALL, seed=3) as host:
        updater, draft = running(host), host.worker._draft_worker
        with monkeypatch.context() as patch:
            patch.setattr(type(draft), "_make_engine", no_memory)
            updater.update_weights_from_disk(None)
            for _ in range(3):
                decoded(host, drafts=False)
            alone(host, None)
            host.worker.clear_cache_pool()
            assert host.worker._draft_worker.counters() == {}
        assert sum("could not be made again" in record.message for record in caplog.records) == 1
        updater.update_weights_from_disk(None)  # there is memory again
        decoded(host, drafts=False)
        tolerant = Tolerant(host)
        tolerant.loose |= {request.number for request in host.running}  # rows of theirs are missing
        new = alone(host, None)
        tolerant.loose.discard(new.number)
        before = host.drafted
        host.decode([])
        assert host.drafted > before


def test_an_embedding_that_cannot_be_shared_any_more_costs_acceptance_alone(caplog: pytest.LogCaptureFixture) -> None:
    with made_host() as host:
        updater, model = running(host), host.worker.target_worker.model_runner.model
        model.embed = model.embed.half()
        updater.update_weights_from_tensor(None)
        for _ in range(3):
            decoded(host, drafts=True)  # by the old one
        assert sum("keeps the old embedding" in record.message for record in caplog.records) == 1


def test_the_targets_revision_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = [], checkpoint.read_target

    def read(target: str, revision: str | None = None) -> Any:
        asked.append(revision)
        return plain(target, revision)

    monkeypatch.setattr(checkpoint, "read_target", read)
    with made_host(Setting(revision="v2")):
        assert asked == [None, "v2", "v2"]  # this test's host; what the draft is, and its weights


def test_a_dedicated_drafter_reads_the_targets_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(Setting(options=OPTIONS, revision="v2"), 1) as host:
        job = host.worker._draft_worker._job()
    given: dict[str, Any] = {}

    def load(*_: Any, **options: Any) -> None:
        given.update(options)
        raise CheckpointError("enough")

    monkeypatch.setattr(drafter.checkpoint, "load", load)
    with pytest.raises(CheckpointError, match="enough"):
        drafter.serve(drafter.Job.from_json(job.to_json()))
    assert (given["target"], given["target_revision"], given["revision"]) == (job.target, "v2", None)
