"""The worker with eaglex's engine under random schedules of the host, every verification against the reference."""

from __future__ import annotations

import pytest
from fake_engine_host import Host, made_host
from fake_engine_parts import Setting, TreeMaskMode

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


def test_a_draft_that_is_never_joined_with_is_found_missing() -> None:
    """The schedules can fail: a worker that does not draft is caught by the first verification after a prompt."""
    with made_host() as host:
        host.worker._draft_worker.draft_prefilled = lambda prefilled: None
        host.prefill(1)
        while any(request.unfinished for request in host.running):
            host.prefill(0)
        with pytest.raises(AssertionError, match="request 1"):
            host.decode([])


def test_locations_of_the_table_would_harm_a_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the host's out_cache_loc is passed on: without it some schedule overwrites a prefix that others share."""
    import dataclasses

    from eaglex.hosts.sglang.translate import Translator

    plain = Translator.after_verify
    monkeypatch.setattr(
        Translator, "after_verify", lambda self, v: dataclasses.replace(plain(self, v), out_cache_loc=None)
    )

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
